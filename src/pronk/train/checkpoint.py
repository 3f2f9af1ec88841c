"""Checkpoints of a training run: one file, replaced atomically, read without executing code from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pronk.errors import CheckpointError
from pronk.files.atomic import convert_write_errors, replace_file

__all__ = ["CHECKPOINT", "load_checkpoint", "save_checkpoint"]

CHECKPOINT = "checkpoint.pt"  # name of the file in the run's folder

_FORMAT = "pronk-train-1"


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint at ``path``; ``state`` has tensors, numbers, strings, lists and dictionaries.

    Raises:
        CheckpointError: the file cannot be written, for example on a full disk; an old checkpoint stays intact.
    """
    what = "a training checkpoint" + (" (the one before is intact)" if path.exists() else "")
    # torch raises RuntimeError when a write fails.
    with convert_write_errors(path, what, RuntimeError), replace_file(path) as file:
        torch.save({"format": _FORMAT, **state}, file)


def load_checkpoint(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Read a checkpoint of :func:`save_checkpoint`; if ``mapped``, tensors are memory-mapped.

    Raises:
        CheckpointError: the file is damaged or of another format.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # torch raises exceptions of many types
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        msg = f"{path}: expected a training checkpoint, found a file that cannot be read ({reason})"
        raise CheckpointError(msg) from error
    found = state.get("format") if isinstance(state, dict) else type(state).__name__
    if found != _FORMAT:
        msg = f"{path}: expected a training checkpoint of format {_FORMAT}, found {found!r}"
        raise CheckpointError(msg)
    return dict(state)
