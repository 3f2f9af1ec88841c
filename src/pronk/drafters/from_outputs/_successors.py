"""A bounded table of the likeliest successors of each token, and its safetensors file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from pronk.errors import OptionError
from pronk.files.atomic import replace_file

_FORMAT = "pronk-successors/1"


@dataclass
class Successors:
    """A table with one row per token: the likeliest successors of that token."""

    top_k: int  # maximum number of successors in a row
    max_tokens: int  # maximum number of rows; a full table evicts the row that was updated longest ago
    # Maps a token id to its successors' ids, likeliest first. Rows are in order of their last update, the oldest first.
    rows: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def get(self, token: int) -> tuple[int, ...]:
        """Return the successors of ``token``, likeliest first; empty for a token without a row."""
        return self.rows.get(token, ())

    def put(self, token: int, successors: Sequence[int]) -> None:
        """Replace the row of ``token`` by the first ``top_k`` of ``successors``; a full table evicts a row."""
        self.rows.pop(token, None)
        self.rows[token] = tuple(successors[: self.top_k])
        if len(self.rows) > self.max_tokens:
            del self.rows[next(iter(self.rows))]

    def move_to_front(self, token: int, successor: int) -> None:
        """Make ``successor`` the likeliest successor of ``token``."""
        self.put(token, (successor, *(other for other in self.get(token) if other != successor)))

    def copy(self) -> Successors:
        """Return an independent copy."""
        return Successors(self.top_k, self.max_tokens, dict(self.rows))


def save_successors(path: Path, table: Successors, vocabulary: str | None) -> None:
    """Write a table to a safetensors file with the int32 tensor ``successors`` ``[rows, 1 + top_k]``.

    A row is a token id and the ids of its successors, padded with -1. The metadata are ``format`` and ``vocabulary``.
    Raises ``OptionError`` if the file cannot be written.
    """
    rows = [[token, *ids, *[-1] * (table.top_k - len(ids))] for token, ids in table.rows.items()]
    tensor = np.array(rows, np.int32).reshape(len(rows), 1 + table.top_k)
    content = save({"successors": tensor}, {"format": _FORMAT, "vocabulary": vocabulary or ""})
    try:
        with replace_file(path) as file:
            file.write(content)
    except OSError as error:
        msg = f"{path}: expected a writable path for the table, found: {error}; choose another path"
        raise OptionError(msg) from error


def load_successors(path: Path, table: Successors, vocabulary: str | None) -> None:
    """Load a file's rows into an empty table; if they are more than ``max_tokens``, keep the last ones.

    Raises:
        OptionError: the file is missing, damaged, or of another vocabulary; the table stays empty.
    """
    try:
        with safe_open(path, "np") as file:
            metadata, tensor = file.metadata() or {}, file.get_tensor("successors")
    except (OSError, SafetensorError) as error:
        msg = f"{path}: expected a table saved by RecyclingProposer.save, found: {error}; choose another table"
        raise OptionError(msg) from error
    if metadata.get("format") != _FORMAT or tensor.ndim != 2 or tensor.dtype != np.int32 or tensor.shape[1] < 1:
        found = f"{metadata.get('format')!r}, {tensor.shape}"
        msg = f"{path}: expected a table of format {_FORMAT}, found {found}; save it again"
        raise OptionError(msg)
    if metadata.get("vocabulary") != (vocabulary or ""):
        msg = f"{path}: expected a table of this model's tokenizer, found one of another; save one with this model"
        raise OptionError(msg)
    for token, *successors in tensor.tolist():
        table.put(token, [successor for successor in successors if successor >= 0])
