"""What drafters need of the target: declared, and refused in one line where the target lacks it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from pronk.base.errors import CacheFullError, OptionError
from pronk.cache.paged import PagedCache
from pronk.drafting import Capabilities, DraftContext, Drafter, Proposer, check_needs
from pronk.drafting.combined.merged import MergedProposer
from pronk.drafting.proposer import bind_proposer
from pronk.drafting.target import Target
from pronk.sampling.tree import TokenTree
from tiny_models import make_engine, tiny_decoder


class Needy(Proposer[tuple[()]]):
    """A drafter with given needs, which never drafts."""

    name = "needy"

    def __init__(self, needs: Capabilities) -> None:
        self.capabilities = needs

    def propose(self, contexts: Sequence[DraftContext[tuple[()]]]) -> list[TokenTree]:
        return [TokenTree.chain(context.tokens[-1:]) for context in contexts]


class Faulty(Drafter):
    """A drafter whose ``bind`` raises a given error."""

    name = "faulty"

    def __init__(self, error: Exception) -> None:
        self.error = error

    def bind(self, target: Target) -> Needy:
        raise self.error


def test_an_error_in_bind_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(OptionError) as caught:
        bind_proposer(Faulty(LookupError("no\nweights")), target())
    message = str(caught.value)
    assert message.startswith("drafter faulty: expected bind() to return a Proposer, found Lookup")
    assert "\n" not in message
    assert "in bind\n" in caplog.text
    with pytest.raises(CacheFullError, match="as it is"):
        bind_proposer(Faulty(CacheFullError("as it is")), target())


class SharedCache(PagedCache):
    """A cache whose rows several processes compute."""

    can_compute_features = False


def target(**options: Any) -> Target:
    """Return a target of four layers."""
    return make_engine(tiny_decoder(windows=(None,) * 4), **options).target


@pytest.mark.parametrize(
    "needs",
    [
        Capabilities(hidden=(1, 4)),
        Capabilities(logits=True),
        Capabilities(first_layers=4),
        Capabilities(kv_layers=(1, 4)),
        Capabilities(computes_features=True),
    ],
)
def test_a_target_in_one_process_has_all(needs: Capabilities) -> None:
    assert bind_proposer(Needy(needs), target()).capabilities == needs


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        (
            Capabilities(hidden=(1, 5)),
            "needy: expected layers 1 to 4 of the target in capabilities.hidden, found 5",
        ),
        (Capabilities(hidden=(0,)), "capabilities.hidden, found 0"),
        (Capabilities(kv_layers=(9,)), "in capabilities.kv_layers, found 9"),
        (
            Capabilities(first_layers=5),
            "needy: expected at most the 4 layers .* capabilities.first_layers, found 5",
        ),
    ],
)
def test_layers_that_the_target_lacks(needs: Capabilities, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        bind_proposer(Needy(needs), target())


def test_a_short_convolution_has_no_keys() -> None:
    decoder = tiny_decoder(special="convolutions", windows=(None,) * 3)
    with pytest.raises(OptionError, match=r"needy: .* found a short convolution in layer 1"):
        check_needs("needy", Capabilities(kv_layers=(1,)), make_engine(decoder).target)
    check_needs("needy", Capabilities(kv_layers=(2,)), make_engine(decoder).target)


def test_keys_that_are_split_among_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "is_split", True)
    check_needs("needy", Capabilities(hidden=(1,), logits=True, first_layers=2), target())
    with pytest.raises(OptionError, match="expected the target's whole KV cache in one process"):
        bind_proposer(Needy(Capabilities(kv_layers=(1,))), target())


def test_features_of_a_cache_that_several_processes_fill() -> None:
    with pytest.raises(OptionError, match="expected a target in one process, found one on several"):
        bind_proposer(Needy(Capabilities(computes_features=True)), target(kind=SharedCache))


def test_a_composite_needs_what_its_parts_need() -> None:
    parts = [
        Needy(Capabilities(hidden=(3,), first_layers=1, kv_layers=(2, 1))),
        Needy(Capabilities(hidden=(1,), first_layers=2, computes_features=True)),
        Needy(Capabilities(logits=True, kv_layers=(4,))),
    ]
    found = MergedProposer(parts, num_nodes=15).capabilities
    assert found.hidden == (1, 3)
    assert found.first_layers == 2
    assert found.kv_layers == (1, 2, 4)
    assert found.logits
    assert found.computes_features
