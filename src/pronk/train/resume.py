"""Checks that a resumed run has the options with which its checkpoint or its text files were made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pronk.errors import OptionError
from pronk.train.options import option_name

__all__ = ["check_run", "check_unchanged"]


def check_run(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compare the options of a checkpoint and of the run that resumes it, like :func:`check_unchanged`.

    The key ``kind`` (such as ``draft_model``) is compared first, with its own error message. Old checkpoints have no
    ``kind``; runs of any kind may resume these.
    """
    kind = now.get("kind")
    if before.get("kind", kind) != kind:
        msg = (
            f"cannot resume {folder}: expected a run of kind {before['kind']} as before, found {kind}; use another "
            "--out folder for a new run"
        )
        raise OptionError(msg)
    check_unchanged(folder, before, {name: value for name, value in now.items() if name != "kind"})


def check_unchanged(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise :class:`~pronk.errors.OptionError` that names the options of ``now`` with a new value."""
    changed = [
        f"{name} = {old!r} as before, found {new!r}"
        for key, value in now.items()
        for name, old, new in _differences(option_name(key), before.get(key), value)
    ]
    if changed:
        msg = f"cannot resume {folder}: expected {', and '.join(changed)}; use another --out folder for a new run"
        raise OptionError(msg)


def _differences(name: str, before: object, now: object) -> Iterator[tuple[str, object, object]]:
    """Yield ``(option, old value, new value)`` of each difference; mappings are compared key by key."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in {**before, **now}:
            yield from _differences(f"{name} {option_name(str(key))}", before.get(key), now.get(key))
    elif before != now:
        yield name, before, now
