"""Building a datastore: write the token ids of all documents to a file, then sort their suffixes.

The sort needs ``pydivsufsort`` of the extra ``pronk[datastore]``; reading a datastore does not. Sorting 10 M tokens
takes 20 bytes of memory per token (50 with a vocabulary of 65,536 or more) and 1 to 2 seconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import numpy as np

from pronk.drafters.from_text.datastore.layout import (
    FORMAT,
    HEADER,
    SUFFIX_TYPES,
    SUFFIXES,
    TOKEN_TYPES,
    TOKENS,
    Header,
)
from pronk.errors import OptionError

__all__ = ["SORTING", "OnProgress", "require_sorter", "write_datastore"]

# Progress callback: receives the number of written tokens before each document, and SORTING before the sort.
OnProgress = Callable[[int], None]
SORTING = -1


def require_sorter() -> ModuleType:
    """Import the library that sorts suffixes.

    Raises:
        OptionError: the library is not installed.
    """
    try:
        import pydivsufsort  # noqa: PLC0415 - optional dependency
    except ImportError as error:
        msg = f"datastore: expected pydivsufsort to sort with, found none ({error}); pip install 'pronk[datastore]'"
        raise OptionError(msg) from error
    return pydivsufsort


def write_datastore(
    folder: Path,
    documents: Iterable[Sequence[int]],
    *,
    vocabulary: str,
    vocab_size: int,
    limit: int | None = None,
    sources: Iterable[str] = (),
    on_progress: OnProgress = lambda _: None,
) -> Header:
    """Write a datastore into an existing folder.

    Args:
        folder: an existing folder.
        documents: token ids of each document, 0..vocab_size - 1; empty ones are skipped. Read lazily up to ``limit``.
        vocabulary: fingerprint of the tokenizer.
        vocab_size: number of token ids, which determines the bytes per id.
        limit: maximum number of tokens, at least 1; the document that exceeds it is cut.
        sources: names of the text's files.
        on_progress: callback for a line about the present phase.

    Raises:
        OptionError: the documents have no tokens, or the sorting library is not installed.
    """
    sorter = require_sorter()
    kind = np.dtype(TOKEN_TYPES[vocab_size > np.iinfo(TOKEN_TYPES[0]).max])
    count, largest, ended = _write_tokens(folder / TOKENS, documents, kind, limit, on_progress)
    if not count:
        msg = "datastore: expected documents with tokens, found none; choose files with text"
        raise OptionError(msg)
    on_progress(SORTING)
    tokens = np.fromfile(folder / TOKENS, dtype=kind)
    suffixes = sorter.divsufsort(tokens.astype(kind.newbyteorder("=")))
    order = np.dtype(SUFFIX_TYPES[len(tokens) > np.iinfo(SUFFIX_TYPES[0]).max])
    suffixes.astype(order).tofile(folder / SUFFIXES)
    header = Header(
        vocabulary,
        largest,
        count,
        ended,
        kind.str,
        order.str,
        _checksum(folder / TOKENS),
        _checksum(folder / SUFFIXES),
        tuple(sources),
    )
    document = {"format": FORMAT, **asdict(header)}
    (folder / HEADER).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return header


def _write_tokens(
    path: Path,
    documents: Iterable[Sequence[int]],
    kind: np.dtype[np.unsignedinteger],
    limit: int | None,
    on_progress: OnProgress,
) -> tuple[int, int, int]:
    """Write the documents; return the number of tokens, the largest id, and the number of documents."""
    separator = np.array([np.iinfo(kind).max], dtype=kind)
    count, largest, ended = 0, 0, 0
    with path.open("wb") as stream:
        for document in documents:
            on_progress(count)
            tokens = np.asarray(document, dtype=np.int64)[: None if limit is None else limit - count]
            if len(tokens):
                largest = max(largest, int(tokens.max()))
                assert 0 <= tokens.min() <= largest < separator[0], "expected ids of the vocabulary"
                stream.write(tokens.astype(kind).tobytes())
                stream.write(separator.tobytes())
                count, ended = count + len(tokens), ended + 1
            if count == limit:
                break
    return count, largest, ended


def _checksum(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
