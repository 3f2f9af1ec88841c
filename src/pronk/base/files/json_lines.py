"""Reader for JSON Lines files."""

from __future__ import annotations

import codecs
import errno
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pronk.base.errors import OptionError, describe_json_error, describe_reason, refuse
from pronk.base.files.regular import MAX_STREAM_BYTES, open_input
from pronk.base.files.text import decode_text


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number (from 1) and JSON object of each non-empty line of a ``.jsonl[.gz]`` file.

    Raises:
        OptionError: the file cannot be read or decompressed, or a line is not a JSON object in
            UTF-8.
    """
    try:
        with open_input(path) as file:
            lines = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            for number, line in enumerate(_read_lines(lines), 1):
                if line.removeprefix(codecs.BOM_UTF8).strip():
                    yield number, _parse(path, number, line)
    except (OSError, EOFError, MemoryError, zlib.error) as error:
        reason = describe_reason(error)
        msg = (
            f"{path}: expected a file with one JSON object a line, found: {reason}; check the path"
        )
        raise OptionError(msg) from error


def _read_lines(file: io.BufferedIOBase | BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file.

    Raise an OSError for one of more than ``MAX_STREAM_BYTES`` bytes.
    """
    while line := file.readline(MAX_STREAM_BYTES + 1):
        if len(line) > MAX_STREAM_BYTES:
            raise OSError(errno.EFBIG, f"a line of more than {MAX_STREAM_BYTES >> 20} MiB")
        yield line


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    # Without the line break: the position of a mistake at the end of a line is in the line.
    text = decode_text(line.rstrip(b"\r\n"), f"{path}, line {number}")
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = (
            f"expected one JSON object a line, found {describe_json_error(error, number)}; "
            "correct the line"
        )
        refuse(f"{path}, line {number}", problem, OptionError, error)
    if not isinstance(row, dict):
        refuse(
            f"{path}, line {number}",
            f"expected a JSON object, found {type(row).__name__}",
            OptionError,
        )
    return row
