"""Staged trees against a best-first search, and beams against a beam search, without caches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import chain as joined
from typing import Any

import numpy as np
import pytest

from drafting.drafting import (
    assert_no_blocks,
    bound,
    context,
    decode,
    dense,
    paths,
    watch_draft,
    watched,
)
from drafting.from_draft.drafts import draft_folder
from pronk.sampling.noise import gumbel_noise
from pronk.sampling.params import SamplingParams
from softmax import softmax
from tiny_models import VOCAB, read_kv

RIGHT = 0.0
FAIR = 0.03
POOR = 0.1
MODEL = f"draft_model(model={draft_folder(FAIR)!r})"
# The same weights in another folder, so that its forward passes are counted separately.
TWIN = f"draft_model(model={draft_folder(FAIR, context=4095)!r}, num_tokens=8)"
SMALLER = {
    "none": "autoregressive",
    "lookup": "prompt_lookup(min_ngram=1)",
    "recycling": "recycling",
    "a poor draft": f"draft_model(model={draft_folder(POOR)!r})",
    "its twin": TWIN,
    "a staged one": f"staged({TWIN}, prompt_lookup(min_ngram=1))",
}
TEXTS = [[1, 2, 3], [4, 5, 6, 7] * 3, [9]]

Path = tuple[int, ...]
Likeliest = Callable[[Path], list[tuple[int, float]]]


def likeliest_after(tokens: Sequence[int], params: SamplingParams, breadth: int) -> Likeliest:
    """Return a function from a path to the ``breadth`` likeliest tokens after it, with their
    probabilities.
    """

    def ask(path: Path) -> list[tuple[int, float]]:
        scores = dense(FAIR)([*tokens, *path]) / (params.temperature or 1.0)
        if params.temperature and not params.rejects:
            scores = scores + gumbel_noise(
                params.seed or 0, len(tokens) + len(path), np.arange(VOCAB)
            )
        probs = softmax(scores)
        best = np.argsort(-scores)[:breadth]
        return list(zip(best.tolist(), probs[best].tolist(), strict=True))

    return ask


def best_first(ask: Likeliest, num_nodes: int, depth: int) -> set[Path]:
    """Return the likeliest nodes; the children of a node are candidates once the node is in the
    tree.
    """
    heap: list[tuple[float, Path]] = []
    found = set[Path]()

    def offer(reach: float, path: Path) -> None:
        if len(path) < depth:
            for token, share in ask(path):
                heappush(heap, (-reach * share, (*path, token)))

    offer(1.0, ())
    while heap and len(found) < num_nodes:
        reach, path = heappop(heap)
        found.add(path)
        if len(found) < num_nodes:
            offer(-reach, path)
    return found


def beam_search(ask: Likeliest, width: int, length: int) -> set[Path]:
    """Return the nodes of the likeliest branches of a length."""
    beam: list[tuple[float, Path]] = [(1.0, ())]
    for _ in range(length):
        longer = [
            (reach * share, (*path, token)) for reach, path in beam for token, share in ask(path)
        ]
        beam = sorted(longer, reverse=True)[:width]
    return {path[: i + 1] for _, path in beam for i in range(length)}


PARAMS = {
    "greedy": SamplingParams(),
    "sampling": SamplingParams(temperature=1.0, seed=5),
    "rejection": SamplingParams(temperature=1.0, seed=5, rule="rejection"),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("smaller", SMALLER.values(), ids=SMALLER)
def test_trees_equal_a_best_first_search(smaller: str, params: SamplingParams) -> None:
    want = [best_first(likeliest_after(tokens, params, 3), 14, 5) for tokens in TEXTS]
    for width, lead in ((1, 0), (1, 5), (4, 4), (16, 1)):
        drafter = bound(
            f"staged({MODEL}, {smaller}, num_nodes=14, breadth=3, depth=5, width={width}, "
            f"lead={lead})"
        )
        passes = watch_draft(drafter.model.draft)
        trees = drafter.propose([context(drafter, tokens, params=params) for tokens in TEXTS])
        assert [paths(tree) for tree in trees] == want
        assert all(tree.probs is None for tree in trees)
        assert len(passes[0].rows) == len(TEXTS)


@pytest.mark.parametrize(
    ("num_nodes", "breadth", "depth"),
    [(1, 4, 8), (20, 1, 6), (20, 2, 1), (30, 16, 2), (60, 4, 64), (9, 3, 3)],
)
def test_trees_of_other_shapes(num_nodes: int, breadth: int, depth: int) -> None:
    options = f"num_nodes={num_nodes}, breadth={breadth}, depth={depth}"
    drafter = bound(f"staged({MODEL}, {SMALLER['lookup']}, {options})")
    for limits in ({}, {"depth": 3}, {"nodes": 5}, {"depth": 1, "nodes": 2}):
        (tree,) = drafter.propose([context(drafter, [1, 2, 3], **limits)])
        most = min(num_nodes, limits.get("nodes", 60))
        deep = min(depth, limits.get("depth", 20))
        want = best_first(likeliest_after([1, 2, 3], SamplingParams(), breadth), most, deep)
        assert paths(tree) == want
        assert max(map(len, want)) <= deep
        assert len(want) <= most


def test_a_proposal_computes_no_node_twice() -> None:
    for smaller in SMALLER.values():
        drafter = bound(f"staged({MODEL}, {smaller}, width=6, depth=3, num_nodes=30)")
        passes = watch_draft(drafter.model.draft)
        drafter.propose([context(drafter, [1, 2, 3])])
        asked = [*joined(*(each.texts[0] for each in passes))]
        assert len(asked) == len(set(asked)) > 10
        assert asked[:3] == [(1,), (1, 2), (1, 2, 3)]
        assert max(map(len, asked)) == 3 + 3 - 1  # leaves, at depth 3, are not computed


def passes_with(smaller: str, **options: Any) -> int:
    more = "".join(f", {name}={value}" for name, value in options.items())
    drafter = bound(f"staged({MODEL}, {smaller}{more})")
    passes = watch_draft(drafter.model.draft)
    for tokens in TEXTS:
        drafter.propose([context(drafter, tokens)])
    return len(passes)


def test_a_right_smaller_drafter_saves_forward_passes() -> None:
    options = {"width": 1, "lead": 8, "num_nodes": 8, "breadth": 1}
    alone = passes_with("autoregressive", **options)
    helped = passes_with(TWIN, **options)
    assert alone == 8 * len(TEXTS)
    assert helped == len(TEXTS)  # one forward pass per text computes the whole branch
    assert passes_with(TWIN, **{**options, "lead": 3}) == 2 * len(TEXTS)
    wide = {"width": 1, "num_nodes": 16, "breadth": 4}
    assert passes_with(TWIN, **wide) < 0.8 * passes_with("autoregressive", **wide)
    assert passes_with("autoregressive", width=8) < 0.8 * passes_with("autoregressive", width=1)


class Counted(list[int]):
    """A text that counts how many of its tokens are read."""

    read = 0

    def __iter__(self) -> Iterator[int]:
        self.read += len(self)
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.read += len(found) if isinstance(index, slice) else 1
        return found


@pytest.mark.few(2)
@pytest.mark.parametrize("smaller", SMALLER.values(), ids=SMALLER)
def test_a_proposal_reads_only_the_end_of_a_long_text(smaller: str) -> None:
    """The smaller drafter is asked in each forward pass; all together read fewer tokens than the
    text has.
    """
    drafter = bound(f"staged({MODEL}, {smaller}, width=1, num_nodes=12)")
    tokens = [*range(20)] * 120
    state = drafter.start(tokens)
    drafter.propose([context(drafter, tokens, state=state)])
    tokens += [5]
    asked = context(drafter, tokens, state=state)
    text = Counted(tokens)
    (tree,) = drafter.propose([replace(asked, tokens=text)])
    assert 0 < text.read < len(text)
    (want,) = bound(f"staged({MODEL}, autoregressive, num_nodes=12)").propose(
        [context(drafter, tokens)]
    )
    assert paths(tree) == paths(want)


def test_accepted_draft_tokens_are_not_computed_again() -> None:
    """The draft's cache keeps the rows of the accepted branch; only its last token is computed
    again.
    """
    engine, drafter = watched(f"staged({MODEL}, {SMALLER['lookup']})")
    passes = watch_draft(drafter.inner.model.draft)
    (request,) = decode(engine, drafter, [[1, 2, 3]])
    text = tuple(request.tokens)
    counts = dict[Path, int]()
    for path in joined(*(each.texts[0] for each in passes)):
        counts[path] = counts.get(path, 0) + 1
    roots = {tuple(asked.tokens) for asked in drafter.of(request)}
    again = {path for path, count in counts.items() if count > 1}
    assert all(text[: len(path)] == path for path in again)
    assert again <= roots
    assert all(counts[path] <= 2 for path in again)
    kept = [path for path in counts if text[: len(path)] == path and path not in roots]
    assert len(kept) > 10
    assert request.stats.accepted > 5
    assert_no_blocks(drafter)


def test_moved_rows_have_the_bits_of_a_new_draft_cache() -> None:
    drafter = bound(f"staged({MODEL}, {SMALLER['lookup']}, breadth=3)")
    draft = drafter.model.draft
    tokens = [1, 2, 3]
    moved = 0
    state = drafter.start(tokens)
    for number in range(8):
        (tree,) = drafter.propose([context(drafter, tokens, state=state)])
        leaf = max(
            range(len(tree)), key=lambda node: (tree.depths[node], node if number % 2 else -node)
        )
        path = tree.path(leaf)
        moved += path != tuple(range(1, len(path) + 1))
        tokens = [*tokens, *(tree.tokens[node] for node in path), number]
        cache = state[0]
        (pending,) = draft.align([context(drafter, tokens, state=cache)])
        assert cache.tokens + pending == tokens
        assert 1 <= len(pending) <= 3
        for layer in range(2):
            got = read_kv(draft.runner.cache, layer, cache.block_table)
            want = dense(FAIR).rows(cache.tokens)[2 * layer : 2 * layer + 2]
            for one, other in zip(got, want, strict=True):
                assert np.array_equal(one, other)
    assert moved > 2


@pytest.mark.parametrize("smaller", SMALLER.values(), ids=SMALLER)
def test_trees_of_a_whole_decoding_equal_a_best_first_search(smaller: str) -> None:
    engine, drafter = watched(f"staged({MODEL}, {smaller}, num_nodes=8, breadth=2, depth=4)")
    for request in decode(engine, drafter, TEXTS[:2], temperature=0.7, max_tokens=16):
        for asked in drafter.of(request):
            most = min(8, asked.nodes)
            depth = min(4, asked.depth)
            want = best_first(
                likeliest_after(asked.tokens, request.params, 2), most if depth else 0, depth
            )
            assert paths(asked.tree) == want
        assert request.stats.accepted > 0


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize(("width", "length"), [(1, 5), (3, 4), (4, 1), (6, 5)])
def test_beams_equal_a_beam_search(width: int, length: int, params: SamplingParams) -> None:
    drafter = bound(f"beam({MODEL}, width={width}, num_tokens={length})")
    passes = watch_draft(drafter.parts[0].draft)
    trees = drafter.propose([context(drafter, tokens, params=params) for tokens in TEXTS])
    for tokens, tree in zip(TEXTS, trees, strict=True):
        assert paths(tree) == beam_search(likeliest_after(tokens, params, width), width, length)
        assert tree.probs is None
    assert len(passes) == length
    assert [each.rows for each in passes[1:]] == [[width] * len(TEXTS)] * (length - 1)


def test_beams_end_at_the_limits() -> None:
    drafter = bound(f"beam({MODEL}, width=3, num_tokens=6)")
    (tree,) = drafter.propose([context(drafter, [1, 2, 3], depth=2)])
    assert paths(tree) == beam_search(likeliest_after([1, 2, 3], SamplingParams(), 3), 3, 2)
    (small,) = drafter.propose([context(drafter, [1, 2, 3], nodes=4)])
    assert small.num_draft_tokens == 4
    assert paths(small) < beam_search(likeliest_after([1, 2, 3], SamplingParams(), 3), 3, 6)
