"""Lookahead decoding (Fu et al. 2024, algorithm 1): n-grams of a Jacobi iteration, verified later.

Source of the draft tokens: a pool of n-grams from the target's own outputs and from the request's text. Each forward
pass *verifies* up to G candidates: n-grams of the pool that begin with the last token, merged by common prefixes. The
same forward pass *explores*: a window of N - 1 rows and W columns holds the outputs of the last N - 1 forward passes
for the next positions, row 0 the oldest. Row 0 is a chain below the root. The later rows are chains below its columns.
The target's output at the end of column j completes that column's n-gram. With W = 5, N = 4 (figure 2 of the paper;
digits are positions, the root is row 0's first column, o g r are the rows from old to new) ::

    0 ── o1 ── o2 ── o3 ── o4
    │     │     │     │     │
    g1    g2    g3    g4    g5      outputs at the r's: n3 n4 n5 n6 n7
    │     │     │     │     │       new n-grams: 0 g1 r2 n3, o1 g2 r3 n4, …
    r2    r3    r4    r5    r6

Then the oldest row is dropped, the outputs become the newest row, and the window advances with the text. The outputs
are greedy even under sampling.

When it pays: on a GPU with idle arithmetic, where tens of rows cost as much as one. On a CPU every row costs time, and
``window="auto"`` settles on a small window or on none, which leaves the text's own n-grams.

Cost: 30 to 220 µs of host time per step, growing with the window (200 µs at W = 15). A pool takes 130 + 45 N bytes per
n-gram, at most ``max_ngrams`` of them: 23 MB with N = 5 and the defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

from pronk.checks import check_flag, check_integer
from pronk.drafters.from_outputs._likeliest import top_tokens
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

_NGRAM = 4  # default N of a window of fixed size

# Kinds of draft tokens, each with an acceptance rate: from n-grams of the text, and from those that only the window
# produced; + 0 the first token of a candidate, + 1 a sibling of another draft token, + 2 a later token of a candidate.
_FROM_TEXT, _FROM_WINDOW = 0, 3
_PRIORS = {
    _FROM_TEXT: 0.35,
    _FROM_TEXT + 1: 0.1,
    _FROM_TEXT + 2: 0.6,
    _FROM_WINDOW: 0.25,
    _FROM_WINDOW + 1: 0.1,
    _FROM_WINDOW + 2: 0.5,
}


@dataclass
class LookaheadState:
    """State of one request.

    Attributes:
        prompt: prompt tokens, which fill window cells without an output.
        pool: n-grams; shared by all requests with the option ``shared``.
        rates: acceptance rates by kind of draft token.
        window: window of the last step, or ``None`` before the first.
        num_indexed: number of text tokens whose n-grams are in the pool.
    """

    prompt: tuple[int, ...]
    pool: NgramPool
    rates: AcceptanceRates
    window: Window | None = None
    num_indexed: int = 0


class _VerifiedTree(NamedTuple):
    tree: TokenTree
    path: tuple[int, ...]


@dataclass(frozen=True)
class Lookahead(Drafter):
    """Options of lookahead decoding.

    Attributes:
        window: W, number of columns of the window (row 0 includes the last token), 1..64; or ``"auto"``: W, N and G
            follow measured costs and the measured gain of the window.
        ngram: N, number of tokens of an n-gram including its first, 2..16; 4 if ``None``. Not with ``"auto"``. The
            window takes W · (N - 1) of the at most 128 rows of a request in a forward pass. At 128 no row is left to
            verify candidates.
        guesses: G, maximum number of candidates per forward pass, 0..64; W if ``None``. Not with ``"auto"``.
        use_prompt: whether n-grams of the prompt and the output are candidates as well.
        shared: whether all requests share one pool.
        max_ngrams: maximum number of n-grams in a pool, 1..1048576; :class:`NgramPool` describes the eviction.
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
                    msg = f'{self.name}: expected no {option} with window="auto", found {value}; set window as well'
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
        """Return a proposer with these options."""
        return LookaheadProposer(self, target)


