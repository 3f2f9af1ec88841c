"""Programs: the operations of a forward pass, and the rows to compute.

Each layer of a model appends its operations to a program once, with ``layer.compile(program, index)``. A forward pass
is then one call into the library. A decoder layer has these operations, where ``x`` is the residual stream, and ``A``
and ``B`` are buffers for intermediate activations ::

    qkv     norm(x) W_qkv          rotates queries and keys, stores keys and values; one operation per matrix
    attend  A = attention
    linear  x = x + A W_out
    linear  B = act(norm(x) W_gate) · (norm(x) W_up)
    linear  x = x + B W_down

A layer with a mixture of experts has these operations in place of the last two ::

    norm    A = norm(x)
    linear  scores = A W_router
    route   choose the experts with the largest scores, and their shares, for each row
    linear  B = act(A W_gate) · (A W_up)                for each row and each of its experts
    linear  x = x + sum over experts of share · B W_down

A layer with a short convolution has these operations in place of the first three ::

    linear    B = norm(x) W_gates
    convolve  A = gated convolution of B and the states of the last tokens; stores the states of the rows
    linear    x = x + A W_out

With a norm of a branch's output, ``linear`` writes to a buffer, and ``norm`` adds it to ``x``. With norms of queries
and keys that span all heads, ``linear`` writes the projections to ``B``, and one ``qkv`` operation reads them.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pronk.architecture.config import MixtureConfig, ModelConfig
from pronk.architecture.rope import RopeTable
from pronk.arrays import Array, DType
from pronk.kernels.structures import NUM_ROPE_TABLES, CForward, CSegment
from pronk.kv_cache.blocks import BlockTable
from pronk.kv_cache.paged import PagedCache
from pronk.speculation.tree import TokenTree

if TYPE_CHECKING:
    from pronk.models.decoder import Decoder

__all__ = ["FIRST_CROSS_ROPE", "CrossAttentionSource", "Program", "ProgramRows", "output_range"]

# Row numbers 0, 1, 2, …: a range of rows (the usual case for logits) is passed as a pointer into this array.
_NUM_CONSECUTIVE = 1 << 14
# Numbers of rotations: 0 and 1 are those of the model's own ``ropes``, 2 and 3 those of the source's.
FIRST_CROSS_ROPE = NUM_ROPE_TABLES // 2
_CONSECUTIVE = (ctypes.c_int32 * _NUM_CONSECUTIVE)(*range(_NUM_CONSECUTIVE))


class CrossAttentionSource(NamedTuple):
    """Another model whose KV cache is read: layer ``i`` reads layer ``layers[i]`` (from 0) of that model."""

    decoder: Decoder
    cache: PagedCache
    layers: tuple[int, ...]


class Program(ABC):
    """A list of operations that is built once and run any number of times.

    ``hidden`` is the width of the residual stream (the *stream*), and ``dtype`` is its dtype, float32 or bfloat16.
    ``cache`` is the KV cache of the model. ``source`` is the model that cross-attention reads, such as GLIDE's target.
    """

    def __init__(
        self, hidden: int, dtype: DType, cache: PagedCache | None, source: CrossAttentionSource | None
    ) -> None:
        self.hidden, self.dtype, self.cache, self.source = hidden, dtype, cache, source

    def attention(self, layer: Any, index: int, *, partial: bool = False) -> None:
        """Append the self-attention of a decoder layer, with its residual connection.

        With ``partial`` (tensor parallelism), the output for this process's heads is written to the buffer ``logits``
        instead of being added to the stream.
        """
        assert self.cache is not None
        self.project(layer.qkv, layer.attention_norm, layer.config, index, (layer.q_norm, layer.k_norm))
        self.attend(layer.config, self.cache, index, sinks=layer.sinks)
        self._add_branch(layer.out, "A", layer.attention_output_norm, layer.config, partial=partial)

    def convolution(self, layer: Any, index: int) -> None:
        """Append the short convolution of a decoder layer, with its residual connection."""
        assert self.cache is not None
        self.linear(layer.gates, norm=layer.attention_norm, to="B")
        self.convolve(layer.filter, layer.filter_bias, self.cache, index)
        self._add_branch(layer.out, "A", layer.attention_output_norm, layer.config, partial=False)

    def cross(self, layer: Any, index: int) -> None:
        """Append cross-attention to the source, with its residual connection, as in the drafter Glide."""
        assert self.source is not None
        config = self.source.decoder.config
        self.project(layer.cross_query, layer.cross_norm, config, self.source.layers[index], cross=True)
        self.attend(config, self.source.cache, self.source.layers[index], cross=True)
        self.linear(layer.cross_out, source="A", residual=True)

    def mlp(self, layer: Any, *, partial: bool = False) -> None:
        """Append the MLP of a decoder layer, with its residual connection; for ``partial``, see ``attention``."""
        activation = "clamped" if layer.config.clamped_gate else layer.config.activation
        if layer.router is None:
            self.linear(layer.up, norm=layer.mlp_norm, activation=activation, to="B")
        else:
            self.norm(layer.mlp_norm, to="A")
            self.linear(layer.router, source="A", to="scores")
            self.route(layer.up.mixture)
            self.linear(layer.up, source="A", activation=activation, to="B")
        self._add_branch(layer.down, "B", layer.mlp_output_norm, layer.config, partial=partial)

    def _add_branch(self, linear: Any, source: str, norm: Any, config: ModelConfig, *, partial: bool) -> None:
        """Append ``stream += scale · norm(source Wᵀ + b)``; for ``partial``, see ``attention``."""
        scale = config.residual_scale
        if norm is None:
            self.linear(linear, source=source, to="logits" if partial else "stream", residual=not partial, scale=scale)
            return
        assert not partial, "expected no norm after a sum over processes"
        buffer = "B" if source == "A" else "A"
        self.linear(linear, source=source, to=buffer)
        self.norm(norm, source=buffer, residual=True, scale=scale)

    @staticmethod
    def rope_number(config: ModelConfig, layer: int, *, cross: bool = False) -> int | None:
        """Return the number (:meth:`ProgramRows.set_rope`) of a layer's rotations; ``None`` without rotations."""
        rope = config.rope_of(layer)
        return None if rope is None else config.ropes.index(rope) + (FIRST_CROSS_ROPE if cross else 0)

    @abstractmethod
    def embed(self, decoder: Any) -> None:
        """Append ``stream = scale · token embeddings (+ learned position embeddings)``."""

    @abstractmethod
    def project(
        self,
        linear: Any,
        norm: Any,
        config: ModelConfig,
        index: int,
        head_norms: tuple[Any, Any] = (None, None),
        *,
        cross: bool = False,
    ) -> None:
        """Append queries, keys and values: ``norm(stream) Wᵀ + b``, rotated; keys and values are stored.

        Args:
            linear: layer with the outputs of all query heads, then of the key heads, then of the value heads.
            norm: norm of the stream; ``None``: the stream is read as it is.
            config: sizes of the heads, and whether they are rotated.
            index: layer (from 0) of ``config``, and of the cache that stores keys and values.
            head_norms: norms of queries and of keys, or ``None``.
            cross: whether there are only queries, for cross-attention to layer ``index`` of another model.
        """

    @abstractmethod
    def attend(
        self, config: ModelConfig, cache: PagedCache, layer: int, *, cross: bool = False, sinks: Array | None = None
    ) -> None:
        """Append ``A = attention`` of the queries to a layer (from 0) of ``cache``.

        With ``cross``, the cache is another model's. ``sinks`` has a score for each head, which takes part in the
        softmax without a value.
        """

    @abstractmethod
    def convolve(self, weights: Array, bias: Array | None, cache: PagedCache, layer: int) -> None:
        """Append ``A = c · (convolution of the states b · x)`` of ``B = [b, c, x]``.

        A row's state is stored in its slot of the layer (from 0) of ``cache``, rounded to ``cache.dtype``; sums take
        the rounded states. ``weights`` are ``[hidden, …, taps]``, ``bias`` is ``[hidden]``.
        """

    @abstractmethod
    def linear(
        self,
        linear: Any,
        *,
        norm: Any = None,
        activation: str | None = None,
        source: str = "stream",
        to: str = "stream",
        residual: bool = False,
        only_logits_rows: bool = False,
        scale: float | None = None,
        cap: float | None = None,
    ) -> None:
        """Append ``to = cap(scale · activation(norm(source) Wᵀ + b))``, or ``to += …`` with ``residual``.

        ``source`` and ``to`` are buffers: ``"stream"``, ``"A"``, ``"B"``, ``"scores"`` or ``"logits"``. ``linear`` may
        be :class:`~pronk.models.linear.Experts`, of which each row uses those of the last :meth:`route`. With
        ``only_logits_rows``, only the rows of :meth:`ProgramRows.select_logits_rows` are computed. A gated layer yields
        ``activation(gate) · up``. ``cap`` is a soft cap. Scale and cap are by default those of ``linear``.
        """

    @abstractmethod
    def norm(
        self, norm: Any, *, source: str = "stream", to: str = "stream", residual: bool = False, scale: float = 1.0
    ) -> None:
        """Append a norm of a buffer.

        The operation is ``to = norm(source)``, or ``stream += scale · norm(source)`` with ``residual``. ``to`` is
        ``"stream"`` or ``"A"``.
        """

    @abstractmethod
    def route(self, mixture: MixtureConfig) -> None:
        """Append the choice of the experts of each row, and of their weights, by the buffer ``scores``."""

    @abstractmethod
    def store_hidden(self, layer: int) -> None:
        """Append an operation: copy the residual stream after ``layer`` (from 1) to ``cache.hidden[layer]``."""

    @abstractmethod
    def collect_hidden(self, index: int) -> None:
        """Append an operation: copy the residual stream to ``collected[index]``, an argument of :meth:`run`."""

    @abstractmethod
    def run(
        self, rows: ProgramRows, stream: Array, logits: Array | None = None, collected: Array | None = None
    ) -> None:
        """Run the program on ``rows``.

        ``stream`` ``[rows, hidden]`` is contiguous and changed in place. The operations fill ``logits``, float32
        ``[rows, outputs]`` or ``[selected rows, outputs]``, and ``collected`` ``[collected layers, rows, hidden]``.
        """


