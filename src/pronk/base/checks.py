"""Checks of option values: a function returns a valid value, and raises an error for any other.

The message is ``NAME: expected …, found …``, with the name as the user writes it: ``max_tokens`` in
Python, ``num-tokens`` on the command line, ``suffix: max_match`` for an option of a drafter.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from math import inf
from pathlib import Path
from typing import NoReturn

from pronk.base.errors import OptionError, PronkError, describe_reason
from pronk.base.files.regular import check_regular


def check_integer(
    name: str,
    value: object,
    low: int,
    high: int | None = None,
    *,
    error: type[PronkError] = OptionError,
) -> int:
    """Return ``value`` if it is an integer from ``low`` to ``high``; otherwise raise ``error``.

    ``high`` may be ``None`` for no limit. True and False are no integers.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        is_in_range = value >= low and (high is None or value <= high)
        if is_in_range:
            return value
    wanted = f"of at least {low}" if high is None else f"in {low}..{high}"
    msg = f"{name}: expected an integer {wanted}, found {value!r}"
    raise error(msg)


def check_number(
    name: str,
    value: object,
    low: float = -inf,
    high: float = inf,
    *,
    exclusive_min: bool = False,
    error: type[PronkError] = OptionError,
) -> float:
    """Return ``value`` as a float if it is from ``low`` to ``high``; otherwise raise ``error``.

    ``exclusive_min`` excludes ``low`` itself. NaN, infinity, True and False are always refused.
    """
    largest = sys.float_info.max  # an int above this cannot be converted to float
    if isinstance(value, int | float) and not isinstance(value, bool):
        is_in_range = max(low, -largest) <= value <= min(high, largest)  # False for NaN
        is_excluded = exclusive_min and value == low
        if is_in_range and not is_excluded:
            return float(value)
    wanted = _interval(low, high, exclusive_min=exclusive_min)
    msg = f"{name}: expected {wanted}, found {value!r}"
    raise error(msg)


def _interval(low: float, high: float, *, exclusive_min: bool) -> str:
    """Return an interval in words, such as ``a number in 0..1``."""
    if high < inf:
        if exclusive_min:
            return f"a number above {low:g} and at most {high:g}"
        return f"a number in {low:g}..{high:g}"
    if low == -inf:
        return "a finite number"
    if exclusive_min:
        return f"a finite number above {low:g}"
    return f"a finite number of at least {low:g}"


def check_flag(name: str, value: object, *, error: type[PronkError] = OptionError) -> bool:
    """Return ``value`` if it is True or False (not 0 or 1); otherwise raise ``error``."""
    if not isinstance(value, bool):
        msg = f"{name}: expected true or false, found {value!r}"
        raise error(msg)
    return value


def check_choice(
    name: str, value: object, choices: Iterable[str], *, error: type[PronkError] = OptionError
) -> str:
    """Return ``value`` if it is one of ``choices``; otherwise call :func:`refuse_choice`."""
    names = list(choices)
    if not isinstance(value, str) or value not in names:
        refuse_choice(name, value, names, error=error)
    return value


def refuse_choice(
    name: str, value: object, choices: Iterable[str], *, error: type[PronkError] = OptionError
) -> NoReturn:
    """Raise ``error`` with ``NAME: expected one of …, found VALUE; did you mean CHOICE?``.

    The question is left out if no choice is spelled like ``value``.
    """
    names = list(choices)
    near = close_choices(value, names) if isinstance(value, str) else ""
    suggestion = f"; did you mean {near}?" if near else ""
    msg = f"{name}: expected one of {', '.join(names)}, found {value!r:.80}{suggestion}"
    raise error(msg)


def close_choices(value: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the choices that are spelled most like ``value``, joined by "or"; "" if none is close.

    Case and the difference between ``-`` and ``_`` do not count. ``cutoff`` is the lowest
    similarity, 0..1.
    """
    from difflib import get_close_matches  # noqa: PLC0415 - only for error messages

    by_spelling = {_fold(choice): choice for choice in choices}
    near = get_close_matches(_fold(value), by_spelling, cutoff=cutoff)
    return " or ".join(by_spelling[spelling] for spelling in near)


def _fold(name: str) -> str:
    return name.lower().replace("-", "_")


def check_path(name: str, value: object) -> str | None:
    """Return ``value`` if it is a non-empty text or ``None``; otherwise raise ``OptionError``."""
    if value is not None and not (isinstance(value, str) and value):
        msg = f"{name}: expected a path, found {value!r}"
        raise OptionError(msg)
    return value


def install_extra(extra: str) -> str:
    """Return the advice to install an extra of pronk: a command for a clone of the repository.

    No package index has pronk.
    """
    return f"run pip install '.[{extra}]' in a clone of pronk"


def check_writable(option: str, path: Path) -> None:
    """Raise ``OptionError`` if no file can be written to ``path``, the value of ``option``."""
    if path.is_dir():
        msg = f"{option}: expected a file, found the folder {path}; name a file in it"
        raise OptionError(msg)
    try:
        check_regular(path)
    except OSError as error:
        reason = describe_reason(error)
        msg = f"{option}: expected a file at {path}, found {reason}; choose another path"
        raise OptionError(msg) from error
    folder = path.absolute().parent
    if not folder.is_dir():
        msg = (
            f"{option}: expected a file in a folder that exists, found {path}; choose another path"
        )
        raise OptionError(msg)
    is_protected = path.exists() and not os.access(path, os.W_OK)
    if is_protected or not os.access(folder, os.W_OK):
        msg = f"{option}: expected a file that can be written, found {path}; choose another path"
        raise OptionError(msg)


def require_extra(purpose: str, extra: str, *modules: str) -> None:
    """Raise ``OptionError`` if a module is not installed.

    Args:
        purpose: the option or command that needs the modules; the message begins with it.
        extra: the extra of pronk that installs the modules.
        *modules: their names.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        msg = f"{purpose}: expected {', '.join(missing)}, found none; {install_extra(extra)}"
        raise OptionError(msg)
