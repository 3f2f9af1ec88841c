"""Lookahead's window and pool against figure 2b of the paper and a slow reference."""

import random
from collections.abc import Callable, Sequence
from typing import Literal

import pytest

from drafting.helpers import Model, bind, context, looping, priced, scrambled, step, verify_step
from pronk import Lookahead
from pronk.base.errors import OptionError
from pronk.lab.drafters.lookahead import LookaheadState
from pronk.lab.drafters.window import (
    NO_WINDOW,
    WINDOW_SIZES,
    NgramPool,
    Window,
    WindowShape,
    WindowTuner,
)
from pronk.models.cost_model import CostCurve
from tiny_models import make_engine, tiny_decoder


def after(pool: NgramPool, token: int) -> list[tuple[int, ...]]:
    return [gram for gram, _ in pool.continuations(token)]


def initial_token(prompt: Sequence[int], position: int) -> int:
    """Return the token of a window cell without an output."""
    return prompt[position * 7919 % len(prompt)]


def reference_ngrams(
    prompt: list[int],
    steps: Sequence[int],
    model: Model,
    width: int,
    size: int,
    *,
    filled: bool = False,
) -> list[list[int]]:
    """Return the n-grams of the lookahead branch (algorithm 1 of the paper) in the order of
    discovery.

    Cells are addressed by absolute positions, with one model call per position. ``steps`` are the
    lengths of the text.
    """
    rows: list[dict[int, int]] = [{}]
    if filled:
        first = steps[0] - 1
        cells = [
            [initial_token(prompt, first + r * width + j) for j in range(width)]
            for r in range(size - 1)
        ]
        rows = [{first + r + j: cells[r][j] for j in range(width)} for r in range(size - 1)]
    grams: list[list[int]] = []
    text = list(prompt)
    while len(text) < steps[-1]:
        text.append(model(text))
    for length in steps:
        now = text[:length]
        root = length - 1
        cells = [
            [row.get(root + r + j, initial_token(prompt, root + r + j)) for j in range(width)]
            for r, row in enumerate(rows)
        ]
        cells[0][0] = now[-1]
        new = {}
        for j in range(width):
            column = [cells[r][j] for r in range(1, len(rows))]
            new[root + len(rows) + j] = model([*now, *cells[0][1 : j + 1], *column])
        if len(rows) == size - 1:
            grams += [
                [*(cells[r][j] for r in range(size - 1)), new[root + size - 1 + j]]
                for j in range(width)
            ]
        rows = [{root + r + j: cells[r][j] for j in range(width)} for r in range(len(rows))]
        rows.append(new)
        if len(rows) == size:
            rows = rows[1:]
    return grams


@pytest.mark.parametrize("warm_up", ["grow", "random"])
@pytest.mark.parametrize("model", [scrambled, looping])
@pytest.mark.parametrize(
    ("width", "size", "draft_tokens"),
    [(1, 2, 1), (5, 4, 2), (3, 2, 3), (2, 5, 2), (4, 3, 0), (1, 4, 2)],
)
def test_ngrams_and_outputs_equal_a_slow_reference(
    model: Model, width: int, size: int, draft_tokens: int, warm_up: Literal["grow", "random"]
) -> None:
    drafter = bind(
        Lookahead(window=width, ngram=size, guesses=draft_tokens, use_prompt=False, warm_up=warm_up)
    )
    tokens = [3, 1, 4]
    found = list[list[int]]()
    state = drafter.start(tokens)
    record = state.pool.add
    state.pool.add = lambda gram, from_window: (
        found.append(list(gram)),
        record(gram, from_window=from_window),
    )  # type: ignore[method-assign,assignment,return-value]
    lengths = []
    for _ in range(30):
        lengths.append(len(tokens))
        step(drafter, state, tokens, model)
    filled = warm_up == "random"
    assert found == reference_ngrams([3, 1, 4], lengths, model, width, size, filled=filled)
    assert len(found) == width * (30 if filled else 30 - (size - 2))
    plain = [3, 1, 4]
    while len(plain) < len(tokens):
        plain.append(model(plain))
    assert tokens == plain
    # With one column, the random tokens never leave the trajectory: each output follows the one
    # above it.
    if draft_tokens and model is looping and not (filled and width == 1 and size > 2):
        assert len(tokens) > 3 + 30 * 1.5


