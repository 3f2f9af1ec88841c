"""Selection of the rows of a stored tensor that belong to one weight of a model.

A checkpoint may store the rows of a weight in another order than pronk has them, or beside those of
other weights: queries beside the gates of gated attention, or all inputs of a recurrent layer in
one matrix. In all of these the tensor has the rows of one head after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pronk.base.arrays import Array


@dataclass(frozen=True)
class HeadRows:
    """Rows of a tensor, which has the rows of ``heads`` heads of one size.

    RoPE rotates pairs of a head's values. In pronk, the values i and i + size / 2 of a head are a
    pair.

    Attributes:
        heads: number of heads in the tensor.
        start: first row of each head that is taken.
        stop: row of each head after the last one that is taken; ``None``: the head's last row is
            taken.
        pairs: whether the values 2i and 2i + 1 of the rows that are taken of a head are a pair.
            They are taken in the order of pronk.
    """

    heads: int
    start: int = 0
    stop: int | None = None
    pairs: bool = False

    def count(self, num_rows: int) -> int:
        """Return the number of rows that are taken of a tensor with ``num_rows`` rows."""
        head = range(num_rows // self.heads)
        return self.heads * len(head[self.start : self.stop])

    def order(self, num_rows: int) -> Array:
        """Return the index in the tensor of each row that is taken, int64.

        For one head of six rows with ``pairs``, the tensor holds the rows 0 3 1 4 2 5, and the
        result is 0 2 4 1 3 5.
        """
        rows = np.arange(num_rows).reshape(self.heads, -1)[:, self.start : self.stop]
        if self.pairs:
            rows = rows.reshape(self.heads, -1, 2).swapaxes(1, 2)
        return rows.reshape(-1)

    def runs(self, num_rows: int) -> list[slice]:
        """Return the rows that are taken as slices of the tensor, one for each head.

        With ``pairs``, the rows of a slice are in the order of the tensor.
        """
        size = num_rows // self.heads
        taken = range(size)[self.start : self.stop]
        firsts = [head * size for head in range(self.heads)]
        return [slice(first + taken.start, first + taken.stop) for first in firsts]
