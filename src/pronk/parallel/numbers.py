"""What processes tell each other of a pass, as integers one after the other."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import islice

from torch import Tensor

from pronk.cache.blocks import BlockTable
from pronk.passes.attention import Segment
from pronk.tree import TokenTree

__all__ = ["of_segment", "read_segment", "reading", "some"]


@contextmanager
def reading(numbers: Tensor, what: str) -> Generator[Iterator[int]]:
    """The integers, to be taken one after the other.

    Raises:
        ValueError: there are fewer of them than ``what`` needs.
    """
    try:
        yield iter(numbers.tolist())
    except StopIteration:
        msg = f"expected {what}, found a part of one"
        raise ValueError(msg) from None


def some(left: Iterator[int], count: int) -> list[int]:
    """The next ones; ``StopIteration`` if there are fewer than ``count``."""
    found = list(islice(left, count))
    if len(found) < count:
        raise StopIteration
    return found


def of_segment(segment: Segment) -> list[int]:
    """A tree below the text that a table holds; which of its nodes may be accepted is not said."""
    table, tree = segment.table, segment.tree
    head = (table.length, table.released, segment.computed, len(table.blocks), len(tree))
    return [*head, *table.blocks, *tree.tokens, *tree.parents]


def read_segment(left: Iterator[int]) -> Segment:
    """What :func:`of_segment` says."""
    length, released, computed, blocks, nodes = some(left, 5)
    table = BlockTable(some(left, blocks), released, length)
    table.changed()
    tokens, parents = [tuple(some(left, nodes)) for _ in range(2)]
    return Segment(table, TokenTree(tokens, parents, verify=(True,) + (False,) * (nodes - 1)), computed)
