"""What drafters remember from one request to the next: whose tokens, and of which requests."""

from __future__ import annotations

from typing import Any

import pytest

from drafters.helpers import context, hear, markov, named
from models import make_engine, tiny_decoder
from pronk.choosing.params import SamplingParams
from pronk.drafters import Drafter, Lookahead, Recycling, Suffix
from pronk.errors import OptionError

REMEMBERING = {
    "suffix": Suffix,
    "recycling": lambda: Recycling(shared=True),
    "lookahead": lambda: Lookahead(window=2, ngram=3, shared=True),
}


def remembered(drafter: Drafter[Any]) -> object:
    """What other requests can learn from."""
    if isinstance(drafter, Suffix):
        return drafter.past.num_tokens
    if isinstance(drafter, Recycling):
        return dict(drafter.start([0]).successors.rows)
    assert isinstance(drafter, Lookahead)
    return {token: dict(grams) for token, grams in drafter.start([0]).pool.grams.items()}


@pytest.mark.parametrize("name", REMEMBERING)
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_request_under_rejection_is_not_remembered(name: str, rule: Any) -> None:
    """Its tokens depend on the guesses; a guess that came from them would bias a request of the same seed."""
    drafter = REMEMBERING[name]()
    drafter.bind(make_engine(tiny_decoder()).target)
    tokens, params = [1, 2, 3], SamplingParams(temperature=1.0, rule=rule)
    state = drafter.start(tokens)
    before = remembered(drafter)
    for _ in range(8):
        (tree,) = drafter.propose([context(state, tokens, params=params)])
        hear(drafter, state, tree, tokens, markov, params)
    drafter.stop(state)
    assert (remembered(drafter) == before) == (rule == "rejection")


@pytest.mark.parametrize("name", REMEMBERING)
def test_memory_belongs_to_one_vocabulary(name: str) -> None:
    drafter = REMEMBERING[name]()
    one, other = (make_engine(tiny_decoder(), tokenizer=named(name)).target for name in ("one", "other"))
    drafter.bind(one)
    drafter.bind(one)
    with pytest.raises(OptionError, match=f"{name}: expected the tokenizer of the model it was used with first"):
        drafter.bind(other)


def test_what_remembers_nothing_goes_with_any_model() -> None:
    for drafter in (Suffix(store_tokens=0), Lookahead(), Recycling()):
        for name in ("one", "other"):
            drafter.bind(make_engine(tiny_decoder(), tokenizer=named(name)).target)
