"""Models of a clone of the repository: ``pronk-tiny`` and its drafters, found by name.

Their weights are in ``models/`` beside ``pyproject.toml``. A wheel has none of them, so outside a clone every model is
given by the user.
"""

from __future__ import annotations

import re
from pathlib import Path

from pronk.errors import OptionError

__all__ = ["DEFAULT_MODEL", "clone_model", "default_model"]

DEFAULT_MODEL = "pronk-tiny"

_ROOT = Path(__file__).resolve().parents[3]


def clone_model(name: str) -> Path | None:
    """Return the folder of a model or drafter of the clone, or ``None`` if there is no clone or no such model."""
    folder = _ROOT / "models" / name
    known = re.fullmatch(r"\w[\w.-]*", name) and (_ROOT / "pyproject.toml").is_file() and folder.is_dir()
    return folder if known else None


def default_model(how: str = "--model, or LLM(model) in Python") -> Path:
    """Return the folder of ``pronk-tiny``, the model of every command in a clone if no other one is given.

    Args:
        how: option that gives another model, for the error.

    Raises:
        OptionError: outside a clone there is no default.
    """
    folder = clone_model(DEFAULT_MODEL)
    if folder is None:
        msg = f"model: expected a local one, or owner/name of one on the Hugging Face Hub, found none; give {how}"
        raise OptionError(msg)
    return folder
