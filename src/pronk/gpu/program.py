"""Operations of drafters' modules on a device.

A module, such as an EAGLE head, describes what it computes by the methods of
:class:`~pronk.backends.Program`. :class:`DeviceProgram` runs these operations at once on tensors,
in place of compiling them for the CPU. Their launches are captured with those of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pronk.backends import Decoder, HeadNorms, KVSource, LinearOutput, ModelConfig, Norm, Program
from pronk.base.arrays import Array
from pronk.base.convert import to_tensor, torch_dtype
from pronk.gpu.attention import AttentionOptions, attend
from pronk.gpu.gemm import multiply
from pronk.gpu.layout import RowLayout
from pronk.gpu.pool import GpuPool
from pronk.gpu.rotations import LayerRotations
from pronk.gpu.rows import Heads, RowNorm, gate, normalize, rotate
from pronk.gpu.weights import GpuLinear


class Uploads:
    """Copies of a module's arrays on a device, each made once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies = dict[int, tuple[object, Tensor]]()

    def add(self, array: Array, copy: Tensor) -> None:
        """Use a tensor that exists already as the copy of an array."""
        self._copies[id(array)] = (array, copy)  # the array is kept, so that its id stays its own

    def tensor(self, array: Array, dtype: torch.dtype) -> Tensor:
        """Return the copy of an array."""
        if id(array) not in self._copies:
            copy = to_tensor(np.ascontiguousarray(array)).to(self.device, dtype)
            self.add(array, copy)
        _, copy = self._copies[id(array)]
        return copy

    def norm(self, norm: Norm) -> RowNorm:
        """Return a norm on the device."""
        return RowNorm(self.tensor(norm.weight, torch.float32), norm.eps)


class DeviceProgram(Program):
    """Runs the operations of a module on the rows of one pass.

    Attributes:
        stream: the residual stream, ``[rows, hidden]``.
        logits: float32 ``[len(logits_rows), vocab]``, after an operation that computes them.
    """

    def __init__(
        self,
        uploads: Uploads,
        pool: GpuPool,
        layout: RowLayout,
        stream: Tensor,
        *,
        rotations: LayerRotations | None = None,
        collected: Mapping[int, Tensor] | None = None,
        logits_rows: Tensor | None = None,
        features: Mapping[Any, Tensor] | None = None,
    ) -> None:
        """Create a program.

        Args:
            uploads: copies of the module's arrays.
            pool: KV pool of the module.
            layout: the rows.
            stream: the stream before the operations.
            rotations: of the layers of the pool, for a module with attention.
            collected: tensors that operations read, by their number.
            logits_rows: int64 indices of the rows with logits.
            features: pools ``[1, slots, width]`` that operations may write.
        """
        super().__init__(pool.kernels, stream.shape[1], pool.dtype, pool)
        self.logits = torch.empty(0)
        self._uploads = uploads
        self._pool = pool
        self._layout = layout
        self._rotations = rotations
        self._collected = collected or {}
        self._logits_rows = logits_rows
        self._features = features or {}
        self._buffers = {"stream": stream}
        # parts of rows of the buffer ``A``, by their number
        self._parts = dict[int, Tensor]()
        self._queries = torch.empty(0)

    @property
    def stream(self) -> Tensor:
        return self._buffers["stream"]

    def embed(
        self,
        decoder: Decoder,
        *,
        norm: Norm | None = None,
        part: tuple[int, int] | None = None,
        zero_first: bool = False,
    ) -> None:
        dtype = torch_dtype(self.dtype)
        tokens = self._layout.tokens
        if isinstance(decoder.table, GpuLinear):
            rows = decoder.table.matrix.rows(tokens.long()).to(dtype)
        else:
            rows = self._uploads.tensor(decoder.embedding, dtype)[tokens]
        scale = float(np.asarray(decoder.config.embedding_scale).astype(self.dtype))
        rows = self._normed(rows * scale, norm)
        if zero_first:
            is_first = self._layout.positions[:, None] == 0
            rows = torch.where(is_first, torch.zeros_like(rows), rows)
        self._put(rows, "stream", part)

    def norm(
        self,
        norm: Norm | None,
        *,
        source: str | int = "stream",
        to: str = "stream",
        residual: bool = False,
        scale: float = 1.0,
        part: tuple[int, int] | None = None,
        width: int | None = None,
        feature: Any = None,
    ) -> None:
        del width  # that of the buffer
        x = self._collected[source] if isinstance(source, int) else self._buffers[source]
        result = self._normed(x, norm) * scale
        if feature is not None:
            self._features[feature][0, self._layout.slots] = result
            return
        self._put(self._buffers[to] + result if residual else result, to, part)

    def linear(
        self,
        linear: Any,
        *,
        norm: Norm | None = None,
        activation: str | None = None,
        source: str = "stream",
        to: str = "stream",
        residual: bool = False,
        only_logits_rows: bool = False,
        output: LinearOutput | None = None,
    ) -> None:
        output = output or LinearOutput(linear.scale, linear.cap or 0.0)
        x = self._buffers[source]
        if only_logits_rows:
            x = x[self._logits_rows]
        is_logits = to == "logits"
        result = multiply(
            self._normed(x, norm), linear.matrix, torch.float32 if is_logits else None
        )
        if activation is not None:
            result = gate(result, activation)
        if output.scale != 1.0:
            result = result * output.scale
        if output.cap:
            result = output.cap * torch.tanh(result / output.cap)
        if output.feature is not None:
            self._features[output.feature][0, self._layout.slots] = result
        elif is_logits:
            self.logits = result
        else:
            self._put(self._buffers[to] + result if residual else result, to, None)

    def project(
        self,
        linear: Any,
        norm: Norm | None,
        config: ModelConfig,
        kv: KVSource,
        head_norms: HeadNorms | None = None,
        *,
        only_queries: bool = False,
        source: str = "stream",
    ) -> None:
        assert not only_queries, "expected layers with keys of their own"
        assert self._rotations is not None, "expected rotations of a module with attention"
        x = self._normed(self._buffers[source], norm)
        parts = [multiply(x, part.matrix) for part in linear.parts]
        norms = None
        if head_norms is not None and head_norms.queries is not None:
            assert head_norms.keys is not None, "expected norms of queries and keys"
            norms = (self._uploads.norm(head_norms.queries), self._uploads.norm(head_norms.keys))
        keys, values = self._pool.layer(kv.layer)
        self._queries = rotate(
            parts[0] if len(parts) == 1 else torch.cat(parts, dim=1),
            Heads(config.num_heads, config.num_kv_heads, config.head_dim),
            self._rotations.of(kv.layer),
            norms,
            self._layout.positions,
            self._layout.slots,
            keys,
            values,
        )

    def attend(self, config: ModelConfig, kv: KVSource, *, sinks: Array | None = None) -> None:
        assert sinks is None, "expected attention without sinks"
        keys, values = self._pool.layer(kv.layer)
        window = self._pool.config.window_of(kv.layer)
        options = AttentionOptions(config.query_scale, config.attention_cap, window)
        self._buffers["A"] = attend(self._queries, keys, values, self._layout, options)

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        return x if norm is None else normalize(x, self._uploads.norm(norm))

    def _put(self, rows: Tensor, to: str, part: tuple[int, int] | None) -> None:
        """Write rows to a buffer, or to a part of the rows of ``A``."""
        if part is None:
            self._buffers[to] = rows
            return
        number, count = part
        self._parts[number] = rows
        if len(self._parts) == count:
            self._buffers["A"] = torch.cat([self._parts[index] for index in range(count)], dim=1)
            self._parts = {}
