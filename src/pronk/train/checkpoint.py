"""Checkpoints of a training run.

A checkpoint is one file, which is replaced atomically, and is read without executing code from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pronk import CheckpointError, OptionError
from pronk.base import convert_write_errors, describe_error, refuse, replace_file
from pronk.train.options import option_name

CHECKPOINT = "checkpoint.pt"  # file name of the checkpoint in the run's folder

_FORMAT = "pronk-train-1"


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write the checkpoint ``path``, in place of an older one.

    ``state`` has tensors, numbers, strings, lists and dictionaries. Raises CheckpointError if
    writing fails; the older checkpoint is then intact.
    """
    what = "a training checkpoint" + (" (the one before is intact)" if path.exists() else "")
    # torch raises RuntimeError when a write fails.
    with convert_write_errors(path, what, RuntimeError), replace_file(path) as file:
        torch.save({"format": _FORMAT, **state}, file)


def load_checkpoint(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Read a checkpoint; if ``mapped``, its tensors are memory-mapped.

    Raises CheckpointError if the file is missing, damaged, or of another format.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # torch raises exceptions of many types for a damaged file
        msg = (
            f"{path}: expected a training checkpoint, found a file that cannot be read "
            f"({describe_error(error)})"
        )
        raise CheckpointError(msg) from error
    found = state.get("format") if isinstance(state, dict) else type(state).__name__
    if found != _FORMAT:
        refuse(path, f"expected a training checkpoint of format {_FORMAT}, found {found!r}")
    return dict(state)


def check_run(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise OptionError if a resumed run is of another kind than before, or has other options.

    The kind is that of the drafter, such as ``draft_model``. ``before`` are the options of the
    run's checkpoint, and ``now`` those of the command.
    """
    kind = now.get("kind")
    if before.get("kind", kind) != kind:  # checkpoints of old versions have no kind
        msg = (
            f"cannot resume {folder}: expected a run of kind {before['kind']} as before, found "
            f"{kind}; use another --out folder for a new run"
        )
        raise OptionError(msg)
    check_unchanged(folder, before, {name: value for name, value in now.items() if name != "kind"})


def check_unchanged(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise OptionError if a resumed run has other options than before; the error names them.

    ``before`` are the options of the checkpoint, and ``now`` those of the command.
    """
    changed: list[str] = []
    for key, value in now.items():
        for name, old, new in _differences(option_name(key), before.get(key), value):
            changed.append(f"{name} = {old!r} as before, found {new!r}")
    if changed:
        msg = (
            f"cannot resume {folder}: expected {', and '.join(changed)}; use another --out folder "
            "for a new run"
        )
        raise OptionError(msg)


def _differences(name: str, before: object, now: object) -> Iterator[tuple[str, object, object]]:
    """Yield ``(option, old value, new value)`` for each option that differs.

    Mappings are compared key by key. ``name`` is the name of the option that has the two values.
    """
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in {**before, **now}:
            full_name = f"{name} {option_name(str(key))}"
            yield from _differences(full_name, before.get(key), now.get(key))
    elif before != now:
        yield name, before, now
