"""Garbage collection of a server: full collections wait until no large body is in memory.

A full collection visits every object while all threads stop. A body of 4 MiB may have half a
million objects, which take a third of a second to visit, and none of which is in a cycle.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from pronk.base import SMALL_JOB

# Number of partial collections before Python itself makes a full one, 10 by default. This bounds
# the garbage of a server that always has a large body in memory.
_LAST = 10_000
# Number of partial collections after which a full one runs, once no large body is left.
_DUE = 1_000


@contextmanager
def calm_collections() -> Iterator[None]:
    """Let :class:`Bodies`, not Python, start full garbage collections within the ``with`` block.

    Collections in the block skip objects that exist before it, such as modules (``gc.freeze``).
    Python's own thresholds are restored at the end.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], _LAST)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


class Bodies:
    """Counter of the large bodies in memory; runs a due full collection when none is left."""

    def __init__(self) -> None:
        self._num_large = 0

    @contextmanager
    def hold(self, num_bytes: int) -> Iterator[None]:
        """Count a body of ``num_bytes`` bytes as in memory within the ``with`` block."""
        is_large = num_bytes > SMALL_JOB
        self._num_large += is_large
        try:
            yield
        finally:
            self._num_large -= is_large
            if self._num_large == 0 and gc.get_count()[2] >= _DUE:
                gc.collect()
