"""Array of texts of a GGUF file, as bytes: a vocabulary without an object for each token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray


class Texts(Sequence[str]):
    """Texts, of which each has a place in the bytes of all.

    Attributes:
        data: UTF-8 bytes of all texts.
        starts: int32 ``[texts]``: place of each text in ``data``.
        stops: int32 ``[texts]``: end of each text in ``data``.
    """

    def __init__(
        self, data: NDArray[np.uint8], starts: NDArray[np.int32], stops: NDArray[np.int32]
    ) -> None:
        self.data = data
        self.starts = starts
        self.stops = stops

    @classmethod
    def of(cls, texts: Sequence[str]) -> Texts:
        """Return ``texts`` as bytes."""
        stored = [text.encode() for text in texts]
        stops = np.add.accumulate([len(text) for text in stored], dtype=np.int32)
        starts = np.concatenate([np.zeros(1, np.int32), stops])[: len(stored)]
        return cls(np.frombuffer(b"".join(stored), np.uint8), starts, stops)

    @property
    def sizes(self) -> NDArray[np.int32]:
        """Number of bytes of each text, ``[texts]``."""
        sizes: NDArray[np.int32] = self.stops - self.starts
        return sizes

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.data[self.starts[index] : self.stops[index]].tobytes().decode()

    def __iter__(self) -> Iterator[str]:
        text = self.data.tobytes().decode()
        # places in characters instead of bytes
        places = np.zeros(len(self.data) + 1, np.int32)
        np.add.accumulate((self.data & 0xC0) != 0x80, dtype=np.int32, out=places[1:])
        starts = places[self.starts].tolist()
        stops = places[self.stops].tolist()
        return (text[start:stop] for start, stop in zip(starts, stops, strict=True))

    def begin_with(self, prefix: str) -> NDArray[np.int64]:
        """Return the numbers of the texts that begin with ``prefix``, ascending."""
        wanted = prefix.encode()
        found = np.flatnonzero(self.sizes >= len(wanted))
        for place, byte in enumerate(wanted):
            found = found[self.data[self.starts[found] + place] == byte]
        return found

    def find(self, text: str) -> int | None:
        """Return the number of the first text that equals ``text``; ``None`` if there is none."""
        found = self.begin_with(text)
        found = found[self.sizes[found] == len(text.encode())]
        return int(found[0]) if len(found) else None

    def replaced(self, texts: dict[int, str]) -> Texts:
        """Return these texts with others in place of those with the given numbers."""
        added = Texts.of(list(texts.values()))
        numbers = list(texts)
        starts = self.starts.copy()
        stops = self.stops.copy()
        starts[numbers] = added.starts + np.int32(len(self.data))
        stops[numbers] = added.stops + np.int32(len(self.data))
        return Texts(np.concatenate([self.data, added.data]), starts, stops)

    def without(self, numbers: NDArray[np.int64]) -> Texts:
        """Return these texts with empty ones in place of those with the given numbers."""
        stops = self.stops.copy()
        stops[numbers] = self.starts[numbers]
        return Texts(self.data, self.starts, stops)
