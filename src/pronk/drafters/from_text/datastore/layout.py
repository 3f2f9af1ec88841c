"""Files of a datastore: names, number types, JSON header; ``reader.py`` explains the binary files."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from pronk.errors import CheckpointError
from pronk.models.checkpoint import read_json

FORMAT = "pronk-datastore/1"
HEADER, TOKENS, SUFFIXES = "datastore.json", "tokens.bin", "suffixes.bin"

# numpy types: 2 or 4 bytes per token id, 4 or 8 per suffix (its start position). Token ids are big-endian, so that ids
# sort like their bytes. Suffixes have native byte order, since the reader calculates with them.
TOKEN_TYPES = (">u2", ">u4")
SUFFIX_TYPES = (np.dtype("u4").str, np.dtype("u8").str)


@dataclass(frozen=True)
class Header:
    """Fields of ``datastore.json``, without the field ``format``, which :meth:`read` checks."""

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
        """Return the number of entries of each binary file: one per token and one per separator."""
        return self.tokens + self.documents

    @property
    def separator(self) -> int:
        """Return the id that ends a document in ``tokens.bin``: the largest number of ``token_type``."""
        return int(np.iinfo(self.token_type).max)

    def file_sizes(self) -> dict[str, int]:
        """Return ``{file name: size in bytes}`` of ``tokens.bin`` and ``suffixes.bin``, in this order."""
        types = {TOKENS: self.token_type, SUFFIXES: self.suffix_type}
        return {name: self.num_entries * np.dtype(entry_type).itemsize for name, entry_type in types.items()}

    @classmethod
    def read(cls, folder: Path) -> Header:
        """Read and check ``datastore.json``.

        Raises ``CheckpointError`` if the file is missing, damaged, or of another format.
        """
        path = folder / HEADER
        if not path.is_file():
            msg = f"{folder}: expected a datastore with {HEADER}, found none; make one with pronk datastore build"
            raise CheckpointError(msg)
        raw = read_json(path)
        if (found := raw.pop("format", None)) != FORMAT:
            msg = f"{path}: expected format {FORMAT!r}, found {found!r}; build the datastore again"
            raise CheckpointError(msg)
        if isinstance(raw.get("sources"), list):
            raw["sources"] = tuple(raw["sources"])
        types = {"str": str, "int": int}
        wrong = (each.name for each in fields(cls) if type(raw.get(each.name)) is not types.get(str(each.type), tuple))
        if (damaged := next(wrong, None)) is None:
            header = cls(**{field.name: raw[field.name] for field in fields(cls)})
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
            "largest_id": self.token_type not in TOKEN_TYPES or 0 <= self.largest_id < self.separator,
        }
        return next((name for name in valid if not valid[name]), None)
