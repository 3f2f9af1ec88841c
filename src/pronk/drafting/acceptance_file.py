"""The calibration file: acceptance counts of a model, stored between runs.

The file is JSON, with the fingerprint of the model and one row per key of
:attr:`~pronk.drafting.acceptance_stats.AcceptanceStats.counts`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pronk.base.checks import check_path
from pronk.base.errors import OptionError, describe_json_error, describe_reason
from pronk.base.files.atomic import replace_file
from pronk.base.files.regular import is_folder, read_input
from pronk.drafting.acceptance_stats import MAX_COUNT, AcceptanceStats
from pronk.models.loader import Fingerprint

_FORMAT = "pronk-calibration/2"  # files of the first format counted only verified draft tokens


@dataclass(frozen=True)
class AcceptanceFile:
    """Acceptance counts of one model, and their file: JSON with the model's fingerprint."""

    # counts of all requests; ``None`` if requests do not share their counts
    stats: AcceptanceStats | None
    path: Path | None = None  # path of the file; ``None`` if the counts are not stored
    model: str = ""  # fingerprint of the model; an empty string without a file

    @classmethod
    def open(cls, calibration: bool | str | Path, model: Path) -> AcceptanceFile:
        """Return the counts of a file, or no counts if there is no file yet.

        ``calibration`` is the path of the file. Without a file it is a flag: whether requests share
        their counts. ``model`` is the folder of the model. Raises ``OptionError`` if the file
        cannot be read, is damaged or of another model, or its folder does not exist.
        """
        if isinstance(calibration, bool):
            return cls(AcceptanceStats() if calibration else None)
        check_path(
            "calibration", str(calibration) if isinstance(calibration, Path) else calibration
        )
        path = Path(calibration)
        if not is_folder(path.absolute().parent):
            msg = (
                f"calibration: expected a file in a folder that exists, found {path}; choose "
                "another place"
            )
            raise OptionError(msg)
        fingerprint = str(Fingerprint.of(model))
        return cls(_read(path, fingerprint), path, fingerprint)

    def save(self) -> None:
        """Write the counts to the file, if there is one.

        Raises ``OptionError`` if the file cannot be written.
        """
        if self.path is None or self.stats is None:
            return
        rows = [[*key, *count] for key, count in sorted(self.stats.counts.items())]
        content = json.dumps({"format": _FORMAT, "model": self.model, "counts": rows})
        try:
            with replace_file(self.path) as file:
                file.write(content.encode())
        except OSError as error:
            found = describe_reason(error)
            msg = (
                f"calibration: expected a place to write to at {self.path}, found {found}; "
                "choose another"
            )
            raise OptionError(msg) from error


def _read(path: Path, model: str) -> AcceptanceStats:
    """Return the counts in a file, or no counts if the file does not exist."""
    stats = AcceptanceStats()
    try:
        if not path.exists():
            return stats
        content = json.loads(read_input(path))
    except (OSError, ValueError, RecursionError) as error:
        is_unreadable = isinstance(error, OSError)
        found = describe_reason(error) if is_unreadable else describe_json_error(error)
        msg = (
            f"calibration: expected a file that pronk has written at {path}, found {found}; "
            "choose another"
        )
        raise OptionError(msg) from error
    is_calibration = isinstance(content, Mapping) and content.get("format") == _FORMAT
    if not is_calibration or not _are_rows(content.get("counts")):
        msg = (
            f"calibration: expected a file of the format {_FORMAT} at {path}, found another; "
            "choose another place"
        )
        raise OptionError(msg)
    if content.get("model") != model:
        msg = (
            f"calibration: expected {path} to be of {model}, found {content.get('model')}; give "
            "each model its own file"
        )
        raise OptionError(msg)
    for *key, reached, accepted in content["counts"]:
        stats.counts[tuple(key)] = [float(reached), float(accepted)]
    return stats


def _are_rows(rows: Any) -> bool:
    return isinstance(rows, list) and all(map(_is_row, rows))


def _is_row(row: Any) -> bool:
    """Return whether a value is a valid row of a file of acceptance counts.

    A row has a drafter, a kind, a depth, a class of temperatures, and the numbers of reached and of
    accepted draft tokens.
    """
    if not isinstance(row, list) or len(row) != 6:
        return False
    if [type(value) for value in row[:4]] != [str, int, int, int]:
        return False
    reached, accepted = row[4:]
    are_numbers = all(type(count) in (int, float) for count in (reached, accepted))
    return are_numbers and 0.0 <= accepted <= reached <= MAX_COUNT
