"""Numbers and sizes in messages, with as many digits as tell them apart."""

from __future__ import annotations

from collections.abc import Sequence

_DIGITS = range(3, 18)  # significant digits to try; 17 tell all floating-point numbers apart
_DECIMAL_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
_BINARY_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def number_texts(*numbers: float) -> list[str]:
    """Return numbers with 3 significant digits, or as many as keep different numbers different."""
    for digits in _DIGITS:
        texts = [f"{number:.{digits}g}" for number in numbers]
        if len(set(texts)) == len(set(numbers)):
            break
    return texts


def count_text(number: int, thing: str) -> str:
    """Return a number of things: ``1 item``, ``2 items``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def size_texts(*sizes: int, binary: bool = False) -> list[str]:
    """Return sizes in bytes with units, so that different sizes have different texts.

    The units are kB, MB and GB, or with ``binary`` KiB, MiB and GiB.
    """
    for digits in _DIGITS:
        texts = [
            _size_text(size, digits, _BINARY_UNITS if binary else _DECIMAL_UNITS) for size in sizes
        ]
        if len(set(texts)) == len(set(sizes)):
            break
    return texts


def _size_text(size: int, digits: int, units: Sequence[tuple[str, int]]) -> str:
    for unit, factor in units:
        if abs(size) >= factor:
            num_decimals = max(0, digits - len(str(abs(size) // factor)))
            number = f"{size / factor:.{num_decimals}f}"
            return f"{number.rstrip('0').rstrip('.') if num_decimals else number} {unit}"
    return count_text(size, "byte")
