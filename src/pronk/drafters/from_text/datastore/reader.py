"""A datastore: the token ids of a corpus, and the order of its suffixes, in which any phrase of it is found.

::

    tokens.bin      a b c | a b d |     the documents, each ended by a separator, which is no token
    suffixes.bin    0 4 1 5 2 6 7 3     where suffixes begin, in the order of their tokens

        number   0           1       2         3     …
        suffix   a b c | …   a b d | b c | …   b d | …

What begins with ``a b`` is suffixes 0 to 1, what begins with ``b`` suffixes 2 to 3, and what follows stands in order
within: phrases and their continuations are found by bisection. Token ids are big-endian, so that the order of bytes is
that of tokens and one comparison of memory compares two phrases. The separator is the largest number that fits; it
comes after every token.

Both files are mapped, not read: an open datastore costs the pages that are looked at, which programs share. On disk it
takes 6 bytes per token (8 with a vocabulary of 65,536 and more). ``datastore.json`` says what the files are; their
sizes are checked when they are opened, their contents by :meth:`Datastore.verify`. Damage that nobody noticed makes
guesses worse, never a text.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pronk.drafters.from_text.datastore.layout import SUFFIXES, TOKENS, Header
from pronk.errors import CheckpointError, OptionError

__all__ = ["Child", "Datastore", "Match"]

# Looking at so many places of a large interval finds whatever owns a thousandth of it.
_SAMPLE = 1024
# Suffixes that are looked at when a datastore is opened, and how many of their tokens.
_SPOTS, _SPOT_TOKENS = 64, 8


class Match(NamedTuple):
    """A phrase of ``length`` tokens begins suffixes ``low`` to ``high``, the last not included; none if it is empty."""

    length: int
    low: int
    high: int


class Child(NamedTuple):
    """``token`` follows a phrase in suffixes ``low`` to ``high``, the last not included."""

    token: int
    low: int
    high: int


class Datastore:
    """Read access to a datastore; :meth:`open` makes one. Nothing in it changes, so threads may share it."""

    def __init__(self, folder: Path, header: Header, tokens: mmap.mmap, suffixes: mmap.mmap) -> None:
        self.folder = folder
        self.header = header
        self._text = tokens
        self._width = np.dtype(header.token_type).itemsize
        self._token_array = np.frombuffer(tokens, dtype=header.token_type)
        self._suffix_array = np.frombuffer(suffixes, dtype=header.suffix_type)
        # Its numbers come out as Python's own, at a fraction of what numpy takes for one.
        self._suffixes = memoryview(suffixes).cast("I" if self._suffix_array.itemsize == 4 else "Q")
        self._separator = header.separator.to_bytes(self._width, "big")

    @classmethod
    def open(cls, folder: Path, vocabulary: str | None = None) -> Datastore:
        """Map the files of a datastore.

        Args:
            folder: as ``pronk datastore build`` left it.
            vocabulary: fingerprint that it must have; ``None`` takes any.

        Raises:
            CheckpointError: files are missing or damaged, or of another format.
            OptionError: it was made with another tokenizer.
        """
        header = Header.read(folder)
        if vocabulary is not None and header.vocabulary != vocabulary:
            msg = (
                f"{folder}: expected a datastore of tokenizer {vocabulary}, found one of {header.vocabulary}; "
                "build one for this model: pronk datastore build OUT FILES --model MODEL"
            )
            raise OptionError(msg)
        store = cls(folder, header, *(_map(folder / name, size) for name, size in header.sizes().items()))
        store._spot_check()
        return store

    def _spot_check(self) -> None:
        """Look at some suffixes: each must exist, and none may come before the one before it."""
        spots = [self._suffixes[i * (self.header.entries - 1) // _SPOTS] for i in range(_SPOTS + 1)]
        phrases = [self._read(at, _SPOT_TOKENS) for at in spots]
        ended = self._read(self.header.entries - 1, 1) == self._separator
        if not ended or max(spots) >= self.header.entries or phrases != sorted(phrases):
            msg = f"{self.folder}: expected {SUFFIXES} to sort {TOKENS}, found otherwise; build the datastore again"
            raise CheckpointError(msg)

    def verify(self) -> None:
        """Read everything and compare checksums.

        Raises:
            CheckpointError: a file is not what it was when the datastore was built.
        """
        for name, want in ((TOKENS, self.header.tokens_sha256), (SUFFIXES, self.header.suffixes_sha256)):
            with (self.folder / name).open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
            if found != want:
                msg = (
                    f"{self.folder / name}: expected sha256 {want[:16]}…, found {found[:16]}…; "
                    "build the datastore again or restore the file"
                )
                raise CheckpointError(msg)

    def find(self, tail: Sequence[int], max_match: int) -> Match:
        """The longest suffix of ``tail``, of at most ``max_match`` tokens, that something follows in a document.

        If a phrase is followed by something then so is what is left of it without its first token: the length is found
        by bisection, and within each length the place. An id that no token has matches nothing.
        """
        usable: list[int] = []
        for token in reversed(tail[max(0, len(tail) - max_match) :]):
            if not 0 <= token <= self.header.largest_id:
                break
            usable.append(token)
        phrase = b"".join(token.to_bytes(self._width, "big") for token in reversed(usable))
        known, low = 0, 0
        unknown = len(usable) + 1
        while unknown - known > 1:
            length = (known + unknown) // 2
            part = phrase[-length * self._width :]
            place = self._first(part)
            if self._goes_on(place, part):
                known, low = length, place
            else:
                unknown = length
        if not known:
            return Match(0, 0, 0)
        return Match(known, low, self._first(phrase[-known * self._width :] + self._separator, low))

    def children(self, low: int, high: int, length: int, most: int) -> list[Child]:
        """What follows a phrase of ``length`` tokens that begins suffixes ``low`` to ``high``.

        Of a large interval an even sample is looked at: whatever owns a thousandth of it is found, rarer tokens may be
        missed. The intervals are exact in any case, except in a damaged datastore.

        Returns:
            At most ``most`` tokens and their intervals, those that follow most often first, among equals in the order
            of their ids.
        """
        count = high - low
        if count <= 0 or most <= 0:
            return []
        if count == 1:
            following = self._read(self._suffixes[low] + length, 1)
            ended = following in (self._separator, b"")
            return [] if ended else [Child(int.from_bytes(following, "big"), low, high)]
        step = max(1.0, count / _SAMPLE)
        places = low + (np.arange(min(count, _SAMPLE)) * step).astype(np.int64)
        begins = self._suffix_array[places].astype(np.int64)
        # A place beyond the end, in a damaged file, must not end the decoding.
        tokens = self._token_array.take(begins + length, mode="clip")
        edges = [0, *(np.flatnonzero(tokens[1:] != tokens[:-1]) + 1).tolist(), len(tokens)]
        runs = [(edges[i], edges[i + 1]) for i in range(len(edges) - 1)]
        runs.sort(key=lambda run: run[0] - run[1])
        found = [
            Child(token, *self._exact(places, run, length, low, high))
            for run in runs[: most + 1]
            if (token := int(tokens[run[0]])) <= self.header.largest_id
        ]
        found.sort(key=lambda child: (child.low - child.high, child.token))
        return found[:most]

    def _exact(
        self, places: NDArray[np.int64], run: tuple[int, int], length: int, low: int, high: int
    ) -> tuple[int, int]:
        """The whole interval of a run of equal tokens in the sample ``places`` of ``low`` to ``high``."""
        if len(places) == high - low:
            return low + run[0], low + run[1]
        token = self._read(self._suffixes[int(places[run[0]])] + length, 1)
        before, first = (int(places[run[0] - 1]) + 1 if run[0] else low), int(places[run[0]])
        last, after = int(places[run[1] - 1]), (int(places[run[1]]) if run[1] < len(places) else high)

        def following(suffix: int) -> bytes:
            return self._read(suffix + length, 1)

        begin = bisect_left(self._suffixes, token, before, first, key=following)
        return begin, bisect_right(self._suffixes, token, last + 1, after, key=following)

    def _first(self, phrase: bytes, low: int = 0) -> int:
        """Number of the first suffix, from ``low`` on, that is not before ``phrase``."""
        text, width, size = self._text, self._width, len(phrase)
        return bisect_left(self._suffixes, phrase, low, key=lambda at: text[at * width : at * width + size])

    def _goes_on(self, number: int, phrase: bytes) -> bool:
        """Whether suffix ``number`` begins with ``phrase`` and its document does not end there.

        Separators come last, so of all suffixes with the phrase the first one has a token after it if any has.
        """
        if number >= self.header.entries:
            return False
        found = self._read(self._suffixes[number], len(phrase) // self._width + 1)
        return found.startswith(phrase) and not found.endswith(self._separator) and len(found) > len(phrase)

    def _read(self, start: int, count: int) -> bytes:
        """``count`` numbers of the text, fewer at its end."""
        return self._text[start * self._width : (start + count) * self._width]


def _map(path: Path, size: int) -> mmap.mmap:
    try:
        with path.open("rb") as stream:
            found = os.fstat(stream.fileno()).st_size
            if found == size:
                return mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as error:
        msg = f"{path}: expected a readable file, found {error.strerror or error}; build the datastore again"
        raise CheckpointError(msg) from error
    msg = f"{path}: expected {size} bytes, found {found}; build the datastore again or restore the file"
    raise CheckpointError(msg)