def test_tree_of_figure_2b() -> None:
    """Check which nodes each node sees and where each node stands, for W = 5, N = 4, G = 2."""
    orange = (0, 11, 12, 13, 14)
    green = (21, 22, 23, 24, 25)
    red = (32, 33, 34, 35, 36)
    pool = NgramPool(100)
    pool.add((0, 41, 42, 43))
    pool.add((0, 51, 52, 53))
    # The window of the last step has a fourth row, the oldest, which is dropped.
    state = LookaheadState((1,), pool, Window(8, ((7, 7, 7, 7, 7), orange, green, red)))
    drafter = bind(Lookahead(window=5, ngram=4, guesses=2, use_prompt=False))
    (tree,) = drafter.propose([context(state, [*range(1, 10), 0])])
    names = dict(enumerate(tree.tokens))
    sees = {
        names[node]: {names[other] for other in range(len(tree)) if tree.visible[node, other]}
        for node in range(len(tree))
    }
    for j in range(5):
        row = {0, *orange[1 : j + 1]}
        assert sees[orange[j]] == row
        assert sees[green[j]] == row | {green[j]}
        assert sees[red[j]] == row | {green[j], red[j]}
    for candidate in ((51, 52, 53), (41, 42, 43)):
        for depth in range(3):
            assert sees[candidate[depth]] == {0, *candidate[: depth + 1]}
    depth_of = {names[node]: depth for node, depth in enumerate(tree.depths)}
    # The digits of the figure are in the tokens' tens and ones.
    assert [depth_of[token] for token in orange] == [0, 1, 2, 3, 4]
    assert [depth_of[token] for token in green] == [1, 2, 3, 4, 5]
    assert [depth_of[token] for token in red] == [2, 3, 4, 5, 6]
    acceptable = {names[node] for node in range(len(tree)) if tree.acceptable[node]}
    assert acceptable == {0, 41, 42, 43, 51, 52, 53}
    assert len(tree) == 1 + 6 + 14
    assert tree.tokens[1:4] == (51, 52, 53)  # the latest candidate is the main chain


def test_pool_is_bounded_and_evicts_the_least_recently_used() -> None:
    pool = NgramPool(3)
    for gram in ((1, 2), (3, 4), (1, 5), (3, 4), (6, 7)):
        pool.add(gram)
    assert pool.size == 3
    assert [after(pool, token) for token in (1, 3, 6)] == [[(5,)], [(4,)], [(7,)]]
    for i in range(50):
        pool.add((i % 7, i, i))
    assert pool.size == 3
    assert sum(len(after(pool, token)) for token in range(60)) == 3


def test_ngrams_of_the_text_are_optional() -> None:
    prompt = [1, 2, 3, 9, 1]
    for use in (True, False):
        drafter = bind(Lookahead(window=1, ngram=3, use_prompt=use))
        state = drafter.start(prompt)
        drafter.propose([context(state, prompt)])
        assert after(state.pool, 1) == ([(2, 3)] if use else [])
        drafter.propose([context(state, [*prompt, 7, 8, 5], drafted=1)])
        assert after(state.pool, 1) == ([(7, 8), (2, 3)] if use else [])
        assert after(state.pool, 9) == ([(1, 7)] if use else [])
        assert after(state.pool, 7) == []


def test_a_window_beyond_the_limits_is_left_out() -> None:
    drafter = bind(Lookahead(window=5, ngram=4, guesses=2))
    dice = random.Random(0)
    tokens = [dice.randrange(3) for _ in range(40)]
    state = drafter.start(tokens)
    for depth, nodes in ((3, 99), (99, 3)):
        (tree,) = drafter.propose([context(state, tokens, depth, nodes)])
        assert all(tree.acceptable)


def test_ngrams_of_the_text_are_marked() -> None:
    pool = NgramPool(9)
    pool.add((1, 2, 3), from_window=True)
    pool.add((1, 4, 5))
    assert list(pool.continuations(1)) == [((4, 5), False), ((2, 3), True)]
    pool.add((1, 4, 5), from_window=True)
    pool.add((1, 2, 3))
    assert list(pool.continuations(1)) == [((2, 3), False), ((4, 5), False)]


@pytest.mark.parametrize("old", [WindowShape(5, 4, 1), WindowShape(2, 3, 1), WindowShape(7, 5, 1)])
@pytest.mark.parametrize("new", [WindowShape(5, 4, 1), WindowShape(3, 3, 1), WindowShape(1, 2, 1)])
@pytest.mark.parametrize("step", [1, 2, 9])
def test_a_resized_window_keeps_its_cells_in_place(
    old: WindowShape, new: WindowShape, step: int
) -> None:
    """Each cell's token is its own position, so a misplaced cell shows."""
    rows = tuple(tuple(10 + r + j for j in range(old.window)) for r in range(old.ngram))
    window = Window(10, rows).shift_to(10 + step, 10 + step, new, [-1])
    assert len(window.rows) == min(new.ngram, old.ngram) - (1 if old.ngram >= new.ngram else 0)
    for r, row in enumerate(window.rows):
        assert len(row) == new.window
        assert all(token in (-1, 10 + step + r + j) for j, token in enumerate(row))
    known = sum(token != -1 for row in window.rows for token in row)
    assert known > 1 or step == 9 or old.window <= 2 or new.window == 1


