"""Suffix decoding: what is guessed from which match, and the store of earlier outputs with its file."""

import json
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drafters.helpers import context, met
from pronk.drafters.from_text import _growth
from pronk.drafters.from_text._growth import PRIORS, SuffixIndex, TreeLimits, make_tree_builder
from pronk.drafters.from_text._suffix_store import SuffixStore
from pronk.drafters.from_text.suffix import Suffix, SuffixProposer, SuffixState
from pronk.errors import OptionError
from pronk.sampling.params import SamplingParams
from pronk.speculation.acceptance_rates import AcceptanceRates
from pronk.speculation.cost_model import CostCurve
from pronk.speculation.proposer import Outcome
from pronk.speculation.tree import TokenTree
from tiny_models import VOCAB

HEADER = '{"format": "pronk-suffix-store/1", "vocabulary": "v"}\n'


@pytest.fixture(autouse=True, params=["compiled", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What computes."""
    if request.param == "python":
        monkeypatch.setattr(_growth, "_library", lambda: None)
    else:
        assert _growth._library() is not None
    return str(request.param)


def bound(vocabulary: str = "v", **options: Any) -> SuffixProposer:
    """By these options, beside a model of this vocabulary."""
    return met(Suffix(**options), vocabulary, VOCAB)


def codes(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def guess(drafter: SuffixProposer, prompt: str, draft_tokens: str = "", **limits: int) -> TokenTree:
    state = drafter.start(codes(prompt))
    (tree,) = drafter.propose([context(state, codes(prompt + draft_tokens), **limits)])
    return tree


def branches(tree: TokenTree) -> set[str]:
    """The paths to the leaves, as text."""
    inner = set(tree.parents)
    return {"".join(chr(tree.tokens[i]) for i in tree.path(node)) for node in range(1, len(tree)) if node not in inner}


def observe(drafter: SuffixProposer, state: SuffixState, text: list[int], new: Sequence[int]) -> None:
    """``new`` becomes certain without guesses; ``text`` grows."""
    root = TokenTree.chain(text[-1:])
    drafter.observe(Outcome(state, root, (), tuple(new), len(text) - 1, SamplingParams()))
    text.extend(new)


def answer(drafter: SuffixProposer, prompt: str, output: str) -> None:
    """A whole request."""
    state = drafter.start(codes(prompt))
    observe(drafter, state, codes(prompt), codes(output))
    drafter.stop(state)


def known(strings: SuffixIndex, token: int) -> bool:
    """Whether something followed this token."""
    found = make_tree_builder(AcceptanceRates("suffix", PRIORS), "suffix").build(
        [strings], [token], TreeLimits(1, 1, 1, 1.0, 0.0)
    )
    return found.num_draft_tokens > 0


def test_what_followed_the_longest_match_comes_first() -> None:
    tree = guess(bound(num_nodes=3, depth_factor=0.25), "the cat sat. the dog ran. a cat, the c")
    assert tree.tokens[:2] == (ord("c"), ord("a"))
    tree = guess(bound(num_nodes=4, min_match=3, depth_factor=1), "abcde  xbcfg  abc")
    assert branches(tree) == {"de "}


def test_shorter_matches_add_branches() -> None:
    text = "abcde  xbcfg  abc"
    tree = guess(bound(num_nodes=9, min_match=2, depth_factor=1), text)
    assert branches(tree) == {"de ", "fg"}
    assert tree.gain is not None
    assert tree.gain[tree.child(0, ord("d"))] > tree.gain[tree.child(0, ord("f"))]
    assert tree.main_chain == 4


def test_the_longest_match_knows_best() -> None:
    """After b alone it is mostly 1, but after ab it is no likelier than the others."""
    tree = guess(bound(num_nodes=4, depth_factor=0.25), "ab1.ab2,ab3;ab4:" + "b1-" * 20 + "!ab")
    assert branches(tree) == {"1", "2", "3", "4"}
    assert tree.gain is not None
    assert len(set(tree.gain[1:])) == 1


def test_frequent_continuations_come_first_then_new_ones() -> None:
    tree = guess(bound(num_nodes=1), "xa1xb2xa3xc4xb5xa6x")
    assert branches(tree) == {"a"}
    tree = guess(bound(num_nodes=2), "xa1xb2xa3xc4xb5xa6x")
    assert branches(tree) == {"a", "b"}
    assert branches(guess(bound(num_nodes=1), "xa1xb2x")) == {"b"}


@pytest.mark.parametrize(("factor", "length", "depth"), [(1, 3, 3), (2, 3, 6), (0.5, 4, 2), (0.25, 1, 1)])
def test_support_bounds_the_depth(factor: float, length: int, depth: int) -> None:
    text = "abcdefghijkl" + "-" + "abcdefghijkl"[:length]
    tree = guess(bound(num_nodes=64, min_match=length, depth_factor=factor), text)
    assert branches(tree) == {"abcdefghijkl"[length : length + depth]}


def test_a_loop_goes_on() -> None:
    assert branches(guess(bound(num_nodes=9, min_match=3), "abcabc")) == {"abcabcabc"}
    assert branches(guess(bound(num_nodes=9, min_match=3), "aaaaaa")) == {"a" * 9}


def test_guesses_of_others_are_matched() -> None:
    """As the smaller drafter of a staged one it is asked what follows them."""
    drafter = bound(num_nodes=3, min_match=2)
    assert branches(guess(drafter, "abcdef  a", "b")) == {"cde"}
    assert branches(guess(drafter, "abcdef  a", "x")) == set()


def test_nothing_known_nothing_guessed() -> None:
    assert len(guess(bound(), "abcdefg")) == 1
    assert len(guess(bound(), "a")) == 1
    assert len(guess(bound(min_match=3), "ab ab")) == 1


def test_limits() -> None:
    drafter = bound(num_nodes=20)
    for depth, nodes in ((0, 9), (9, 0), (1, 9), (2, 9), (9, 3), (99, 99)):
        tree = guess(drafter, "abcabdabcabeabcab", depth=depth, nodes=nodes)
        assert tree.num_draft_tokens <= min(nodes, 20)
        assert max(tree.depths) <= depth
        assert (tree.num_draft_tokens > 0) == (depth > 0 < nodes)


def test_rates_learn_what_comes_of_guesses() -> None:
    drafter = bound(num_nodes=1)
    state = drafter.start(codes("ab ab a"))
    (before,) = drafter.propose([context(state, codes("ab ab a"))])
    for path in ((), (1,)):
        learned = drafter.start(codes("ab ab a"))
        for _ in range(3):
            drafter.observe(Outcome(learned, before, path, (), 6, SamplingParams()))
        (after,) = drafter.propose([context(learned, codes("ab ab a"))])
        assert before.gain is not None
        assert after.gain is not None
        assert (after.gain[1] > before.gain[1]) == bool(path)


def test_gains_tell_how_often_guesses_are_right() -> None:
    """On texts with a bias, the sum of the gains is close to the number of guesses that the walk reached."""
    dice, expected, reached = random.Random(0), 0.0, 0
    for _ in range(20):
        text = random.Random(dice.random()).choices(range(6), (9, 3, 1, 1, 1, 1), k=400)
        drafter, held = bound(), text[:50]
        state = drafter.start(held)
        while len(held) < 390:
            (tree,) = drafter.propose([context(state, held)])
            assert tree.gain is not None
            path, node = list[int](), 0
            while (child := tree.child(node, text[len(held) + len(path)])) and len(held) + len(path) < 398:
                path.append(node := child)
            new = text[len(held) : len(held) + len(path) + 1]
            expected, reached = expected + sum(tree.gain[1:]), reached + len(path)
            drafter.observe(Outcome(state, tree, tuple(path), tuple(new), len(held) - 1, SamplingParams()))
            held += new
    assert reached > 1000
    assert 0.8 < expected / reached < 1.25


def test_other_requests_profit_from_outputs_but_not_from_prompts() -> None:
    drafter = bound(min_match=3)
    answer(drafter, "a question", "the answer")
    assert branches(guess(drafter, "say the a")) == {"nswer"}
    assert branches(guess(drafter, "a ques")) == set()
    assert branches(guess(bound(min_match=3), "say the a")) == set()
    off = bound(min_match=3, store_tokens=0)
    answer(off, "a question", "the answer")
    assert branches(guess(off, "say the a")) == set()
    assert off.store.nbytes == 0


def test_the_store_makes_no_difference_between_drafters() -> None:
    drafter = bound()
    answer(drafter, "a", "b")
    assert drafter.store.num_tokens == 1
    assert drafter.options == Suffix()
    assert hash(drafter.options) == hash(Suffix())
    for options in (drafter.options, replace(drafter.options, num_nodes=3)):
        assert met(options, "v", VOCAB).store.num_tokens == 0


def test_state_is_that_of_a_fresh_replay() -> None:
    dice = random.Random(3)
    for _ in range(10):
        drafter, text = bound(), [dice.randrange(3) for _ in range(5)]
        prompt, state = list(text), drafter.start(text)
        for _ in range(12):
            drafter.propose([context(state, [*text, dice.randrange(3)], guessed=1)])
            observe(drafter, state, text, [dice.randrange(3) for _ in range(dice.randrange(4))])
        fresh = drafter.start(prompt)
        observe(drafter, fresh, list(prompt), text[len(prompt) :])
        drafter.propose([context(each, text) for each in (state, fresh)])
        assert fresh == state
        assert fresh.index.num_tokens == len(text)


def test_the_store_forgets_the_oldest() -> None:
    store, dice = SuffixStore(4, 100), random.Random(0)
    largest = 0
    for number in range(100):
        output = [number] * dice.randint(1, 30)
        store.add(output)
        largest = max(largest, store.num_tokens)
        assert store.num_tokens <= 100
        assert known(store.generations[0], number) or len(output) == 1
    assert largest > 60
    assert len(store.generations) == 2
    assert not any(known(each, 3) for each in store.generations)
    store.add(list(range(80)))
    assert store.generations[0].num_tokens == 50
    assert not known(store.generations[0], 29)
    assert known(store.generations[0], 30)


def test_a_file_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    for _ in range(2):  # used by two at the same time
        drafter, other = (bound(min_match=3, store=str(path)) for _ in range(2))
        answer(drafter, "a question", "the answer")
        answer(other, "a question", "more text")
    lines = path.read_text().splitlines(keepends=True)
    assert lines[0] == HEADER
    assert [json.loads(line) for line in lines[1:]] == [codes("the answer"), codes("more text")] * 2
    again = bound(min_match=3, store=str(path))
    assert again.store.num_tokens == 2 * len("the answer" + "more text")
    assert branches(guess(again, "say the a")) == {"nswer"}
    assert branches(guess(again, "some more t")) == {"ext"}


def test_the_file_is_made_when_a_model_is_met(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    options = Suffix(min_match=3, store=str(path))
    assert not path.exists()
    drafter = met(options, "v", VOCAB)
    assert path.read_text() == HEADER
    answer(drafter, "a", "early words")
    assert branches(guess(drafter, "early w")) == {"ords"}
    assert path.read_text() == f"{HEADER}{json.dumps(codes('early words'))}\n"


def test_outputs_of_another_vocabulary_are_not_mixed_in(tmp_path: Path) -> None:
    drafter, other = (bound(name, min_match=3) for name in "vw")
    answer(drafter, "a", "early words")
    assert branches(guess(drafter, "early w")) == {"ords"}
    assert branches(guess(other, "early w")) == set()
    assert other.store.num_tokens == 0
    path = tmp_path / "store.jsonl"
    answer(bound(store=str(path)), "a", "early words")
    with pytest.raises(OptionError, match="expected outputs of the vocabulary w, found v; give every tokenizer a file"):
        bound("w", store=str(path))
    assert bound(store=str(path)).store.num_tokens == len("early words")


@pytest.mark.parametrize("torn", ["[1, 2", "[1, 2]", "[", HEADER[:30]])
def test_a_torn_last_line_is_cut(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "store.jsonl"
    path.write_text(HEADER + "[5, 6, 7]\n" + torn)
    drafter = bound(store=str(path))
    assert drafter.store.num_tokens == 3
    answer(drafter, "a", "bc")
    assert path.read_text() == HEADER + "[5, 6, 7]\n[98, 99]\n"


@pytest.mark.parametrize("torn", ["", HEADER[:1], HEADER[:-1]])
def test_a_torn_header_is_written_again(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "store.jsonl"
    path.write_text(torn)
    drafter = bound(store=str(path))
    answer(drafter, "a", "bc")
    assert path.read_text() == HEADER + "[98, 99]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no header", "line 1: expected the header of a pronk-suffix-store/1 file, found b'no header'"),
        ("\n", "line 1: expected the header"),
        ("[1, 2]\n", "line 1: expected the header"),
        ('{"format": "pronk-suffix-store/9", "vocabulary": "v"}\n', "line 1: expected the header"),
        (HEADER.replace('"v"', '"w"'), "expected outputs of the vocabulary v, found w; give every tokenizer a file"),
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
def test_damage_is_named_and_nothing_is_touched(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "store.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))
    for _ in range(2):
        with pytest.raises(OptionError, match=message) as caught:
            bound(store=str(path))
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == text.encode(errors="surrogateescape")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "store.jsonl"):
        with pytest.raises(
            OptionError, match=r"suffix: store: expected a readable and writable file.*; choose"
        ) as caught:
            bound(store=str(path))
        assert "\n" not in str(caught.value)


def test_a_file_that_vanishes_ends_no_request(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    drafter = bound(min_match=3, store=str(path))
    path.unlink()
    with pytest.warns(RuntimeWarning, match=r"store\.jsonl: past outputs are no longer saved"):
        answer(drafter, "a", "early words")
    answer(drafter, "a", "later words")  # warns once
    assert branches(guess(drafter, "early w")) == {"ords"}
    assert not path.exists()


def test_half_a_write_is_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.jsonl"
    drafter, write = bound(store=str(path)), os.write
    monkeypatch.setattr(os, "write", lambda file, line: write(file, line[:-3]))
    with pytest.warns(RuntimeWarning, match="6 of 9 bytes were written"):
        answer(drafter, "a", "bc")
    monkeypatch.undo()
    answer(drafter, "a", "de")
    assert path.read_text() == HEADER + "[98, 9"
    bound(store=str(path))
    assert path.read_text() == HEADER


def test_a_large_file_is_cut_down_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    outputs = [[number] * 10 for number in range(50)]
    path.write_text(HEADER + "".join(f"{json.dumps(output)}\n" for output in outputs) + "[1")
    drafter = bound(store=str(path), store_tokens=45)
    assert drafter.store.num_tokens <= 45
    assert path.read_text() == HEADER + "".join(f"{json.dumps(output)}\n" for output in outputs[-4:])
    assert os.listdir(tmp_path) == ["store.jsonl"]  # noqa: PTH208
    answer(drafter, "a", "bc")
    assert path.read_text().endswith("]\n[98, 99]\n")
    path.write_text(HEADER + json.dumps(list(range(100))) + "\n")
    bound(store=str(path), store_tokens=45)
    assert path.read_text() == HEADER + json.dumps(list(range(55, 100))) + "\n"


def test_what_cannot_pay_for_its_row_is_not_guessed() -> None:
    """And the likelier guesses are the same; where nobody is to save, all are there."""
    drafter, text, trees = bound(), codes("abcde  xbcfg  abc"), {}
    for price in (0.0, 0.05, 0.3):
        for thrifty in (True, False):
            costs = CostCurve((1, 8), (1.0, 1.0 + 7 * price))
            asked = replace(context(drafter.start(text), text), costs=costs, prune_unprofitable=thrifty)
            (trees[price, thrifty],) = drafter.propose([asked])
    whole = trees[0.0, True]
    assert whole.gain is not None
    for price in (0.05, 0.3):
        assert trees[price, False] == whole
        kept = [gain for gain in whole.gain if gain >= price]
        assert 1 < len(kept) < len(whole)
        assert sorted(trees[price, True].gain or ()) == sorted(kept)
