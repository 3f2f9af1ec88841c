"""What lookahead decoding keeps: the n-gram pool, the two-dimensional window, and the window's size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pronk.drafters.from_outputs._likeliest import unknown
from pronk.speculation.cost_model import CostCurve
from pronk.speculation.tree import Origin, TokenTree

__all__ = ["LADDER", "NO_WINDOW", "NgramPool", "Window", "WindowShape", "WindowTuner"]


@dataclass
class NgramPool:
    """A bounded pool of n-grams by their first token.

    A full pool evicts from the first token whose n-grams were touched longest ago, and of these the oldest n-gram.

    Attributes:
        max_ngrams: maximum number of n-grams.
        size: number of n-grams.
        grams: first token to its continuations, oldest first; each with whether only the window produced it.
    """

    max_ngrams: int
    size: int = 0
    grams: dict[int, dict[tuple[int, ...], bool]] = field(default_factory=dict)

    def add(self, gram: Sequence[int], *, explored: bool = False) -> None:
        """Keep an n-gram, or note that it came up again; ``explored``: the window found it, not the text."""
        first, rest = gram[0], tuple(gram[1:])
        # Moved to the end, as the token that came up last.
        own = self.grams[first] = self.grams.pop(first, {})
        self.size += rest not in own
        own[rest] = own.pop(rest, explored) and explored
        while self.size > self.max_ngrams:
            oldest = next(iter(self.grams))
            del self.grams[oldest][next(iter(self.grams[oldest]))]
            self.size -= 1
            if not self.grams[oldest]:
                del self.grams[oldest]

    def after(self, token: int) -> Iterator[tuple[tuple[int, ...], bool]]:
        """What followed ``token`` and whether only the window says so, latest first."""
        return reversed(self.grams.get(token, {}).items())


@dataclass(frozen=True)
class WindowShape:
    """Sizes of a window: W columns, n-grams of N tokens, G candidates. W = 0 is no window at all."""

    window: int
    ngram: int
    guesses: int

    @property
    def explored(self) -> int:
        """Nodes of a full window that are not the root."""
        return max(0, self.window * (self.ngram - 1) - 1)


@dataclass(frozen=True)
class Window:
    """The two-dimensional window below a text.

    ``rows[r][j]`` is for the position ``r + j`` behind the root, which is at ``position`` and is column 0 of row 0.
    """

    position: int
    rows: tuple[tuple[int, ...], ...]

    @property
    def depth(self) -> int:
        """How far behind the root its last node is."""
        return len(self.rows[0]) + len(self.rows) - 2

    def moved(self, position: int, root: int, shape: WindowShape, fill: Sequence[int]) -> Window:
        """The window of ``shape`` where the text ends now; what is not known yet is some token of ``fill``."""
        rows, behind = self.rows[-shape.ngram :], position - self.position
        behind -= len(self.rows) - len(rows)
        if len(rows) == shape.ngram:
            # A row more than the window has: the oldest goes, which moves the others one position on.
            rows, behind = rows[1:], behind - 1
        kept = [
            [
                row[column + behind] if 0 <= column + behind < len(row) else unknown(fill, position + number + column)
                for column in range(shape.window)
            ]
            for number, row in enumerate(rows or [()])
        ]
        kept[0][0] = root
        return Window(position, tuple(tuple(row) for row in kept))

    def tree(self) -> tuple[list[int], list[int]]:
        """Tokens and parents of its nodes, row by row; parents count from the root, 0."""
        width = len(self.rows[0])
        tokens, parents = list(self.rows[0][1:]), list(range(width - 1))
        for number, row in enumerate(self.rows[1:], 1):
            tokens += row
            above = (number - 1) * width
            parents += range(above, above + width)
        return tokens, parents

    def below(self, trie: TokenTree, mark: Origin) -> TokenTree:
        """``trie``, with this window beside its candidates; its nodes carry ``mark`` and may not be accepted."""
        tokens, parents = self.tree()
        verify, origin = (True, *(False,) * len(tokens)), (("", 0), *(mark,) * len(tokens))
        return trie.beside(TokenTree((trie.tokens[0], *tokens), (-1, *parents), verify, origin=origin))


NO_WINDOW = WindowShape(0, 5, 3)

# Sizes to try one after the other; the larger ones are the paper's for 34B, 13B and 7B models (section 5).
LADDER = (
    NO_WINDOW,
    WindowShape(2, 3, 2),
    WindowShape(3, 4, 3),
    WindowShape(5, 4, 5),
    WindowShape(7, 5, 7),
    WindowShape(10, 5, 10),
    WindowShape(15, 5, 15),
)

# Steps that a size is tried for, and steps without a window before one is tried again.
_TRIAL, _REST = 16, 1024

# Tokens a step that the smallest window is hoped to bring, before anything was seen.
_HOPE = 0.25


@dataclass
class WindowTuner:
    """Finds the size of the window that pays: a ladder, climbed while twice the harvest would pay for the next rung.

    With ``a`` tokens a step without the window's help, ``h`` more with it, and the time ``t`` of a pass with and
    without the window's rows, a rung is worth ``(a + h) / t``, over all requests of the pass together. It belongs to
    the drafter: what one request learned, the next one need not.
    """

    rung: int = 0
    waiting: int = 0
    steps: int = 0
    sums: Counter[str] = field(default_factory=Counter)

    def shape(self) -> WindowShape:
        """The present size."""
        return LADDER[self.rung]

    def learn(self, *, requests: int, rows: int, plain: int, harvest: int, costs: CostCurve) -> None:
        """Count a step.

        Args:
            requests: that took part.
            rows: of the pass, but for the windows'.
            plain: tokens that would have come without windows.
            harvest: tokens that the windows brought.
            costs: of passes.
        """
        self.steps += 1
        self.sums.update(requests=requests, rows=rows, plain=plain, harvest=harvest)
        if self.rung == 0:
            self.waiting -= 1
            if self.waiting < 0 and self._worth(1, costs, _HOPE * self._mean("requests")) > self._worth(0, costs):
                self._move(1)
            elif self.steps >= _TRIAL:
                self._move(0)
        elif self.steps >= _TRIAL:
            self._judge(costs)

    def _judge(self, costs: CostCurve) -> None:
        harvest, rung = self._mean("harvest"), self.rung
        here = self._worth(rung, costs, harvest)
        if here < self._worth(0, costs):
            self._move(0)
            self.waiting = _REST
        elif rung + 1 < len(LADDER) and self._worth(rung + 1, costs, 2.0 * harvest) > here:
            self._move(rung + 1)
        elif self.steps >= _REST:
            self._move(rung)

    def _mean(self, name: str) -> float:
        return self.sums[name] / self.steps

    def _worth(self, rung: int, costs: CostCurve, harvest: float = 0.0) -> float:
        rows = self._mean("rows") + self._mean("requests") * LADDER[rung].explored
        return (self._mean("plain") + harvest) / costs.at(round(rows))

    def _move(self, rung: int) -> None:
        self.rung, self.steps = rung, 0
        self.sums.clear()
