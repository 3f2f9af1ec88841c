"""Texts of numbers and sizes in messages, with enough digits to tell different numbers apart."""

from __future__ import annotations

from collections.abc import Sequence

_DIGITS = range(3, 18)  # significant digits to try; 17 tell all floating-point numbers apart
_DECIMAL_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
_BINARY_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def number_texts(*numbers: float) -> list[str]:
    """Return numbers as texts of 3 significant digits, or more to tell different numbers apart."""
    for digits in _DIGITS:
        texts = [f"{number:.{digits}g}" for number in numbers]
        if len(set(texts)) == len(set(numbers)):
            break
    return texts


def count_text(number: int, thing: str) -> str:
    """Return a number with a noun, such as ``1 item`` or ``2 items``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def size_texts(*sizes: int, binary: bool = False) -> list[str]:
    """Return texts of sizes in bytes, such as ``1.5 GB``; different sizes have different texts.

    The units are kB, MB and GB, or with ``binary`` KiB, MiB and GiB.
    """
    units = _BINARY_UNITS if binary else _DECIMAL_UNITS
    for digits in _DIGITS:
        texts = [_size_text(size, digits, units) for size in sizes]
        if len(set(texts)) == len(set(sizes)):
            break
    return texts


def _size_text(size: int, digits: int, units: Sequence[tuple[str, int]]) -> str:
    """Return a size in the largest unit that it reaches, without zeros after the decimal point."""
    for unit, factor in units:
        if abs(size) >= factor:
            num_decimals = max(0, digits - len(str(abs(size) // factor)))
            number = f"{size / factor:.{num_decimals}f}"
            if num_decimals:
                number = number.rstrip("0").rstrip(".")
            return f"{number} {unit}"
    return count_text(size, "byte")
