"""Lookahead decoding (Fu et al. 2024, algorithm 1): n-grams of a Jacobi iteration, verified later.

Each forward pass *verifies* up to G *candidates*: n-grams (sequences of N tokens) of a pool that
begin with the last token of the text, merged by common prefixes.

The same forward pass produces new n-grams in the *window*, a table of W columns and N - 1 rows
(``docs/methods/lookahead.md`` draws the window). A row holds outputs of one of the last N - 1
forward passes, the oldest first. Row 0 is a chain that begins with the root; each column continues
row 0 downwards. The target's output at the lower end of a column completes an n-gram. After the
forward pass, the oldest row is dropped, the outputs become the newest row, and column 0 moves to
the new root. The outputs are the target's likeliest tokens, even if the request samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from pronk import Drafter, OptionError, Proposer, TokenTree
from pronk.base import known_keywords
from pronk.base.checks import check_choice, check_flag, check_integer
from pronk.drafting import (
    MAX_TREE,
    Capabilities,
    CostCurve,
    DraftContext,
    Origin,
    Outcome,
    Target,
    Trie,
    top_tokens,
)
from pronk.lab.drafters.window import NO_WINDOW, NgramPool, Window, WindowShape, WindowTuner

_DEFAULT_NGRAM = 4  # N if the option ``ngram`` is ``None`` and the option ``window`` is a number

# Acceptance rates are measured by *kind* of draft token, the sum of source and role: 0 to 5. The
# source is 0 if the token's n-gram occurs in the text, and 3 if only the window produced it. The
# role is 1 if the token's parent already has another child; otherwise it is 0 for the first token
# of a candidate, and 2 for any later token.
_FROM_TEXT = 0
_FROM_WINDOW = 3
_FIRST = 0
_SIBLING = 1
_NEXT = 2

# Acceptance rates by kind, assumed before any measurement.
_PRIORS = {
    _FROM_TEXT + _FIRST: 0.35,
    _FROM_TEXT + _SIBLING: 0.1,
    _FROM_TEXT + _NEXT: 0.6,
    _FROM_WINDOW + _FIRST: 0.25,
    _FROM_WINDOW + _SIBLING: 0.1,
    _FROM_WINDOW + _NEXT: 0.5,
}


@dataclass
class LookaheadState:
    """State of one request: its pool of n-grams and its window."""

    # Token ids of the prompt, which fill the window where the target has no output yet.
    prompt: tuple[int, ...]
    pool: NgramPool  # the request's pool, or the proposer's pool with the option ``shared``
    # ``None`` before the first outcome, and after an outcome without logits.
    window: Window | None = None
    num_indexed: int = 0  # number of leading tokens of the text whose n-grams are in the pool


@known_keywords
@dataclass(frozen=True)
class Lookahead(Drafter):
    """Options of lookahead decoding, which drafts n-grams from the text and the target's outputs.

    Attributes:
        window: W, number of columns of the window, 1..1024 (the root is the first column of row 0);
            or ``"auto"``, which selects W, N and G by measured costs and by the tokens that the
            window adds.
        ngram: N, number of tokens of an n-gram, 2..16; 4 if ``None``. Not with ``"auto"``. The
            window takes W · (N - 1) of the rows that a request may have in a forward pass, 128 or
            the option ``max_tree`` of the model. If it takes all, none is left for candidates.
        guesses: G, maximum number of candidates per forward pass, 0..1024; W if ``None``. Not with
            ``"auto"``.
        use_prompt: whether n-grams of the request's text (prompt and output) are added to the pool.
        shared: whether all requests share one pool.
        max_ngrams: maximum number of n-grams in a pool, 1..1048576; :class:`NgramPool` describes
            the eviction.
        warm_up: ``"grow"`` starts with row 0 and adds a row of outputs per forward pass.
            ``"random"`` fills all N - 1 rows with tokens of the prompt at once, as the paper does:
            n-grams are found from the first forward pass on, but those of the first N - 1 passes
            contain random tokens, and these passes compute more rows. With W = 1 the column never
            recovers from its random tokens.
    """

    name = "lookahead"

    window: int | Literal["auto"] = "auto"
    ngram: int | None = None
    guesses: int | None = None
    use_prompt: bool = True
    shared: bool = False
    max_ngrams: int = 65536
    warm_up: Literal["grow", "random"] = "grow"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ngram is not None:
            check_integer(f"{self.name}: ngram", self.ngram, 2, 16)
            self._check_not_auto("ngram", self.ngram)
        if self.guesses is not None:
            check_integer(f"{self.name}: guesses", self.guesses, 0, MAX_TREE)
            self._check_not_auto("guesses", self.guesses)
        if isinstance(self.window, str) and self.window != "auto":
            expected = f'expected "auto" or an integer in 1..{MAX_TREE}'
            msg = f"{self.name}: window: {expected}, found {self.window!r}"
            raise OptionError(msg)
        if self.window != "auto":
            check_integer(f"{self.name}: window", self.window, 1, MAX_TREE)
            if self.num_window_rows > MAX_TREE:
                expected = f"expected window * (ngram - 1) of at most {MAX_TREE}"
                found = f"found {self.num_window_rows}; use a smaller window or ngram"
                msg = f"{self.name}: {expected}, {found}"
                raise OptionError(msg)
        check_flag(f"{self.name}: use_prompt", self.use_prompt)
        check_flag(f"{self.name}: shared", self.shared)
        check_integer(f"{self.name}: max_ngrams", self.max_ngrams, 1, 1048576)
        check_choice(f"{self.name}: warm_up", self.warm_up, ("grow", "random"))

    def _check_not_auto(self, option: str, value: int) -> None:
        if self.window == "auto":
            expected = f'expected no {option} with window="auto"'
            msg = f"{self.name}: {expected}, found {value}; set window as well"
            raise OptionError(msg)

    @property
    def num_window_rows(self) -> int:
        """Rows that a window of a given size takes in a forward pass; 0 with ``"auto"``."""
        if isinstance(self.window, str):
            return 0
        return self.window * ((self.ngram or _DEFAULT_NGRAM) - 1)

    def bind(self, target: Target) -> LookaheadProposer:
        target.check_rows(f"{self.name}: window * (ngram - 1)", self.num_window_rows)
        return LookaheadProposer(self, target)

    def for_adapter(self) -> Lookahead | None:
        return self if self.shared else None


class LookaheadProposer(Proposer[LookaheadState]):
    """Proposes candidates and a window, for all requests of a target; tunes the window's size."""

    name = Lookahead.name

    def __init__(self, options: Lookahead, target: Target) -> None:
        self.options = options
        self.target = target
        self.capabilities = Capabilities(logits=True, observes_all_steps=False)
        self._pool = NgramPool(options.max_ngrams) if options.shared else None
        self._tuner = WindowTuner()
        self._costs: CostCurve | None = None
        # Pairs (tree of the last step, its accepted nodes), for the tuner.
        self._verified: list[tuple[TokenTree, tuple[int, ...]]] = []

    @property
    def shape(self) -> WindowShape:
        window = self.options.window
        ngram = self.options.ngram
        guesses = self.options.guesses
        if window == "auto":
            return self._tuner.shape()
        return WindowShape(window, ngram or _DEFAULT_NGRAM, window if guesses is None else guesses)

    def start(self, prompt: Sequence[int]) -> LookaheadState:
        pool = NgramPool(self.options.max_ngrams) if self._pool is None else self._pool
        return LookaheadState(tuple(prompt), pool)

    def propose(self, contexts: Sequence[DraftContext[LookaheadState]]) -> list[TokenTree]:
        self._tune()
        costs = contexts[0].plan.costs if contexts else None
        self._costs = None if costs is None else costs.curve
        return [self._build_tree(context, self.shape) for context in contexts]

    def observe(self, outcome: Outcome[LookaheadState]) -> None:
        self._update_window(outcome, self.shape)
        if self.options.window == "auto" and not outcome.params.rejects:
            self._verified.append((outcome.tree, outcome.path))

    def _index_text(self, context: DraftContext[LookaheadState]) -> None:
        """Add the n-grams of the text's new tokens to the pool."""
        state = context.state
        num_committed = context.root + 1
        if not self.options.use_prompt or self._forbids_pooling(context):
            return
        size = NO_WINDOW.ngram if self.options.window == "auto" else self.shape.ngram
        text = context.tokens[max(0, state.num_indexed - size + 1) : num_committed]
        for start in range(len(text) - size + 1):
            state.pool.add(text[start : start + size])
        state.num_indexed = num_committed

    def _build_tree(self, context: DraftContext[LookaheadState], shape: WindowShape) -> TokenTree:
        self._index_text(context)
        window = self._advance_window(context, shape)
        candidates = self._find_candidates(context, shape)
        if window is None:
            return candidates.tree(context.max_nodes)
        window_size = len(window.tree()[0])
        tree = candidates.tree(context.max_nodes - window_size)
        return window.attach_to(tree, _window_origin(shape.window))

    def _advance_window(
        self, context: DraftContext[LookaheadState], shape: WindowShape
    ) -> Window | None:
        """Return the window at the text's end; ``None`` if W is 0, or the window does not fit."""
        if not shape.window:
            return None
        root = context.tokens[-1]
        position = len(context.tokens) - 1
        old_window = context.state.window
        prompt = context.state.prompt
        if old_window is None and self.options.warm_up == "grow":
            old_window = Window(position, ())
        elif old_window is None:
            old_window = Window.filled(position, root, shape, prompt)
        window = old_window.shift_to(position, root, shape, prompt)
        depth = len(window.rows[0]) + len(window.rows) - 2  # depth of the tree's deepest node
        fits = depth <= context.max_depth and len(window.tree()[0]) <= context.max_nodes
        return window if fits else None

    def _find_candidates(self, context: DraftContext[LookaheadState], shape: WindowShape) -> Trie:
        """Return a trie of the latest G n-grams that begin with the text's last token."""
        root = context.tokens[-1]
        trie = Trie(root)
        rates = context.acceptance.rates(self.name, _PRIORS)
        continuations = context.state.pool.continuations(root)
        for gram, from_window in islice(continuations, shape.num_candidates):
            source = _FROM_WINDOW if from_window else _FROM_TEXT
            node = 0
            for depth, token in enumerate(gram[: context.max_depth]):
                role = _NEXT if depth else _FIRST
                if trie.adds_sibling(node, token):
                    role = _SIBLING
                kind = source + role
                gain = trie.gains[node] * rates.rate(kind, depth + 1)
                node = trie.add(node, token, gain, (self.name, kind))
        return trie

    def _update_window(self, outcome: Outcome[LookaheadState], shape: WindowShape) -> None:
        """Append the target's outputs after the window's last row as a new row.

        If the window had all N - 1 rows, its columns with the new outputs go into the pool.
        """
        tree = outcome.tree
        state = outcome.state
        width = shape.window
        if outcome.logits is None:
            state.window = None
            return
        nodes = [0, *_window_nodes(tree, width)]
        if not width or len(nodes) % width:  # the tree was verified without the window
            return
        if len(nodes) == 1 and state.window is not None and shape.ngram > 2:
            # With W = 1, only the first window is the root alone. A later window has further nodes,
            # which this tree lacks: it was verified without the window.
            return
        tokens = [tree.tokens[node] for node in nodes]
        rows = [tuple(tokens[i : i + width]) for i in range(0, len(tokens), width)]
        outputs = tuple(token for (token,) in top_tokens(outcome, 1, nodes[-width:]))
        if len(rows) == shape.ngram - 1 and not self._forbids_pooling(outcome):
            for column, output in enumerate(outputs):
                state.pool.add([*(row[column] for row in rows), output], from_window=True)
        state.window = Window(outcome.position, (*rows, outputs))

    def _forbids_pooling(
        self, request: Outcome[LookaheadState] | DraftContext[LookaheadState]
    ) -> bool:
        """Return True if the pool is shared, but the request's outputs must not affect other texts.

        Under the rules ``rejection`` and ``block``, texts depend on the draft tokens.
        """
        return self.options.shared and request.params.rejects

    def _tune(self) -> None:
        """Report the last step to the tuner, which may change the window's size.

        Trees that contain a window of another size than the current one are left out.
        """
        width = self.shape.window
        costs = self._costs
        verified = [
            (tree, path) for tree, path in self._verified if not width or _window_nodes(tree, width)
        ]
        self._verified.clear()
        if not verified or costs is None:
            return
        window_tokens = 0
        for tree, path in verified:
            if tree.origin is not None:
                origins = [tree.origin[node] for node in path]
                window_tokens += sum(
                    name == self.name and kind >= _FROM_WINDOW for name, kind in origins
                )
        self._tuner.record_step(
            requests=len(verified),
            # Number of draft tokens; nodes of the window cannot be accepted.
            rows=sum(sum(tree.acceptable) for tree, _ in verified),
            other_tokens=sum(1 + len(path) for _, path in verified) - window_tokens,
            window_tokens=window_tokens,
            costs=costs,
        )


def _window_origin(width: int) -> Origin:
    """Return the entry of ``TokenTree.origin`` that marks the nodes of a window.

    ``width`` is the number of the window's columns. The kind in the entry is negative, unlike the
    kinds of draft tokens.
    """
    return (Lookahead.name, -width)


def _window_nodes(tree: TokenTree, width: int) -> list[int]:
    """Return the nodes of a window of ``width`` columns, row by row; empty if the tree has none."""
    if tree.origin is None:
        return []
    window_origin = _window_origin(width)
    return [node for node, origin in enumerate(tree.origin) if origin == window_origin]
