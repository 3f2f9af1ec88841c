"""Odds of guesses in a file: JSON, with what tells the model that they are of from others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pronk.checks import check_path
from pronk.errors import OptionError
from pronk.files.atomic import replace_file
from pronk.models.fingerprint import Fingerprint
from pronk.speculation.acceptance_stats import AcceptanceStats

__all__ = ["AcceptanceFile"]

_FORMAT = "pronk-calibration/1"

# A row: a source, its kind, depth and class of temperatures; guesses, and those that were right.
_KEY, _ROW = 4, 6

_MOST = 1e18  # guesses, and more than anybody makes


@dataclass(frozen=True)
class AcceptanceFile:
    """What guesses have shown of one model, and where it is kept.

    Attributes:
        acceptance_stats: ``None`` where requests do not know of each other.
        path: of the file, if there is to be one.
        model: the fingerprint of the model, where there is.
    """

    acceptance_stats: AcceptanceStats | None
    path: Path | None = None
    model: str = ""

    @classmethod
    def open(cls, calibration: bool | str | Path, model: Path) -> AcceptanceFile:
        """Nothing shown yet, or what the file has.

        Args:
            calibration: whether to learn at all, or the file.
            model: the folder of the model.

        Raises:
            OptionError: the file cannot be read, or is damaged, or of another model.
        """
        if isinstance(calibration, bool):
            return cls(AcceptanceStats() if calibration else None)
        check_path("calibration", str(calibration) if isinstance(calibration, Path) else calibration)
        path = Path(calibration)
        if not path.absolute().parent.is_dir():
            msg = f"calibration: expected a file in a folder that exists, found {path}; choose another place"
            raise OptionError(msg)
        fingerprint = str(Fingerprint.of(model))
        return cls(_read(path, fingerprint), path, fingerprint)

    def save(self) -> None:
        """Write it to the file; without one, nothing.

        Raises:
            OptionError: it cannot be written.
        """
        if self.path is None or self.acceptance_stats is None:
            return
        rows = [[*key, *count] for key, count in sorted(self.acceptance_stats.counts.items())]
        try:
            with replace_file(self.path) as file:
                file.write(json.dumps({"format": _FORMAT, "model": self.model, "counts": rows}).encode())
        except OSError as error:
            msg = f"calibration: expected a place to write to at {self.path}, found {error.strerror}; choose another"
            raise OptionError(msg) from error


def _read(path: Path, model: str) -> AcceptanceStats:
    """What a file has; nothing, if it is not there."""
    acceptance_stats = AcceptanceStats()
    try:
        if not path.exists():
            return acceptance_stats
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        msg = f"calibration: expected a file that pronk has written at {path}, found: {error}; choose another place"
        raise OptionError(msg) from error
    if not isinstance(found, Mapping) or found.get("format") != _FORMAT or not _is_sound(found.get("counts")):
        msg = f"calibration: expected a file of the format {_FORMAT} at {path}, found another; choose another place"
        raise OptionError(msg)
    if found.get("model") != model:
        msg = f"calibration: expected {path} to be of {model}, found {found.get('model')}; give each model its own file"
        raise OptionError(msg)
    acceptance_stats.counts.update(
        {tuple(row[:_KEY]): [float(row[_KEY]), float(row[_KEY + 1])] for row in found["counts"]}
    )
    return acceptance_stats


def _is_sound(rows: Any) -> bool:
    return isinstance(rows, list) and all(
        isinstance(row, list)
        and len(row) == _ROW
        and isinstance(row[0], str)
        and all(type(each) is int and each >= 0 for each in row[1:_KEY])
        and all(type(each) in (int, float) for each in row[_KEY:])
        and 0.0 <= row[_KEY + 1] <= row[_KEY] < _MOST
        for row in rows
    )
