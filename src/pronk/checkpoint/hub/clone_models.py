"""Models in the folder ``models/`` of a clone of the repository: ``pronk-tiny`` and its drafters.

The wheel of pronk does not contain these models.
"""

from __future__ import annotations

import re
from pathlib import Path

from pronk.base.errors import OptionError

TINY_MODEL = "pronk-tiny"

_ROOT = Path(__file__).resolve().parents[4]  # top folder of the repository, if this is a clone


def clone_model(name: str) -> Path | None:
    """Return the folder ``models/NAME`` of the clone; ``None`` without a clone or such a folder."""
    is_plain_name = re.fullmatch(r"\w[\w.-]*", name) is not None  # without path separators
    if not is_plain_name or not _is_clone():
        return None
    folder = _ROOT / "models" / name
    return folder if folder.is_dir() else None


def clone_names() -> list[str]:
    """Return the names of the folders in ``models/`` of the clone; none without a clone."""
    if not _is_clone():
        return []
    return sorted(folder.name for folder in (_ROOT / "models").glob("*/"))


def _is_clone() -> bool:
    return (_ROOT / "pyproject.toml").is_file()


def tiny_model(remedy: str = "--model, or LLM(model) in Python") -> Path:
    """Return the folder of ``pronk-tiny``.

    Raises:
        OptionError: there is no clone with this model; the message ends with ``give REMEDY``.
    """
    folder = clone_model(TINY_MODEL)
    if folder is None:
        msg = (
            f"model: expected a clone of the repository with models/{TINY_MODEL}, found none; "
            f"give {remedy}"
        )
        raise OptionError(msg)
    return folder