def output_range(linear: Any, scale: float | None, cap: float | None) -> tuple[float, float]:
    """Return scale and soft cap (0: none) of a linear layer's outputs; ``None``: those of ``linear``."""
    scale = getattr(linear, "scale", 1.0) if scale is None else scale
    return scale, (getattr(linear, "cap", None) if cap is None else cap) or 0.0


@dataclass
class ProgramRows:
    """Rows of a forward pass, request after request; ``call`` describes them to the kernels.

    This object keeps the memory to which ``call`` points. ``count`` is the number of rows. The other attributes are the
    arguments of the methods, for backends without C structures.
    """

    call: CForward = field(default_factory=CForward)
    touched: ctypes.c_int64 = field(default_factory=ctypes.c_int64)  # result: number of experts read, over all layers
    count: int = 0
    segments: Sequence[tuple[BlockTable, TokenTree, int]] = ()
    tokens: Sequence[int] = ()
    cross_block_tables: Sequence[BlockTable] = ()
    rope: dict[int, tuple[Array, bool]] = field(default_factory=dict)  # arguments ``table`` and ``by_row``, by number
    logits_rows: Sequence[int] | range = ()
    _kept_alive: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.call.touched = ctypes.addressof(self.touched)

    def set_segments(
        self,
        segments: Sequence[tuple[BlockTable, TokenTree, int]],
        tokens: Sequence[int] | None = None,
        cross_block_tables: Sequence[BlockTable] | None = None,
    ) -> ProgramRows:
        """Set the rows of all requests, and return this object.

        A segment is a request's block table, its draft tree, and the number of leading nodes of the tree that are
        already computed and get no row. ``tokens`` has the token id of each row, for programs that begin with an
        embedding. ``cross_block_tables`` has the block table that each request's cross-attention reads.
        """
        self.segments, self.tokens, self.cross_block_tables = segments, tokens or (), cross_block_tables or ()
        call, count = self.call, len(segments)
        call.segment = (CSegment * count)(*[self._segment(*each) for each in segments])
        self.count = sum([len(tree) - computed for _, tree, computed in segments])
        call.segments, call.rows = count, self.count
        if tokens is not None:
            call.tokens = self._int32_array(tokens)
        if cross_block_tables is not None:
            call.cross_segment = (CSegment * count)(*[self._segment(table) for table in cross_block_tables])
        return self

    def _segment(self, table: BlockTable, tree: TokenTree | None = None, computed: int = 0) -> CSegment:
        """Return the structure of a segment; one for cross-attention has no tree."""
        blocks, nodes, parents = table.c_blocks, 0, None
        self._kept_alive.append(blocks)
        if tree is not None:
            nodes = len(tree)
            parents = self._int32_array(tree.parents) if nodes > 1 and tree.main_chain < nodes else None
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

    def set_rope(self, number: int, table: Array | None, *, by_row: bool = False) -> None:
        """Set the :class:`RopeTable` array of the rotations with a number, see :meth:`Program.rope_number`.

        Entry ``i`` of ``table`` is for position ``i``, or with ``by_row`` for row ``i``.
        """
        if table is not None:
            self.rope[number] = table, by_row
            self.call.rope[number], self.call.rope_by_row[number] = table.ctypes.data, int(by_row)

    def rotate(
        self, rope: RopeTable, number: int = 0, *, prompt_lengths: Sequence[int] = (), num_extra: int = 0
    ) -> None:
        """Set the RoPE table of the rows: by position, or by row if rotations depend on the text's length.

        Args:
            rope: table, which grows if necessary; without effect if it has no RoPE.
            number: argument of :meth:`set_rope`.
            prompt_lengths: number of prompt tokens of each request; all are rotated for a text of this length. By
                default each row is rotated for the text up to this row.
            num_extra: number of positions, after those of the rows, that a draft chain needs.
        """
        if rope.config is None:
            return
        if not rope.dynamic:
            stop = max([block_table.length + len(tree) for block_table, tree, _ in self.segments])
            self.set_rope(number, rope.up_to(stop + num_extra))
            return
        positions, text_lengths = list[int](), list[int]()
        lengths = prompt_lengths or [0] * len(self.segments)
        for (block_table, tree, computed), prompt_length in zip(self.segments, lengths, strict=True):
            row_positions = [block_table.length + depth for depth in tree.depths[computed:]]
            positions += row_positions
            text_lengths += [max(prompt_length, position + 1) for position in row_positions]
        self.set_rope(number, rope.compute_entries(positions, text_lengths), by_row=True)

    def select_logits_rows(self, rows: Sequence[int] | range) -> int:
        """Set the indices of the rows whose logits are computed; return the number of these rows."""
        self.logits_rows, self.call.num_wanted = rows, len(rows)
        if isinstance(rows, range) and rows.step == 1 and rows.stop <= _NUM_CONSECUTIVE:
            self.call.wanted = ctypes.addressof(_CONSECUTIVE) + 4 * rows.start
        else:
            self.call.wanted = self._int32_array(rows)
        return len(rows)
