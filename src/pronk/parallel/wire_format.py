"""Serialization of one request's rows in a forward pass (a :class:`Segment`) as a list of integers."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from pronk.execution.segment import Segment
from pronk.kv_cache.blocks import BlockTable
from pronk.speculation.tree import TokenTree

__all__ = ["message_integers", "parse_segment", "serialize_segment", "take_integers"]


@contextmanager
def message_integers(numbers: NDArray[np.int64], message_name: str) -> Generator[Iterator[int]]:
    """Yield an iterator over the integers of a message, for a ``with`` block that parses the message.

    Raises:
        ValueError: the block needs more integers than the message has; the error calls the message ``message_name``.
    """
    try:
        yield iter(numbers.tolist())
    except StopIteration:
        msg = f"expected {message_name}, found a truncated one"
        raise ValueError(msg) from None


def take_integers(integers: Iterator[int], count: int) -> list[int]:
    """Return the next ``count`` integers; raise ``StopIteration``, as ``next()`` does, if there are fewer."""
    taken = list(islice(integers, count))
    if len(taken) < count:
        raise StopIteration
    return taken


def serialize_segment(segment: Segment) -> list[int]:
    """Serialize a segment: its block table, and the tokens and parents of its tree."""
    block_table, tree = segment.block_table, segment.tree
    head = (block_table.length, block_table.num_released, segment.num_computed, len(block_table.blocks), len(tree))
    return [*head, *block_table.blocks, *tree.tokens, *tree.parents]


def parse_segment(integers: Iterator[int]) -> Segment:
    """Parse the integers of :func:`serialize_segment`.

    ``TokenTree.verify`` is not transmitted: here it is True for the root and False for all other nodes.
    """
    length, num_released, computed, num_blocks, num_nodes = take_integers(integers, 5)
    block_table = BlockTable(take_integers(integers, num_blocks), num_released, length)
    block_table.update_derived()
    tokens, parents = [tuple(take_integers(integers, num_nodes)) for _ in range(2)]
    return Segment(block_table, TokenTree(tokens, parents, verify=(True,) + (False,) * (num_nodes - 1)), computed)
