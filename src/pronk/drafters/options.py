"""Checks that the drafters' options share."""

from __future__ import annotations

from pronk.errors import OptionError

__all__ = ["check_integer"]


def check_integer(drafter: str, option: str, value: object, low: int, high: int) -> None:
    """Raise :class:`~pronk.errors.OptionError` unless ``value`` is an integer in ``low..high``."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        msg = f"{drafter}: {option} must be an integer in {low}..{high}, found {value!r}"
        raise OptionError(msg)
