"""File of one model's acceptance rates: JSON with its fingerprint, for the option ``calibration``."""

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

# A row has a key (source, kind, depth, class of temperatures), then the numbers of verified and accepted draft tokens.
_KEY, _ROW = 4, 6  # number of elements of the key, and of the row

_MAX_COUNT = 1e18  # larger numbers of draft tokens mean that a file is damaged


@dataclass(frozen=True)
class AcceptanceFile:
    """Measured acceptance rates of one model, and the file that stores them.

    Attributes:
        acceptance_stats: rates shared by all requests; ``None`` if each request measures its own.
        path: the file; ``None`` if the rates are not stored.
        model: fingerprint of the model; empty without a file.
    """

    acceptance_stats: AcceptanceStats | None
    path: Path | None = None
    model: str = ""

    @classmethod
    def open(cls, calibration: bool | str | Path, model: Path) -> AcceptanceFile:
        """Return the rates of a file, or no rates if there is no file yet.

        Args:
            calibration: whether requests share their rates, or the file that stores them.
            model: folder of the model.

        Raises:
            OptionError: the file cannot be read, is damaged or of another model, or its folder does not exist.
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
        """Write the rates to the file, if there is one.

        Raises:
            OptionError: the file cannot be written.
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
    """Return the rates in a file, or no rates if the file does not exist."""
    acceptance_stats = AcceptanceStats()
    try:
        if not path.exists():
            return acceptance_stats
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        msg = f"calibration: expected a file that pronk has written at {path}, found: {error}; choose another place"
        raise OptionError(msg) from error
    if not isinstance(found, Mapping) or found.get("format") != _FORMAT or not _are_rows(found.get("counts")):
        msg = f"calibration: expected a file of the format {_FORMAT} at {path}, found another; choose another place"
        raise OptionError(msg)
    if found.get("model") != model:
        msg = f"calibration: expected {path} to be of {model}, found {found.get('model')}; give each model its own file"
        raise OptionError(msg)
    acceptance_stats.counts.update(
        {tuple(row[:_KEY]): [float(row[_KEY]), float(row[_KEY + 1])] for row in found["counts"]}
    )
    return acceptance_stats


def _are_rows(rows: Any) -> bool:
    return isinstance(rows, list) and all(
        isinstance(row, list)
        and len(row) == _ROW
        and isinstance(row[0], str)
        and all(type(number) is int and number >= 0 for number in row[1:_KEY])
        and all(type(count) in (int, float) for count in row[_KEY:])
        and 0.0 <= row[_KEY + 1] <= row[_KEY] < _MAX_COUNT
        for row in rows
    )
