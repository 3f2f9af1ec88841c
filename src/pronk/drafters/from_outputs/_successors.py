"""A bounded table of the likeliest successors of each token, and its safetensors file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from pronk.errors import OptionError
from pronk.files.atomic import replace_file

__all__ = ["Successors", "load_successors", "save_successors"]

_FORMAT = "pronk-successors/1"


@dataclass
class Successors:
    """A least-recently-updated table of the likeliest successors of tokens.

    Attributes:
        top_k: maximum number of successors per token.
        max_tokens: maximum number of rows.
        rows: token to its successors, likeliest first; the row updated longest ago comes first and is evicted first.
    """

    top_k: int
    max_tokens: int
    rows: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def get(self, token: int) -> tuple[int, ...]:
        """Return the successors of ``token``, likeliest first; empty for a token without a row."""
        return self.rows.get(token, ())

    def put(self, token: int, successors: Sequence[int]) -> None:
        """Replace the successors of ``token``."""
        self.rows.pop(token, None)
        self.rows[token] = tuple(successors[: self.top_k])
        if len(self.rows) > self.max_tokens:
            del self.rows[next(iter(self.rows))]

    def move_to_front(self, token: int, successor: int) -> None:
        """Move ``successor`` to the front of the successors of ``token``."""
        self.put(token, (successor, *(other for other in self.get(token) if other != successor)))

    def copy(self) -> Successors:
        """Return an independent copy."""
        return Successors(self.top_k, self.max_tokens, dict(self.rows))


def save_successors(path: Path, table: Successors, vocabulary: str | None) -> None:
    """Write a table as int32 rows ``[1 + top_k]``: the token, then its successors, padded with -1.

    Raises:
        OptionError: the file cannot be written.
    """
    rows = [[token, *after, *[-1] * (table.top_k - len(after))] for token, after in table.rows.items()]
    tensor = torch.tensor(rows, dtype=torch.int32).reshape(len(rows), 1 + table.top_k)
    content = save({"successors": tensor}, {"format": _FORMAT, "vocabulary": vocabulary or ""})
    try:
        with replace_file(path) as file:
            file.write(content)
    except OSError as error:
        msg = f"{path}: expected a writable path for the table, found: {error}; choose another path"
        raise OptionError(msg) from error


def load_successors(path: Path, table: Successors, vocabulary: str | None) -> None:
    """Load the rows of a file into an empty table; if they exceed ``max_tokens``, the latest ones.

    Raises:
        OptionError: the file is missing, damaged, or of another vocabulary; the table stays empty.
    """
    try:
        with safe_open(path, "pt") as file:
            found, tensor = file.metadata() or {}, file.get_tensor("successors")
    except (OSError, SafetensorError) as error:
        msg = f"{path}: expected a table saved by RecyclingProposer.save, found: {error}; choose another table"
        raise OptionError(msg) from error
    if found.get("format") != _FORMAT or tensor.dim() != 2 or tensor.dtype != torch.int32 or tensor.shape[1] < 1:
        shape = tuple(tensor.shape)
        msg = f"{path}: expected a table of format {_FORMAT}, found {found.get('format')!r}, {shape}; save it again"
        raise OptionError(msg)
    if found.get("vocabulary") != (vocabulary or ""):
        msg = f"{path}: expected a table of this model's tokenizer, found one of another; save one with this model"
        raise OptionError(msg)
    for token, *after in tensor.tolist():
        table.put(token, [each for each in after if each >= 0])
