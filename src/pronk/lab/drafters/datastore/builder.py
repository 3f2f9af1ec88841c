"""Building a datastore: write the token ids of all documents to a file, then sort their suffixes.

The sort needs the package ``pydivsufsort`` (the extra ``datastore``), which readers do not need.
Sorting takes 20 bytes of memory per token (50 for vocabularies of 65,536 ids or more), and 1 to 2
seconds for 10 M tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import numpy as np

from pronk import OptionError
from pronk.base import write_json, write_tokens
from pronk.base.checks import install_extra
from pronk.lab.drafters.datastore.reader import (
    FORMAT,
    HEADER,
    SUFFIX_TYPES,
    SUFFIXES,
    TOKEN_TYPES,
    TOKENS,
    Header,
    sha256,
)

# Progress callback. Its argument is the number of tokens written so far, or SORTING when the sort
# begins.
OnProgress = Callable[[int], None]
SORTING = -1


def require_sorter() -> ModuleType:
    """Import the library that sorts suffixes; raise OptionError if it is not installed."""
    try:
        import pydivsufsort  # noqa: PLC0415 - optional dependency
    except ImportError as error:
        msg = (
            f"datastore: expected pydivsufsort to sort with, found none ({error}); "
            f"{install_extra('datastore')}"
        )
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
        documents: token ids of each document, 0..vocab_size - 1. Empty documents are skipped. The
            iterable is read one document at a time, until ``limit`` is reached.
        vocabulary: the tokenizer's ``Tokenizer.fingerprint``.
        vocab_size: size of the vocabulary; a token takes 2 bytes in the file if the size is at most
            65,535, else 4.
        limit: maximum number of tokens, at least 1; the document that exceeds it is cut.
        sources: names of the files that the documents come from, kept in the header for ``pronk
            datastore info``.
        on_progress: called before each document and before the sort.

    Raises OptionError if the documents have no tokens, or the sorting library is not installed.
    """
    sorter = require_sorter()
    # TOKEN_TYPES and SUFFIX_TYPES are pairs (small type, large type). The large type is needed if
    # values exceed the range of the small one.
    token_type = np.dtype(TOKEN_TYPES[vocab_size > np.iinfo(TOKEN_TYPES[0]).max])
    num_tokens, largest_id, num_documents = _write_tokens(
        folder / TOKENS, documents, token_type, limit, on_progress
    )
    if not num_tokens:
        msg = "datastore: expected documents with tokens, found none; choose files with text"
        raise OptionError(msg)
    on_progress(SORTING)
    tokens = np.fromfile(folder / TOKENS, dtype=token_type)
    suffixes = sorter.divsufsort(tokens.astype(token_type.newbyteorder("=")))
    suffix_type = np.dtype(SUFFIX_TYPES[len(tokens) > np.iinfo(SUFFIX_TYPES[0]).max])
    write_tokens(folder / SUFFIXES, suffixes.astype(suffix_type))
    header = Header(
        vocabulary=vocabulary,
        largest_id=largest_id,
        tokens=num_tokens,
        documents=num_documents,
        token_type=token_type.str,
        suffix_type=suffix_type.str,
        tokens_sha256=sha256(folder / TOKENS),
        suffixes_sha256=sha256(folder / SUFFIXES),
        sources=tuple(sources),
    )
    fields = {"format": FORMAT, **asdict(header)}
    write_json(folder / HEADER, fields, indent=1)
    return header


def _write_tokens(
    path: Path,
    documents: Iterable[Sequence[int]],
    token_type: np.dtype[np.unsignedinteger],
    limit: int | None,
    on_progress: OnProgress,
) -> tuple[int, int, int]:
    """Write all documents; return (number of tokens, largest token id, number of documents)."""
    separator = np.array([np.iinfo(token_type).max], dtype=token_type)  # one after each document
    num_tokens = 0
    largest_id = 0
    num_documents = 0
    with path.open("wb") as stream:
        for document in documents:
            on_progress(num_tokens)
            num_left = None if limit is None else limit - num_tokens
            tokens = np.asarray(document, dtype=np.int64)[:num_left]
            if len(tokens):
                largest_id = max(largest_id, int(tokens.max()))
                assert 0 <= tokens.min() <= largest_id < separator[0], (
                    "expected ids of the vocabulary"
                )
                stream.write(tokens.astype(token_type).tobytes())
                stream.write(separator.tobytes())
                num_tokens += len(tokens)
                num_documents += 1
            if num_tokens == limit:
                break
    return num_tokens, largest_id, num_documents
