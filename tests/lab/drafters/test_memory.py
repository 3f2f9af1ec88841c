"""The memory of ``lookahead`` across requests: the engine's tests of drafters with a memory."""

from typing import Any

import pytest

from drafting import test_memory as memory
from drafting.test_memory import memory_of
from pronk import Lookahead
from pronk.drafting import Drafter
from pronk.lab.drafters.lookahead import LookaheadProposer

SHARED = pytest.mark.parametrize(
    "given", [Lookahead(window=2, ngram=3, shared=True)], ids=["lookahead"]
)


@memory_of.register
def _(drafter: LookaheadProposer) -> object:
    return {token: dict(grams) for token, grams in drafter.start([0]).pool.groups.items()}


@SHARED
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_requests_under_rejection_do_not_enter_the_memory(given: Drafter, rule: Any) -> None:
    memory.test_requests_under_rejection_do_not_enter_the_memory(given, rule)


@SHARED
def test_memory_belongs_to_one_target(given: Drafter) -> None:
    memory.test_memory_belongs_to_one_target(given)


@SHARED
def test_equal_options_of_one_llm_share_a_memory(given: Drafter) -> None:
    memory.test_equal_options_of_one_llm_share_a_memory(given)


@SHARED
def test_each_adapter_has_a_memory_of_its_own(given: Drafter) -> None:
    memory.test_each_adapter_has_a_memory_of_its_own(given)


def test_drafters_without_memory_keep_nothing() -> None:
    memory.test_drafters_without_memory_keep_nothing(Lookahead())
