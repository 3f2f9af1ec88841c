"""What the filters, tests and methods of a template cost, beyond the step that each of them is.

Most go once through their arguments. Tables name the others: those that look at no element, those that make much of
little (``'x'.center(10**9)``), and those that go through their arguments again and again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import log2
from typing import Any

from jinja2.runtime import LoopContext

from pronk.tokenization.chat.meter import STEP, Meter, count, extent

__all__ = ["Cost", "filter_cost", "function_cost", "method_cost", "percent", "test_cost", "times"]

Cost = Callable[[Meter, Sequence[Any], Mapping[str, Any]], None]


def _look(meter: Meter, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """At the value itself, not at what is in it."""
    meter.whole(*args[1:], *kwargs.values())


def _once(meter: Meter, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    meter.whole(*args, *kwargs.values())


def _plus(more: Callable[..., float]) -> Cost:
    """Once, and ``more``, which takes what the filter or the method itself takes."""

    def cost(meter: Meter, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        meter.whole(*args, *kwargs.values())
        meter.charge(more(*args, **kwargs))

    return cost


def _each(meter: Meter, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """The elements one by one, and the other arguments for each of them: the name of an attribute may be long."""
    meter.charge(count(args[0]) * (STEP + meter.whole(*args[1:], *kwargs.values())))


def _characters(meter: Meter, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """A step for each character: by regular expressions, or in Python."""
    meter.charge(STEP * meter.whole(*args, *kwargs.values()))


def _sorting(meter: Meter, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    meter.charge(meter.whole(args[0]) * log2(2 + count(args[0])))
    _each(meter, args, kwargs)


def _square(meter: Meter, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """All of it for all of it."""
    meter.charge(meter.whole(*args, *kwargs.values()) ** 2 / STEP)


def _number(value: object) -> int:
    """A size that was asked for; of anything else the filter or the method itself complains."""
    return max(0, value) if isinstance(value, int) else 0


def _padded(_: object, width: object = 80, *__: object) -> int:
    return _number(width)


def _replaced(text: object, old: object, new: object, most: int | None = None) -> int:  # noqa: ARG001 - as given
    return str(text).count(str(old)) * len(str(new))


def _joined(items: object, between: object = "", attribute: object = None) -> int:
    return count(items) * (extent(between) + extent(attribute))


def _indented(text: object, width: object = 4, first: bool = False, blank: bool = False) -> int:  # noqa: ARG001 - as given
    return len(str(text).splitlines()) * (STEP + (len(width) if isinstance(width, str) else _number(width)))


def _as_json(value: object, ensure_ascii: bool = False, indent: object = None, *rest: object, **more: object) -> int:  # noqa: ARG001 - as given
    # An element stands in a line of its own, behind as many indents as it is deep: at most 100, of its 16 units.
    room = len(indent) if isinstance(indent, str) else _number(indent)
    return extent(value) * (1 + 8 * room + extent(*rest, *more.values()) // STEP)


def _rounded(_: object, precision: object = 0, *__: object, **___: object) -> int:
    """By way of ten to the power of ``precision``."""
    return precision**2 if isinstance(precision, int) else 0


def _split(text: str, separator: str | None = None, maxsplit: int = -1) -> int:  # noqa: ARG001 - as given
    return STEP * (len(text) // 2 if separator is None else text.count(separator))


def _both(text: str, other: object = "", *_: object) -> int:
    """Every place of the one for every place of the other."""
    return len(text) * (len(other) if isinstance(other, str) else 0)


def percent(text: str, values: object) -> int:
    """Units of ``text % values``: a conversion may have a width, and stand there many times."""
    asked = sum(int(digits) for digits in re.findall(r"\d+", text))
    if "*" in text:
        asked += sum(_number(value) for value in (values if isinstance(values, tuple) else ()))
    return asked + text.count("%") * extent(values)


def times(left: Any, right: Any) -> int:
    """Units of ``left * right``, where one of them is a number and the other a text or a list."""
    for many, number in ((left, right), (right, left)):
        if isinstance(number, int) and not isinstance(many, (int, float)):
            return _number(number) * count(many) * (1 if isinstance(many, str) else STEP)
    return 0


_FILTERS: dict[str, Cost] = {
    **dict.fromkeys("attr count d default first last length random".split(), _look),
    **dict.fromkeys("items list map reject rejectattr reverse select selectattr".split(), _each),
    **dict.fromkeys("dictsort groupby max min sort".split(), _sorting),
    **dict.fromkeys("filesizeformat title urlencode wordcount".split(), _characters),
    **dict.fromkeys("abs capitalize e escape float forceescape int lower safe string truncate upper".split(), _once),
    "batch": _plus(lambda items, size, *_, **__: STEP * (count(items) + _number(size))),
    "center": _plus(_padded),
    "format": _plus(lambda text, *args, **kwargs: percent(str(text), kwargs or args)),
    "indent": _plus(_indented),
    "join": _plus(_joined),
    "replace": _plus(_replaced),
    "round": _plus(_rounded),
    "slice": _plus(lambda items, size, *_, **__: STEP * (count(items) + _number(size))),
    "tojson": _plus(_as_json),
    "trim": _plus(_both),
}
_TESTS: dict[str, Cost] = dict.fromkeys(
    "boolean callable defined escaped false filter float integer iterable mapping none number sameas sequence string "
    "test true undefined".split(),
    _look,
)
_FUNCTIONS: dict[str, Cost] = {"strftime_now": _plus(lambda pattern: 256 * len(pattern))}
_TEXT: dict[str, Cost] = {
    **dict.fromkeys(
        "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower "
        "isnumeric isprintable isspace istitle isupper lower partition removeprefix removesuffix startswith swapcase "
        "title upper".split(),
        _once,
    ),
    **dict.fromkeys("center ljust rjust zfill".split(), _plus(_padded)),
    # Python looks from the end in the simple way, and strips characters one by one.
    **dict.fromkeys("rfind rindex rpartition".split(), _plus(_both)),
    **dict.fromkeys("lstrip rstrip strip".split(), _plus(_both)),
    "expandtabs": _plus(lambda text, tabsize=8: text.count("\t") * _number(tabsize)),
    "join": _plus(lambda between, items: count(items) * len(between)),
    "replace": _plus(_replaced),
    "rsplit": _plus(lambda text, *args, **kwargs: _split(text, *args, **kwargs) + _both(text, *args)),
    "split": _plus(_split),
    "splitlines": _plus(lambda text, *_, **__: STEP * len(text) // 2),
}
_METHODS: tuple[tuple[type | tuple[type, ...], dict[str, Cost]], ...] = (
    (str, _TEXT),
    (Mapping, dict.fromkeys("copy get items keys values".split(), _look)),
    ((list, tuple, range), dict.fromkeys("copy count index".split(), _once)),
    (float, {"is_integer": _look}),
    (LoopContext, {"changed": _look, "cycle": _look}),
)


def filter_cost(name: str) -> Cost:
    """The cost of a filter: of one that is not known, the highest."""
    return _FILTERS.get(name, _square)


def test_cost(name: str) -> Cost:
    """The cost of a test."""
    return _TESTS.get(name, _once)


def function_cost(name: str) -> Cost:
    """The cost of a function that templates are given."""
    return _FUNCTIONS.get(name, _once)


def method_cost(owner: object, name: str) -> Cost | None:
    """The cost of a method, with its owner as the first argument; ``None`` if templates have no use for it."""
    return next((methods.get(name) for kind, methods in _METHODS if isinstance(owner, kind)), None)