class LookaheadProposer(Proposer[LookaheadState]):
    """Lookahead decoding for all requests of a target; tunes the window size with ``window="auto"``."""

    name = Lookahead.name

    def __init__(self, options: Lookahead, target: Target) -> None:
        self.options, self.target = options, target
        self.capabilities = Capabilities(logits=True, costs=options.window == "auto", observes_all_steps=False)
        self._pool = NgramPool(options.max_ngrams) if options.shared else None
        self._tuner = WindowTuner()
        self._costs: CostCurve | None = None
        self._verified: list[_VerifiedTree] = []

    @property
    def shape(self) -> WindowShape:
        """Return the current sizes."""
        window, ngram, guesses = self.options.window, self.options.ngram, self.options.guesses
        if window == "auto":
            return self._tuner.shape()
        return WindowShape(window, ngram or _NGRAM, window if guesses is None else guesses)

    def start(self, prompt: Sequence[int]) -> LookaheadState:
        """Return a state without a window; the first proposal reads the text's n-grams."""
        pool = NgramPool(self.options.max_ngrams) if self._pool is None else self._pool
        return LookaheadState(
            tuple(prompt), pool, AcceptanceRates(self.name, _PRIORS, SharedAcceptance.of(self.target))
        )

    def propose(self, contexts: Sequence[DraftContext[LookaheadState]]) -> list[TokenTree]:
        """Return one tree per context: candidates from the pool plus the window."""
        self._tune()
        self._costs = contexts[0].costs if contexts else None
        return [self._tree(context, self.shape) for context in contexts]

    def observe(self, outcome: Outcome[LookaheadState]) -> None:
        """Add the window's new n-grams to the pool, and the outputs as a new row to the window."""
        outcome.state.rates.learn(outcome)
        self._update_window(outcome, self.shape)
        if self.options.window == "auto" and not outcome.params.rejects:
            self._verified.append(_VerifiedTree(outcome.tree, outcome.path))

    def _index_text(self, context: DraftContext[LookaheadState]) -> None:
        state, num_committed = context.state, context.root + 1
        if not self.options.use_prompt or self._is_private(context):
            return
        size = NO_WINDOW.ngram if self.options.window == "auto" else self.shape.ngram
        text = context.tokens[max(0, state.num_indexed - size + 1) : num_committed]
        for start in range(len(text) - size + 1):
            state.pool.add(text[start : start + size])
        state.num_indexed = num_committed

    def _tree(self, context: DraftContext[LookaheadState], shape: WindowShape) -> TokenTree:
        self._index_text(context)
        window = self._window(context, shape)
        num_free = context.max_nodes - (0 if window is None else len(window.tree()[0]))
        trie = self._candidates(context, shape).tree(num_free)
        return trie if window is None else window.attach_to(trie, _window_origin(shape.window))

    def _window(self, context: DraftContext[LookaheadState], shape: WindowShape) -> Window | None:
        """Return the window at the text's end, or ``None`` if its size is 0 or the limits are too small."""
        if not shape.window:
            return None
        root, position = context.tokens[-1], len(context.tokens) - 1
        old = context.state.window or Window(position, ())
        window = old.shifted(position, root, shape, context.state.prompt)
        fits = window.depth <= context.max_depth and len(window.tree()[0]) <= context.max_nodes
        return window if fits else None

    def _candidates(self, context: DraftContext[LookaheadState], shape: WindowShape) -> Trie:
        """Return a trie of up to G n-grams that begin with the text's last token, latest first."""
        trie, rates = Trie(context.tokens[-1]), context.state.rates
        for gram, from_window in islice(context.state.pool.continuations(context.tokens[-1]), shape.num_candidates):
            node = 0
            for depth, token in enumerate(gram[: context.max_depth]):
                kind = (_FROM_WINDOW if from_window else _FROM_TEXT) + (
                    1 if trie.adds_sibling(node, token) else 2 if depth else 0
                )
                node = trie.add(node, token, trie.gains[node] * rates.rate(kind, depth + 1), (self.name, kind))
        return trie

    def _update_window(self, outcome: Outcome[LookaheadState], shape: WindowShape) -> None:
        """Append the outputs at the window's last row as its next row; pool the columns' n-grams if complete."""
        tree, state, width = outcome.tree, outcome.state, shape.window
        if outcome.logits is None:
            state.window = None
            return
        nodes = [0, *_window_nodes(tree, width)]
        if not width or len(nodes) % width:
            return
        if len(nodes) == 1 and state.window is not None and shape.ngram > 2:
            return  # a window is the root alone only in its first step: this later one did not fit
        rows = [tuple(tree.tokens[node] for node in nodes[i : i + width]) for i in range(0, len(nodes), width)]
        outputs = tuple(token for (token,) in top_tokens(outcome, 1, nodes[-width:]))
        if len(rows) == shape.ngram - 1 and not self._is_private(outcome):
            for column, output in enumerate(outputs):
                state.pool.add([*(row[column] for row in rows), output], from_window=True)
        state.window = Window(outcome.position, (*rows, outputs))

    def _is_private(self, outcome: Outcome[LookaheadState] | DraftContext[LookaheadState]) -> bool:
        """Return whether this request must not write to the shared pool (rejection sampling)."""
        return self.options.shared and outcome.params.rejects

    def _tune(self) -> None:
        """Let the tuner choose the window size by the last step, if that step had the window."""
        shape, costs = self.shape, self._costs
        verified = [each for each in self._verified if not shape.window or _window_nodes(each.tree, shape.window)]
        self._verified.clear()
        if not verified or costs is None:
            return
        accepted = [tree.origin[node] for tree, path in verified if tree.origin is not None for node in path]
        num_from_window = sum(name == self.name and kind >= _FROM_WINDOW for name, kind in accepted)
        self._tuner.record_step(
            requests=len(verified),
            rows=sum(sum(each.tree.acceptable) for each in verified),
            plain=sum(1 + len(each.path) for each in verified) - num_from_window,
            harvest=num_from_window,
            costs=costs,
        )


def _window_origin(width: int) -> Origin:
    """Return the origin of window nodes: its number is negative, unlike those of draft tokens."""
    return (Lookahead.name, -width)


def _window_nodes(tree: TokenTree, width: int) -> list[int]:
    """Return the nodes of a window of ``width`` columns, row by row; none in another drafter's tree."""
    window_origin = _window_origin(width)
    return [] if tree.origin is None else [node for node, origin in enumerate(tree.origin) if origin == window_origin]
