"""File names of a datastore and its header ``datastore.json`` (format: see ``reader``)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from pronk.errors import CheckpointError
from pronk.models.checkpoint import read_json

__all__ = ["FORMAT", "HEADER", "SUFFIXES", "SUFFIX_TYPES", "TOKENS", "TOKEN_TYPES", "Header"]

FORMAT = "pronk-datastore/1"
HEADER, TOKENS, SUFFIXES = "datastore.json", "tokens.bin", "suffixes.bin"

# numpy types by size. Token ids are big-endian so that byte order is token order; suffixes are native for arithmetic.
TOKEN_TYPES = (">u2", ">u4")
SUFFIX_TYPES = (np.dtype("u4").str, np.dtype("u8").str)


@dataclass(frozen=True)
class Header:
    """Fields of ``datastore.json`` besides the format.

    Attributes:
        vocabulary: fingerprint of the tokenizer.
        largest_id: largest token id.
        tokens: number of tokens without separators, at least 1.
        documents: number of documents, each ended by one separator.
        token_type: numpy type of ``tokens.bin``, one of :data:`TOKEN_TYPES`.
        suffix_type: numpy type of ``suffixes.bin``, one of :data:`SUFFIX_TYPES`.
        tokens_sha256: checksum of ``tokens.bin``.
        suffixes_sha256: checksum of ``suffixes.bin``.
        sources: names of the text's files.
    """

    vocabulary: str
    largest_id: int
    tokens: int
    documents: int
    token_type: str
    suffix_type: str
    tokens_sha256: str
    suffixes_sha256: str
    sources: tuple[str, ...]

    @property
    def entries(self) -> int:
        """Return the number of entries of each file: tokens and separators."""
        return self.tokens + self.documents

    @property
    def separator(self) -> int:
        """Return the entry that ends a document: the largest number of ``token_type``."""
        return int(np.iinfo(self.token_type).max)

    def sizes(self) -> dict[str, int]:
        """Return the size of each file in bytes."""
        types = {TOKENS: self.token_type, SUFFIXES: self.suffix_type}
        return {name: self.entries * np.dtype(kind).itemsize for name, kind in types.items()}

    @classmethod
    def read(cls, folder: Path) -> Header:
        """Read and check ``datastore.json``.

        Raises:
            CheckpointError: the file is missing, damaged, or of another format.
        """
        path = folder / HEADER
        if not path.is_file():
            msg = f"{folder}: expected a datastore with {HEADER}, found none; make one with pronk datastore build"
            raise CheckpointError(msg)
        raw = read_json(path)
        if (found := raw.pop("format", None)) != FORMAT:
            msg = f"{path}: expected format {FORMAT!r}, found {found!r}; build the datastore again"
            raise CheckpointError(msg)
        sources = raw.get("sources")
        if isinstance(sources, list) and all(isinstance(name, str) for name in sources):
            raw["sources"] = tuple(sources)
        for each in fields(cls):
            kind = {"str": str, "int": int}.get(str(each.type), tuple)
            if type(raw.get(each.name)) is not kind:
                raise CheckpointError(_damaged(path, each.name, raw.get(each.name)))
        header = cls(**{each.name: raw[each.name] for each in fields(cls)})
        header._check(path)
        return header

    def _check(self, path: Path) -> None:
        rules = (
            ("token_type", self.token_type in TOKEN_TYPES),
            ("suffix_type", self.suffix_type in SUFFIX_TYPES),
            ("tokens", self.tokens >= 1),
            ("documents", 1 <= self.documents <= self.tokens),
        )
        for name, valid in rules:
            if not valid:
                raise CheckpointError(_damaged(path, name, getattr(self, name)))
        if not 0 <= self.largest_id < self.separator:
            raise CheckpointError(_damaged(path, "largest_id", self.largest_id))


def _damaged(path: Path, name: str, value: object) -> str:
    return f"{path}: found a damaged {name}: {value!r:.60}; build the datastore again or restore the file"
