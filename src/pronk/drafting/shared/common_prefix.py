"""Comparison of the cached tokens of a text with the text as it is now."""

from __future__ import annotations

from collections.abc import Sequence

_BLOCK = 256  # number of tokens that are compared at once


def common_prefix_length(
    cached: Sequence[int], text: Sequence[int], known: int, start: int = 0
) -> int:
    """Return how many leading tokens of ``cached`` equal those of ``text`` from index ``start`` on.

    The first ``known`` tokens are known to be equal, and are not compared.
    """
    stop = min(len(cached), len(text) - start)
    first = max(0, min(known, stop))
    while first + _BLOCK <= stop:  # blocks are ten times as fast as one token after the other
        if cached[first : first + _BLOCK] != text[start + first : start + first + _BLOCK]:
            break
        first += _BLOCK
    for index in range(first, stop):
        if cached[index] != text[start + index]:
            return index
    return stop
