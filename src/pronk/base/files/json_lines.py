"""Reader of JSON Lines files: one JSON object per line."""

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
    """Yield the JSON objects of a file with their line numbers, from 1; skip empty lines.

    A file whose name ends in ``.gz`` is decompressed.

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
    """Yield the lines of a file; raise OSError for a line of more than ``MAX_STREAM_BYTES``."""
    while line := file.readline(MAX_STREAM_BYTES + 1):
        if len(line) > MAX_STREAM_BYTES:
            raise OSError(errno.EFBIG, f"a line of more than {MAX_STREAM_BYTES >> 20} MiB")
        yield line


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    where = f"{path}, line {number}"
    # Without the line break, a mistake at the end of the line has a position in this line.
    text = decode_text(line.rstrip(b"\r\n"), where)
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        found = describe_json_error(error, number)
        problem = f"expected one JSON object a line, found {found}; correct the line"
        refuse(where, problem, OptionError, error)
    if not isinstance(row, dict):
        refuse(where, f"expected a JSON object, found {type(row).__name__}", OptionError)
    return row
