"""State of lookahead decoding: the n-gram pool, the two-dimensional window, and the tuner of its size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pronk.drafters.from_outputs._likeliest import initial_draft_token
from pronk.speculation.cost_model import CostCurve
from pronk.speculation.tree import Origin, TokenTree

__all__ = ["LADDER", "NO_WINDOW", "NgramPool", "Window", "WindowShape", "WindowTuner"]


@dataclass
class NgramPool:
    """A bounded pool of n-grams by their first token.

    A full pool evicts from the first token whose n-grams were touched longest ago, and of these the oldest n-gram.

    Attributes:
        grams: first token to its continuations, oldest first; each with whether only the window produced it.
    """

    max_ngrams: int
    size: int = 0
    grams: dict[int, dict[tuple[int, ...], bool]] = field(default_factory=dict)

    def add(self, gram: Sequence[int], *, from_window: bool = False) -> None:
        """Insert an n-gram or mark it as the latest; ``from_window``: the window produced it, not the text."""
        first, rest = gram[0], tuple(gram[1:])
        # Re-inserted at the end: the first token touched last.
        own = self.grams[first] = self.grams.pop(first, {})
        self.size += rest not in own
        own[rest] = own.pop(rest, from_window) and from_window
        while self.size > self.max_ngrams:
            oldest = next(iter(self.grams))
            del self.grams[oldest][next(iter(self.grams[oldest]))]
            self.size -= 1
            if not self.grams[oldest]:
                del self.grams[oldest]

    def continuations(self, token: int) -> Iterator[tuple[tuple[int, ...], bool]]:
        """Yield the continuations of ``token``, latest first, each with whether only the window produced it."""
        return reversed(self.grams.get(token, {}).items())


@dataclass(frozen=True)
class WindowShape:
    """Sizes of a window: W columns, n-grams of N tokens, G candidates. W = 0 means no window."""

    window: int
    ngram: int
    num_candidates: int

    @property
    def num_window_nodes(self) -> int:
        """Return the number of nodes of a full window without the root."""
        return max(0, self.window * (self.ngram - 1) - 1)


@dataclass(frozen=True)
class Window:
    """The two-dimensional window after the text's last token.

    ``rows[r][j]`` is the draft token ``r + j`` positions after the root. The root is ``rows[0][0]``, at ``position`` of
    the text.
    """

    position: int
    rows: tuple[tuple[int, ...], ...]

    @property
    def depth(self) -> int:
        """Return the depth of the deepest node below the root."""
        return len(self.rows[0]) + len(self.rows) - 2

    def shifted(self, position: int, root: int, shape: WindowShape, fill: Sequence[int]) -> Window:
        """Return the window of ``shape`` at the text's new end; unknown cells get a token of ``fill``."""
        rows, shift = self.rows[-shape.ngram :], position - self.position
        shift -= len(self.rows) - len(rows)
        if len(rows) == shape.ngram:
            # One row too many: dropping the oldest makes each remaining row start one position later.
            rows, shift = rows[1:], shift - 1
        shifted_rows = [
            [
                row[column + shift]
                if 0 <= column + shift < len(row)
                else initial_draft_token(fill, position + number + column)
                for column in range(shape.window)
            ]
            for number, row in enumerate(rows or [()])
        ]
        shifted_rows[0][0] = root
        return Window(position, tuple(tuple(row) for row in shifted_rows))

    def tree(self) -> tuple[list[int], list[int]]:
        """Return tokens and parents of all nodes but the root, row by row; parent 0 is the root."""
        width = len(self.rows[0])
        tokens, parents = list(self.rows[0][1:]), list(range(width - 1))
        for number, row in enumerate(self.rows[1:], 1):
            tokens += row
            row_above = (number - 1) * width
            parents += range(row_above, row_above + width)
        return tokens, parents

    def attach_to(self, trie: TokenTree, window_origin: Origin) -> TokenTree:
        """Return ``trie`` plus this window's nodes, of origin ``window_origin`` and not acceptable."""
        tokens, parents = self.tree()
        verify, origin = (True, *(False,) * len(tokens)), (("", 0), *(window_origin,) * len(tokens))
        return trie.with_unacceptable(TokenTree((trie.tokens[0], *tokens), (-1, *parents), verify, origin=origin))


NO_WINDOW = WindowShape(0, 5, 3)

# Sizes that the tuner tries in order. The three largest are the paper's for 34B, 13B and 7B models (section 5).
LADDER = (
    NO_WINDOW,
    WindowShape(2, 3, 2),
    WindowShape(3, 4, 3),
    WindowShape(5, 4, 5),
    WindowShape(7, 5, 7),
    WindowShape(10, 5, 10),
    WindowShape(15, 5, 15),
)

# Steps per trial of a size, and steps without a window after an unprofitable trial.
_TRIAL, _REST = 16, 1024

# Tokens per request and step that the smallest window is assumed to gain before its first trial.
_PRIOR_HARVEST = 0.25


@dataclass
class WindowTuner:
    """Choose the window size by measured throughput: climb a ladder while a larger size should pay.

    The worth of a rung of :data:`LADDER` is ``(a + h) / t``: ``a`` tokens per step without the window, ``h`` more from
    its n-grams (the harvest), and ``t`` seconds of a forward pass with the window's rows, summed over all requests of
    the step. The next rung is expected to double the harvest. One tuner serves all requests of a proposer.
    """

    rung: int = 0
    waiting: int = 0  # steps until rung 1 may be tried again
    steps: int = 0  # steps at the current rung, whose measurements ``sums`` adds up
    sums: Counter[str] = field(default_factory=Counter)

    def shape(self) -> WindowShape:
        """Return the current size."""
        return LADDER[self.rung]

    def record_step(self, *, requests: int, rows: int, plain: int, harvest: int, costs: CostCurve) -> None:
        """Record one step and move to another rung if that is expected to pay.

        Args:
            requests: number of requests in the step.
            rows: rows of the forward pass without the windows' rows.
            plain: committed tokens that need no window.
            harvest: committed tokens from n-grams that only the windows produced.
            costs: seconds of a forward pass by its rows.
        """
        self.steps += 1
        self.sums.update(requests=requests, rows=rows, plain=plain, harvest=harvest)
        if self.rung == 0:
            self.waiting -= 1
            prior = _PRIOR_HARVEST * self._mean("requests")
            if self.waiting < 0 and self._tokens_per_second(1, costs, prior) > self._tokens_per_second(0, costs):
                self._set_rung(1)
            elif self.steps >= _TRIAL:
                self._set_rung(0)
        elif self.steps >= _TRIAL:
            self._evaluate(costs)

    def _evaluate(self, costs: CostCurve) -> None:
        harvest, rung = self._mean("harvest"), self.rung
        speed = self._tokens_per_second(rung, costs, harvest)
        if speed < self._tokens_per_second(0, costs):
            self._set_rung(0)
            self.waiting = _REST
        elif rung + 1 < len(LADDER) and self._tokens_per_second(rung + 1, costs, 2.0 * harvest) > speed:
            self._set_rung(rung + 1)
        elif self.steps >= _REST:
            self._set_rung(rung)

    def _mean(self, name: str) -> float:
        return self.sums[name] / self.steps

    def _tokens_per_second(self, rung: int, costs: CostCurve, harvest: float = 0.0) -> float:
        rows = self._mean("rows") + self._mean("requests") * LADDER[rung].num_window_nodes
        return (self._mean("plain") + harvest) / costs.at(round(rows))

    def _set_rung(self, rung: int) -> None:
        self.rung, self.steps = rung, 0
        self.sums.clear()
