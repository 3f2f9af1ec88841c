"""What drafters remember from one request to the next: for which model, and of which requests."""

from typing import Any

import pytest

from drafters.helpers import context, hear, markov, met, named
from pronk.drafters import Drafter, Lookahead, Proposer, Recycling, Suffix
from pronk.drafters.from_outputs.lookahead import LookaheadProposer
from pronk.drafters.from_outputs.recycling import RecyclingProposer
from pronk.drafters.from_text.suffix import SuffixProposer
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from tiny_models import make_engine, tiny_decoder

REMEMBERING: dict[str, Drafter] = {
    "suffix": Suffix(),
    "recycling": Recycling(shared=True),
    "lookahead": Lookahead(window=2, ngram=3, shared=True),
}


def remembered(drafter: Proposer[Any]) -> object:
    """What other requests can learn from."""
    if isinstance(drafter, SuffixProposer):
        return drafter.store.num_tokens
    if isinstance(drafter, RecyclingProposer):
        return dict(drafter.start([0]).successors.rows)
    assert isinstance(drafter, LookaheadProposer)
    return {token: dict(grams) for token, grams in drafter.start([0]).pool.grams.items()}


def decode(drafter: Proposer[Any], params: SamplingParams | None = None) -> None:
    """One request, from which others may learn."""
    tokens, params = [1, 2, 3], params or SamplingParams()
    state = drafter.start(tokens)
    for _ in range(8):
        (tree,) = drafter.propose([context(state, tokens, params=params)])
        hear(drafter, state, tree, tokens, markov, params)
    drafter.stop(state)


@pytest.mark.parametrize("name", REMEMBERING)
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_request_under_rejection_is_not_remembered(name: str, rule: Any) -> None:
    """Its tokens depend on the guesses; a guess that came from them would bias a request of the same seed."""
    drafter = met(REMEMBERING[name])
    drafter.start([1, 2, 3])
    before = remembered(drafter)
    decode(drafter, SamplingParams(temperature=1.0, rule=rule))
    assert (remembered(drafter) == before) == (rule == "rejection")


@pytest.mark.parametrize("name", REMEMBERING)
def test_memory_belongs_to_one_model(name: str) -> None:
    """Models of different vocabularies may be given the same options; what one has learned is not told the other."""
    one, other = (
        REMEMBERING[name].bind(make_engine(tiny_decoder(), tokenizer=named(vocabulary)).target)
        for vocabulary in ("one", "other")
    )
    assert one is not other
    before = remembered(one)
    assert remembered(other) == before
    decode(one)
    assert remembered(one) != before
    assert remembered(other) == before
    again = REMEMBERING[name].bind(make_engine(tiny_decoder(), tokenizer=named("one")).target)
    assert remembered(again) == before


@pytest.mark.parametrize("name", REMEMBERING)
def test_equal_options_given_to_one_model_share_a_memory(name: str) -> None:
    llm = LLM()
    one = llm.get_proposer(REMEMBERING[name])
    assert llm.get_proposer(REMEMBERING[name]) is one
    assert LLM().get_proposer(REMEMBERING[name]) is not one


def test_what_remembers_nothing_goes_with_any_model() -> None:
    for drafter in (Suffix(store_tokens=0), Lookahead(), Recycling()):
        for name in ("one", "other"):
            made = drafter.bind(make_engine(tiny_decoder(), tokenizer=named(name)).target)
            before = remembered(made)
            decode(made)
            assert remembered(made) == before
