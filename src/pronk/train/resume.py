"""What a resumed run must have as before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pronk.errors import OptionError
from pronk.train.options import option_name

__all__ = ["check_unchanged"]


def check_unchanged(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise :class:`~pronk.errors.OptionError` that names every option of the run in ``folder`` that is another now."""
    changed = [
        f"{option_name(name)} = {before.get(name)!r} as before, found {value!r}"
        for name, value in now.items()
        if before.get(name) != value
    ]
    if changed:
        msg = f"cannot resume {folder}: expected {', and '.join(changed)}; use another --out folder for a new run"
        raise OptionError(msg)
