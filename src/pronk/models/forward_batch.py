"""The input of a forward pass: a batch with one entry per request, and its rows.

An entry has a request's KV slots and a token tree; each node of the tree that no earlier pass has
computed is a *row*. Rows of all entries follow each other, without padding::

    entry   tokens of the tree   computed   rows
      0     a ─ b ─ c                0       0 1 2
      1     d ┬ e                    1           3 4       e and f; an earlier pass computed d
              └ f
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pronk.base.arrays import Array, split_rows
from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.cache.states import StatePass
from pronk.checkpoint.rope import RopeConfig, RopeTable
from pronk.kernels.structures import CRecurrence
from pronk.models.kernel_batch import KernelBatch, KernelChoices
from pronk.sampling.library_sampler import LibrarySampler
from pronk.sampling.stateless import StatelessSampler
from pronk.sampling.tree import TokenTree


class BatchEntry(NamedTuple):
    """One request's rows in a forward pass: the nodes of a token tree after the committed tokens.

    A row sees the committed tokens of its request, its ancestors in the tree, and itself.

    Attributes:
        block_table: KV slots of the committed tokens, then of the nodes in order;
            :meth:`PagedCache.prepare` has allocated them.
        tree: token ids and parents of the nodes; several tokens of a text are a chain.
        logits_nodes: indices of the nodes whose logits ``[vocab]`` are returned; empty: none.
        prompt_length: number of tokens of the prompt. Only models with dynamic RoPE scaling
            (``RopeTable.dynamic``) read it: all tokens of the prompt are rotated for a text of this
            length. With 0, each row is rotated for the text up to this row. A drafter gives it if
            its own model may have such a scaling, and equal values in all passes over a text.
        num_computed: number of leading nodes that earlier passes have computed, as when a drafter
            adds one depth per pass. They get no rows; the other nodes see their keys and values.
        num_final: number of tokens, those in the cache included, that stay in the text whatever is
            sampled or rejected; draft tokens do not. Only models with recurrent layers read it:
            their states take over these tokens, and cannot drop them again. A drafter whose own
            model may be recurrent gives the number of tokens of the text that the cache has after
            the pass. With 0, the states take over nothing, and the pool's update slots run out.
        other_tables: the request's block table in each KV cache of another model that the program
            reads.
        all_logits: for a model in several processes. True: they return the logits of all
            ``logits_nodes``. False: a node's logits are sent when they are read.
        stateless_sampler: for a model in several processes or on a GPU; set if tokens depend on
            logits, temperature and seed alone. Processes sample tokens with it, and send these
            instead of logits. A GPU also verifies the tree, which no earlier pass has computed a
            part of.
        library_sampler: sampler of a request whose tokens the library can choose. A
            :class:`~pronk.models.layer_executor.LayerExecutor` then verifies the tree in the call
            of the pass; other executors do not read it. The first of ``logits_nodes``, of which
            there is at least one, is the last token of the text.
    """

    block_table: BlockTable
    tree: TokenTree
    logits_nodes: range = range(0)
    prompt_length: int = 0
    num_computed: int = 0
    num_final: int = 0
    other_tables: tuple[BlockTable, ...] = ()
    all_logits: bool = True
    stateless_sampler: StatelessSampler | None = None
    library_sampler: LibrarySampler | None = None

    @property
    def num_rows(self) -> int:
        """Number of nodes that the forward pass computes."""
        return len(self.tree.tokens) - self.num_computed

    @property
    def logits_rows(self) -> range:
        """Indices of the rows of ``logits_nodes``, counted from the entry's first row."""
        nodes = self.logits_nodes
        first = self.num_computed
        if not first:
            return nodes
        return range(nodes.start - first, nodes.stop - first, nodes.step)


