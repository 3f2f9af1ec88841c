"""From options of the command line to a guide."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pronk.errors import OptionError

if TYPE_CHECKING:
    from pronk.sampling.guide import Guide

__all__ = ["read_guide"]


def read_guide(
    json_schema: str | None = None,
    regex: str | None = None,
    choice: list[str] | None = None,
    grammar: str | None = None,
) -> Guide | None:
    """The guide of the one option that is given; ``None`` if none is.

    Args:
        json_schema: a file with a JSON schema; ``"object"`` is any JSON object, where there is no such file.
        regex: a regular expression.
        choice: texts.
        grammar: a file with a Lark grammar.

    Raises:
        OptionError: more than one is given, a file cannot be read, or what it has is no guide.
    """
    from pronk.sampling.guide import Guide

    given = {"--json-schema": json_schema, "--regex": regex, "--choice": choice or None, "--grammar": grammar}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        msg = f"guide: expected one of {', '.join(given)}, found {' and '.join(names)}"
        raise OptionError(msg)
    if json_schema is not None:
        anything = json_schema == "object" and not Path(json_schema).exists()
        return Guide(json={"type": "object"} if anything else _read("json-schema", json_schema))
    if grammar is not None:
        return Guide(grammar=_read("grammar", grammar))
    if regex is not None:
        return Guide(regex=regex)
    return Guide(choice=choice) if choice else None


def _read(option: str, path: str) -> str:
    from pronk.sampling.guide import MAX_SIZE

    try:
        with Path(path).open("rb") as file:
            return file.read(4 * MAX_SIZE + 1).decode()  # more is too much, whatever it is
    except OSError as error:
        msg = f"{option}: expected a file that can be read at {path}, found {error.strerror}; check the path"
        raise OptionError(msg) from error
    except UnicodeDecodeError as error:
        msg = f"{option}: expected text in UTF-8 in {path}, found {error}"
        raise OptionError(msg) from error
