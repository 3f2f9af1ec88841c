"""Build a guide (constraint on the text) from command-line options."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from pronk.errors import OptionError

if TYPE_CHECKING:
    from pronk.sampling.guide import Guide

__all__ = ["read_guide", "read_text"]


def read_guide(
    json_schema: str | None = None,
    regex: str | None = None,
    choice: list[str] | None = None,
    grammar: str | None = None,
) -> Guide | None:
    """Build the guide from the one option that is set; return ``None`` if no option is set.

    Args:
        json_schema: path of a JSON schema; ``"object"`` allows any JSON object unless a file has that name.
        regex: regular expression for the whole text.
        choice: allowed texts.
        grammar: path of a Lark grammar.

    Raises:
        OptionError: several options are set, a file cannot be read, or its content is not a valid guide.
    """
    from pronk.sampling.guide import MAX_SIZE, Guide

    given = {"--json-schema": json_schema, "--regex": regex, "--choice": choice or None, "--grammar": grammar}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        msg = f"guide: expected at most one of {', '.join(given)}, found {' and '.join(names)}; give one"
        raise OptionError(msg)
    # Bytes to read. A longer file is too long in any case: UTF-8 has at most 4 bytes per character.
    size = 4 * MAX_SIZE + 1
    if json_schema is not None:
        anything = json_schema == "object" and not Path(json_schema).exists()
        return Guide(json={"type": "object"} if anything else read_text("json-schema", json_schema, size))
    if grammar is not None:
        return Guide(grammar=read_text("grammar", grammar, size))
    if regex is not None:
        return Guide(regex=regex)
    return Guide(choice=choice) if choice else None


def read_text(option: str, path: str, size: int = -1, *, stdin: bool = False) -> str:
    """Return the first ``size`` bytes (-1: all) of a file, or with ``stdin`` of standard input, as text.

    Raises:
        OptionError: the file cannot be read, or is not UTF-8.
    """
    try:
        with nullcontext(sys.stdin.buffer) if stdin else Path(path).open("rb") as file:
            return file.read(size).decode()
    except OSError as error:
        msg = f"{option}: expected a file that can be read at {path}, found {error.strerror}; check the path"
        raise OptionError(msg) from error
    except UnicodeDecodeError as error:
        msg = f"{option}: expected text in UTF-8 in {path}, found {error}"
        raise OptionError(msg) from error
