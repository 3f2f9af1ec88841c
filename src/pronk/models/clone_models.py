"""``pronk-tiny`` and its drafters, found by name in ``models/`` of a clone of the repository.

A wheel does not contain these models, so outside a clone the user gives every model.
"""

from __future__ import annotations

import re
from pathlib import Path

from pronk.errors import OptionError

__all__ = ["DEFAULT_MODEL", "clone_model", "default_model"]

DEFAULT_MODEL = "pronk-tiny"

_ROOT = Path(__file__).resolve().parents[3]


def clone_model(name: str) -> Path | None:
    """Return the folder of a model of the clone, or ``None`` without a clone or such a model."""
    folder = _ROOT / "models" / name
    known = re.fullmatch(r"\w[\w.-]*", name) and (_ROOT / "pyproject.toml").is_file() and folder.is_dir()
    return folder if known else None


def default_model(how: str = "--model, or LLM(model) in Python") -> Path:
    """Return the folder of ``pronk-tiny``; outside a clone, raise an error that names the option ``how``."""
    folder = clone_model(DEFAULT_MODEL)
    if folder is None:
        msg = f"model: expected a local one, or owner/name of one on the Hugging Face Hub, found none; give {how}"
        raise OptionError(msg)
    return folder
