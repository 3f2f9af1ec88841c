"""The rows of a forward pass, as the kernels read them."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from pronk.base.arrays import Array
from pronk.cache.blocks import BlockTable
from pronk.checkpoint.rope import RopeConfig, RopeTable
from pronk.kernels.structures import CForward, CSegment
from pronk.sampling.tree import TokenTree

# Row numbers 0, 1, 2, …: a range of rows (the usual case for logits) is passed as a pointer into
# this array.
_NUM_CONSECUTIVE = 1 << 14
_CONSECUTIVE = (ctypes.c_int32 * _NUM_CONSECUTIVE)(*range(_NUM_CONSECUTIVE))


@dataclass
class ProgramRows:
    """Rows of a forward pass, request after request; ``call`` describes them to the kernels.

    This object keeps the memory to which ``call`` points. ``count`` is the number of rows. The
    other attributes are the arguments of the methods, for backends without C structures.
    """

    call: CForward = field(default_factory=CForward)
    # result: number of experts read, over all layers
    touched: ctypes.c_int64 = field(default_factory=ctypes.c_int64)
    count: int = 0
    segments: Sequence[tuple[BlockTable, TokenTree, int]] = ()
    tokens: Sequence[int] = ()
    other_tables: Sequence[Sequence[BlockTable]] = ()
    # Entries of a :class:`RopeTable`: entry ``i`` is for position ``i`` or, if the second value is
    # true, for row ``i``.
    rope_tables: dict[RopeConfig, tuple[Array, bool]] = field(default_factory=dict)
    logits_rows: Sequence[int] | range = ()
    _kept_alive: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.call.touched = ctypes.addressof(self.touched)

    def set_segments(
        self,
        segments: Sequence[tuple[BlockTable, TokenTree, int]],
        tokens: Sequence[int] | None = None,
        other_tables: Sequence[Sequence[BlockTable]] = (),
    ) -> ProgramRows:
        """Set the rows of all requests, and return this object.

        A segment is a request's block table, its draft tree, and the number of leading nodes of the
        tree that are already computed and get no row. ``tokens`` has the token id of each row, for
        programs that begin with an embedding. ``other_tables`` has for each of
        :attr:`Program.other_caches` the block table of each request.
        """
        self.segments = segments
        self.tokens = tokens or ()
        self.other_tables = other_tables
        call = self.call
        count = len(segments)
        call.segment = (CSegment * count)(*[self._segment(*each) for each in segments])
        self.count = sum([len(tree) - computed for _, tree, computed in segments])
        call.segments = count
        call.rows = self.count
        if tokens is not None:
            call.tokens = self._int32_array(tokens)
        if other_tables:
            others = [self._segment(table) for tables in other_tables for table in tables]
            call.others = (CSegment * len(others))(*others)
            call.num_others = len(other_tables)
        return self

    def _segment(
        self, table: BlockTable, tree: TokenTree | None = None, computed: int = 0
    ) -> CSegment:
        """Return the structure of a segment; one of another cache has no tree."""
        blocks = table.c_blocks
        nodes = 0
        parents = None
        self._kept_alive.append(blocks)
        if tree is not None:
            nodes = len(tree)
            parents = (
                self._int32_array(tree.parents) if nodes > 1 and tree.main_chain < nodes else None
            )
        numbers = table.num_released, table.length, nodes, computed, len(blocks), table.adapter
        return CSegment(ctypes.addressof(blocks), parents, *numbers)

    def _int32_array(self, values: Sequence[int]) -> int:
        """Copy ``values`` to an array that this object keeps, and return the address of the array."""
        numbers = array("i", values)
        self._kept_alive.append(numbers)
        return numbers.buffer_info()[0]

    @classmethod
    def without_segments(cls, count: int) -> ProgramRows:
        """Return ``count`` rows that have no KV cache, for a program without attention."""
        rows = cls(count=count)
        rows.call.rows = count
        return rows

    def rotate(
        self, rope: RopeTable, *, prompt_lengths: Sequence[int] = (), num_extra: int = 0
    ) -> None:
        """Add a RoPE table of the rows: by position, or by row if rotations depend on the text's length.

        ``rope`` grows if necessary; without RoPE it has no effect. ``prompt_lengths`` has the
        number of prompt tokens of each request, which are all rotated for a text of this length; by
        default each row is rotated for the text up to this row. ``num_extra`` is the number of
        positions, after those of the rows, that a draft chain needs.
        """
        if rope.config is None:
            return
        if not rope.dynamic:
            stop = max([block_table.length + len(tree) for block_table, tree, _ in self.segments])
            self.rope_tables[rope.config] = rope.up_to(stop + num_extra), False
            return
        positions = list[int]()
        text_lengths = list[int]()
        lengths = prompt_lengths or [0] * len(self.segments)
        for (block_table, tree, computed), prompt_length in zip(
            self.segments, lengths, strict=True
        ):
            row_positions = [block_table.length + depth for depth in tree.depths[computed:]]
            positions += row_positions
            text_lengths += [max(prompt_length, position + 1) for position in row_positions]
        self.rope_tables[rope.config] = rope.compute_entries(positions, text_lengths), True

    def select_logits_rows(self, rows: Sequence[int] | range) -> int:
        """Set the indices of the rows whose logits are computed.

        Return the number of these rows.
        """
        self.logits_rows = rows
        self.call.num_wanted = len(rows)
        if isinstance(rows, range) and rows.step == 1 and rows.stop <= _NUM_CONSECUTIVE:
            self.call.wanted = ctypes.addressof(_CONSECUTIVE) + 4 * rows.start
        else:
            self.call.wanted = self._int32_array(rows)
        return len(rows)
