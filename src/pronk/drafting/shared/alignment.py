"""The place in a predicted text that an output has reached, found again after each edit.

An *edit* is a place where the output differs from the prediction: tokens are inserted, left out or
replaced. Until the first edit the next token is that of the prediction. After an edit, the last
tokens of the output are looked up in the prediction; such an occurrence is a *match*.
:class:`Alignment` continues after the longest match, and among equally long ones after the nearest
that lies ahead of the *anchor*, the end of the last reliable match. Example, with one letter for
each token::

    prediction   a b c d e f g h
    output       a b X d e             anchor after b; then X has no match, and d e has one
                                       that ends before f, which is the next token

An output that has inserted tokens goes on at the anchor, without any match that would show it.
Therefore the anchor is a second place to continue, as long as no later match is reliable.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

# Longest match in tokens. Among longer ones the nearest counts.
_MAX_MATCH = 16

# Shortest match, in tokens, after which the output is taken to have reached its place. A single
# token, such as the end of a line, also occurs where the output has not arrived.
_RELIABLE = 2

# Largest number of occurrences of the last token that are compared with the output: those nearest
# to the anchor. It bounds the time of a token in a prediction with thousands of equal lines.
_MAX_OCCURRENCES = 256


class Place(NamedTuple):
    """A place in the prediction from which the output may continue.

    Attributes:
        position: index of the prediction's token that comes next.
        match: number of tokens before ``position`` that equal the last tokens of the output,
            0..16.
    """

    position: int
    match: int


@dataclass
class Alignment:
    """Place of an output in a prediction, as a function of the two texts alone.

    Attributes:
        prediction: token ids of the expected output.
        num_tokens: number of output tokens so far; initially none.
    """

    prediction: Sequence[int]
    num_tokens: int = field(default=0, init=False)
    _place: Place = field(default=Place(0, 0), init=False)
    _anchor: int = field(default=0, init=False)
    # the last output tokens, at most ``_MAX_MATCH``
    _recent: list[int] = field(default_factory=list, init=False, repr=False)
    # indices of the prediction's tokens in reliable matches
    _found: set[int] = field(default_factory=set, init=False, repr=False)
    # for each token, the positions after its occurrences in the prediction, ascending
    _ends: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for position, token in enumerate(self.prediction, 1):
            self._ends.setdefault(token, []).append(position)

    @property
    def num_found(self) -> int:
        """Number of the prediction's tokens that the output has, in the order of its matches."""
        return len(self._found)

    def places(self) -> list[Place]:
        """Return the places from which the output may continue, the likeliest first.

        There are two between an edit and the next reliable match, one otherwise.
        """
        anchor = Place(self._anchor, 0)
        if self._place.position == self._anchor:
            return [self._place]
        return [self._place, anchor]

    def extend(self, output: Iterable[int]) -> None:
        """Continue with the next tokens of the output."""
        for token in output:
            self._push(token)

    def after(self, tokens: Iterable[int]) -> Alignment:
        """Return the alignment of the output with further ``tokens``; this one stays as it is."""
        longer = copy(self)
        longer._recent = [*self._recent]  # noqa: SLF001 - of the same class
        longer._found = {*self._found}  # noqa: SLF001 - of the same class
        longer.extend(tokens)
        return longer

    def _push(self, token: int) -> None:
        self.num_tokens += 1
        self._recent.append(token)
        del self._recent[:-_MAX_MATCH]
        position, match = self._place
        if position < len(self.prediction) and self.prediction[position] == token:
            self._place = Place(position + 1, min(match + 1, _MAX_MATCH))
        else:
            self._place = self._realign(token)
        position, match = self._place
        # A single token is reliable where it is expected: at the anchor.
        if match >= _RELIABLE or (match and position == self._anchor + 1):
            self._anchor = position
            self._found.update(range(position - match, position))

    def _realign(self, token: int) -> Place:
        """Return the best match of the last output tokens; without any, the anchor."""
        ends = self._ends.get(token, ())
        first_ahead = bisect_right(ends, self._anchor)
        start = max(0, first_ahead - _MAX_OCCURRENCES // 2)
        best = Place(self._anchor, 0)
        best_rank = (0, False, 0)
        for position in ends[start : start + _MAX_OCCURRENCES]:
            match = self._match_length(position)
            rank = (match, position > self._anchor, -abs(position - self._anchor))
            if rank > best_rank:
                best = Place(position, match)
                best_rank = rank
        return best

    def _match_length(self, position: int) -> int:
        """Return how many of the last output tokens stand before ``position``."""
        recent = self._recent
        most = min(position, len(recent))
        for length in range(most):
            if self.prediction[position - 1 - length] != recent[-1 - length]:
                return length
        return most
