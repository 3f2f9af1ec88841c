"""Record which layers the kernels compute for which rows, and interrupt them."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pronk.cache.paged import PagedCache
from pronk.models.forward_batch import ForwardBatch
from pronk.models.program import Program

# operations of ``csrc/pronk.h`` that store keys and values, or states
_QKV = 2
_CONVOLVE = 7


def layers_of(program: Program) -> list[int]:
    """Return the layers of its cache for which the program computes keys and values, or states, in
    order.
    """
    if program.cache is None:
        return []
    where = {keys.ctypes.data: layer for layer, keys in enumerate(program.cache.keys)}
    return [where[op.keys] for op in program._ops if op.kind in (_QKV, _CONVOLVE) and op.keys]


def slots_of(batch: ForwardBatch, block_size: int) -> list[int]:
    """Return the KV slots of the rows of a forward pass, as the kernels get them."""
    found: list[int] = []
    for segment in batch.for_kernels.segments:
        blocks = ctypes.cast(segment.blocks, ctypes.POINTER(ctypes.c_int32))
        places = range(segment.length + segment.computed, segment.length + segment.nodes)
        found += [
            blocks[p // block_size - segment.released] * block_size + p % block_size for p in places
        ]
    return found


class Calls:
    """Records ``(layer, slots)`` for every layer of every forward pass that computes into a
    cache.
    """

    def __init__(self, cache: PagedCache, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[int, list[int]]] = []
        run = Program.run

        def watched(program: Program, batch: ForwardBatch, *args: Any) -> int:
            if program.cache is cache:
                slots = slots_of(batch, cache.block_size)
                self.calls.extend((layer, slots) for layer in layers_of(program))
            return run(program, batch, *args)

        patch.setattr(Program, "run", watched)

    def count(self, layer: int, slot: int) -> int:
        return sum(slots.count(slot) for number, slots in self.calls if number == layer)


@contextmanager
def burning(cache: PagedCache, at: int, *, after: bool = True) -> Iterator[Callable[[], int]]:
    """Raise KeyboardInterrupt at forward pass ``at`` (0 is the next one) that computes into
    ``cache``.

    With ``after`` the pass has been computed and its caller has not been informed; otherwise the
    pass has not begun. Yields a function that returns the number of passes.
    """
    passes = 0
    run = Program.run

    def burns(program: Program, batch: ForwardBatch, *args: Any) -> int:
        nonlocal passes
        mine = program.cache is cache
        passes += mine
        if mine and passes == at + 1 and not after:
            raise KeyboardInterrupt
        experts_read = run(program, batch, *args)
        if mine and passes == at + 1:
            raise KeyboardInterrupt
        return experts_read

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "run", burns)
        yield lambda: passes
