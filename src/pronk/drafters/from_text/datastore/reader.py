"""Reading a datastore: the token ids of a corpus and their suffix array.

::

    tokens.bin      a b c | a b d |     the documents, each ended by a separator
    suffixes.bin    0 4 1 5 2 6 7 3     start positions of all suffixes, sorted by their tokens

        number   0           1       2         3     …
        suffix   a b c | …   a b d | b c | …   b d | …

Suffixes 0 to 1 begin with ``a b``, and suffixes 2 to 3 with ``b``. Within an interval the continuations are sorted, so
phrases and their continuations are found by bisection. Token ids are big-endian: byte order is token order, and one
memory comparison compares two phrases. The separator is the largest number of the type, so it sorts after every token.

Both files are memory-mapped: an open datastore takes the memory of the accessed pages, which processes share. On disk
it takes 6 bytes per token (8 with a vocabulary of 65,536 or more). File sizes are checked against ``datastore.json`` on
opening, contents by :meth:`Datastore.verify`. Undetected damage makes draft tokens worse and never changes the output.
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

# Sample size in large intervals: enough to find every token with a share of a thousandth.
_SAMPLE = 1024
# Intervals between the suffixes checked on opening, and tokens compared per suffix.
_SPOTS, _SPOT_TOKENS = 64, 8


class Match(NamedTuple):
    """A phrase of ``length`` tokens and its suffixes ``low .. high - 1``; length 0 means no match."""

    length: int
    low: int
    high: int


class Child(NamedTuple):
    """A token that follows a phrase in suffixes ``low .. high - 1``."""

    token: int
    low: int
    high: int


class Datastore:
    """Read access to a datastore, opened by :meth:`open`; immutable and thread-safe."""

    def __init__(self, folder: Path, header: Header, tokens: mmap.mmap, suffixes: mmap.mmap) -> None:
        self.folder = folder
        self.header = header
        self._text = tokens
        self._width = np.dtype(header.token_type).itemsize
        self._token_array = np.frombuffer(tokens, dtype=header.token_type)
        self._suffix_array = np.frombuffer(suffixes, dtype=header.suffix_type)
        # A memoryview yields Python integers, much faster than numpy scalars.
        self._suffixes = memoryview(suffixes).cast("I" if self._suffix_array.itemsize == 4 else "Q")
        self._separator = header.separator.to_bytes(self._width, "big")

    @classmethod
    def open(cls, folder: Path, vocabulary: str | None = None) -> Datastore:
        """Map the files of a datastore.

        Args:
            folder: folder of ``pronk datastore build``.
            vocabulary: expected fingerprint of the tokenizer; ``None`` accepts any.

        Raises:
            CheckpointError: files are missing, damaged, or of another format.
            OptionError: the datastore was made with another tokenizer.
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
        """Check some suffixes: each must lie in the text, and they must be sorted."""
        spots = [self._suffixes[i * (self.header.entries - 1) // _SPOTS] for i in range(_SPOTS + 1)]
        phrases = [self._read(at, _SPOT_TOKENS) for at in spots]
        ended = self._read(self.header.entries - 1, 1) == self._separator
        if not ended or max(spots) >= self.header.entries or phrases != sorted(phrases):
            msg = f"{self.folder}: expected {SUFFIXES} to sort {TOKENS}, found otherwise; build the datastore again"
            raise CheckpointError(msg)

    def verify(self) -> None:
        """Read both files and compare checksums.

        Raises:
            CheckpointError: a file has changed since the datastore was built.
        """
        for name, expected in ((TOKENS, self.header.tokens_sha256), (SUFFIXES, self.header.suffixes_sha256)):
            with (self.folder / name).open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
            if found != expected:
                msg = (
                    f"{self.folder / name}: expected sha256 {expected[:16]}…, found {found[:16]}…; "
                    "build the datastore again or restore the file"
                )
                raise CheckpointError(msg)

    def find(self, tail: Sequence[int], max_match: int) -> Match:
        """Return the longest suffix of ``tail``, up to ``max_match`` tokens, that continues in a document.

        If a phrase has a continuation, so have its suffixes. The length is therefore found by bisection, and for each
        length the interval. An id outside ``0..largest_id`` matches nothing.
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
            suffix = self._first_suffix(part)
            if self._continues(suffix, part):
                known, low = length, suffix
            else:
                unknown = length
        if not known:
            return Match(0, 0, 0)
        return Match(known, low, self._first_suffix(phrase[-known * self._width :] + self._separator, low))

    def children(self, low: int, high: int, length: int, max_children: int) -> list[Child]:
        """Return up to ``max_children`` continuations of a phrase of ``length`` tokens, by frequency, then id.

        The phrase has suffixes ``low .. high - 1``. In a large interval an even sample is examined: it finds every
        token with a share of a thousandth and may miss rarer ones. The returned intervals are exact, except in a
        damaged datastore.
        """
        count = high - low
        if count <= 0 or max_children <= 0:
            return []
        if count == 1:
            following = self._read(self._suffixes[low] + length, 1)
            ended = following in (self._separator, b"")
            return [] if ended else [Child(int.from_bytes(following, "big"), low, high)]
        step = max(1.0, count / _SAMPLE)
        samples = low + (np.arange(min(count, _SAMPLE)) * step).astype(np.int64)
        begins = self._suffix_array[samples].astype(np.int64)
        # Clip: a position beyond the end, in a damaged file, must not raise during decoding.
        tokens = self._token_array.take(begins + length, mode="clip")
        edges = [0, *(np.flatnonzero(tokens[1:] != tokens[:-1]) + 1).tolist(), len(tokens)]
        runs = [(edges[i], edges[i + 1]) for i in range(len(edges) - 1)]
        runs.sort(key=lambda run: run[0] - run[1])
        found = [
            Child(token, *self._exact_interval(samples, run, length, low, high))
            for run in runs[: max_children + 1]
            if (token := int(tokens[run[0]])) <= self.header.largest_id
        ]
        found.sort(key=lambda child: (child.low - child.high, child.token))
        return found[:max_children]

    def _exact_interval(
        self, samples: NDArray[np.int64], run: tuple[int, int], length: int, low: int, high: int
    ) -> tuple[int, int]:
        """Return the exact interval of a run of equal tokens in the sample ``samples`` of ``low .. high - 1``."""
        if len(samples) == high - low:
            return low + run[0], low + run[1]
        token = self._read(self._suffixes[int(samples[run[0]])] + length, 1)
        before, first = (int(samples[run[0] - 1]) + 1 if run[0] else low), int(samples[run[0]])
        last, after = int(samples[run[1] - 1]), (int(samples[run[1]]) if run[1] < len(samples) else high)

        def following(suffix: int) -> bytes:
            return self._read(suffix + length, 1)

        begin = bisect_left(self._suffixes, token, before, first, key=following)
        return begin, bisect_right(self._suffixes, token, last + 1, after, key=following)

    def _first_suffix(self, phrase: bytes, low: int = 0) -> int:
        """Return the first suffix from ``low`` on that does not sort before ``phrase``."""
        text, width, size = self._text, self._width, len(phrase)
        return bisect_left(self._suffixes, phrase, low, key=lambda at: text[at * width : at * width + size])

    def _continues(self, number: int, phrase: bytes) -> bool:
        """Return whether suffix ``number`` begins with ``phrase`` and continues in its document.

        Separators sort last: of all suffixes with the phrase, the first continues if any does.
        """
        if number >= self.header.entries:
            return False
        found = self._read(self._suffixes[number], len(phrase) // self._width + 1)
        return found.startswith(phrase) and not found.endswith(self._separator) and len(found) > len(phrase)

    def _read(self, start: int, count: int) -> bytes:
        """Return ``count`` entries of the text as bytes, fewer at its end."""
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
