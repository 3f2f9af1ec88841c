"""Programs for the kernels: the operations of a forward pass, and the rows to compute.

Each layer of a model appends its operations to a program once, with ``layer.compile(program, index)``. A forward pass
is then one call into the library. A decoder layer has these operations, where ``x`` is the residual stream, and ``A``
and ``B`` are buffers for intermediate activations ::

    qkv     norm(x) W_qkv          rotates queries and keys, stores keys and values; one operation per matrix
    attend  A = attention
    linear  x = x + A W_out
    linear  B = act(norm(x) W_gate) · (norm(x) W_up)
    linear  x = x + B W_down
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pronk.architecture.config import ModelConfig
from pronk.kernels.library import TYPES, Kernels
from pronk.kernels.structures import CDraftChain, CForward, COp, CSegment
from pronk.kernels.threads import num_threads
from pronk.kernels.weights import PackedMatrix
from pronk.kv_cache.blocks import BlockTable
from pronk.kv_cache.paged import PagedCache
from pronk.speculation.tree import TokenTree

__all__ = ["Program", "ProgramRows"]

_EMBED, _LINEAR, _QKV, _ATTEND, _STORE, _NORM = range(6)  # kinds of operations (``pronk_kind``)
_STREAM, _A, _B, _LOGITS = range(4)  # buffers that an operation reads or writes (``pronk_buffer``)
_RMS_NORM, _LAYER_NORM = 1, 2  # kinds of norms (``pronk_norm_kind``); 0 means no norm
_ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}

# Row numbers 0, 1, 2, …: a range of rows (the usual case for logits) is passed as a pointer into this array.
_NUM_CONSECUTIVE = 1 << 14
_CONSECUTIVE = (ctypes.c_int32 * _NUM_CONSECUTIVE)(*range(_NUM_CONSECUTIVE))


class Program:
    """A list of operations that is built once and run any number of times.

    ``hidden`` is the width of the residual stream (the *stream*), and ``dtype`` is its dtype, float32 or bfloat16.
    ``cache`` is the KV cache of the model. ``cross_model`` is the config and KV cache of another model; cross-attention
    of layer ``i`` reads that model's layer ``cross_layers[i]``.
    """

    def __init__(
        self,
        kernels: Kernels,
        hidden: int,
        dtype: torch.dtype,
        cache: PagedCache | None = None,
        cross_model: tuple[ModelConfig, PagedCache] | None = None,
        cross_layers: Sequence[int] = (),
    ) -> None:
        self.kernels, self.hidden, self.dtype = kernels, hidden, dtype
        self.cache, self.cross_model, self.cross_layers = cache, cross_model, tuple(cross_layers)
        self._ops: list[COp] = []
        self._kept_alive: list[object] = []  # objects whose memory the operations point to
        self._compiled: Any = None  # C array of the operations; ``None`` before the first run

    def embed(self, decoder: Any) -> None:
        """Append ``stream = token embeddings (+ learned position embeddings)``."""
        op = self._append(_EMBED)
        op.positions = self._keep_alive(decoder.positions)
        if decoder.table is not None:
            self._set_weights(op, decoder.table)
        else:
            op.table = self._keep_alive(decoder.embedding)
        op.table_type = TYPES[decoder.embedding.dtype]

    def attention(self, layer: Any, index: int, *, partial: bool = False) -> None:
        """Append the self-attention of a decoder layer, with its residual connection.

        With ``partial`` (tensor parallelism), the output for this process's heads is written to the buffer ``logits``
        instead of being added to the stream.
        """
        config = layer.config
        for op in self._append_projection(layer.qkv, layer.attention_norm, config, index, rope=1 if config.rope else 0):
            if layer.q_norm is not None:
                op.q_norm = self._keep_alive(layer.q_norm.weight.float())
                op.k_norm = self._keep_alive(layer.k_norm.weight.float())
        self._append_attention(config, self.cache, index)
        self.linear(layer.out, source="A", to="logits" if partial else "stream", residual=not partial)

    def cross(self, layer: Any, index: int) -> None:
        """Append cross-attention to ``cross_model``, with its residual connection, as in the drafter Glide."""
        assert self.cross_model is not None
        target, cache = self.cross_model
        self._append_projection(layer.cross_query, layer.cross_norm, target, None, rope=2 if target.rope else 0)
        self._append_attention(target, cache, self.cross_layers[index], cross=True)
        self.linear(layer.cross_out, source="A", residual=True)

    def mlp(self, layer: Any, *, partial: bool = False) -> None:
        """Append the MLP of a decoder layer, with its residual connection; for ``partial``, see ``attention``."""
        self.linear(layer.up, norm=layer.mlp_norm, activation=layer.config.activation, to="B")
        self.linear(layer.down, source="B", to="logits" if partial else "stream", residual=not partial)

    def linear(
        self,
        linear: nn.Module | PackedMatrix,
        *,
        norm: nn.Module | None = None,
        activation: str | None = None,
        source: str = "stream",
        to: str = "stream",
        residual: bool = False,
        only_logits_rows: bool = False,
    ) -> None:
        """Append the operation ``to = activation(norm(source) Wᵀ + b)``, or ``to += …`` with ``residual``.

        ``source`` and ``to`` are buffers: ``"stream"``, ``"A"``, ``"B"`` or ``"logits"``. With ``only_logits_rows``,
        only the rows of :meth:`ProgramRows.select_logits_rows` are computed.
        """
        op = self._append(_LINEAR)
        buffers = {"stream": _STREAM, "A": _A, "B": _B, "logits": _LOGITS}
        op.input, op.output, op.residual, op.wanted = buffers[source], buffers[to], int(residual), int(only_logits_rows)
        op.activation = _ACTIVATIONS[activation]
        self._set_weights(op, linear)
        if norm is not None:
            self._set_norm(op, norm)

    def norm(self, norm: nn.Module) -> None:
        """Append an operation: normalize the residual stream in place."""
        self._set_norm(self._append(_NORM), norm)

    def store_hidden(self, layer: int) -> None:
        """Append an operation: copy the residual stream after ``layer`` (from 1) to ``cache.hidden[layer]``."""
        assert self.cache is not None
        self._append(_STORE).keys = self._keep_alive(self.cache.hidden[layer])

    def collect_hidden(self, index: int) -> None:
        """Append an operation: copy the residual stream to ``collected[index]``, an argument of :meth:`run`."""
        self._append(_STORE).collected = index + 1

    def run(
        self, rows: ProgramRows, stream: Tensor, logits: Tensor | None = None, collected: Tensor | None = None
    ) -> None:
        """Run the program on ``rows``.

        ``stream`` ``[rows, hidden]`` is contiguous and changed in place. The operations fill ``logits``, float32
        ``[rows, outputs]`` or ``[selected rows, outputs]``, and ``collected`` ``[collected layers, rows, hidden]``.
        """
        self.kernels.run(self._prepare_call(rows, stream, logits, collected), len(self._ops), rows.call)

    def draft_chain(self, rows: ProgramRows, stream: Tensor, logits: Tensor, chain: CDraftChain) -> int:
        """Run the program on one request's rows, then on each draft token; see :meth:`Kernels.draft_chain`.

        ``logits``, float32 ``[1, vocab]``, is overwritten with the logits of each forward pass.
        """
        ops = self._prepare_call(rows, stream, logits, None)
        return self.kernels.draft_chain(ops, len(self._ops), rows.call, chain)

    def _prepare_call(self, rows: ProgramRows, stream: Tensor, logits: Tensor | None, collected: Tensor | None) -> Any:
        """Set the buffers in ``rows.call``, and return the operations as a C array."""
        if self._compiled is None:
            self._compiled = (COp * len(self._ops))(*self._ops)
        call = rows.call
        call.type, call.hidden, call.isa = TYPES[self.dtype], self.hidden, self.kernels.isa
        call.threads = num_threads()
        call.stream = stream.data_ptr()
        call.logits = None if logits is None else logits.data_ptr()
        call.collected = None if collected is None else collected.data_ptr()
        return self._compiled

    def _append(self, kind: int) -> COp:
        op = COp(kind=kind)
        if self.cache is not None:
            op.block_size, op.slots = self.cache.block_size, self.cache.num_slots
        self._ops.append(op)
        return op

    def _append_projection(
        self, linear: Any, norm: nn.Module, config: ModelConfig, index: int | None, *, rope: int
    ) -> list[COp]:
        """Append and return layer ``index``'s operations for queries, keys, values; ``None``: queries only."""
        ops, first_head = [], 0
        for part in linear.parts:
            op = self._append(_QKV)
            self._set_weights(op, part)
            self._set_norm(op, norm)
            op.heads, op.head_dim, op.first_head, op.rope = config.num_heads, config.head_dim, first_head, rope
            if index is not None:
                assert self.cache is not None
                op.kv_heads = config.num_kv_heads
                self._kv_cache(op, self.cache, index)
            first_head += part.out_features // config.head_dim
            ops.append(op)
        num_heads = config.num_heads + (0 if index is None else 2 * config.num_kv_heads)
        assert first_head == num_heads, "expected as many outputs as heads"
        return ops

    def _append_attention(
        self, config: ModelConfig, cache: PagedCache | None, layer: int, *, cross: bool = False
    ) -> None:
        assert cache is not None
        op = self._append(_ATTEND)
        op.heads, op.kv_heads, op.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        op.window = config.windows[layer] or 0 if config.windows else 0
        op.cross = int(cross)
        op.block_size, op.slots = cache.block_size, cache.num_slots
        self._kv_cache(op, cache, layer)

    def _kv_cache(self, op: COp, cache: PagedCache, layer: int) -> None:
        op.kv_type = TYPES[cache.kv_dtype]
        op.keys, op.values = self._keep_alive(cache.keys[layer]), self._keep_alive(cache.values[layer])

    def _set_weights(self, op: COp, linear: nn.Module | PackedMatrix) -> None:
        packed = linear if isinstance(linear, PackedMatrix) else getattr(linear, "packed", None)
        assert isinstance(packed, PackedMatrix), "expected weights packed for the kernels, found plain ones"
        self._kept_alive.append(packed)
        op.w = ctypes.pointer(packed.struct)

    def _set_norm(self, op: COp, norm: Any) -> None:
        op.norm, op.eps = (_LAYER_NORM if isinstance(norm, nn.LayerNorm) else _RMS_NORM), norm.eps
        op.norm_weight = self._keep_alive(norm.weight.detach().float())
        bias = getattr(norm, "bias", None)
        op.norm_bias = self._keep_alive(None if bias is None else bias.detach().float())

    def _keep_alive(self, tensor: Tensor | None) -> int | None:
        """Return the address of a tensor, and keep its memory as long as the program exists."""
        if tensor is None:
            return None
        tensor = tensor.detach().contiguous()
        self._kept_alive.append(tensor)
        return tensor.data_ptr()


