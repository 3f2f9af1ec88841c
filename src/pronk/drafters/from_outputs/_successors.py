"""A bounded table of the likeliest successors of tokens, and its file."""

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
    """What follows which token.

    ``rows`` maps a token to its successors, likeliest first; the tokens that were met longest ago come first and are
    the first to go.
    """

    top_k: int
    max_tokens: int
    rows: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def after(self, token: int) -> tuple[int, ...]:
        """The successors of ``token``, likeliest first; empty if it is not known."""
        return self.rows.get(token, ())

    def put(self, token: int, successors: Sequence[int]) -> None:
        """These follow ``token`` now."""
        self.rows.pop(token, None)
        self.rows[token] = tuple(successors[: self.top_k])
        if len(self.rows) > self.max_tokens:
            del self.rows[next(iter(self.rows))]

    def follow(self, token: int, successor: int) -> None:
        """``successor`` was seen after ``token``: it becomes the likeliest."""
        self.put(token, (successor, *(other for other in self.after(token) if other != successor)))

    def copy(self) -> Successors:
        """A table that goes its own way."""
        return Successors(self.top_k, self.max_tokens, dict(self.rows))


def save_successors(path: Path, table: Successors, vocabulary: str | None) -> None:
    """Write a table: one row ``[1 + top_k]`` per token, int32, the token first; missing successors are -1.

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
        msg = f"{path}: expected a place to write the table to, found: {error}"
        raise OptionError(msg) from error


def load_successors(path: Path, table: Successors, vocabulary: str | None) -> None:
    """Put a file's rows into an empty table, the latest ones if it has more than fit.

    Raises:
        OptionError: the file is missing, damaged, or of another vocabulary; nothing is loaded then.
    """
    try:
        with safe_open(path, "pt") as file:
            found, tensor = file.metadata() or {}, file.get_tensor("successors")
    except (OSError, SafetensorError) as error:
        msg = f"{path}: expected a table saved by Recycling.save, found: {error}"
        raise OptionError(msg) from error
    if found.get("format") != _FORMAT or tensor.dim() != 2 or tensor.dtype != torch.int32 or tensor.shape[1] < 1:
        msg = f"{path}: expected a table of format {_FORMAT}, found {found.get('format')!r}, {tuple(tensor.shape)}"
        raise OptionError(msg)
    if found.get("vocabulary") != (vocabulary or ""):
        msg = f"{path}: expected a table of this model's tokenizer, found one of another; save one with this model"
        raise OptionError(msg)
    for token, *after in tensor.tolist():
        table.put(token, [each for each in after if each >= 0])
