"""N-gram pool, window and window tuner of lookahead decoding, which ``lookahead.py`` describes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pronk import TokenTree
from pronk.drafting import CostCurve, Origin, initial_draft_token


@dataclass
class NgramPool:
    """A bounded pool of n-grams, grouped by their first token.

    A full pool evicts one n-gram: the oldest n-gram of the group whose last :meth:`add` was longest
    ago.
    """

    max_ngrams: int  # maximum number of n-grams
    size: int = 0  # number of n-grams in the pool
    # ``groups[first token][other tokens]``: True if only a window produced the n-gram, False if it
    # occurs in the text. Groups, and the n-grams of a group, are in order of their last ``add``,
    # the oldest first.
    groups: dict[int, dict[tuple[int, ...], bool]] = field(default_factory=dict)

    def add(self, gram: Sequence[int], *, from_window: bool = False) -> None:
        """Add an n-gram, or make it the latest of the pool again.

        ``from_window`` is True if a window of target outputs produced the n-gram, and False if the
        n-gram occurs in the request's text.
        """
        first = gram[0]
        rest = tuple(gram[1:])
        # Move the group to the end of ``groups``, and the n-gram to the end of its group.
        group = self.groups.pop(first, {})
        self.groups[first] = group
        self.size += rest not in group
        group[rest] = group.pop(rest, from_window) and from_window
        while self.size > self.max_ngrams:
            oldest_first = next(iter(self.groups))
            oldest_group = self.groups[oldest_first]
            del oldest_group[next(iter(oldest_group))]
            self.size -= 1
            if not oldest_group:
                del self.groups[oldest_first]

    def continuations(self, token: int) -> Iterator[tuple[tuple[int, ...], bool]]:
        """Yield the n-grams that begin with ``token``, the latest first.

        Each is a pair of the tokens after ``token``, and whether only a window produced the n-gram.
        """
        return reversed(self.groups.get(token, {}).items())


@dataclass(frozen=True)
class WindowShape:
    """Sizes of lookahead decoding: W columns, n-grams of N tokens, at most G candidates."""

    window: int  # W: number of columns of the window; 0: no window
    ngram: int  # N: number of tokens of an n-gram
    num_candidates: int  # G: maximum number of n-grams of the pool that a forward pass verifies

    @property
    def num_window_nodes(self) -> int:
        """Number of nodes of a window with all N - 1 rows, not counting the root."""
        return max(0, self.window * (self.ngram - 1) - 1)


@dataclass(frozen=True)
class Window:
    """Table of the target's outputs in the last forward passes, for positions after the text's end.

    Each row is from one forward pass; the oldest row comes first. The *root* is the last token of
    the text.
    """

    position: int  # position of the root in the text, from 0
    # ``rows[r][j]`` is the token for text position ``position + r + j``; ``rows[0][0]`` is the
    # root.
    rows: tuple[tuple[int, ...], ...]

    @classmethod
    def filled(cls, position: int, root: int, shape: WindowShape, prompt: Sequence[int]) -> Window:
        """Return a window of N - 1 rows that begins with ``root``, at ``position`` in the text.

        The target has no outputs yet: all other cells are tokens from different places of the
        prompt (Fu et al. 2024, algorithm 1, line 4).
        """
        width = shape.window
        num_cells = width * (shape.ngram - 1)
        cells = [initial_draft_token(prompt, position + cell) for cell in range(num_cells)]
        cells[0] = root
        rows = [tuple(cells[start : start + width]) for start in range(0, num_cells, width)]
        return cls(position, tuple(rows))

    def shift_to(
        self, position: int, root: int, shape: WindowShape, prompt: Sequence[int]
    ) -> Window:
        """Return the window for a text that now ends with the token ``root`` at ``position``.

        The window has the size ``shape``. Cells without an output get tokens of the prompt.
        """
        # The last N - 1 rows; there are N after the latest outputs were added.
        rows = self.rows[-(shape.ngram - 1) :]
        # ``shifted_rows[r][column]`` and ``self.rows[r + num_dropped][column + shift]`` are for the
        # same text position.
        num_dropped = len(self.rows) - len(rows)
        shift = position - self.position - num_dropped
        shifted_rows: list[list[int]] = []
        for row_number, row in enumerate(rows or [()]):
            shifted: list[int] = []
            for column in range(shape.window):
                if 0 <= column + shift < len(row):
                    shifted.append(row[column + shift])
                else:
                    shifted.append(initial_draft_token(prompt, position + row_number + column))
            shifted_rows.append(shifted)
        shifted_rows[0][0] = root
        return Window(position, tuple(tuple(row) for row in shifted_rows))

    def tree(self) -> tuple[list[int], list[int]]:
        """Return the tokens and the parents of the nodes below the root, row by row.

        A parent is the number of a node in this order, from 1; 0 is the root.
        """
        width = len(self.rows[0])
        tokens = list(self.rows[0][1:])
        parents = list(range(width - 1))
        for row_number, row in enumerate(self.rows[1:], 1):
            tokens += row
            first_above = (row_number - 1) * width
            parents += range(first_above, first_above + width)
        return tokens, parents

    def attach_to(self, candidates: TokenTree, window_origin: Origin) -> TokenTree:
        """Return the tree ``candidates`` with the window's nodes added.

        The forward pass computes the window's nodes for their outputs, but never accepts them as
        tokens of the text. ``window_origin`` marks them in ``TokenTree.origin``.
        """
        tokens, parents = self.tree()
        acceptable = (True, *(False,) * len(tokens))
        origin = (("", 0), *(window_origin,) * len(tokens))
        all_tokens = (candidates.tokens[0], *tokens)
        window_tree = TokenTree(all_tokens, (-1, *parents), acceptable, origin=origin)
        return candidates.with_unacceptable(window_tree)


NO_WINDOW = WindowShape(0, 5, 3)

# Sizes that the tuner tries in order. The three largest are the paper's for 34B, 13B and 7B models
# (section 5).
WINDOW_SIZES = (
    NO_WINDOW,
    WindowShape(2, 3, 2),
    WindowShape(3, 4, 3),
    WindowShape(5, 4, 5),
    WindowShape(7, 5, 7),
    WindowShape(10, 5, 10),
    WindowShape(15, 5, 15),
)

# Number of steps that a window is measured before its size may change. The measurement without a
# window begins again after this number of steps.
_TRIAL_STEPS = 16
# Number of steps without a window after a window did not pay. The measurement of a window begins
# again after this number of steps.
_LONG_STEPS = 1024

# Tokens that the smallest window is assumed to add per request and step, before any measurement.
_PRIOR_WINDOW_TOKENS = 0.25


@dataclass
class WindowTuner:
    """Chooses the window size by expected throughput: tries larger :data:`WINDOW_SIZES` one by one.

    The throughput of a size is ``(other_tokens + window_tokens) / seconds``. Per step and for all
    requests together, ``window_tokens`` is the mean number of tokens from the window,
    ``other_tokens`` that of all other tokens, and ``seconds`` the duration of a forward pass with
    the window. The next larger size is assumed to double ``window_tokens``. One tuner serves all
    requests of a proposer.

    The rule is the planner's, the most expected tokens per second (:mod:`pronk.drafting.planner`),
    applied to whole windows: their rows cannot be dropped one by one. The planner decides as for
    any drafter whether a window is proposed.
    """

    index: int = 0  # index of the current size in WINDOW_SIZES
    # Number of steps until a window may be tried again; below 0, a window may be tried now.
    retry_in: int = 0
    num_steps: int = 0  # number of steps since the measurement of the current size began
    # Sums of the arguments of ``record_step`` over ``num_steps`` steps, by name of the argument.
    sums: Counter[str] = field(default_factory=Counter)

    def shape(self) -> WindowShape:
        """Return the sizes W, N and G that are in use now."""
        return WINDOW_SIZES[self.index]

    def record_step(
        self, *, requests: int, rows: int, other_tokens: int, window_tokens: int, costs: CostCurve
    ) -> None:
        """Record a step, and change the size if another has a higher throughput.

        Args:
            requests: number of requests of the step.
            rows: number of rows of the forward pass, without those of windows.
            other_tokens: number of committed tokens without ``window_tokens``.
            window_tokens: number of committed tokens from n-grams that only windows produced.
            costs: seconds of a forward pass by its number of rows.
        """
        self.num_steps += 1
        self.sums.update(
            requests=requests, rows=rows, other_tokens=other_tokens, window_tokens=window_tokens
        )
        if self.index == 0:
            self.retry_in -= 1
            prior = _PRIOR_WINDOW_TOKENS * self._mean("requests")
            expected = self._tokens_per_second(1, costs, prior)
            if self.retry_in < 0 and expected > self._tokens_per_second(0, costs):
                self._set_size(1)
            elif self.num_steps >= _TRIAL_STEPS:
                self._set_size(0)
        elif self.num_steps >= _TRIAL_STEPS:
            self._evaluate(costs)

    def _evaluate(self, costs: CostCurve) -> None:
        window_tokens = self._mean("window_tokens")
        index = self.index
        throughput = self._tokens_per_second(index, costs, window_tokens)
        larger = index + 1
        expected = 0.0  # tokens per second with the next larger window; 0 if none is larger
        if larger < len(WINDOW_SIZES):
            expected = self._tokens_per_second(larger, costs, 2.0 * window_tokens)
        if throughput < self._tokens_per_second(0, costs):
            self._set_size(0)
            self.retry_in = _LONG_STEPS
        elif expected > throughput:
            self._set_size(larger)
        elif self.num_steps >= _LONG_STEPS:
            self._set_size(index)

    def _mean(self, argument: str) -> float:
        return self.sums[argument] / self.num_steps

    def _tokens_per_second(self, index: int, costs: CostCurve, window_tokens: float = 0.0) -> float:
        """Return the throughput with ``WINDOW_SIZES[index]``.

        ``window_tokens`` is the number of tokens per step that the window adds.
        """
        rows = self._mean("rows") + self._mean("requests") * WINDOW_SIZES[index].num_window_nodes
        return (self._mean("other_tokens") + window_tokens) / costs.at(round(rows))

    def _set_size(self, index: int) -> None:
        self.index = index
        self.num_steps = 0
        self.sums.clear()
