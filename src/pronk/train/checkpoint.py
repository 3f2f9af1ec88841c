"""Checkpoints of a training run: one file, replaced atomically, read without running any code from it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from pronk.errors import CheckpointError

__all__ = ["load_checkpoint", "save_checkpoint"]

_FORMAT = "pronk-train-1"


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` (tensors and plain values) so that ``path`` is always a whole checkpoint, old or new.

    Raises:
        CheckpointError: it cannot be written, for want of room for example.
    """
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            torch.save({"format": _FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # torch has its own for what a file refuses
        partial.unlink(missing_ok=True)
        kept = "; the one before is intact" if path.exists() else ""
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        msg = f"{path}: expected to write a training checkpoint, found {reason}{kept}"
        raise CheckpointError(msg) from error


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read what :func:`save_checkpoint` wrote.

    Raises:
        CheckpointError: the file is damaged or of another format.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        msg = f"{path}: expected a training checkpoint, found a file that cannot be read ({reason})"
        raise CheckpointError(msg) from error
    found = state.get("format") if isinstance(state, dict) else type(state).__name__
    if found != _FORMAT:
        msg = f"{path}: expected a training checkpoint of format {_FORMAT}, found {found!r}"
        raise CheckpointError(msg)
    return dict(state)
