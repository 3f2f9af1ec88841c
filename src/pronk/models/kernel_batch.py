"""Converts the entries of a forward batch to C structures and arrays of the kernels."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pronk.cache.blocks import BlockTable
from pronk.kernels.structures import CChoice, CSegment
from pronk.sampling.tree import TokenTree
from pronk.sampling.verify import VerifiedPath

if TYPE_CHECKING:
    from pronk.models.forward_batch import BatchEntry

# Row numbers 0, 1, 2, …: a range of rows (the usual case for logits) is passed as a pointer into
# this array.
_NUM_CONSECUTIVE = 1 << 14
_CONSECUTIVE = (ctypes.c_int32 * _NUM_CONSECUTIVE)(*range(_NUM_CONSECUTIVE))


class KernelBatch:
    """The entries of a batch as arrays of structures of ``pronk.h``, which this object keeps alive.

    Attributes:
        segments: ``pronk_segment`` of each entry.
        tokens: token id of each row, int32.
        others: segments in the KV caches of other models that layers read, the entries of one
            cache after those of another; a segment has committed tokens only, no draft tokens.
        num_others: number of the other models' caches.
        logits_rows: address of the indices of the rows whose logits are needed, int32.
    """

    def __init__(self, entries: Sequence[BatchEntry], logits_rows: Sequence[int]) -> None:
        self._kept_alive: list[object] = []
        self.segments = (CSegment * len(entries))()
        self.tokens = array("i")
        for index, entry in enumerate(entries):
            tree = entry.tree
            computed = entry.num_computed
            self.segments[index] = self._make_segment(entry.block_table, tree, computed)
            self.tokens.extend(tree.tokens[computed:] if computed else tree.tokens)
        self.others: ctypes.Array[CSegment] | None = None
        self.num_others = len(entries[0].other_tables)
        if self.num_others:
            others = list[CSegment]()
            for tables in zip(*[entry.other_tables for entry in entries], strict=True):
                others += [self._make_segment(table) for table in tables]
            self.others = (CSegment * len(others))(*others)
        self.logits_rows = self._address_of_rows(logits_rows)

    def _make_segment(
        self, table: BlockTable, tree: TokenTree | None = None, num_computed: int = 0
    ) -> CSegment:
        """Return the C structure of one request's rows.

        They follow the committed tokens of ``table``, and are the nodes of ``tree`` after the first
        ``num_computed``. Without a tree there are no rows.
        """
        blocks = table.c_blocks
        self._kept_alive.append(blocks)
        num_nodes = 0
        parents = None
        if tree is not None:
            num_nodes = len(tree.tokens)
            # without parents, the tree is a chain
            if num_nodes > 1 and tree.main_chain < num_nodes:
                parents = self._int32_array(tree.parents)
        return CSegment(
            ctypes.addressof(blocks),
            parents,
            table.num_released,
            table.length,
            num_nodes,
            num_computed,
            len(blocks),
            table.adapter,
        )

    def _address_of_rows(self, rows: Sequence[int]) -> int:
        if isinstance(rows, range) and rows.step == 1 and rows.stop <= _NUM_CONSECUTIVE:
            return ctypes.addressof(_CONSECUTIVE) + 4 * rows.start
        return self._int32_array(rows)

    def _int32_array(self, values: Sequence[int]) -> int:
        """Copy ``values`` to an array that this object keeps, and return the array's address."""
        numbers = array("i", values)
        self._kept_alive.append(numbers)
        address, _ = numbers.buffer_info()
        return address


class KernelChoices:
    """Choices of the entries' tokens at the end of a pass, and their results.

    Attributes:
        structs: ``pronk_choice`` of each entry, in which the kernels write the results.
    """

    def __init__(self, entries: Sequence[BatchEntry], arrays: KernelBatch) -> None:
        """Prepare the choices of a pass.

        ``arrays`` are the rows of the entries. An entry without a ``library_sampler`` has no
        choice.
        """
        self._entries = entries
        self._kept_alive: list[array[int]] = []
        self._paths: list[array[int]] = []
        self.structs = (CChoice * len(entries))()
        first_token, _ = arrays.tokens.buffer_info()
        first_logits = 0
        for number, entry in enumerate(entries):
            nodes = entry.logits_nodes
            path = array("i", bytes(4 * len(nodes)))
            self._paths.append(path)
            if entry.library_sampler is not None:
                assert len(nodes) > 0, "expected the logits after the last token of the text"
                self.structs[number] = CChoice(
                    ctypes.addressof(entry.library_sampler.options),
                    first_token + 4 * (nodes.start - entry.num_computed),
                    self._parents(entry),
                    entry.block_table.length + nodes.start + 1,
                    first_logits,
                    len(nodes),
                    0,
                    path.buffer_info()[0],
                )
            first_token += 4 * entry.num_rows
            first_logits += len(nodes)

    def _parents(self, entry: BatchEntry) -> int | None:
        """Return the address of the parents of an entry's nodes; ``None`` for a chain."""
        tree = entry.tree
        num_nodes = len(entry.logits_nodes)
        if num_nodes == 1 or (tree.verify is None and tree.main_chain == num_nodes):
            return None
        assert num_nodes == len(tree.tokens), "expected the logits of the whole tree"
        parents = array("i", tree.acceptable_parents)
        self._kept_alive.append(parents)
        address, _ = parents.buffer_info()
        return address

    def results(self) -> list[VerifiedPath | None]:
        """Return the verified path of each entry after the pass.

        ``None``: the entry has no choice, or its choice has failed, because logits on its path are
        not finite or memory is full.
        """
        results: list[VerifiedPath | None] = []
        for entry, struct, path in zip(self._entries, self.structs, self._paths, strict=True):
            found = None
            if entry.library_sampler is not None and struct.accepted >= 0:
                tokens = entry.tree.tokens[entry.logits_nodes.start :]
                nodes = path[: struct.accepted].tolist()
                found = VerifiedPath.of_nodes(tokens, nodes, path[struct.accepted])
            results.append(found)
        return results
