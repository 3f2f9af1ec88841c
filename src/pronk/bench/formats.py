"""Numbers and names as the page of a benchmark shows them."""

from __future__ import annotations

import re
from typing import Any

from markupsafe import Markup, escape

from pronk.bench.document import Range

__all__ = ["FILTERS", "NOTHING", "plus_minus"]

NOTHING = "–"
_SPACE = "\N{NO-BREAK SPACE}"


def plus_minus(value: Range | None) -> str:
    """``2.31 ± 0.04``: a median with its spread."""
    if value is None:
        return NOTHING
    digits = 2 if abs(value.median) < 10 else 1 if abs(value.median) < 100 else 0
    return f"{value.median:,.{digits}f}{_SPACE}±{_SPACE}{value.spread:,.{digits}f}"


def _count(value: int) -> str:
    """``120 M`` of a number of parameters."""
    for unit, scale in ((" B", 1e9), (" M", 1e6), (" k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g}{unit}"
    return str(value)


def _inflation(mark: dict[str, Any], parameters: int) -> str:
    """Whose text an inflated model writes, at whose cost; ``mark`` is what its ``config.json`` says of it."""
    small = mark.get("parameters")
    source = f"{mark.get('source', 'a smaller model')}" + (
        f" ({_count(small)} parameters)" if isinstance(small, int) else ""
    )
    return f"the text of {source} at the cost of {_count(parameters)} parameters."


def _number(value: float | None, digits: int = 2) -> str:
    """A number with ``digits`` decimal places."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    """``37%`` of a share."""
    return NOTHING if value is None else f"{value:.0%}"


def _milliseconds(value: float | None) -> str:
    """Seconds as milliseconds."""
    return NOTHING if value is None else f"{1e3 * value:,.{1 if value < 0.1 else 0}f}"


def _size(value: float | None) -> str:
    """Bytes in a unit that leaves few digits."""
    if value is None:
        return NOTHING
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def _soft(text: str) -> Markup:
    """Names of methods are long: they may break behind an underscore or a bracket."""
    return Markup(re.sub(r"([_(,/=])(?=\w)", r"\1<wbr>", str(escape(text))))  # noqa: S704 (escaped before)


def _flat(value: Any, name: str = "") -> str:
    """A fact on one line; ``memory`` in bytes as a size."""
    if name == "memory" and isinstance(value, int):
        return _size(value)
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# What the page's template calls them.
FILTERS = {
    "count": _count,
    "flat": _flat,
    "inflation": _inflation,
    "milliseconds": _milliseconds,
    "number": _number,
    "percent": _percent,
    "plus_minus": plus_minus,
    "share": lambda share: f"{share:.2%}",
    "size": _size,
    "soft": _soft,
}
