"""Files of a datastore and their reader: the token ids of a corpus and their suffix array.

``datastore.json`` is the header. The binary files are::

    tokens.bin      a b c | a b d |     the documents, each ended by a separator
    suffixes.bin    0 4 1 5 2 6 7 3     start positions of all suffixes, sorted by their tokens

        index    0           1       2         3     …     index in suffixes.bin
        suffix   a b c | …   a b d | b c | …   b d | …

A *phrase* is a sequence of tokens. The suffixes that begin with a phrase are consecutive: 0 and 1
begin with ``a b``, 2 and 3 with ``b``. These suffixes are sorted by the token after the phrase, so
bisection finds phrases and their continuations. Token ids are big-endian: comparing phrases as
bytes gives the same order as comparing them id by id. The separator is the largest number of the
type, so it sorts after every token.

Both files are memory-mapped: only accessed pages take memory, and all processes that open the
datastore share them. Opening checks the file sizes and a few suffixes; :meth:`Datastore.verify`
checks all contents. Undetected damage can make draft tokens worse, but never changes the output.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise, takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pronk import CheckpointError
from pronk.base import is_file
from pronk.checkpoint import read_json

FORMAT = "pronk-datastore/1"
HEADER = "datastore.json"
TOKENS = "tokens.bin"
SUFFIXES = "suffixes.bin"

# numpy types: 2 or 4 bytes per token id, 4 or 8 bytes per suffix (its start position). Token ids
# are big-endian, so that ids sort like their bytes. Suffixes have native byte order, because the
# reader calculates with their positions.
TOKEN_TYPES = (">u2", ">u4")
SUFFIX_TYPES = (np.dtype("u4").str, np.dtype("u8").str)

# If a phrase occurs more than 1024 times, its continuations are counted in 1024 evenly spaced
# occurrences. A token that follows at least 1/1024 of all occurrences is always found.
_SAMPLE = 1024

# Opening a datastore compares the first 8 tokens of 65 evenly spaced suffixes (64 intervals).
# Comparing all suffixes would take seconds.
_SPOT_INTERVALS = 64
_SPOT_TOKENS = 8


@dataclass(frozen=True)
class Header:
    """Fields of ``datastore.json``, without ``format``, which :meth:`read` checks."""

    vocabulary: str  # fingerprint of the tokenizer
    largest_id: int  # largest token id in the documents
    tokens: int  # number of tokens without separators, at least 1
    documents: int  # number of documents, each ended by one separator
    token_type: str  # numpy type of ``tokens.bin``, one of ``TOKEN_TYPES``
    suffix_type: str  # numpy type of ``suffixes.bin``, one of ``SUFFIX_TYPES``
    tokens_sha256: str  # checksum of ``tokens.bin``
    suffixes_sha256: str  # checksum of ``suffixes.bin``
    sources: tuple[str, ...]  # names of the files that the documents come from

    @property
    def num_entries(self) -> int:
        """Number of entries of each binary file: one per token and one per separator."""
        return self.tokens + self.documents

    @property
    def separator(self) -> int:
        """The id that ends a document in ``tokens.bin``: the largest number of ``token_type``."""
        return int(np.iinfo(self.token_type).max)

    def file_sizes(self) -> dict[str, int]:
        """Return the size in bytes of each binary file, by name: ``tokens.bin`` comes first."""
        types = {TOKENS: self.token_type, SUFFIXES: self.suffix_type}
        return {
            name: self.num_entries * np.dtype(entry_type).itemsize
            for name, entry_type in types.items()
        }

    @classmethod
    def read(cls, folder: Path) -> Header:
        """Read ``datastore.json``.

        Raises CheckpointError if the file is missing, damaged, or of another format.
        """
        path = folder / HEADER
        if not is_file(path):
            msg = (
                f"{folder}: expected a datastore with {HEADER}, found none; make one with pronk "
                "datastore build"
            )
            raise CheckpointError(msg)
        raw = read_json(path)
        if (found := raw.pop("format", None)) != FORMAT:
            msg = f"{path}: expected format {FORMAT!r}, found {found!r}; build the datastore again"
            raise CheckpointError(msg)
        if isinstance(raw.get("sources"), list):
            raw["sources"] = tuple(raw["sources"])
        types = {"str": str, "int": int}
        damaged: str | None = None
        for each in fields(cls):
            if type(raw.get(each.name)) is not types.get(str(each.type), tuple):
                damaged = each.name
                break
        else:
            header = cls(**{each.name: raw[each.name] for each in fields(cls)})
            damaged = header._find_invalid()
        if damaged is not None:
            found = f"found a damaged {damaged}: {raw.get(damaged)!r:.60}"
            msg = f"{path}: {found}; build the datastore again or restore the file"
            raise CheckpointError(msg)
        return header

    def _find_invalid(self) -> str | None:
        """Return the name of the first field with an invalid value; ``None`` if all are valid."""
        valid = {
            "sources": all(isinstance(name, str) for name in self.sources),
            "token_type": self.token_type in TOKEN_TYPES,
            "suffix_type": self.suffix_type in SUFFIX_TYPES,
            "tokens": self.tokens >= 1,
            "documents": 1 <= self.documents <= self.tokens,
        }
        if valid["token_type"]:
            valid["largest_id"] = 0 <= self.largest_id < self.separator
        return next((name for name, is_valid in valid.items() if not is_valid), None)


class Match(NamedTuple):
    """Longest ending of a text that occurs in the corpus."""

    length: int  # number of tokens; 0 if there is no match
    low: int  # index of the first suffix that begins with the match
    high: int  # 1 + index of the last suffix that begins with the match


class Child(NamedTuple):
    """A token that follows a phrase: suffixes ``low .. high - 1`` begin with phrase and token."""

    token: int
    low: int
    high: int


class Datastore:
    """Read access to a datastore, opened by :meth:`open`; immutable and thread-safe."""

    def __init__(
        self, folder: Path, header: Header, tokens: mmap.mmap, suffixes: mmap.mmap
    ) -> None:
        self.folder = folder
        self.header = header
        # Two views of each file: bytes or a memoryview for single entries, a numpy array for many
        # at once.
        self._token_bytes = tokens
        self._token_array = np.frombuffer(tokens, dtype=header.token_type)
        self._suffix_array = np.frombuffer(suffixes, dtype=header.suffix_type)
        self._suffixes = memoryview(suffixes).cast("I" if self._suffix_array.itemsize == 4 else "Q")
        self._token_size = np.dtype(header.token_type).itemsize  # bytes per token id
        self._separator = header.separator.to_bytes(self._token_size, "big")

    @classmethod
    def open(cls, folder: Path) -> Datastore:
        """Map the files of a datastore that ``pronk datastore build`` wrote into ``folder``.

        Raises ``CheckpointError`` if a file is missing, damaged, or of another format.
        """
        header = Header.read(folder)
        sizes = header.file_sizes()
        tokens = _map_file(folder / TOKENS, sizes[TOKENS])
        suffixes = _map_file(folder / SUFFIXES, sizes[SUFFIXES])
        store = cls(folder, header, tokens, suffixes)
        store._spot_check()
        return store

    def _spot_check(self) -> None:
        """Check 65 suffixes, and that ``tokens.bin`` ends with a separator.

        Raises CheckpointError if the separator is missing, or a suffix is out of range or unsorted.
        """
        num_entries = self.header.num_entries
        checked = [i * (num_entries - 1) // _SPOT_INTERVALS for i in range(_SPOT_INTERVALS + 1)]
        starts = [self._suffixes[index] for index in checked]
        phrases = [self._read(start, _SPOT_TOKENS) for start in starts]
        ends_with_separator = self._read(num_entries - 1, 1) == self._separator
        if not ends_with_separator or max(starts) >= num_entries or phrases != sorted(phrases):
            msg = (
                f"{self.folder}: expected {SUFFIXES} to sort {TOKENS}, found otherwise; build the "
                "datastore again"
            )
            raise CheckpointError(msg)

    def verify(self) -> None:
        """Compare the checksums of both binary files with those in the header.

        Raises CheckpointError if a file has changed since the datastore was built.
        """
        checksums = {TOKENS: self.header.tokens_sha256, SUFFIXES: self.header.suffixes_sha256}
        for name, expected in checksums.items():
            path = self.folder / name
            found = sha256(path)
            if found != expected:
                hashes = f"expected sha256 {expected[:16]}…, found {found[:16]}…"
                msg = f"{path}: {hashes}; build the datastore again or restore the file"
                raise CheckpointError(msg)

    def find(self, tail: Sequence[int], max_match: int) -> Match:
        """Return the longest ending of ``tail`` that has a continuation.

        The ending has at most ``max_match`` tokens. A phrase has a continuation if a token follows
        the phrase in a document. An id outside ``0..largest_id`` has no match. The length is found
        by bisection, because each ending of a phrase with a continuation has a continuation, too.
        """
        last_tokens = tail[max(0, len(tail) - max_match) :]
        largest_id = self.header.largest_id
        valid_tokens = [*takewhile(lambda token: 0 <= token <= largest_id, reversed(last_tokens))]
        valid_tokens.reverse()
        size = self._token_size
        phrase = b"".join(token.to_bytes(size, "big") for token in valid_tokens)
        endings = [phrase[-length * size :] for length in range(1, len(valid_tokens) + 1)]
        length = bisect_left(endings, True, key=lambda ending: not self._has_continuation(ending))
        if not length:
            return Match(0, 0, 0)
        match = endings[length - 1]
        low = self._first_suffix(match)
        return Match(length, low, self._first_suffix(match + self._separator, low))

    def children(self, low: int, high: int, length: int, max_children: int) -> list[Child]:
        """Return the ``max_children`` most frequent tokens after a phrase, most frequent first.

        Of equally frequent tokens, the one with the smaller id comes first. Suffixes ``low .. high
        - 1`` begin with the phrase, which has ``length`` tokens. Of more
        than 1024 such suffixes, 1024 are examined: a token that follows fewer than 1/1024 of the
        occurrences may be missed. ``low`` and ``high`` of a child are exact.
        """
        count = high - low
        if count <= 0 or max_children <= 0:
            return []
        if count == 1:
            following = self._read(self._suffixes[low] + length, 1)
            document_ends = following in (self._separator, b"")
            return [] if document_ends else [Child(int.from_bytes(following, "big"), low, high)]
        step = max(1.0, count / _SAMPLE)
        samples = low + (np.arange(min(count, _SAMPLE)) * step).astype(np.int64)
        starts = self._suffix_array[samples].astype(np.int64)
        # Clipped, because a position beyond the end, in a damaged file, must not raise.
        tokens = self._token_array.take(starts + length, mode="clip")
        # Equal tokens are adjacent: split the samples into runs ``(start, stop)`` of one token, the
        # longest run first.
        changes = np.flatnonzero(tokens[1:] != tokens[:-1]) + 1
        edges = [0, *changes.tolist(), len(tokens)]
        runs = sorted(pairwise(edges), key=lambda run: run[0] - run[1])
        children: list[Child] = []
        for run in runs[: max_children + 1]:  # one more, as a run of separators is no child
            token = int(tokens[run[0]])
            if token <= self.header.largest_id:
                interval = self._exact_interval(samples, run, length, low, high)
                children.append(Child(token, *interval))
        children.sort(key=lambda child: (child.low - child.high, child.token))
        return children[:max_children]

    def _exact_interval(
        self, samples: NDArray[np.int64], run: tuple[int, int], length: int, low: int, high: int
    ) -> tuple[int, int]:
        """Return ``low`` and ``high`` of the :class:`Child` of one run of samples.

        ``samples`` are indices of suffixes within ``low .. high - 1``. The suffixes
        ``samples[start:stop]``, with ``run = (start, stop)``, have the child's token after the
        phrase of ``length`` tokens.
        """
        start, stop = run
        if len(samples) == high - low:
            return low + start, low + stop
        # The first suffix with this token lies after the sample before the run, and the last one
        # before the sample after the run. Bisection finds both.
        token = self._read(self._suffixes[int(samples[start])] + length, 1)
        previous_end = int(samples[start - 1]) + 1 if start else low
        next_start = int(samples[stop]) if stop < len(samples) else high

        def following(position: int) -> bytes:
            return self._read(position + length, 1)

        first_sample = int(samples[start])
        last_sample = int(samples[stop - 1])
        first = bisect_left(self._suffixes, token, previous_end, first_sample, key=following)
        end = bisect_right(self._suffixes, token, last_sample + 1, next_start, key=following)
        return first, end

    def _first_suffix(self, phrase: bytes, low: int = 0) -> int:
        """Return the index of the first suffix that does not sort before ``phrase``.

        This suffix begins with the phrase if any suffix does. Suffixes before the index ``low`` are
        left out.
        """
        text = self._token_bytes
        token_size = self._token_size
        length = len(phrase)
        return bisect_left(
            self._suffixes,
            phrase,
            low,
            key=lambda i: text[i * token_size : i * token_size + length],
        )

    def _has_continuation(self, phrase: bytes) -> bool:
        """Return whether a token follows ``phrase`` in a document."""
        # A separator sorts after all tokens: if a token follows the phrase anywhere, then a token
        # follows in the first suffix.
        first = self._first_suffix(phrase)
        if first >= self.header.num_entries:
            return False
        extended = self._read(self._suffixes[first], len(phrase) // self._token_size + 1)
        return (
            extended.startswith(phrase)
            and not extended.endswith(self._separator)
            and len(extended) > len(phrase)
        )

    def _read(self, start: int, count: int) -> bytes:
        """Return the bytes of ``count`` token ids of ``tokens.bin`` from index ``start``.

        At the end of the file, fewer ids are returned.
        """
        return self._token_bytes[start * self._token_size : (start + count) * self._token_size]


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _map_file(path: Path, size: int) -> mmap.mmap:
    try:
        with path.open("rb") as stream:
            actual_size = os.fstat(stream.fileno()).st_size
            if actual_size == size:
                return mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as error:
        msg = (
            f"{path}: expected a readable file, found {error.strerror or error}; build the "
            "datastore again"
        )
        raise CheckpointError(msg) from error
    msg = (
        f"{path}: expected {size} bytes, found {actual_size}; "
        "build the datastore again or restore the file"
    )
    raise CheckpointError(msg)