@dataclass
class ProgramRows:
    """Rows of a forward pass, request after request; ``call`` describes them to the kernels.

    This object keeps the memory to which ``call`` points. ``count`` is the number of rows.
    """

    call: CForward = field(default_factory=CForward)
    count: int = 0
    _kept_alive: list[object] = field(default_factory=list)

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
        structs = (CSegment * len(segments))()
        for struct, (table, tree, computed) in zip(structs, segments, strict=True):
            self._set_block_table(struct, table)
            struct.nodes, struct.computed = len(tree), computed
            if tree.main_chain < len(tree):
                struct.parents = self._int32_array(tree.parents)
            self.count += len(tree) - computed
        self.call.segment, self.call.segments, self.call.rows = structs, len(segments), self.count
        if tokens is not None:
            self.call.tokens = self._int32_array(tokens)
        if cross_block_tables is not None:
            cross_structs = (CSegment * len(cross_block_tables))()
            for struct, table in zip(cross_structs, cross_block_tables, strict=True):
                self._set_block_table(struct, table)
            self.call.cross_segment = cross_structs
        return self

    def _set_block_table(self, struct: CSegment, table: BlockTable) -> None:
        numbers = table.c_blocks
        self._kept_alive.append(numbers)
        struct.blocks, struct.num_blocks = ctypes.addressof(numbers), len(numbers)
        struct.released, struct.length = table.num_released, table.length

    def _int32_array(self, values: Sequence[int]) -> int:
        """Copy ``values`` to an array that this object keeps, and return the address of the array."""
        array = (ctypes.c_int32 * len(values))(*values)
        self._kept_alive.append(array)
        return ctypes.addressof(array)

    @classmethod
    def without_segments(cls, count: int) -> ProgramRows:
        """Return ``count`` rows that have no KV cache, for a program without attention."""
        rows = cls(count=count)
        rows.call.rows = count
        return rows

    def set_rope(self, number: int, table: Tensor | None, *, by_row: bool = False) -> None:
        """Set the :class:`RopeTable` tensor of self-attention (``number`` 0) or cross-attention (1).

        Entry ``i`` of ``table`` is for position ``i``, or with ``by_row`` for row ``i``.
        """
        if table is not None:
            self._kept_alive.append(table)
            self.call.rope[number], self.call.rope_by_row[number] = table.data_ptr(), int(by_row)

    def select_logits_rows(self, rows: Sequence[int] | range) -> int:
        """Set the indices of the rows whose logits are computed; return the number of these rows."""
        self.call.num_wanted = len(rows)
        if isinstance(rows, range) and rows.step == 1 and rows.stop <= _NUM_CONSECUTIVE:
            self.call.wanted = ctypes.addressof(_CONSECUTIVE) + 4 * rows.start
        else:
            self.call.wanted = self._int32_array(rows)
        return len(rows)