CHEAP = CostCurve(1.0, 1.0, 0.0007)  # 1.09 with 128 rows
DEAR = CostCurve(1.0, 0.6, 0.1125)  # 1.05 with 4 rows, 1.5 with 8


def tuned_shapes(
    tuner: WindowTuner,
    costs: CostCurve,
    harvest: Callable[[WindowShape, int], int],
    steps: int,
    requests: int = 1,
) -> list[WindowShape]:
    """Return the shape of each step; ``harvest(shape, step)`` is the number of tokens that the
    window yields.
    """
    shapes = []
    for number in range(steps):
        shapes.append(tuner.shape())
        found = harvest(tuner.shape(), number)
        tuner.record_step(
            requests=requests,
            rows=requests,
            other_tokens=requests,
            window_tokens=found * requests,
            costs=costs,
        )
    return shapes


@pytest.mark.parametrize(
    ("costs", "period", "requests", "sizes"),
    [
        (CHEAP, 1, 1, {*WINDOW_SIZES[1:]}),
        (DEAR, 2, 1, {WINDOW_SIZES[1]}),
        (DEAR, 4, 1, {WINDOW_SIZES[1]}),
        (DEAR, 4, 16, {NO_WINDOW}),  # rows that are free for one request are not free for 16
        (CostCurve(1.0, 0.0, 1.0), 1, 1, {NO_WINDOW}),
    ],
    ids=["cheap rows", "dear rows", "rare gain", "large batch", "no free row"],
)
def test_automatic_window_grows_while_its_gain_pays_for_its_rows(
    costs: CostCurve, period: int, requests: int, sizes: set[WindowShape]
) -> None:
    shapes = tuned_shapes(
        WindowTuner(),
        costs,
        lambda shape, step: int(shape.window > 0 and step % period == 0),
        300,
        requests,
    )
    assert shapes[0] == NO_WINDOW
    assert {*shapes[1:]} == sizes
    assert shapes[-1] == max(sizes, key=lambda shape: shape.num_window_nodes)


def test_automatic_window_closes_where_it_gains_nothing() -> None:
    shapes = tuned_shapes(WindowTuner(), DEAR, lambda _, __: 0, 3000)
    assert shapes[-1] == NO_WINDOW
    assert 0 < sum(shape != NO_WINDOW for shape in shapes) < 0.03 * len(shapes)
    assert max(shape.num_window_nodes for shape in shapes) == WINDOW_SIZES[1].num_window_nodes


def test_the_window_is_off_without_costs_and_changes_between_steps_only() -> None:
    """No window without known costs; the shape changes only when the first request of a new step
    proposes.
    """
    drafter = bind(Lookahead())
    texts = [[1, 2, 3], [4, 0, 1]]
    states = [drafter.start(text) for text in texts]
    for costs in (None, CHEAP):
        trees = drafter.propose(
            [context(*each, plan=priced(costs)) for each in zip(states, texts, strict=True)]
        )
        assert all(all(tree.acceptable) for tree in trees)
    for state, text, tree in zip(states, texts, trees, strict=True):
        verify_step(drafter, state, tree, text, looping)
        assert drafter.shape == NO_WINDOW
    trees = drafter.propose(
        [context(*each, plan=priced(CHEAP)) for each in zip(states, texts, strict=True)]
    )
    assert drafter.shape == WINDOW_SIZES[1]
    assert all(
        len(tree) - sum(tree.acceptable) == WINDOW_SIZES[1].window - 1 for tree in trees
    )  # row 0 counts the root


@pytest.mark.parametrize(
    ("window", "ngram", "rows"), [(33, 5, 132), (43, None, 129), (64, 16, 960)]
)
def test_windows_of_more_rows_than_a_forward_pass_are_refused(
    window: int, ngram: int | None, rows: int
) -> None:
    drafter = Lookahead(window=window, ngram=ngram)
    expected = (
        rf"^lookahead: window \* \(ngram - 1\): expected at most 128, the limit max_tree, found {rows}; "
        rf"set max_tree to {rows}$"
    )
    with pytest.raises(OptionError, match=expected):
        drafter.bind(make_engine(tiny_decoder()).target)
    drafter.bind(make_engine(tiny_decoder(), max_tree=rows).target)
    with pytest.raises(OptionError, match=r"window \* \(ngram - 1\) of at most 1024, found 1025"):
        Lookahead(window=205, ngram=6)


@pytest.mark.parametrize(("window", "ngram"), [(32, 5), (42, None), (64, 3)])
def test_the_largest_accepted_windows_are_explored(window: int, ngram: int | None) -> None:
    """The first forward pass has at least a row for each column of the window."""
    drafter = bind(Lookahead(window=window, ngram=ngram))
    (tree,) = drafter.propose([context(drafter.start([1, 2, 3]), [1, 2, 3], depth=200, nodes=127)])
    assert len(tree) >= window
