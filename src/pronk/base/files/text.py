"""Reading of text files in UTF-8, with or without a byte order mark.

Editors and shells of Windows begin a file with the mark U+FEFF. The mark is not a part of the text:
in a prompt it would be a token, and JSON does not allow it.
"""

from __future__ import annotations

import codecs
from pathlib import Path

from pronk.base.errors import OptionError, PronkError, describe_reason, refuse
from pronk.base.files.regular import read_input

BYTE_ORDER_MARK = "\ufeff"

# Byte order marks of other encodings. UTF-32 comes first, because its mark begins with the mark of
# UTF-16.
_OTHER_ENCODINGS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


def read_text(
    path: Path, where: object = None, *, max_bytes: int = -1, error: type[PronkError] = OptionError
) -> str:
    """Return the text of a file, without a byte order mark; line breaks are unchanged.

    Args:
        path: the file.
        where: the option or file that error messages name; by default ``path``.
        max_bytes: number of bytes to read at most; -1: no limit.
        error: class of the error that is raised if the file cannot be read, is a folder or a
            device, or is not in UTF-8.
    """
    try:
        data = read_input(path, max_bytes)
    except (OSError, MemoryError) as cause:
        found = describe_reason(cause)
        problem = f"expected a file that can be read at {path}, found {found}; check the path"
        refuse(path if where is None else where, problem, error, cause)
    return decode_text(data, path if where is None else f"{where}: {path}", error=error)


def decode_text(data: bytes, where: object, *, error: type[PronkError] = OptionError) -> str:
    """Decode UTF-8, without a byte order mark.

    Raises:
        error: the bytes are not UTF-8; the message begins with ``where``.
    """
    for mark, encoding in _OTHER_ENCODINGS:
        if data.startswith(mark):
            refuse(where, f"expected text in UTF-8, found {encoding}; save it as UTF-8", error)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        found = f"byte 0x{data[problem.start]:02x} at position {problem.start}"
        refuse(where, f"expected text in UTF-8, found {found}; save it as UTF-8", error, problem)
