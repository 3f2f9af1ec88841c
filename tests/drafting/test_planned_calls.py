"""Which drafters get the outcomes of steps."""

from collections.abc import Sequence
from typing import Any

import pytest

from pronk.drafting.from_target.eagle3 import Eagle3Proposer
from pronk.drafting.from_text.prediction import Prediction
from pronk.drafting.from_text.prompt_lookup import PromptLookup
from pronk.drafting.from_text.suffix import Suffix
from pronk.drafting.planned_calls import observe_planned
from pronk.drafting.proposer import DraftContext, Outcome, Proposer
from pronk.sampling.params import SamplingParams
from pronk.sampling.tree import TokenTree
from tiny_models import make_engine, tiny_decoder


class Silent(Proposer[Any]):
    """A drafter that uses no outcomes."""

    def start(self, prompt: Sequence[int]) -> Any:
        return [*prompt]

    def propose(self, contexts: Sequence[DraftContext[Any]]) -> list[TokenTree]:
        return [TokenTree.chain(context.tokens[-1:]) for context in contexts]


class Observer(Silent):
    def observe(self, outcome: Outcome[Any]) -> None:
        outcome.state.append(outcome.committed)


class Both(Proposer[Any]):
    """A drafter that consists of others."""

    def __init__(self, *parts: Proposer[Any]) -> None:
        self.set_parts(parts)

    def propose(self, contexts: Sequence[DraftContext[Any]]) -> list[TokenTree]:
        return [TokenTree.chain(context.tokens[-1:]) for context in contexts]


OBSERVERS = {
    "silent": (Silent(), False),
    "observer": (Observer(), True),
    "silent parts": (Both(Silent(), Silent()), False),
    "one part observes": (Both(Silent(), Observer()), True),
    "a part of a part observes": (Both(Both(Silent()), Both(Observer())), True),
    "prompt_lookup": (PromptLookup(), True),
    "prediction": (Prediction(), False),
}


@pytest.mark.parametrize("name", OBSERVERS)
def test_drafters_with_a_method_observe_use_outcomes(name: str) -> None:
    drafter, observes = OBSERVERS[name]
    assert drafter.observes == observes


def test_drafters_of_auto_use_outcomes_if_they_keep_texts() -> None:
    target = make_engine(tiny_decoder()).target
    assert Suffix().bind(target).observes
    assert not Suffix(store_tokens=0).bind(target).observes
    assert Eagle3Proposer.observe is Proposer.observe


def test_each_part_gets_an_outcome_with_its_own_state() -> None:
    seconds = iter(range(9))
    drafter = Both(Silent(), Observer(), Both(Observer(), Silent()))
    state = drafter.start([1, 2])
    outcome = Outcome(state, TokenTree.chain([2]), (), (7,), 1, SamplingParams())
    observe_planned(drafter, outcome, lambda: float(next(seconds)))
    assert state == ([1, 2], [1, 2, (7,)], ([1, 2, (7,)], [1, 2]))


def test_the_time_of_a_drafter_without_outcomes_is_not_measured() -> None:
    outcome = Outcome([1], TokenTree.chain([2]), (), (7,), 1, SamplingParams())
    observe_planned(Silent(), outcome, lambda: pytest.fail("expected no look at the clock"))
