"""Results of long computations, which a full disk or a missing folder must not lose."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from pronk.base.errors import OptionError, describe_reason, refuse
from pronk.base.files.atomic import replace_file


def save_result(option: str, path: Path, text: str) -> None:
    """Replace the file ``path``, the value of an option, by ``text``.

    If this fails, the text is kept in a new file of the folder for temporary files, and if this
    fails, too, it is written to standard output. The old file at ``path`` stays. Raises
    OptionError, whose message names the new place.
    """
    content = text.encode("utf-8", "backslashreplace")
    try:
        with replace_file(path) as file:
            file.write(content)
    except OSError as error:
        place = _save_elsewhere(path, content)
        if place is None:
            sys.stdout.write(text)
        kept = "standard output" if place is None else place
        reason = describe_reason(error)
        refuse(
            option,
            f"expected to write {path}, found: {reason}; the result is in {kept}",
            OptionError,
            error,
        )


def _save_elsewhere(path: Path, content: bytes) -> Path | None:
    """Write a new file with a name like that of ``path``.

    Return its path, or ``None`` if this fails.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="pronk-"))
        with replace_file(folder / path.name) as file:
            file.write(content)
    except OSError:
        return None
    return folder / path.name
