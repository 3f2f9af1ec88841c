"""Checks that the drafters' options share."""

from __future__ import annotations

from collections.abc import Sequence

from pronk.errors import OptionError

__all__ = ["check_choice", "check_flag", "check_integer", "check_number", "check_path"]


def check_integer(drafter: str, option: str, value: object, low: int, high: int) -> None:
    """Raise :class:`~pronk.errors.OptionError` unless ``value`` is an integer in ``low..high``."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        msg = f"{drafter}: {option} must be an integer in {low}..{high}, found {value!r}"
        raise OptionError(msg)


def check_number(drafter: str, option: str, value: object, low: float, high: float) -> None:
    """Raise :class:`~pronk.errors.OptionError` unless ``value`` is a number in ``low..high``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        msg = f"{drafter}: {option} must be a number in {low}..{high}, found {value!r}"
        raise OptionError(msg)


def check_flag(drafter: str, option: str, value: object) -> None:
    """Raise :class:`~pronk.errors.OptionError` unless ``value`` is true or false."""
    if not isinstance(value, bool):
        msg = f"{drafter}: {option} must be true or false, found {value!r}"
        raise OptionError(msg)


def check_path(drafter: str, option: str, value: object) -> None:
    """Raise :class:`~pronk.errors.OptionError` unless ``value`` is text, or ``None`` for no file."""
    if value is not None and not (isinstance(value, str) and value):
        msg = f"{drafter}: {option} must be a path, found {value!r}"
        raise OptionError(msg)


def check_choice(drafter: str, option: str, value: object, choices: Sequence[str]) -> None:
    """Raise :class:`~pronk.errors.OptionError` unless ``value`` is one of ``choices``."""
    if value not in choices:
        listed = ", ".join(f'"{choice}"' for choice in choices)
        msg = f"{drafter}: {option} must be one of {listed}, found {value!r}"
        raise OptionError(msg)
