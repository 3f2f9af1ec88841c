"""Checkpoints of a training run: one file, replaced atomically, read without running any code from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pronk.errors import CheckpointError
from pronk.files.atomic import replace_file, writing

__all__ = ["load_checkpoint", "save_checkpoint"]

_FORMAT = "pronk-train-1"


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` (tensors and plain values) so that ``path`` is always a whole checkpoint, old or new.

    Raises:
        CheckpointError: it cannot be written, for want of room for example.
    """
    what = "a training checkpoint" + (" (the one before is intact)" if path.exists() else "")
    # torch has an error of its own for what a file refuses.
    with writing(path, what, RuntimeError), replace_file(path) as file:
        torch.save({"format": _FORMAT, **state}, file)


def load_checkpoint(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Read what :func:`save_checkpoint` wrote; ``mapped`` tensors are read when they are used.

    Raises:
        CheckpointError: the file is damaged or of another format.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # torch raises many kinds for a damaged file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        msg = f"{path}: expected a training checkpoint, found a file that cannot be read ({reason})"
        raise CheckpointError(msg) from error
    found = state.get("format") if isinstance(state, dict) else type(state).__name__
    if found != _FORMAT:
        msg = f"{path}: expected a training checkpoint of format {_FORMAT}, found {found!r}"
        raise CheckpointError(msg)
    return dict(state)
