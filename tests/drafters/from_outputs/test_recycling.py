"""Token recycling: the tree it grows, what it learns, what it keeps, and its file."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drafters.helpers import VOCAB, context, hear, markov, met, step
from pronk.drafters import Outcome, Recycling
from pronk.drafters.from_outputs._successors import Successors, load_successors, save_successors
from pronk.drafters.from_outputs.recycling import RecyclingProposer, RecyclingState
from pronk.errors import OptionError
from pronk.sampling.params import SamplingParams
from pronk.speculation.tree import TokenTree

THE, CAT, DOG, SUN, SAT, RAN, WAS, ON, AT, IN = range(10)


def tabled(drafter: RecyclingProposer, rows: dict[int, tuple[int, ...]]) -> RecyclingState:
    state = drafter.start([THE])
    for token, successors in rows.items():
        state.successors.put(token, successors)
    return state


def test_the_tree_of_the_docstring() -> None:
    drafter = met(Recycling(num_nodes=5, top_k=3))
    rows = {THE: (CAT, DOG, SUN), CAT: (SAT, RAN, WAS), SAT: (ON, AT, IN), DOG: (RAN, SAT, WAS)}
    state = tabled(drafter, rows)
    state.rates.priors = {0: 0.6, 1: 0.4, 2: 0.05}
    (tree,) = drafter.propose([context(state, [THE])])
    assert (tree.tokens, tree.parents) == ((THE, CAT, SAT, RAN, DOG, RAN), (-1, 0, 1, 1, 0, 4))
    assert tree.gain is not None
    assert tree.gain[:3] == pytest.approx((1.0, 0.6, 0.36))


def test_it_keeps_the_nodes_of_largest_gain() -> None:
    drafter = met(Recycling(num_nodes=12, top_k=3))
    state = tabled(drafter, {token: tuple((token * 3 + rank) % 10 for rank in range(3)) for token in range(10)})
    rates = [state.rates.rate(rank) for rank in range(3)]
    every, level = list[float](), [1.0]
    for _ in range(8):
        level = [gain * rate for gain in level for rate in rates]
        every += level
    (tree,) = drafter.propose([context(state, [THE])])
    assert tree.gain is not None
    assert sorted(tree.gain[1:], reverse=True) == pytest.approx(sorted(every, reverse=True)[:12])


def test_logits_of_rejected_nodes_are_recycled_too() -> None:
    drafter = met(Recycling(top_k=2))
    state = drafter.start([1])
    tree = TokenTree((1, 2, 3), (-1, 0, 0))
    logits = torch.zeros(3, VOCAB)
    logits[0, [4, 5]] = torch.tensor([2.0, 1.0])
    logits[1, [6, 7]] = torch.tensor([2.0, 1.0])
    logits[2, [8, 9]] = torch.tensor([1.0, 2.0])
    drafter.observe(Outcome(state, tree, (), (4,), 0, SamplingParams(), logits))
    assert [state.successors.get(token) for token in (1, 2, 3)] == [(4, 5), (6, 7), (9, 8)]
    biased = SamplingParams(logit_bias={4: -100.0, 10: 50.0})
    drafter.observe(Outcome(state, TokenTree.chain([1]), (), (5,), 0, biased, logits[:1]))
    assert state.successors.get(1) == (10, 5)


def test_a_model_that_looks_back_one_token_is_learned() -> None:
    drafter, tokens = met(Recycling(num_nodes=6, top_k=2)), [1, 2]
    state = drafter.start(tokens)
    for _ in range(12):
        step(drafter, state, tokens, markov)
    (tree,) = drafter.propose([context(state, tokens)])
    assert len(hear(drafter, state, tree, tokens, markov)) >= 4


def test_the_prompt_is_read() -> None:
    drafter, prompt = met(Recycling(top_k=2)), [1, 2, 1, 3, 1, 4, 1]
    state = drafter.start(prompt)
    drafter.propose([context(state, prompt)])
    assert state.successors.get(1) == (4, 3)
    assert state.successors.get(4) == (1,)
    assert state.successors.get(9) == ()


def test_without_logits_the_text_is_read_with_the_next_proposal() -> None:
    drafter, text = met(Recycling(top_k=2)), [1, 2]
    state = drafter.start(text)
    for token in (3, 1, 4):
        drafter.observe(Outcome(state, TokenTree.chain(text[-1:]), (), (token,), len(text) - 1, SamplingParams()))
        text.append(token)
    drafter.propose([context(state, text)])
    assert [state.successors.get(token) for token in (1, 2, 3, 4)] == [(4, 2), (3,), (1,), ()]
    logits = torch.zeros(1, 16)
    logits[0, [8, 9]] = torch.tensor([2.0, 1.0])
    drafter.observe(Outcome(state, TokenTree.chain([4]), (), (8,), 4, SamplingParams(), logits))
    drafter.observe(Outcome(state, TokenTree.chain([8]), (), (5,), 5, SamplingParams()))
    drafter.propose([context(state, [*text, 8, 5])])
    assert [state.successors.get(token) for token in (4, 8)] == [(8, 9), (5,)]


def test_the_table_is_bounded_and_forgets_what_was_met_longest_ago() -> None:
    table = Successors(2, 3)
    for token in (1, 2, 3, 1, 4):
        table.put(token, [token, 9, 9])
    assert list(table.rows) == [3, 1, 4]
    assert table.get(1) == (1, 9)
    state = met(Recycling(max_tokens=16)).start(list(range(1000)))
    state.read_text(list(range(1000)), 1000)
    assert len(state.successors.rows) == 16


def test_tables_are_the_request_s_own_or_shared() -> None:
    for shared in (False, True):
        drafter = met(Recycling(shared=shared))
        drafter.propose([context(drafter.start([1, 2]), [1, 2])])
        assert drafter.start([9]).successors.get(1) == ((2,) if shared else ())


def test_a_saved_table_warms_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"
    with pytest.raises(OptionError, match="shared=True"):
        met(Recycling(), "mine").save(path)
    drafter = met(Recycling(shared=True), "mine")
    drafter.propose([context(drafter.start([1, 2, 3, 1, 4]), [1, 2, 3, 1, 4])])
    drafter.save(path)
    warm = met(Recycling(table=str(path), top_k=1), "mine")
    first, second = warm.start([7, 8]), warm.start([5])
    assert first.successors.get(1) == (4,)
    assert second.successors.get(7) == ()  # requests go their own ways
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OptionError, match="shared=True"):
        warm.save(path)
    with pytest.raises(OptionError, match="another"):
        met(Recycling(table=str(path)), "yours")


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    good, table = tmp_path / "good", Successors(4, 100)
    table.put(1, (2, 3))
    save_successors(good, table, "mine")
    cases: dict[str, str] = {"missing": "expected a table saved by"}
    (tmp_path / "torn").write_bytes(good.read_bytes()[:-5])
    cases["torn"] = "expected a table saved by"
    (tmp_path / "text").write_text("no table")
    cases["text"] = "expected a table saved by"
    save_file({"successors": torch.zeros(2, 2)}, tmp_path / "floats", {"format": "pronk-successors/1"})
    cases["floats"] = "expected a table of format"
    save_file({"other": torch.zeros(2, 2)}, tmp_path / "other", {"format": "pronk-successors/1"})
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
