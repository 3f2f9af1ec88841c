"""Saving of results of long computations, which must survive a full disk or a missing folder."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from pronk.base.errors import OptionError, describe_reason, refuse
from pronk.base.files.atomic import replace_file


def save_result(option: str, path: Path, text: str) -> None:
    """Replace the file ``path`` by ``text``.

    If this fails, the old file stays, and the text is written to a new file in the folder for
    temporary files, or else to standard output.

    Args:
        option: the option that gives the path; an error message begins with it.
        path: the file.
        text: the result.

    Raises:
        OptionError: the file cannot be written; the message names the place of the text.
    """
    content = text.encode("utf-8", "backslashreplace")
    try:
        with replace_file(path) as file:
            file.write(content)
    except OSError as error:
        place = _save_elsewhere(path, content)
        if place is None:
            sys.stdout.write(text)
        saved_in = "standard output" if place is None else place
        reason = describe_reason(error)
        problem = f"expected to write {path}, found: {reason}; the result is in {saved_in}"
        refuse(option, problem, OptionError, error)


def _save_elsewhere(path: Path, content: bytes) -> Path | None:
    """Write a file with the name of ``path`` in a new temporary folder.

    Returns:
        The path of the new file; ``None`` if it cannot be written.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="pronk-"))
        with replace_file(folder / path.name) as file:
            file.write(content)
    except OSError:
        return None
    return folder / path.name
