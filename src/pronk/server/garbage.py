"""Memory of a server's requests: large bodies are freed in slices, and delay full collections.

A full garbage collection visits every object while all threads stop. A body of 4 MiB may have half
a million objects, which take a third of a second to visit, and none of which is in a cycle. Without
slices, Python would free the objects of a body in one call, in which no other thread runs.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from pronk.base import SMALL_JOB

# Number of objects of a body that are freed before the event loop runs other requests. Python frees
# so many messages in about half a millisecond.
_FREED_AT_ONCE = 1024

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
    """The request bodies in memory: frees each in slices, and runs due full collections.

    A full collection waits until no large body is left.
    """

    def __init__(self) -> None:
        self._num_large = 0

    @asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncGenerator[list[Any]]:
        """Count a body of ``num_bytes`` bytes as in memory within the ``async with`` block.

        Yields an empty list, to which the reader of the body adds its objects, inner ones before
        outer ones. The list keeps them alive until the end of the block, which frees them in
        slices, outer ones first. Freeing an object then never frees those within it.
        """
        is_large = num_bytes > SMALL_JOB
        self._num_large += is_large
        objects = list[Any]()
        try:
            yield objects
        finally:
            try:
                await _free_in_slices(objects)
            finally:
                self._num_large -= is_large
                if self._num_large == 0 and gc.get_count()[2] >= _DUE:
                    gc.collect()


async def _free_in_slices(objects: list[Any]) -> None:
    """Empty a list from its end; let the event loop run other tasks between two slices."""
    while len(objects) > _FREED_AT_ONCE:
        del objects[-_FREED_AT_ONCE:]
        await asyncio.sleep(0)
    objects.clear()
