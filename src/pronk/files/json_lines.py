"""Reader for JSON Lines files."""

from __future__ import annotations

import codecs
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pronk.errors import OptionError, describe_error, describe_json_error, refuse
from pronk.files.text import decode_text


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number (from 1) and JSON object of each non-empty line of a ``.jsonl[.gz]`` file.

    Raises:
        OptionError: the file cannot be read or decompressed, or a line is not a JSON object in UTF-8.
    """
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.removeprefix(codecs.BOM_UTF8).strip():
                    yield number, _parse(path, number, line)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or describe_error(error)
        msg = f"{path}: expected a file with one JSON object a line, found: {reason}; check the path"
        raise OptionError(msg) from error


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    text = decode_text(line, f"{path}, line {number}")
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = f"expected one JSON object a line, found {describe_json_error(error, number)}; correct the line"
        refuse(f"{path}, line {number}", problem, OptionError, error)
    if not isinstance(row, dict):
        refuse(f"{path}, line {number}", f"expected a JSON object, found {type(row).__name__}", OptionError)
    return row
