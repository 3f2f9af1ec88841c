"""Acceptance counts that travel with a trained head: the file ``acceptance.json`` in its folder.

A cold engine knows by them how good the head is, and plans its first proposals accordingly. The
file has one row for each kind of draft token, depth and class of temperatures
(:mod:`pronk.drafting.acceptance_stats`), counted on other texts with the target of the head.
Training writes it after its evaluation; ``tools/head_acceptance.py`` measures a finished head.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pronk.base.errors import CheckpointError, describe_json_error, describe_reason
from pronk.base.files.regular import read_input
from pronk.drafting.acceptance_stats import MAX_COUNT, Counts, KindKey

ACCEPTANCE_FILE = "acceptance.json"
_FORMAT = "pronk-head-acceptance/1"


def read_head_acceptance(folder: Path) -> Counts:
    """Return the acceptance counts of a head; empty without a file, or for a head in one file.

    Raises ``CheckpointError`` if the file cannot be read or is damaged.
    """
    path = folder / ACCEPTANCE_FILE
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_input(path))
    except (OSError, ValueError, RecursionError) as error:
        is_unreadable = isinstance(error, OSError)
        found = describe_reason(error) if is_unreadable else describe_json_error(error)
        msg = f"{path}: expected acceptance counts of a head, found {found}; delete the file"
        raise CheckpointError(msg) from error
    is_known = isinstance(content, Mapping) and content.get("format") == _FORMAT
    rows = content.get("counts") if is_known else None
    if not isinstance(rows, list) or not all(map(_is_row, rows)):
        msg = (
            f"{path}: expected acceptance counts of the format {_FORMAT}, found another; delete "
            "the file"
        )
        raise CheckpointError(msg)
    return {
        KindKey(kind, depth, temperature): (float(reached), float(accepted))
        for kind, depth, temperature, reached, accepted in rows
    }


def head_acceptance_document(counts: Counts) -> dict[str, Any]:
    """Return the content of a head's file of acceptance counts, as JSON values."""
    rows = [[*key, *count] for key, count in sorted(counts.items())]
    return {"format": _FORMAT, "counts": rows}


def _is_row(row: Any) -> bool:
    """Return whether a value is a row: kind, depth, class of temperatures, reached, accepted."""
    if not isinstance(row, list) or len(row) != 5:
        return False
    if any(type(value) is not int for value in row[:3]):
        return False
    reached, accepted = row[3:]
    are_numbers = all(type(count) in (int, float) for count in (reached, accepted))
    return are_numbers and 0.0 <= accepted <= reached <= MAX_COUNT
