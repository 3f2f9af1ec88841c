"""Lookahead decoding (Fu et al. 2024, algorithm 1): n-grams from the trajectory of a Jacobi iteration, verified later.

Each pass does two things. It *verifies* up to G candidates: n-grams of the pool that begin with the last token, merged
by their common prefixes. And it *explores*: a window of N - 1 rows and W columns holds the outputs of the last N - 1
passes for the next positions, row 0 the oldest. Row 0 hangs below the root as a chain, and below each of its columns
the later rows; what the target says at the end of column j is the next token of that column's n-gram. With W = 5, N = 4
(figure 2 of the paper; digits are positions, the root is row 0's first column, o g r the rows from old to new) ::

    0 ── o1 ── o2 ── o3 ── o4
    │     │     │     │     │
    g1    g2    g3    g4    g5      outputs at the r's: n3 n4 n5 n6 n7
    │     │     │     │     │       new n-grams: 0 g1 r2 n3, o1 g2 r3 n4, …
    r2    r3    r4    r5    r6

Then the oldest row goes, the outputs become the newest, and the window moves on with the text. The outputs are greedy
when sampling, too: they are guesses.

For a GPU with idle arithmetic, where tens of rows cost what one does; on a CPU every row has its price, and the
automatic window ends up small or gone, which leaves the text's own n-grams. It takes 30 to 220 µs a step with
the window's size, 5,000 steps a second at W = 15. A pool holds at most ``max_ngrams`` n-grams of 130 + 45 N bytes: 23
MB with N = 5 and the defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

from pronk.checks import check_flag, check_integer
from pronk.drafters.from_outputs._likeliest import likeliest
from pronk.drafters.from_outputs._window import NO_WINDOW, NgramPool, Window, WindowShape, WindowTuner
from pronk.drafters.shared.rank_tree import MAX_NODES
from pronk.drafters.shared.trie import Trie
from pronk.errors import OptionError
from pronk.speculation.acceptance_rates import AcceptanceRates
from pronk.speculation.cost_model import CostCurve
from pronk.speculation.proposer import Capabilities, DraftContext, Drafter, Outcome, Proposer
from pronk.speculation.shared_acceptance import SharedAcceptance
from pronk.speculation.target import Target
from pronk.speculation.tree import Origin, TokenTree

__all__ = ["Lookahead", "LookaheadState"]

_NGRAM = 4  # N without the option, where the window is given

# Ways of guessing: n-grams of the text, and those that only the window found; of each, what the first candidate begins
# with, what stands beside another guess, and what follows.
_TEXT, _EXPLORED = 0, 3
_PRIORS = {_TEXT: 0.35, _TEXT + 1: 0.1, _TEXT + 2: 0.6, _EXPLORED: 0.25, _EXPLORED + 1: 0.1, _EXPLORED + 2: 0.5}


@dataclass
class LookaheadState:
    """One request's pool and window; there is no window before the first pass that has room for one.

    The pool has the n-grams of the first ``read`` tokens.
    """

    prompt: tuple[int, ...]
    pool: NgramPool
    rates: AcceptanceRates
    window: Window | None = None
    read: int = 0


class _VerifiedTree(NamedTuple):
    """A verified tree, and its accepted nodes."""

    tree: TokenTree
    path: tuple[int, ...]


@dataclass(frozen=True)
class Lookahead(Drafter):
    """Options of lookahead decoding.

    Attributes:
        window: W, columns of the window, 1..64, where row 0 counts the last token; or ``"auto"``: W, N and G follow
            what passes cost here and what the window brings.
        ngram: N, tokens of an n-gram, the one it begins with included, 2..16; 4 if ``None``. Not with ``"auto"``. The
            window takes W · (N - 1) of the at most 128 rows of a request in a forward pass. At 128 no row is left to
            verify candidates.
        guesses: G, candidates that are verified in a pass, 0..64; W if ``None``. Not with ``"auto"``.
        use_prompt: whether n-grams of the prompt and of the text are candidates, too.
        shared: one pool for all requests instead of one for each.
        max_ngrams: maximum number of n-grams in a pool, 1..1048576; see :class:`NgramPool` for what is evicted.
    """

    name = "lookahead"

    window: int | Literal["auto"] = "auto"
    ngram: int | None = None
    guesses: int | None = None
    use_prompt: bool = True
    shared: bool = False
    max_ngrams: int = 65536

    def __post_init__(self) -> None:
        for option, value, low, high in (("ngram", self.ngram, 2, 16), ("guesses", self.guesses, 0, 64)):
            if value is not None:
                check_integer(f"{self.name}: {option}", value, low, high)
                if self.window == "auto":
                    msg = f'{self.name}: expected no {option} with window="auto", which chooses it; found {value}'
                    raise OptionError(msg)
        if isinstance(self.window, str) and self.window != "auto":
            msg = f'{self.name}: window: expected "auto" or an integer in 1..64, found {self.window!r}'
            raise OptionError(msg)
        if self.window != "auto":
            check_integer(f"{self.name}: window", self.window, 1, 64)
            if (rows := self.window * ((self.ngram or _NGRAM) - 1)) > MAX_NODES + 1:
                msg = (
                    f"{self.name}: expected window * (ngram - 1) of at most {MAX_NODES + 1}, found {rows}; "
                    "use a smaller window or ngram"
                )
                raise OptionError(msg)
        check_flag(f"{self.name}: use_prompt", self.use_prompt)
        check_flag(f"{self.name}: shared", self.shared)
        check_integer(f"{self.name}: max_ngrams", self.max_ngrams, 1, 1048576)

    def bind(self, target: Target) -> LookaheadProposer:
        """What guesses by these options."""
        return LookaheadProposer(self, target)


class LookaheadProposer(Proposer[LookaheadState]):
    """Lookahead decoding with what its windows have been worth so far.

    Attributes:
        options: it guesses by.
        needs: logits at every node, and costs where the window's size follows from them.
    """

    name = Lookahead.name

    def __init__(self, options: Lookahead, target: Target) -> None:
        self.options, self.target = options, target
        self.capabilities = Capabilities(logits=True, costs=options.window == "auto", observes_all_steps=False)
        self._pool = NgramPool(options.max_ngrams) if options.shared else None
        self._experience = WindowTuner()
        self._costs: CostCurve | None = None
        self._heard: list[_VerifiedTree] = []

    @property
    def shape(self) -> WindowShape:
        """The present sizes."""
        window, ngram, guesses = self.options.window, self.options.ngram, self.options.guesses
        if window == "auto":
            return self._experience.shape()
        return WindowShape(window, ngram or _NGRAM, window if guesses is None else guesses)

    def start(self, prompt: Sequence[int]) -> LookaheadState:
        """No window yet; the text's n-grams are read with the first proposal."""
        pool = NgramPool(self.options.max_ngrams) if self._pool is None else self._pool
        return LookaheadState(
            tuple(prompt), pool, AcceptanceRates(self.name, _PRIORS, SharedAcceptance.of(self.target))
        )

    def propose(self, contexts: Sequence[DraftContext[LookaheadState]]) -> list[TokenTree]:
        """Candidates from the pool, and the window beside them."""
        self._judge()
        self._costs = contexts[0].costs if contexts else None
        return [self._tree(context, self.shape) for context in contexts]

    def observe(self, outcome: Outcome[LookaheadState]) -> None:
        """New n-grams into the pool; the window gets its next row."""
        outcome.state.rates.learn(outcome)
        self._explore(outcome, self.shape)
        if self.options.window == "auto" and not outcome.params.rejects:
            self._heard.append(_VerifiedTree(outcome.tree, outcome.path))

    def _read(self, context: DraftContext[LookaheadState]) -> None:
        """The n-grams of the text are candidates, too."""
        state, certain = context.state, context.root + 1
        if not self.options.use_prompt or self._is_private(context):
            return
        size = NO_WINDOW.ngram if self.options.window == "auto" else self.shape.ngram
        text = context.tokens[max(0, state.read - size + 1) : certain]
        for start in range(len(text) - size + 1):
            state.pool.add(text[start : start + size])
        state.read = certain

    def _tree(self, context: DraftContext[LookaheadState], shape: WindowShape) -> TokenTree:
        self._read(context)
        window = self._window(context, shape)
        room = context.max_nodes - (0 if window is None else len(window.tree()[0]))
        trie = self._candidates(context, shape).tree(room)
        return trie if window is None else window.below(trie, _mark(shape.window))

    def _window(self, context: DraftContext[LookaheadState], shape: WindowShape) -> Window | None:
        """The window where the text ends now; ``None`` where it is not wanted or does not fit."""
        if not shape.window:
            return None
        root, position = context.tokens[-1], len(context.tokens) - 1
        old = context.state.window or Window(position, ())
        window = old.moved(position, root, shape, context.state.prompt)
        fits = window.depth <= context.max_depth and len(window.tree()[0]) <= context.max_nodes
        return window if fits else None

    def _candidates(self, context: DraftContext[LookaheadState], shape: WindowShape) -> Trie:
        """Up to G n-grams that begin with the text's last token, the latest first."""
        trie, rates = Trie(context.tokens[-1]), context.state.rates
        for gram, explored in islice(context.state.pool.after(context.tokens[-1]), shape.guesses):
            node = 0
            for depth, token in enumerate(gram[: context.max_depth]):
                way = (_EXPLORED if explored else _TEXT) + (1 if trie.forks(node, token) else 2 if depth else 0)
                node = trie.add(node, token, trie.gains[node] * rates.rate(way, depth + 1), (self.name, way))
        return trie

    def _explore(self, outcome: Outcome[LookaheadState], shape: WindowShape) -> None:
        """What the target said at the window's last row is its next row, and ends its columns' n-grams."""
        tree, state, width = outcome.tree, outcome.state, shape.window
        if outcome.logits is None:
            state.window = None
            return
        nodes = [0, *_explored(tree, width)]
        if not width or len(nodes) % width:
            return
        if len(nodes) == 1 and state.window is not None and shape.ngram > 2:
            return  # only the first window of one column is the root alone: there was no room for a later one
        rows = [tuple(tree.tokens[node] for node in nodes[i : i + width]) for i in range(0, len(nodes), width)]
        outputs = tuple(guess for (guess,) in likeliest(outcome, 1, nodes[-width:]))
        if len(rows) == shape.ngram - 1 and not self._is_private(outcome):
            for column, output in enumerate(outputs):
                state.pool.add([*(row[column] for row in rows), output], explored=True)
        state.window = Window(outcome.position, (*rows, outputs))

    def _is_private(self, outcome: Outcome[LookaheadState] | DraftContext[LookaheadState]) -> bool:
        """Whether other requests may not learn from this one, though all share the pool."""
        return self.options.shared and outcome.params.rejects

    def _judge(self) -> None:
        """Give the window the size that the last step's worth speaks for, if the window was there."""
        shape, costs = self.shape, self._costs
        heard = [each for each in self._heard if not shape.window or _explored(each.tree, shape.window)]
        self._heard.clear()
        if not heard or costs is None:
            return
        accepted = [tree.origin[node] for tree, path in heard if tree.origin is not None for node in path]
        found = sum(name == self.name and way >= _EXPLORED for name, way in accepted)
        self._experience.learn(
            requests=len(heard),
            rows=sum(sum(each.tree.acceptable) for each in heard),
            plain=sum(1 + len(each.path) for each in heard) - found,
            harvest=found,
            costs=costs,
        )


def _mark(width: int) -> Origin:
    """What the nodes of a window carry: a number that no way of guessing has."""
    return (Lookahead.name, -width)


def _explored(tree: TokenTree, width: int) -> list[int]:
    """The nodes of a window of ``width`` columns, row by row; none if the tree is another drafter's."""
    mark = _mark(width)
    return [] if tree.origin is None else [node for node, origin in enumerate(tree.origin) if origin == mark]
