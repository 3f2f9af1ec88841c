"""A text and the draft tokens after it as one sequence, without a copy of the text, which may be long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload


class TokenView(Sequence[int]):
    """``text`` followed by ``more``, which must not change; a slice is a list."""

    def __init__(self, text: Sequence[int], more: Sequence[int]) -> None:
        self._text, self._more, self._size = text, more, len(text)

    def __len__(self) -> int:
        return self._size + len(self._more)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        """Return a token, or a list of the tokens of a slice."""
        size = self._size
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return [self[i] for i in range(start, stop, step)]
            return [*self._text[start:stop], *self._more[max(0, start - size) : max(0, stop - size)]]
        place = index if index >= 0 else index + len(self)
        if not 0 <= place < len(self):
            raise IndexError(index)
        return self._text[place] if place < size else self._more[place - size]
