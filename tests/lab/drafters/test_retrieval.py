"""Retrieval: trees of the datastore's continuations, likeliest first; datastores of another
vocabulary.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drafting.helpers import bind, context
from lab.drafters.stores import VOCABULARY, followers, random_documents, write
from pronk import LLM
from pronk.base.errors import CheckpointError, OptionError
from pronk.checkpoint.hub.clone_models import tiny_model
from pronk.drafting.ledger import RequestLedger
from pronk.lab.drafters.datastore.reader import SUFFIXES, Header
from pronk.lab.drafters.retrieval import (
    _NUM_SHARE_CLASSES,
    _PRIORS,
    _PRIORS_BY_KIND,
    Retrieval,
    RetrievalProposer,
    _kind_of,
)
from pronk.sampling.params import SamplingParams
from pronk.sampling.tree import TokenTree

RETURN, SELF, DOT, COMMA, NAME, VALUE, END = range(20, 27)
DOCUMENTS = [
    *[[RETURN, SELF, DOT, NAME, END]] * 3,
    *[[RETURN, SELF, DOT, VALUE]] * 2,
    [RETURN, SELF, COMMA],
]


def bound(folder: Path, **options: Any) -> RetrievalProposer:
    return bind(Retrieval(datastore=str(folder), **options), VOCABULARY, 4096)


def propose(drafter: RetrievalProposer, tokens: Sequence[int], **limits: int) -> TokenTree:
    (tree,) = drafter.propose([context(drafter.start(tokens), tokens, **limits)])
    return tree


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "s", DOCUMENTS)


def test_example_of_the_module(folder: Path) -> None:
    drafter = bound(folder)
    tree = propose(drafter, [3, RETURN, SELF])
    assert tree.tokens == (SELF, DOT, NAME, END, VALUE, COMMA)
    assert tree.parents == (-1, 0, 1, 2, 1, 0)
    ways = [
        _kind_of(2, 5, 6),
        _kind_of(3, 3, 5),
        _kind_of(4, 3, 3),
        _kind_of(3, 2, 5),
        _kind_of(2, 1, 6),
    ]
    assert tree.origin == (("", 0), *(("retrieval", way) for way in ways))
    edges = [1.0, *(_PRIORS[way // _NUM_SHARE_CLASSES][way % _NUM_SHARE_CLASSES] for way in ways)]
    assert tree.gain is not None
    for node in range(1, len(tree)):
        assert tree.gain[node] == pytest.approx(edges[node] * tree.gain[tree.parents[node]])


@pytest.mark.parametrize(
    ("options", "limits", "tokens"),
    [
        ({"num_nodes": 3}, {}, (SELF, DOT, NAME, COMMA)),
        ({}, {"nodes": 1}, (SELF, DOT)),
        ({}, {"nodes": 0}, (SELF,)),
        ({"max_depth": 1}, {}, (SELF, DOT, COMMA)),
        ({}, {"depth": 2}, (SELF, DOT, NAME, VALUE, COMMA)),
        ({}, {"depth": 0}, (SELF,)),
        ({"min_match": 3}, {}, (SELF,)),
        ({"max_match": 1}, {}, None),
        ({"max_match": 1, "min_match": 1}, {}, (SELF, DOT, NAME, END, VALUE, COMMA)),
    ],
    ids=str,
)
def test_limits(
    options: dict[str, int], limits: dict[str, int], tokens: tuple[int, ...] | None, folder: Path
) -> None:
    if tokens is None:
        with pytest.raises(OptionError, match="expected min_match at most max_match = 1, found 2"):
            bound(folder, **options)
        return
    assert propose(bound(folder, **options), [3, RETURN, SELF], **limits).tokens == tokens


def test_no_draft_tokens_without_a_match(folder: Path) -> None:
    drafter = bound(folder)
    for tokens in ([3], [3, SELF], [RETURN, 3], [DOT, NAME, END], [SELF, COMMA], [RETURN, 10**9]):
        tree = propose(drafter, tokens)
        assert (tree.tokens, tree.origin) == ((tokens[-1],), (("", 0),))


def test_nodes_are_the_likeliest_continuations_of_the_longest_match(tmp_path: Path) -> None:
    documents = random_documents(7, 150, 25, 4)
    drafter = bound(write(tmp_path / "s", documents), num_nodes=12, max_depth=4)
    dice = random.Random(1)
    most = 0
    for _ in range(40):
        tokens = [dice.randrange(4) for _ in range(dice.randint(2, 9))]
        tree = propose(drafter, tokens)
        gains = every_gain(documents, tokens)
        assert tree.gain is not None
        assert len(tree) == min(13, len(gains))
        for node in range(len(tree)):
            path = tuple(tree.tokens[each] for each in tree.path(node))
            assert tree.gain[node] == pytest.approx(gains[path])
        assert sorted(tree.gain, reverse=True) == pytest.approx(
            sorted(gains.values(), reverse=True)[:13]
        )
        for parent in range(len(tree)):
            children = [
                tree.gain[node] for node in range(1, len(tree)) if tree.parents[node] == parent
            ]
            assert children == sorted(children, reverse=True)
        most = max(most, len(tree))
    assert most == 13


def every_gain(documents: list[list[int]], tokens: list[int]) -> dict[tuple[int, ...], float]:
    """Return the gain of every continuation of the longest match, up to 4 tokens long."""
    sizes = range(1, len(tokens) + 1)
    length = max(n for n in sizes if any(token >= 0 for token in followers(documents, tokens[-n:])))
    gains = {(): 1.0}
    for path in iter_paths(gains):
        after = followers(documents, [*tokens[-length:], *path])
        # Occurrences at the end of a document count, except for the children of the root.
        total = len([token for token in after if token >= 0]) if not path else len(after)
        for token in {token for token in after if token >= 0}:
            way = _kind_of(length + len(path), after.count(token), total)
            gains[*path, token] = (
                gains[path] * _PRIORS[way // _NUM_SHARE_CLASSES][way % _NUM_SHARE_CLASSES]
            )
    return gains


def iter_paths(gains: dict[tuple[int, ...], float]) -> Any:
    for depth in range(4):
        yield from [path for path in gains if len(path) == depth]


def test_gains_follow_the_measured_acceptance(folder: Path) -> None:
    drafter = bound(folder)
    ledger = RequestLedger()

    def tree(ledger: RequestLedger) -> TokenTree:
        (tree,) = drafter.propose(
            [context(drafter.start([RETURN, SELF]), [RETURN, SELF], ledger=ledger)]
        )
        return tree

    before = tree(ledger)
    for _ in range(20):  # VALUE is accepted each time
        ledger.acceptance.propose("retrieval", (), tree(ledger))
        ledger.acceptance.advance((DOT, VALUE, 3))
    assert before.tokens == (SELF, DOT, NAME, END, VALUE, COMMA)
    assert tree(ledger).tokens == (SELF, DOT, VALUE, NAME, END, COMMA)
    assert tree(RequestLedger()) == before


def test_every_kind_has_a_prior() -> None:
    ways = {
        _kind_of(length, count, total)
        for length in range(1, 90)
        for total in range(1, 200)
        for count in range(1, total)
    }
    assert ways <= set(_PRIORS_BY_KIND)
    assert len(_PRIORS_BY_KIND) == len(_PRIORS) * _NUM_SHARE_CLASSES
    assert all(
        len(row) == _NUM_SHARE_CLASSES and all(0 < rate < 1 for rate in row) for row in _PRIORS
    )


def test_a_datastore_of_another_vocabulary_is_refused(folder: Path) -> None:
    drafter = Retrieval(datastore=str(folder))
    for vocabulary, size in (("other", 4096), ("other", 4096), (VOCABULARY, 26), (None, 26)):
        with pytest.raises(
            OptionError, match=r"retrieval: expected .*; build one with pronk datastore build"
        ) as caught:
            bind(drafter, vocabulary, size)
        assert str(folder) in str(caught.value)
        assert "\n" not in str(caught.value)
    for fitting, size in ((VOCABULARY, 4096), (None, 4096), (VOCABULARY, 27)):
        bind(drafter, fitting, size)
    with pytest.raises(
        OptionError, match="found that of pronk-tiny, of another tokenizer; build one with"
    ):
        bind(Retrieval(), VOCABULARY, 4096)


def test_the_datastore_is_opened_once(folder: Path) -> None:
    drafter = bound(folder)
    (folder / SUFFIXES).rename(folder / "away")
    assert drafter.target is not None
    assert drafter.bind(drafter.target) is drafter
    assert len(propose(drafter, [RETURN, SELF])) == 6
    with pytest.raises(CheckpointError, match=r"suffixes\.bin: expected a readable file"):
        bound(folder)


def test_the_datastore_of_pronk_tiny_is_small_and_documented() -> None:
    folder = tiny_model() / "datastore"
    header = Header.read(folder)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1.5e6
    card = (folder / "README.md").read_text(encoding="utf-8")
    for word in (
        f"{header.tokens:,}",
        f"{header.documents} short texts",
        "licence",
        "pronk datastore build",
        "PSF-2.0",
    ):
        assert word in card
    llm = LLM(drafter=Retrieval(), budget="all")
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    prompts = [
        "import os\n\n\nclass Path:\n    def __init__(self",
        "Question: Tom has 3 apples and buys",
    ]
    retrieved, plain = (
        llm.generate(prompts, params, drafter=name) for name in (None, "autoregressive")
    )
    assert [done.token_ids for done in retrieved] == [done.token_ids for done in plain]
    assert all(done.stats.accepted > 0 for done in retrieved)
    proposer = llm.get_proposer()
    assert isinstance(proposer, RetrievalProposer)
    proposer.store.verify()
