"""Memory of drafters across requests: which target it belongs to, and which requests enter it."""

from functools import singledispatch
from pathlib import Path
from typing import Any

import pytest

from drafting.helpers import bind, context, markov, num_stored, tokenizer_stub, verify_step
from pronk.drafting import Auto, Drafter, FirstOf, PromptLookup, Proposer, Recycling, Suffix
from pronk.drafting.from_outputs.recycling import RecyclingProposer
from pronk.drafting.from_text.suffix import SuffixProposer
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from tiny_models import make_engine, tiny_decoder

WITH_MEMORY: dict[str, Drafter] = {
    "suffix": Suffix(),
    "recycling": Recycling(shared=True),
}


@singledispatch
def memory_of(drafter: Proposer[Any]) -> object:
    """Return the memory that later requests draft from; each drafter with a memory registers a
    function.
    """
    raise AssertionError(drafter)


@memory_of.register
def _(drafter: SuffixProposer) -> object:
    return num_stored(drafter.store)


@memory_of.register
def _(drafter: RecyclingProposer) -> object:
    return dict(drafter.start([0]).successors.rows)


def decode(drafter: Proposer[Any], params: SamplingParams | None = None) -> None:
    """Decode one request, whose output may enter the memory."""
    tokens = [1, 2, 3]
    params = params or SamplingParams()
    state = drafter.start(tokens)
    for _ in range(8):
        (tree,) = drafter.propose([context(state, tokens, params=params)])
        verify_step(drafter, state, tree, tokens, markov, params)
    drafter.stop(state)


@pytest.mark.parametrize("given", WITH_MEMORY.values(), ids=WITH_MEMORY)
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_requests_under_rejection_do_not_enter_the_memory(given: Drafter, rule: Any) -> None:
    """Their tokens depend on draft tokens, and would bias later requests of the same seed."""
    drafter = bind(given)
    drafter.start([1, 2, 3])
    before = memory_of(drafter)
    decode(drafter, SamplingParams(temperature=1.0, rule=rule))
    assert (memory_of(drafter) == before) == (rule == "rejection")


@pytest.mark.parametrize("given", WITH_MEMORY.values(), ids=WITH_MEMORY)
def test_memory_belongs_to_one_target(given: Drafter) -> None:
    one, other = (
        given.bind(make_engine(tiny_decoder(), tokenizer=tokenizer_stub(vocabulary)).target)
        for vocabulary in ("one", "other")
    )
    assert one is not other
    before = memory_of(one)
    assert memory_of(other) == before
    decode(one)
    assert memory_of(one) != before
    assert memory_of(other) == before
    again = given.bind(make_engine(tiny_decoder(), tokenizer=tokenizer_stub("one")).target)
    assert memory_of(again) == before


@pytest.mark.parametrize("given", WITH_MEMORY.values(), ids=WITH_MEMORY)
def test_equal_options_of_one_llm_share_a_memory(given: Drafter) -> None:
    llm = LLM()
    one = llm.get_proposer(given)
    assert llm.get_proposer(given) is one
    assert LLM().get_proposer(given) is not one


@pytest.mark.parametrize("given", WITH_MEMORY.values(), ids=WITH_MEMORY)
def test_each_adapter_has_a_memory_of_its_own(given: Drafter) -> None:
    """Also inside composites; drafters without memory have one proposer for all adapters."""
    llm = LLM(drafter=given)
    one = llm.get_proposer(adapter="a")
    other = llm.get_proposer(adapter="b")
    assert len({id(one), id(other), id(llm.get_proposer())}) == 3
    assert llm.get_proposer(adapter="a") is one
    before = memory_of(other)
    decode(one)
    assert memory_of(one) != before
    assert memory_of(other) == memory_of(llm.get_proposer()) == before
    composite = FirstOf((given, PromptLookup()))
    parts = [llm.get_proposer(composite, adapter) for adapter in (None, "a", "b")]
    assert len({*map(id, parts)}) == 3
    for without in (Auto(), PromptLookup(), FirstOf((Suffix(store_tokens=0), Recycling()))):
        assert llm.get_proposer(without, "a") is llm.get_proposer(without)


def test_a_store_on_disk_has_texts_of_the_model_alone(tmp_path: Path) -> None:
    file = tmp_path / "store"
    llm = LLM(drafter=Suffix(store=str(file)))
    own = llm.get_proposer()
    size = file.stat().st_size
    decode(llm.get_proposer(adapter="a"))
    assert file.stat().st_size == size
    decode(own)
    assert file.stat().st_size > size


@pytest.mark.parametrize(
    "drafter", [Suffix(store_tokens=0), Recycling()], ids=["suffix", "recycling"]
)
def test_drafters_without_memory_keep_nothing(drafter: Drafter) -> None:
    made = drafter.bind(make_engine(tiny_decoder(), tokenizer=tokenizer_stub("one")).target)
    before = memory_of(made)
    decode(made)
    assert memory_of(made) == before
