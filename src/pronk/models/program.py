"""Programs for the kernels: the operations of a forward pass as a list, and the rows they run on.

Each module of the model describes itself once (``module.compile(program, index)``). A forward pass is then one call
into the library. With ``x`` the residual stream and ``A``, ``B`` intermediate activations, a layer is ::

    qkv     rotate(norm(x) W_qkv)      stores keys and values in the cache; one operation per weight matrix
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
from pronk.kernels.weights import Packed
from pronk.kv_cache.blocks import BlockTable
from pronk.kv_cache.paged import PagedCache
from pronk.speculation.tree import TokenTree

__all__ = ["Program", "ProgramRows"]

_EMBED, _LINEAR, _QKV, _ATTEND, _STORE, _NORM = range(6)
_STREAM, _A, _B, _LOGITS = range(4)
_ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}

# The array 0, 1, 2, …: the logits rows are nearly always consecutive, so their address points into this array.
_NUM_CONSECUTIVE = 1 << 14
_CONSECUTIVE = (ctypes.c_int32 * _NUM_CONSECUTIVE)(*range(_NUM_CONSECUTIVE))


class Program:
    """Operations, collected from the modules of a model once and run any number of times.

    ``hidden`` is the width of the residual stream, ``dtype`` its type: float32 or bfloat16. Cross-attention reads the
    model and cache ``cross_model``: its layer ``cross_layers[i]`` for layer ``i``.
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
        self._kept_alive: list[object] = []  # owns the memory that the operations point to
        self._compiled: Any = None

    def embed(self, decoder: Any) -> None:
        """Start the stream with the rows of a decoder's embedding, plus learned positions."""
        op = self._add(_EMBED)
        op.positions = self._keep_alive(decoder.positions)
        if decoder.table is not None:
            self._weights(op, decoder.table)
        else:
            op.table = self._keep_alive(decoder.embedding)
        op.table_type = TYPES[decoder.embedding.dtype]

    def attention(self, layer: Any, index: int, *, partial: bool = False) -> None:
        """Add self-attention of a decoder layer and its residual.

        With ``partial`` (tensor parallelism) the output, a sum over this process's heads, goes to the logits buffer.
        """
        c = layer.config
        for op in self._project(layer.qkv, layer.attention_norm, c, index, rope=1 if c.rope else 0):
            if layer.q_norm is not None:
                op.q_norm, op.k_norm = (
                    self._keep_alive(layer.q_norm.weight.float()),
                    self._keep_alive(layer.k_norm.weight.float()),
                )
        self._attend(c, self.cache, index)
        self.linear(layer.out, source="A", to="logits" if partial else "stream", residual=not partial)

    def cross(self, layer: Any, index: int) -> None:
        """Add cross-attention into the cache of ``cross_model`` and its residual; used by ``Glide``."""
        assert self.cross_model is not None
        target, cache = self.cross_model
        self._project(layer.cross_query, layer.cross_norm, target, None, rope=2 if target.rope else 0)
        self._attend(target, cache, self.cross_layers[index], cross=True)
        self.linear(layer.cross_out, source="A", residual=True)

    def mlp(self, layer: Any, *, partial: bool = False) -> None:
        """Add the MLP of a decoder layer; ``partial`` as in :meth:`attention`."""
        self.linear(layer.up, norm=layer.mlp_norm, activation=layer.config.activation, to="B")
        self.linear(layer.down, source="B", to="logits" if partial else "stream", residual=not partial)

    def linear(
        self,
        linear: nn.Module | Packed,
        *,
        norm: nn.Module | None = None,
        activation: str | None = None,
        source: str = "stream",
        to: str = "stream",
        residual: bool = False,
        only_logits_rows: bool = False,
    ) -> None:
        """Add ``to = activation(norm(source) Wᵀ + b)``, or ``to += …`` with ``residual``.

        With ``only_logits_rows`` the operation runs only on the rows of :meth:`ProgramRows.select_logits_rows`.
        """
        op = self._add(_LINEAR)
        buffers = {"stream": _STREAM, "A": _A, "B": _B, "logits": _LOGITS}
        op.input, op.output, op.residual, op.wanted = buffers[source], buffers[to], int(residual), int(only_logits_rows)
        op.activation = _ACTIVATIONS[activation]
        self._weights(op, linear)
        if norm is not None:
            self._norm(op, norm)

    def norm(self, norm: nn.Module) -> None:
        """Add a normalization of the stream."""
        self._norm(self._add(_NORM), norm)

    def store_hidden(self, layer: int) -> None:
        """Store the stream in the cache as the hidden state after ``layer``."""
        assert self.cache is not None
        self._add(_STORE).keys = self._keep_alive(self.cache.hidden[layer])

    def collect_hidden(self, index: int) -> None:
        """Copy the stream to index ``index`` of ``collected``; see :meth:`run`."""
        self._add(_STORE).collected = index + 1

    def run(
        self, rows: ProgramRows, stream: Tensor, logits: Tensor | None = None, collected: Tensor | None = None
    ) -> None:
        """Run the program on ``rows``.

        ``stream`` ``[rows, hidden]`` is contiguous and changed in place. ``logits`` is float32
        ``[logits rows or rows, outputs]``, and ``collected`` is ``[layers, rows, hidden]``.
        """
        self.kernels.run(self._ready(rows, stream, logits, collected), len(self._ops), rows.call)

    def draft_chain(self, rows: ProgramRows, stream: Tensor, logits: Tensor, chain: CDraftChain) -> int:
        """Run on one request's ``rows``, then on one draft token after the other.

        ``logits`` float32 ``[1, vocab]`` receives those of the last forward pass; see :meth:`Kernels.draft_chain`.
        """
        return self.kernels.draft_chain(self._ready(rows, stream, logits, None), len(self._ops), rows.call, chain)

    def _ready(self, rows: ProgramRows, stream: Tensor, logits: Tensor | None, collected: Tensor | None) -> Any:
        """Set the buffers of the call and return the compiled operations."""
        if self._compiled is None:
            self._compiled = (COp * len(self._ops))(*self._ops)
        call = rows.call
        call.type, call.hidden, call.isa = TYPES[self.dtype], self.hidden, self.kernels.isa
        call.threads = num_threads()
        call.stream = stream.data_ptr()
        call.logits = None if logits is None else logits.data_ptr()
        call.collected = None if collected is None else collected.data_ptr()
        return self._compiled

    def _add(self, kind: int) -> COp:
        op = COp(kind=kind)
        if self.cache is not None:
            op.block_size, op.slots = self.cache.block_size, self.cache.num_slots
        self._ops.append(op)
        return op

    def _project(self, linear: Any, norm: nn.Module, c: ModelConfig, index: int | None, *, rope: int) -> list[COp]:
        """Add one operation per weight matrix of the heads; without ``index`` the heads are queries only."""
        ops, heads = [], 0
        for part in linear.parts:
            op = self._add(_QKV)
            self._weights(op, part)
            self._norm(op, norm)
            op.heads, op.head_dim, op.first_head, op.rope = c.num_heads, c.head_dim, heads, rope
            if index is not None:
                assert self.cache is not None
                op.kv_heads = c.num_kv_heads
                self._pools(op, self.cache, index)
            heads += part.out_features // c.head_dim
            ops.append(op)
        assert heads == c.num_heads + (0 if index is None else 2 * c.num_kv_heads), "expected as many outputs as heads"
        return ops

    def _attend(self, c: ModelConfig, cache: PagedCache | None, layer: int, *, cross: bool = False) -> None:
        assert cache is not None
        op = self._add(_ATTEND)
        op.heads, op.kv_heads, op.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        op.window = c.windows[layer] or 0 if c.windows else 0
        op.cross = int(cross)
        op.block_size, op.slots = cache.block_size, cache.num_slots
        self._pools(op, cache, layer)

    def _pools(self, op: COp, cache: PagedCache, layer: int) -> None:
        op.kv_type = TYPES[cache.kv_dtype]
        op.keys, op.values = self._keep_alive(cache.keys[layer]), self._keep_alive(cache.values[layer])

    def _weights(self, op: COp, linear: nn.Module | Packed) -> None:
        packed = linear if isinstance(linear, Packed) else getattr(linear, "packed", None)
        assert isinstance(packed, Packed), "expected weights packed for the kernels, found plain ones"
        self._kept_alive.append(packed)
        op.w = ctypes.pointer(packed.struct)

    def _norm(self, op: COp, norm: Any) -> None:
        op.norm, op.eps = (2 if isinstance(norm, nn.LayerNorm) else 1), norm.eps
        op.norm_weight = self._keep_alive(norm.weight.detach().float())
        bias = getattr(norm, "bias", None)
        op.norm_bias = self._keep_alive(None if bias is None else bias.detach().float())

    def _keep_alive(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.detach().contiguous()
        self._kept_alive.append(tensor)
        return tensor.data_ptr()


@dataclass
class ProgramRows:
    """The rows of a forward pass in the form of the kernels, request after request.

    ``call`` is a C structure; this object owns the memory that its pointers refer to.
    """

    call: CForward = field(default_factory=CForward)
    count: int = 0
    _kept_alive: list[object] = field(default_factory=list)

    def add(
        self,
        segments: Sequence[tuple[BlockTable, TokenTree, int]],
        tokens: Sequence[int] | None = None,
        cross_block_tables: Sequence[BlockTable] | None = None,
    ) -> ProgramRows:
        """Add one draft tree per request: block table, tree and number of leading nodes already computed.

        ``tokens`` holds the ids of all rows, for programs that begin with an embedding. ``cross_block_tables``
        holds the block table that each request reads in cross-attention.
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
        array = (ctypes.c_int32 * len(values))(*values)
        self._kept_alive.append(array)
        return ctypes.addressof(array)

    @classmethod
    def independent(cls, count: int) -> ProgramRows:
        """Return ``count`` rows without attention to other rows."""
        rows = cls(count=count)
        rows.call.rows = count
        return rows

    def set_rope(self, number: int, table: Tensor | None, *, by_row: bool = False) -> None:
        """Set rotations 0 (self-attention) or 1 (cross-attention): float32 ``[lines, 2, head_dim / 2]``."""
        if table is not None:
            self._kept_alive.append(table)
            self.call.rope[number], self.call.rope_by_row[number] = table.data_ptr(), int(by_row)

    def select_logits_rows(self, rows: Sequence[int] | range) -> int:
        """Select the rows whose logits are computed; return their number."""
        self.call.num_wanted = len(rows)
        if isinstance(rows, range) and rows.step == 1 and rows.stop <= _NUM_CONSECUTIVE:
            self.call.wanted = ctypes.addressof(_CONSECUTIVE) + 4 * rows.start
        else:
            self.call.wanted = self._int32_array(rows)
        return len(rows)
