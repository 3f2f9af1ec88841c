"""Programs for the kernels: what a pass computes, as a list of operations, and the rows it computes it for.

A module of the model describes itself once, layer by layer (``module.compile(program, index)``); each pass is then one
call into the library. With ``x`` the stream of rows and ``A``, ``B`` activations between operations, a layer is ::

    qkv     rotate(norm(x) W_qkv)      queries aside, keys and values into the cache; one for each form of weights
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

# 0, 1, 2, …: rows that are wanted nearly always follow each other.
_COUNTED = 1 << 14
_COUNTING = (ctypes.c_int32 * _COUNTED)(*range(_COUNTED))


class Program:
    """Operations, collected by the modules that describe themselves, then run any number of times.

    Attributes:
        kernels: who runs them.
        hidden: width of the stream.
        dtype: of the stream: float32 or bfloat16.
        cache: where self-attention's keys and values are.
        beside: the cache that cross-attention reads, and whose heads, or ``None``.
        cross_layers: for each layer the number (from 0) of the layer that it reads there.
    """

    def __init__(
        self,
        kernels: Kernels,
        hidden: int,
        dtype: torch.dtype,
        cache: PagedCache | None = None,
        beside: tuple[ModelConfig, PagedCache] | None = None,
        cross_layers: Sequence[int] = (),
    ) -> None:
        self.kernels, self.hidden, self.dtype = kernels, hidden, dtype
        self.cache, self.beside, self.cross_layers = cache, beside, tuple(cross_layers)
        self._ops: list[COp] = []
        self._held: list[object] = []  # what the operations point to
        self._compiled: Any = None

    def embed(self, decoder: Any) -> None:
        """The stream begins as rows of a :class:`~pronk.models.decoder.Decoder`'s embedding, plus learned positions."""
        op = self._add(_EMBED)
        op.positions = self._hold(decoder.positions)
        if decoder.table is not None:
            self._weights(op, decoder.table)
        else:
            op.table = self._hold(decoder.embedding)
        op.table_type = TYPES[decoder.embedding.dtype]

    def attention(self, layer: Any, index: int, *, partial: bool = False) -> None:
        """Self-attention of a :class:`~pronk.models.decoder.Layer` and its residual.

        Where it is ``partial``, others have other heads: what is to be added to the stream goes to the logits.
        """
        c = layer.config
        for op in self._project(layer.qkv, layer.attention_norm, c, index, rope=1 if c.rope else 0):
            if layer.q_norm is not None:
                op.q_norm, op.k_norm = self._hold(layer.q_norm.weight.float()), self._hold(layer.k_norm.weight.float())
        self._attend(c, self.cache, index)
        self.linear(layer.out, source="A", to="logits" if partial else "stream", residual=not partial)

    def cross(self, layer: Any, index: int) -> None:
        """Cross-attention into the cache beside, and its residual; see ``Glide``."""
        assert self.beside is not None
        target, cache = self.beside
        self._project(layer.cross_query, layer.cross_norm, target, None, rope=2 if target.rope else 0)
        self._attend(target, cache, self.cross_layers[index], cross=True)
        self.linear(layer.cross_out, source="A", residual=True)

    def mlp(self, layer: Any, *, partial: bool = False) -> None:
        """The second half of a :class:`~pronk.models.decoder.Layer`; see :meth:`attention`."""
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
        wanted: bool = False,
    ) -> None:
        """``to = activation(norm(source) Wᵀ + b)``, or ``to + …`` with ``residual``; ``wanted``: for some rows only."""
        op = self._add(_LINEAR)
        places = {"stream": _STREAM, "A": _A, "B": _B, "logits": _LOGITS}
        op.input, op.output, op.residual, op.wanted = places[source], places[to], int(residual), int(wanted)
        op.activation = _ACTIVATIONS[activation]
        self._weights(op, linear)
        if norm is not None:
            self._norm(op, norm)

    def norm(self, norm: nn.Module) -> None:
        """Normalize the stream."""
        self._norm(self._add(_NORM), norm)

    def keep(self, layer: int) -> None:
        """Store the stream where the cache keeps the output of ``layer``."""
        assert self.cache is not None
        self._add(_STORE).keys = self._hold(self.cache.hidden[layer])

    def collect(self, place: int) -> None:
        """Copy the stream to number ``place`` of what the pass returns."""
        self._add(_STORE).collected = place + 1

    def run(
        self, rows: ProgramRows, stream: Tensor, logits: Tensor | None = None, collected: Tensor | None = None
    ) -> None:
        """Execute over ``rows``.

        Args:
            rows: of the pass.
            stream: ``[rows, hidden]`` contiguous, changed in place.
            logits: float32 ``[wanted or rows, outputs]`` for what goes to "logits".
            collected: ``[layers, rows, hidden]``.
        """
        self.kernels.run(self._ready(rows, stream, logits, collected), len(self._ops), rows.call)

    def grow(self, rows: ProgramRows, stream: Tensor, logits: Tensor, growth: CDraftChain) -> int:
        """Execute over one request's ``rows``, and then for one token after the other; see :meth:`Kernels.grow`.

        ``logits`` float32 ``[1, vocab]`` are those of the last pass.
        """
        return self.kernels.grow(self._ready(rows, stream, logits, None), len(self._ops), rows.call, growth)

    def _ready(self, rows: ProgramRows, stream: Tensor, logits: Tensor | None, collected: Tensor | None) -> Any:
        """The operations, after the pass was told where its numbers go."""
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
        """An operation for each matrix that the heads lie in; without an ``index`` there are queries alone."""
        made, heads = [], 0
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
            made.append(op)
        assert heads == c.num_heads + (0 if index is None else 2 * c.num_kv_heads), "expected a place for every head"
        return made

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
        op.keys, op.values = self._hold(cache.keys[layer]), self._hold(cache.values[layer])

    def _weights(self, op: COp, linear: nn.Module | Packed) -> None:
        packed = linear if isinstance(linear, Packed) else getattr(linear, "packed", None)
        assert isinstance(packed, Packed), "expected weights packed for the kernels, found others"
        self._held.append(packed)
        op.w = ctypes.pointer(packed.struct)

    def _norm(self, op: COp, norm: Any) -> None:
        op.norm, op.eps = (2 if isinstance(norm, nn.LayerNorm) else 1), norm.eps
        op.norm_weight = self._hold(norm.weight.detach().float())
        bias = getattr(norm, "bias", None)
        op.norm_bias = self._hold(None if bias is None else bias.detach().float())

    def _hold(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.detach().contiguous()
        self._held.append(tensor)
        return tensor.data_ptr()


@dataclass
class ProgramRows:
    """The rows of a pass, as the kernels are told of them: each request's, one after the other.

    Attributes:
        call: the structure; what it points to is held here.
        count: number of rows.
    """

    call: CForward = field(default_factory=CForward)
    count: int = 0
    _held: list[object] = field(default_factory=list)

    def add(
        self,
        segments: Sequence[tuple[BlockTable, TokenTree, int]],
        tokens: Sequence[int] | None = None,
        beside: Sequence[BlockTable] | None = None,
    ) -> ProgramRows:
        """Take in trees below the texts that tables hold, of which the first nodes may have been computed.

        Args:
            segments: table, tree and number of computed nodes of each request.
            tokens: of all rows, for programs that begin with an embedding.
            beside: the tables that cross-attention looks at.
        """
        made = (CSegment * len(segments))()
        for struct, (table, tree, computed) in zip(made, segments, strict=True):
            self._place(struct, table)
            struct.nodes, struct.computed = len(tree), computed
            if tree.main_chain < len(tree):
                struct.parents = self._numbers(tree.parents)
            self.count += len(tree) - computed
        self.call.segment, self.call.segments, self.call.rows = made, len(segments), self.count
        if tokens is not None:
            self.call.tokens = self._numbers(tokens)
        if beside is not None:
            others = (CSegment * len(beside))()
            for struct, table in zip(others, beside, strict=True):
                self._place(struct, table)
            self.call.cross_segment = others
        return self

    def _place(self, struct: CSegment, table: BlockTable) -> None:
        numbers = table.numbers
        self._held.append(numbers)
        struct.blocks, struct.num_blocks = ctypes.addressof(numbers), len(numbers)
        struct.released, struct.length = table.released, table.length

    def _numbers(self, values: Sequence[int]) -> int:
        """The address of int32 numbers."""
        array = (ctypes.c_int32 * len(values))(*values)
        self._held.append(array)
        return ctypes.addressof(array)

    @classmethod
    def loose(cls, count: int) -> ProgramRows:
        """``count`` rows that see no others."""
        made = cls(count=count)
        made.call.rows = count
        return made

    def rotate(self, number: int, table: Tensor | None, *, by_row: bool = False) -> None:
        """Give rotations number 0 (self-attention) or 1 (cross-attention): float32 ``[lines, 2, head_dim / 2]``."""
        if table is not None:
            self._held.append(table)
            self.call.rope[number], self.call.rope_by_row[number] = table.data_ptr(), int(by_row)

    def want(self, rows: Sequence[int] | range) -> int:
        """Say which rows' logits are wanted; returns how many."""
        self.call.num_wanted = len(rows)
        if isinstance(rows, range) and rows.step == 1 and rows.stop <= _COUNTED:
            self.call.wanted = ctypes.addressof(_COUNTING) + 4 * rows.start
        else:
            self.call.wanted = self._numbers(rows)
        return len(rows)
