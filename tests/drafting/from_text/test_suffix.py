"""Suffix decoding: proposals from matches in the text and in the store of earlier outputs, and the
store's file.
"""

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drafting.helpers import bind, context, num_stored, priced
from pronk.base.errors import OptionError
from pronk.drafting.acceptance_stats import DrafterRates
from pronk.drafting.from_text import _growth
from pronk.drafting.from_text._growth import PRIORS, SuffixIndex, TreeLimits, make_tree_builder
from pronk.drafting.from_text._suffix_store import SuffixStore
from pronk.drafting.from_text.suffix import Suffix, SuffixProposer, SuffixState
from pronk.drafting.ledger import RequestLedger
from pronk.drafting.proposer import Outcome
from pronk.models.cost_model import CostCurve
from pronk.sampling.params import SamplingParams
from pronk.sampling.tree import TokenTree
from tiny_models import VOCAB

HEADER = '{"format": "pronk-suffix-store/1", "vocabulary": "v"}\n'


@pytest.fixture(autouse=True, params=["compiled", "python"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run every test with the compiled kernels and in Python."""
    if request.param == "python":
        monkeypatch.setattr(_growth, "find_suffix_library", lambda: None)
    else:
        assert _growth.find_suffix_library() is not None
    return str(request.param)


def bound(vocabulary: str = "v", **options: Any) -> SuffixProposer:
    """Bind these options to a target of the vocabulary."""
    return bind(Suffix(**options), vocabulary, VOCAB)


def codes(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def propose(
    drafter: SuffixProposer, prompt: str, draft_tokens: str = "", **limits: int
) -> TokenTree:
    state = drafter.start(codes(prompt))
    (tree,) = drafter.propose([context(state, codes(prompt + draft_tokens), **limits)])
    return tree


def branches(tree: TokenTree) -> set[str]:
    """Return the paths to the leaves, as text."""
    inner = set(tree.parents)
    return {
        "".join(chr(tree.tokens[i]) for i in tree.path(node))
        for node in range(1, len(tree))
        if node not in inner
    }


def observe(
    drafter: SuffixProposer, state: SuffixState, text: list[int], new: Sequence[int]
) -> None:
    """Append committed tokens without draft tokens to the text."""
    root = TokenTree.chain(text[-1:])
    drafter.observe(Outcome(state, root, (), tuple(new), len(text) - 1, SamplingParams()))
    text.extend(new)


def answer(drafter: SuffixProposer, prompt: str, output: str) -> None:
    """Decode a whole request."""
    state = drafter.start(codes(prompt))
    observe(drafter, state, codes(prompt), codes(output))
    drafter.stop(state)


def known(strings: SuffixIndex, token: int) -> bool:
    """Whether a token has a continuation."""
    found = make_tree_builder(DrafterRates("suffix", PRIORS), "suffix").build(
        [strings], [token], TreeLimits(1, 1, 1, 1.0, 0.0)
    )
    return found.num_draft_tokens > 0


def test_the_continuation_of_the_longest_match_comes_first() -> None:
    tree = propose(bound(num_nodes=3, depth_factor=0.25), "the cat sat. the dog ran. a cat, the c")
    assert tree.tokens[:2] == (ord("c"), ord("a"))
    tree = propose(bound(num_nodes=4, min_match=3, depth_factor=1), "abcde  xbcfg  abc")
    assert branches(tree) == {"de "}


def test_shorter_matches_add_branches() -> None:
    text = "abcde  xbcfg  abc"
    tree = propose(bound(num_nodes=9, min_match=2, depth_factor=1), text)
    assert branches(tree) == {"de ", "fg"}
    assert tree.gain is not None
    assert tree.gain[tree.child(0, ord("d"))] > tree.gain[tree.child(0, ord("f"))]
    assert tree.main_chain == 4


def test_gains_are_those_of_the_longest_match() -> None:
    """After "ab" the tokens 1 to 4 are equally likely, although 1 is frequent after "b"."""
    tree = propose(bound(num_nodes=4, depth_factor=0.25), "ab1.ab2,ab3;ab4:" + "b1-" * 20 + "!ab")
    assert branches(tree) == {"1", "2", "3", "4"}
    assert tree.gain is not None
    assert len(set(tree.gain[1:])) == 1


def test_frequent_continuations_come_first_then_recent_ones() -> None:
    tree = propose(bound(num_nodes=1), "xa1xb2xa3xc4xb5xa6x")
    assert branches(tree) == {"a"}
    tree = propose(bound(num_nodes=2), "xa1xb2xa3xc4xb5xa6x")
    assert branches(tree) == {"a", "b"}
    assert branches(propose(bound(num_nodes=1), "xa1xb2x")) == {"b"}


@pytest.mark.parametrize(
    ("factor", "length", "depth"), [(1, 3, 3), (2, 3, 6), (0.5, 4, 2), (0.25, 1, 1)]
)
def test_the_match_length_bounds_the_depth(factor: float, length: int, depth: int) -> None:
    text = "abcdefghijkl" + "-" + "abcdefghijkl"[:length]
    tree = propose(bound(num_nodes=64, min_match=length, depth_factor=factor), text)
    assert branches(tree) == {"abcdefghijkl"[length : length + depth]}


def test_loops_are_continued() -> None:
    assert branches(propose(bound(num_nodes=9, min_match=3), "abcabc")) == {"abcabcabc"}
    assert branches(propose(bound(num_nodes=9, min_match=3), "aaaaaa")) == {"a" * 9}


def test_draft_tokens_of_another_drafter_are_matched() -> None:
    """As the smaller drafter of ``staged``, suffix decoding proposes below the draft model's
    tokens.
    """
    drafter = bound(num_nodes=3, min_match=2)
    assert branches(propose(drafter, "abcdef  a", "b")) == {"cde"}
    assert branches(propose(drafter, "abcdef  a", "x")) == set()


def test_no_draft_tokens_without_a_match() -> None:
    assert len(propose(bound(), "abcdefg")) == 1
    assert len(propose(bound(), "a")) == 1
    assert len(propose(bound(min_match=3), "ab ab")) == 1


def test_limits() -> None:
    drafter = bound(num_nodes=20)
    for depth, nodes in ((0, 9), (9, 0), (1, 9), (2, 9), (9, 3), (99, 99)):
        tree = propose(drafter, "abcabdabcabeabcab", depth=depth, nodes=nodes)
        assert tree.num_draft_tokens <= min(nodes, 20)
        assert max(tree.depths) <= depth
        assert (tree.num_draft_tokens > 0) == (depth > 0 < nodes)


def test_gains_follow_the_measured_acceptance() -> None:
    drafter = bound(num_nodes=1)
    text = codes("ab ab a")
    state = drafter.start(text)
    for right in (False, True):
        ledger = RequestLedger()
        (before,) = drafter.propose([context(state, text, ledger=ledger)])
        for _ in range(3):
            ledger.acceptance.propose("suffix", (), before)
            ledger.acceptance.advance([before.tokens[1] if right else 0])
        (after,) = drafter.propose([context(state, text, ledger=ledger)])
        assert before.gain is not None
        assert after.gain is not None
        assert (after.gain[1] > before.gain[1]) == right


def test_gains_are_calibrated() -> None:
    """On biased random texts, the sum of the gains is close to the number of accepted draft
    tokens.
    """
    dice = random.Random(0)
    expected = 0.0
    reached = 0
    for _ in range(20):
        text = random.Random(dice.random()).choices(range(6), (9, 3, 1, 1, 1, 1), k=400)
        drafter = bound()
        held = text[:50]
        ledger = RequestLedger()
        state = drafter.start(held)
        while len(held) < 390:
            (tree,) = drafter.propose([context(state, held, ledger=ledger)])
            assert tree.gain is not None
            path = list[int]()
            node = 0
            while (child := tree.child(node, text[len(held) + len(path)])) and len(held) + len(
                path
            ) < 398:
                path.append(node := child)
            new = text[len(held) : len(held) + len(path) + 1]
            expected = expected + sum(tree.gain[1:])
            reached = reached + len(path)
            ledger.acceptance.propose("suffix", (), tree)
            ledger.acceptance.advance(new)
            held += new
    assert reached > 1000
    assert 0.8 < expected / reached < 1.25


def test_outputs_enter_the_store_and_prompts_do_not() -> None:
    drafter = bound(min_match=3)
    answer(drafter, "a question", "the answer")
    assert branches(propose(drafter, "say the a")) == {"nswer"}
    assert branches(propose(drafter, "a ques")) == set()
    assert branches(propose(bound(min_match=3), "say the a")) == set()
    off = bound(min_match=3, store_tokens=0)
    answer(off, "a question", "the answer")
    assert branches(propose(off, "say the a")) == set()
    assert not off.store.generations


def test_the_store_evicts_the_oldest_outputs() -> None:
    store = SuffixStore(4, 100)
    dice = random.Random(0)
    largest = 0
    for number in range(100):
        output = [number] * dice.randint(1, 30)
        store.add(output)
        largest = max(largest, num_stored(store))
        assert num_stored(store) <= 100
        assert known(store.generations[0], number) or len(output) == 1
    assert largest > 60
    assert len(store.generations) == 2
    assert not any(known(each, 3) for each in store.generations)
    store.add(list(range(80)))
    assert store.generations[0].num_tokens == 50
    assert not known(store.generations[0], 29)
    assert known(store.generations[0], 30)


def test_the_file_keeps_outputs_of_several_processes(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    for _ in range(2):  # each time by two proposers
        drafter, other = (bound(min_match=3, store=str(path)) for _ in range(2))
        answer(drafter, "a question", "the answer")
        answer(other, "a question", "more text")
    lines = path.read_text().splitlines(keepends=True)
    assert lines[0] == HEADER
    assert [json.loads(line) for line in lines[1:]] == [codes("the answer"), codes("more text")] * 2
    again = bound(min_match=3, store=str(path))
    assert num_stored(again.store) == 2 * len("the answer" + "more text")
    assert branches(propose(again, "say the a")) == {"nswer"}
    assert branches(propose(again, "some more t")) == {"ext"}


@pytest.mark.parametrize("incomplete", ["[1, 2", "[1, 2]", "[", HEADER[:30]])
def test_an_incomplete_last_line_is_removed(tmp_path: Path, incomplete: str) -> None:
    path = tmp_path / "store.jsonl"
    path.write_text(HEADER + "[5, 6, 7]\n" + incomplete)
    drafter = bound(store=str(path))
    assert num_stored(drafter.store) == 3
    answer(drafter, "a", "bc")
    assert path.read_text() == HEADER + "[5, 6, 7]\n[98, 99]\n"


@pytest.mark.parametrize("incomplete", ["", HEADER[:1], HEADER[:-1]])
def test_an_incomplete_header_is_replaced(tmp_path: Path, incomplete: str) -> None:
    path = tmp_path / "store.jsonl"
    path.write_text(incomplete)
    drafter = bound(store=str(path))
    answer(drafter, "a", "bc")
    assert path.read_text() == HEADER + "[98, 99]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "no header",
            "line 1: expected the header of a pronk-suffix-store/1 file, found b'no header'",
        ),
        ("\n", "line 1: expected the header"),
        ("[1, 2]\n", "line 1: expected the header"),
        ('{"format": "pronk-suffix-store/9", "vocabulary": "v"}\n', "line 1: expected the header"),
        (
            HEADER.replace('"v"', '"w"'),
            "expected outputs of the vocabulary v, found w; give every tokenizer a file",
        ),
        (HEADER.replace('"v"', "null"), "expected outputs of the vocabulary v, found None"),
        (HEADER + "[1]\n[2\n[3]\n", "line 3: expected a list of ids below 131, found b'\\[2\\\\n'"),
        (HEADER + "[1]\n\n[3]\n", "line 3: expected a list of ids"),
        (HEADER + "{}\n", "line 2: expected a list of ids"),
        (HEADER + "[1, -1]\n", "line 2: expected a list of ids"),
        (HEADER + f"[{VOCAB}]\n", "line 2: expected a list of ids"),
        (HEADER + "[true]\n", "line 2: expected a list of ids"),
        (HEADER + "[1.0]\n", "line 2: expected a list of ids"),
        (HEADER + '["\udcff"]\n', "line 2: expected a list of ids"),
        (HEADER + "[" * 100_000 + "\n", "line 2: expected a list of ids"),
    ],
    ids=lambda value: value[-20:].strip(),
)
def test_a_damaged_file_is_refused_and_not_changed(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "store.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))
    for _ in range(2):
        with pytest.raises(OptionError, match=message) as caught:
            bound(store=str(path))
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == text.encode(errors="surrogateescape")


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "store.jsonl"):
        with pytest.raises(
            OptionError, match=r"suffix: store: expected a readable and writable file.*; choose"
        ) as caught:
            bound(store=str(path))
        assert "\n" not in str(caught.value)


def test_a_deleted_file_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    drafter = bound(min_match=3, store=str(path))
    path.unlink()
    with pytest.warns(RuntimeWarning, match=r"store\.jsonl: past outputs are no longer saved"):
        answer(drafter, "a", "early words")
    answer(drafter, "a", "later words")  # the warning is not repeated
    assert branches(propose(drafter, "early w")) == {"ords"}
    assert not path.exists()


def test_an_incomplete_write_ends_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.jsonl"
    drafter = bound(store=str(path))
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, line: write(file, line[:-3]))
    with pytest.warns(RuntimeWarning, match="6 of 9 bytes were written"):
        answer(drafter, "a", "bc")
    monkeypatch.undo()
    answer(drafter, "a", "de")
    assert path.read_text() == HEADER + "[98, 9"
    bound(store=str(path))
    assert path.read_text() == HEADER


def test_a_large_file_keeps_its_last_outputs(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    outputs = [[number] * 10 for number in range(50)]
    path.write_text(HEADER + "".join(f"{json.dumps(output)}\n" for output in outputs) + "[1")
    drafter = bound(store=str(path), store_tokens=45)
    assert num_stored(drafter.store) <= 45
    assert path.read_text() == HEADER + "".join(
        f"{json.dumps(output)}\n" for output in outputs[-4:]
    )
    assert os.listdir(tmp_path) == ["store.jsonl"]  # noqa: PTH208
    answer(drafter, "a", "bc")
    assert path.read_text().endswith("]\n[98, 99]\n")
    path.write_text(HEADER + json.dumps(list(range(100))) + "\n")
    bound(store=str(path), store_tokens=45)
    assert path.read_text() == HEADER + json.dumps(list(range(55, 100))) + "\n"


def test_nodes_that_cannot_pay_for_their_row_are_left_out() -> None:
    """If costs are known, nodes are left out whose gain is less than the cost of a row."""
    drafter = bound()
    text = codes("abcde  xbcfg  abc")

    def tree(costs: CostCurve | None) -> TokenTree:
        (tree,) = drafter.propose([context(drafter.start(text), text, plan=priced(costs))])
        return tree

    whole = tree(None)
    assert whole.gain is not None
    assert tree(CostCurve(1.0, 1.0, 0.0)) == whole
    for price in (0.05, 0.3):
        kept = [gain for gain in whole.gain if gain >= price]
        assert 1 < len(kept) < len(whole)
        assert sorted(tree(CostCurve(1.0, 1.0 - price, price)).gain or ()) == sorted(kept)
