"""Token recycling: the tree, what its table learns and keeps, and the table's file."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from drafting.helpers import VOCAB, bind, context
from pronk.base.errors import OptionError
from pronk.drafting import Outcome, Recycling
from pronk.drafting.from_outputs.recycling import (
    _PRIORS,
    RecyclingProposer,
    RecyclingState,
    Successors,
    load_successors,
    save_successors,
)
from pronk.drafting.ledger import RequestLedger
from pronk.sampling.logits_processors import TokenContext
from pronk.sampling.noise import gumbel_noise
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.sampling.tree import TokenTree
from tiny_models import kernels

THE, CAT, DOG, SUN, SAT, RAN, WAS, ON, AT, IN = range(10)


def tabled(drafter: RecyclingProposer, rows: dict[int, tuple[int, ...]]) -> RecyclingState:
    state = drafter.start([THE])
    for token, successors in rows.items():
        state.successors.put(token, successors)
    return state


def test_tree_of_the_modules_example() -> None:
    drafter = bind(Recycling(num_nodes=5, top_k=3))
    rows = {THE: (CAT, DOG, SUN), CAT: (SAT, RAN, WAS), SAT: (ON, AT, IN), DOG: (RAN, SAT, WAS)}
    state = tabled(drafter, rows)
    ledger = RequestLedger()
    ledger.acceptance.rates("recycling", {0: 0.6, 1: 0.4, 2: 0.05})
    (tree,) = drafter.propose([context(state, [THE], ledger=ledger)])
    assert (tree.tokens, tree.parents) == ((THE, CAT, SAT, RAN, DOG, RAN), (-1, 0, 1, 1, 0, 4))
    assert tree.gain is not None
    assert tree.gain[:3] == pytest.approx((1.0, 0.6, 0.36))


def test_the_tree_has_the_nodes_of_largest_gain() -> None:
    drafter = bind(Recycling(num_nodes=12, top_k=3))
    state = tabled(
        drafter, {token: tuple((token * 3 + rank) % 10 for rank in range(3)) for token in range(10)}
    )
    ledger = RequestLedger()
    rates = [ledger.acceptance.rates("recycling", _PRIORS).rate(rank, 1) for rank in range(3)]
    every = list[float]()
    level = [1.0]
    for _ in range(8):
        level = [gain * rate for gain in level for rate in rates]
        every += level
    (tree,) = drafter.propose([context(state, [THE], ledger=ledger)])
    assert tree.gain is not None
    assert sorted(tree.gain[1:], reverse=True) == pytest.approx(sorted(every, reverse=True)[:12])


def test_logits_of_rejected_nodes_are_learned() -> None:
    drafter = bind(Recycling(top_k=2))
    state = drafter.start([1])
    tree = TokenTree((1, 2, 3), (-1, 0, 0))
    logits = np.zeros((3, VOCAB), np.float32)
    logits[0, [4, 5]] = 2.0, 1.0
    logits[1, [6, 7]] = 2.0, 1.0
    logits[2, [8, 9]] = 1.0, 2.0
    drafter.observe(Outcome(state, tree, (), (4,), 0, SamplingParams(), logits))
    assert [state.successors.get(token) for token in (1, 2, 3)] == [(4, 5), (6, 7), (9, 8)]
    biased = SamplingParams(logit_bias={4: -100.0, 10: 50.0})
    drafter.observe(Outcome(state, TokenTree.chain([1]), (), (5,), 0, biased, logits[:1]))
    assert state.successors.get(1) == (10, 5)


def test_text_without_logits_is_read_with_the_next_proposal() -> None:
    drafter = bind(Recycling(top_k=2))
    text = [1, 2]
    state = drafter.start(text)
    for token in (3, 1, 4, 1, 5):
        drafter.observe(
            Outcome(
                state, TokenTree.chain(text[-1:]), (), (token,), len(text) - 1, SamplingParams()
            )
        )
        text.append(token)
    drafter.propose([context(state, text)])
    assert [state.successors.get(token) for token in (1, 2, 3, 4, 5)] == [
        (5, 4),
        (3,),
        (1,),
        (1,),
        (),
    ]
    logits = np.zeros((1, 16), np.float32)
    logits[0, [8, 9]] = 2.0, 1.0
    drafter.observe(Outcome(state, TokenTree.chain([5]), (), (8,), 6, SamplingParams(), logits))
    drafter.observe(Outcome(state, TokenTree.chain([8]), (), (4,), 7, SamplingParams()))
    drafter.propose([context(state, [*text, 8, 4])])
    assert [state.successors.get(token) for token in (5, 8)] == [(8, 9), (4,)]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 2.0])
def test_successors_are_ranked_by_their_logits_and_the_noise(temperature: float) -> None:
    """The first draft token after a token is the one that the same logits would give now."""
    drafter = bind(Recycling(num_nodes=3, top_k=4))
    state = drafter.start([THE])
    ids = (CAT, DOG, SUN, SAT)
    logits = (1.5, 1.25, 1.0, 0.5)
    for token in range(VOCAB):
        state.successors.put(token, ids, logits)
    firsts = list[int]()
    num_seconds = 0
    for seed in range(40):
        params = SamplingParams(temperature=temperature, seed=seed)
        own = context(state, [THE, SUN], params=params)
        own.sampler = Sampler(params, seed, TokenContext([THE, SUN]), VOCAB, kernels=kernels())
        (tree,) = drafter.propose([own])
        children = tree.children(0)
        scores = np.array(logits)
        if temperature:
            scores = scores / temperature + gumbel_noise(seed, 2, np.array(ids))
        assert next(iter(children)) == ids[scores.argmax()]
        second = next(iter(tree.children(children[ids[scores.argmax()]])), None)
        if temperature and second is not None:
            deeper = np.array(logits) / temperature + gumbel_noise(seed, 3, np.array(ids))
            assert second == ids[deeper.argmax()]
            num_seconds += 1
        firsts.append(next(iter(children)))
    assert (len(set(firsts)) > 1) == (temperature > 0.0)
    assert (num_seconds > 0) == (temperature > 0.0)


def test_damaged_logits_leave_the_order_as_it_is() -> None:
    drafter = bind(Recycling(num_nodes=3, top_k=2))
    state = drafter.start([THE])
    state.successors.put(THE, (CAT, DOG), (float("nan"), 1.0))
    params = SamplingParams(temperature=1.0)
    own = context(state, [THE], params=params)
    own.sampler = Sampler(params, 0, TokenContext([THE]), VOCAB, kernels=kernels())
    (tree,) = drafter.propose([own])
    assert [*tree.children(0)] == [CAT, DOG]


def test_a_successor_of_the_text_gets_the_largest_logit() -> None:
    table = Successors(2, 16)
    table.put(THE, (CAT, DOG), (2.0, 1.0))
    table.put_first(THE, SUN)
    assert (table.get(THE), table.logits[THE]) == ((SUN, CAT), (2.0, 2.0))
    table.put_first(CAT, SAT)
    assert (table.get(CAT), table.logits.get(CAT)) == ((SAT,), None)
    for token in range(3, 30):
        table.put(token, (1,), (0.0,))
    assert set(table.logits) <= set(table.rows)


def test_the_table_is_bounded_and_evicts_the_oldest_rows() -> None:
    table = Successors(2, 3)
    for token in (1, 2, 3, 1, 4):
        table.put(token, [token, 9, 9])
    assert list(table.rows) == [3, 1, 4]
    assert table.get(1) == (1, 9)
    state = bind(Recycling(max_tokens=16)).start(list(range(1000)))
    state.read_text(list(range(1000)), 1000)
    assert len(state.successors.rows) == 16


def test_a_saved_table_initializes_another_proposers_tables(tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"
    with pytest.raises(OptionError, match="shared=True"):
        bind(Recycling(), "mine").save(path)
    drafter = bind(Recycling(shared=True), "mine")
    drafter.propose([context(drafter.start([1, 2, 3, 1, 4]), [1, 2, 3, 1, 4])])
    drafter.save(path)
    warm = bind(Recycling(table=str(path), top_k=1), "mine")
    first = warm.start([7, 8])
    second = warm.start([5])
    assert first.successors.get(1) == (4,)
    assert second.successors.get(7) == ()  # each request has its own copy
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OptionError, match="shared=True"):
        warm.save(path)
    with pytest.raises(OptionError, match="another"):
        bind(Recycling(table=str(path)), "yours")


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    good = tmp_path / "good"
    table = Successors(4, 100)
    table.put(1, (2, 3))
    save_successors(good, table, "mine")
    cases: dict[str, str] = {"missing": "expected a table saved by"}
    (tmp_path / "torn").write_bytes(good.read_bytes()[:-5])
    cases["torn"] = "expected a table saved by"
    (tmp_path / "text").write_text("no table")
    cases["text"] = "expected a table saved by"
    save_file(
        {"successors": np.zeros((2, 2), np.float32)},
        tmp_path / "floats",
        {"format": "pronk-successors/1"},
    )
    cases["floats"] = "expected a table of format"
    save_file(
        {"other": np.zeros((2, 2), np.float32)},
        tmp_path / "other",
        {"format": "pronk-successors/1"},
    )
    cases["other"] = "expected a table saved by"
    for name, message in cases.items():
        fresh = Successors(4, 100)
        with pytest.raises(OptionError, match=message) as caught:
            load_successors(tmp_path / name, fresh, "mine")
        assert "\n" not in str(caught.value)
        assert not fresh.rows
    with pytest.raises(OptionError, match="another"):
        load_successors(good, Successors(4, 100), "yours")
    with pytest.raises(OptionError, match="expected a writable path"):
        save_successors(tmp_path / "no" / "folder", table, None)