class ForwardBatch:
    """The rows of one forward pass, entry after entry.

    The engine creates one object per pass, and passes it down to the kernels. Values that are
    derived from the entries are computed at most once, so block tables must not change before the
    pass is over.

    Attributes:
        entries: one entry per request, at least one.
        row_counts: number of rows of each entry.
        num_rows: number of rows of all entries.
        logits_counts: number of rows of each entry whose logits are needed.
        logits_rows: indices of these rows, in the order of the entries.
        num_committed: number of committed tokens in the cache before the pass, over all entries.
        num_positions: upper bound of the positions of all rows, at least 1 more than each of them.
    """

    def __init__(self, entries: Sequence[BatchEntry]) -> None:
        self.entries = entries
        self.row_counts: list[int] = []
        self.logits_counts: list[int] = []
        self.num_rows = 0
        self.num_committed = 0
        self.num_positions = 0
        for entry in entries:
            num_nodes = len(entry.tree.tokens)
            length = entry.block_table.length
            self.row_counts.append(num_nodes - entry.num_computed)
            self.logits_counts.append(len(entry.logits_nodes))
            self.num_rows += num_nodes - entry.num_computed
            self.num_committed += length
            self.num_positions = max(self.num_positions, length + num_nodes)
        self.logits_rows: Sequence[int] = (
            entries[0].logits_rows if len(entries) == 1 else self._find_logits_rows()
        )
        self._for_kernels: KernelBatch | None = None
        self._recurrence: list[StatePass] = []
        # cosines and sines of the rows' rotations under dynamic RoPE
        self._rope_entries: dict[RopeConfig, Array] = {}

    def without_unread(self) -> tuple[list[BatchEntry], list[int]]:
        """Return the batch without the rows before the first logits of each entry.

        Entries without logits are left out. The nodes of the other rows count as computed. The
        pass over these rows chooses no tokens.

        Returns:
            The entries, and the indices of their rows in this batch.
        """
        entries = list[BatchEntry]()
        rows = list[int]()
        first = 0
        for entry, count in zip(self.entries, self.row_counts, strict=True):
            start = entry.logits_nodes.start
            if len(entry.logits_nodes):
                entries.append(entry._replace(num_computed=start, library_sampler=None))
                rows.extend(range(first + start - entry.num_computed, first + count))
            first += count
        return entries, rows

    def _find_logits_rows(self) -> Sequence[int]:
        rows = list[int]()
        first = 0
        for entry, count in zip(self.entries, self.row_counts, strict=True):
            rows.extend(first + row for row in entry.logits_rows)
            first += count
        return rows

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """Position of each row in its text."""
        parts = list[NDArray[np.int64]]()
        for entry in self.entries:
            depths = np.asarray(entry.tree.depths[entry.num_computed :], np.int64)
            parts.append(entry.block_table.length + depths)
        return np.concatenate(parts)

    @cached_property
    def tokens(self) -> NDArray[np.int32]:
        """Token id of each row."""
        return np.frombuffer(self.for_kernels.tokens, np.int32)

    @property
    def for_kernels(self) -> KernelBatch:
        """The entries as C structures, made at first use."""
        if self._for_kernels is None:
            self._for_kernels = KernelBatch(self.entries, self.logits_rows)
        return self._for_kernels

    def make_choices(self) -> KernelChoices | None:
        """Return the choices of tokens for a pass with logits.

        ``None``: no entry has a ``library_sampler``.
        """
        if all(entry.library_sampler is None for entry in self.entries):
            return None
        return KernelChoices(self.entries, self.for_kernels)

    def begin_states(
        self, cache: PagedCache, *, keeps: bool, num_extra: int = 0
    ) -> ctypes.Array[CRecurrence]:
        """Prepare the states of recurrent layers for a pass; return them as C structures.

        With ``keeps``, the pass adds tokens of the text to the states. ``num_extra`` is the number
        of later rows of a chain of draft tokens.

        Raises:
            StateError: a state holds tokens that are rows of this pass, or lacks committed ones,
                because an earlier pass was interrupted.
        """
        assert cache.states is not None
        arguments = [
            cache.states.begin_pass(
                entry.block_table,
                entry.tree,
                num_computed=entry.num_computed,
                num_final=entry.num_final if keeps else 0,
                num_extra=num_extra,
            )
            for entry in self.entries
        ]
        self._recurrence = arguments  # keeps the memory alive to which the C structures point
        return (CRecurrence * len(arguments))(*[each.struct for each in arguments])

    def slots(self, cache: PagedCache) -> NDArray[np.int64]:
        """Return the KV slot of each row."""
        parts = list[NDArray[np.int64]]()
        for entry in self.entries:
            table = entry.block_table
            first = table.length + entry.num_computed
            parts.append(cache.slots(table, first, table.length + len(entry.tree)))
        return np.concatenate(parts)

    def dynamic_rope_entries(self, rope: RopeTable) -> Array:
        """Return cosines and sines of a rotation with dynamic scaling, one entry per row.

        The entries are float32 ``[rows, 2, dim / 2]``.
        """
        assert rope.dynamic, "expected dynamic scaling; other rotations have a table by position"
        assert rope.config is not None
        if rope.config not in self._rope_entries:
            prompt_lengths = [entry.prompt_length for entry in self.entries]
            spans = np.maximum(self.positions + 1, np.repeat(prompt_lengths, self.row_counts))
            entries = rope.compute_entries(self.positions.tolist(), spans.tolist())
            self._rope_entries[rope.config] = entries
        return self._rope_entries[rope.config]

    def split_rows(self, rows: Array) -> list[Array]:
        """Split an array with one row per row of the batch into views, one per entry."""
        return split_rows(rows, self.row_counts)

    def split_logits(self, logits: Array) -> list[Array]:
        """Split the logits ``[len(logits_rows), vocab]`` into views, one per entry."""
        return split_rows(logits, self.logits_counts)
