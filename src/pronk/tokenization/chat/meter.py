"""What rendering a template may cost.

It is counted in units, not in seconds: the same messages are refused on every machine or on none, in any thread. A
character is one unit, a step or an element of a list 16; so much takes about as long, or as much memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import copy
from itertools import chain
from math import inf
from operator import length_hint
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext

__all__ = ["LIST_ITERATOR", "STEP", "Meter", "OverBudgetError", "count", "extent"]

STEP = 16  # units

_BITS = 4096  # of an integer: arithmetic with longer ones is no step any more
_LEVELS = 100  # of lists in lists: Python's hashing goes down without a limit, and the process with it
LIST_ITERATOR = type(iter(list[Any]()))
_PLAIN = frozenset({str, int, bool, float, type(None)})  # most values, which have nothing in them


class OverBudgetError(Exception):
    """A template has used up its budget. It is none of the errors that Jinja's own filters catch."""


class Meter:
    """What is left of a budget.

    Args:
        units: to begin with.
    """

    def __init__(self, units: float) -> None:
        self._left = units

    def charge(self, units: float) -> None:
        """Take so many units.

        Raises:
            OverBudgetError: there are not so many left.
        """
        self._left -= units
        if self._left < 0:
            raise OverBudgetError

    def whole(self, *values: Any) -> int:
        """The units of values with all that is in them, as often as it is in them; they are taken.

        Text, comparisons, sorting and hashing go through the whole of a value. One list may have another twice, that
        one a third twice, and so on: what takes no room at all then takes for ever.

        Raises:
            OverBudgetError: there are not so many left.
            SecurityError: an integer is too long, or lists are nested too deeply.
        """
        total = 0
        levels = [iter(values)]
        while levels:
            inner = None
            for value in levels[-1]:
                units = _own(value)
                self.charge(units)
                total += units
                inner = None if type(value) in _PLAIN else _inner(value)
                if inner is not None:
                    break
            if inner is None:
                levels.pop()
            else:
                levels.append(iter(inner))
            if len(levels) > _LEVELS:
                msg = f"expected lists in lists of at most {_LEVELS} levels, found more"
                raise SecurityError(msg)
        return total


def extent(*values: Any) -> int:
    """Units of values with all that is in them, which nobody takes."""
    return Meter(inf).whole(*values)


def count(value: Any) -> int:
    """Elements of a list and its like, characters of a text; 0 for what has none."""
    _own(value)
    return length_hint(value, 0)


def _own(value: Any) -> int:
    """Units of a value without what is in it."""
    if isinstance(value, (str, bytes)):
        return STEP + len(value)
    if isinstance(value, int) and value.bit_length() > _BITS:
        msg = f"expected integers of at most {_BITS} bits, found {value.bit_length()}"
        raise SecurityError(msg)
    if isinstance(value, LoopContext):
        # It can be read as a list, once, and its end is not known before.
        msg = "expected a value, found the loop itself"
        raise SecurityError(msg)
    return STEP


def _inner(value: Any) -> Iterable[Any] | None:
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, Mapping):
        return chain.from_iterable(value.items())
    if isinstance(value, Collection) and not isinstance(value, (str, bytes)):
        return value
    # Filters such as ``map`` return the iterator of a list (see ``sandbox``); the copy can be read without harm.
    return copy(value) if isinstance(value, LIST_ITERATOR) else None
