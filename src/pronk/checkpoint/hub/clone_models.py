"""Models in ``models/`` of a clone of the repository: ``pronk-tiny`` and its drafters.

A wheel does not contain these models, so without a clone the user must give a model.
"""

from __future__ import annotations

import re
from pathlib import Path

from pronk.base.errors import OptionError

TINY_MODEL = "pronk-tiny"

_ROOT = Path(__file__).resolve().parents[4]  # top folder of the repository, if this is a clone


def clone_model(name: str) -> Path | None:
    """Return the folder ``models/NAME`` of the clone.

    ``None`` if there is no clone or no such folder.
    """
    folder = _ROOT / "models" / name
    # a plain name such as pronk-tiny, not a path
    is_name = re.fullmatch(r"\w[\w.-]*", name) is not None
    return folder if is_name and (_ROOT / "pyproject.toml").is_file() and folder.is_dir() else None


def clone_names() -> list[str]:
    """Return the names of the folders in ``models/`` of the clone, empty without a clone."""
    if not (_ROOT / "pyproject.toml").is_file():
        return []
    return sorted(folder.name for folder in (_ROOT / "models").glob("*/"))


def tiny_model(remedy: str = "--model, or LLM(model) in Python") -> Path:
    """Return the folder of ``pronk-tiny``.

    Without it raise an OptionError that ends with ``remedy``.
    """
    folder = clone_model(TINY_MODEL)
    if folder is None:
        msg = (
            f"model: expected a clone of the repository with models/{TINY_MODEL}, found none; "
            f"give {remedy}"
        )
        raise OptionError(msg)
    return folder
