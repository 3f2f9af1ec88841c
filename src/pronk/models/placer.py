"""Builds embeddings, norms and linear layers of a decoder from a checkpoint, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pronk.base.arrays import FLOAT32, UINT8, Array, DType, mapped_zeros, split_rows
from pronk.base.errors import locate_error, refuse
from pronk.checkpoint.formats.matrix import QuantizedMatrix, fusible_runs, stack_matrices
from pronk.checkpoint.gguf.blocks import PACKED_BLOCKS, BlockMatrix
from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint
from pronk.kernels.exact_math import exp
from pronk.models.decoder import Decoder
from pronk.models.inventory import Inventory
from pronk.models.linear import (
    AnyWeight,
    Experts,
    Linear,
    LinearFactory,
    Norm,
    StackedLinear,
    WeightLayout,
)
from pronk.models.split import TensorSplit
from pronk.models.tensor_plan import CheckpointTensor, DecoderPart

_Matrix = Array | QuantizedMatrix  # a weight as it is read from a checkpoint
_OUTPUTS_PER_SLICE = 1024  # number of rows of a matrix that are dequantized at a time


class WeightPlacer:
    """Builds the parts of a decoder, one by one, from the tensors of a checkpoint.

    Args:
        decoder: decoder whose attributes are set.
        inventory: reader of the checkpoint's tensors.
        dtype: data type to which unquantized weights are converted.
        linear: function that builds a linear layer from a weight.
        split: shard of this process in tensor parallelism, ``None`` for the whole model.
    """

    def __init__(
        self,
        decoder: Decoder,
        inventory: Inventory,
        dtype: DType,
        linear: LinearFactory,
        split: TensorSplit | None,
    ) -> None:
        self.decoder = decoder
        self.inventory = inventory
        self.split = split
        self.dtype = dtype
        self.linear = linear
        self._num_unfused = 0

    @property
    def notes(self) -> list[str]:
        """List of one warning, if stacked matrices had to be dequantized; else empty."""
        if not self._num_unfused:
            return []
        found = f"{self._num_unfused} stacked matrices are dequantized to {self.dtype}"
        return [f"{found}: their parts have different formats"]

    def place(self, part: DecoderPart) -> None:
        """Load one part of the decoder, such as a norm, and set the decoder's attribute."""
        path, _, name = part.target.rpartition(".")
        parent = self.decoder.get(path)
        if part.kind == "table":
            setattr(parent, name, self._table(part.weight[0]))
        elif part.kind == "mapped":
            setattr(parent, name, self._mapped_table(part.weight[0]))
        elif not part.weight and self.decoder.table is not None:
            # the LM head is tied to a quantized embedding, so it is the same linear layer
            setattr(parent, name, self.decoder.table)
        elif isinstance(parent, Experts):
            self._set_expert(parent, int(name), part)
        elif part.kind == "vector":
            setattr(parent, name, self._vector(part))
        elif part.kind == "linear":
            is_head = parent is self.decoder
            layout = WeightLayout(head=True) if is_head else parent.layout(name)
            setattr(parent, name, self._linear(part, layout))
        else:
            setattr(parent, name, self._norm(part))
        if part.target == "head":
            self.decoder.head.scale = self.decoder.config.logits_scale
            self.decoder.head.cap = self.decoder.config.logits_cap
        self.inventory.checkpoint.release()

    def _set_expert(self, experts: Experts, number: int, part: DecoderPart) -> None:
        linear = self._linear(part, experts.layout)
        assert isinstance(linear, Linear), "expected one matrix per expert, found several"
        tensor = f"{self.inventory.checkpoint.folder}: tensor {part.weight[0].name}"
        with locate_error(tensor, ValueError, remedy="; quantize all alike"):
            experts.set(number, linear)

    def _norm(self, part: DecoderPart) -> Norm:
        """Load a norm; its numbers are rounded to ``dtype``, except for those of GGUF files.

        GGUF files store ``1 + weight`` for Gemma, in float32; rounding would lose digits of the
        weight.
        """
        arrays = [self.inventory.tensor(source) for source in part.tensors]
        if not isinstance(self.inventory.checkpoint, GgufCheckpoint):
            arrays = [self._stack([array]) for array in arrays]
        if part.offset:
            arrays[0] = arrays[0].astype(np.float32) + np.float32(part.offset)
        if part.factor != 1.0:
            arrays[0] = arrays[0].astype(np.float32) * np.float32(part.factor)
        norm = Norm.of(self.decoder.config, *arrays)
        return norm if part.eps is None else replace(norm, eps=part.eps)

    def _vector(self, part: DecoderPart) -> Array:
        """Load an array of few numbers, in float32."""
        arrays = [self.inventory.tensor(source).astype(FLOAT32) for source in part.weight]
        values = np.concatenate(arrays)
        return -exp(values).astype(FLOAT32) if part.log_decay else values

    def _table(self, source: CheckpointTensor) -> Array:
        """Load an embedding ``[vocab, hidden]``.

        If its rows stay quantized, set ``decoder.table`` to a linear layer with them, and return an
        array of 0 rows.
        """
        if not self.inventory.is_quantized(source):
            return self.inventory.tensor(source)
        blocks = self._blocks([source], WeightLayout(head=True))
        if blocks is None:
            stored = self._read(source, mapped_zeros(source.shape, UINT8))
        weight = stored if blocks is None else blocks[0]
        self.decoder.table = self._pack(weight, None, WeightLayout(head=True))
        return np.empty((0, source.shape[1]), self.dtype)

    def _mapped_table(self, source: CheckpointTensor) -> Array | BlockMatrix:
        """Return a table of the mapped file, which is never copied to memory.

        Raises:
            CheckpointError: the table has a type of GGUF blocks that the kernels cannot read.
        """
        if not self.inventory.is_quantized(source):
            return self.inventory.tensor(source)
        blocks = self.inventory.blocks(source)
        if blocks is None:
            checkpoint = self.inventory.checkpoint
            expected = ", ".join(sorted(PACKED_BLOCKS))
            found = "found another type; use a Q4_0, Q4_K_M or Q8_0 file of this model"
            refuse(checkpoint.folder, f"tensor {source.name}: expected {expected}, {found}")
        return blocks

    def _linear(self, part: DecoderPart, layout: WeightLayout) -> Linear | StackedLinear:
        weights: Sequence[AnyWeight]
        if part.transposed_heads:
            weights = [self._transpose_heads(part)]
        else:
            weights = self._blocks(part.weight, layout) or self._weights(part, layout)
        bias = self._bias(part, layout)
        if part.interleaved:
            weights = [_separate_halves(weight) for weight in weights]
            bias = None if bias is None else _separate_halves(bias)
        if len(weights) == 1:
            return self._pack(weights[0], bias, layout)
        rows = [weight.shape[0] for weight in weights]
        biases = [None] * len(rows) if bias is None else split_rows(bias, rows)
        return StackedLinear(
            [self._pack(*pair, layout) for pair in zip(weights, biases, strict=True)]
        )

    def _transpose_heads(self, part: DecoderPart) -> Array:
        """Return the matrices of the heads of a tensor, transposed one by one and stacked.

        A quantized tensor is dequantized: its groups are along the outputs of the result.
        """
        source = part.weight[0]
        stored = self._read(source, mapped_zeros(source.part_shape, UINT8))
        plain = self._stack([stored])
        heads = plain.reshape(part.transposed_heads, -1, plain.shape[1])
        transposed = np.ascontiguousarray(heads.swapaxes(1, 2))
        return transposed.reshape(-1, transposed.shape[-1])

    def _pack(self, weight: AnyWeight, bias: Array | None, layout: WeightLayout) -> Linear:
        """Build a linear layer.

        Raise a CheckpointError if a GGUF file's blocks of numbers are damaged.
        """
        if not isinstance(weight, BlockMatrix):
            return self.linear(weight, bias, layout)
        names = " or ".join(dict.fromkeys(rows.name for rows in weight.parts))
        tensor = f"{self.inventory.checkpoint.folder}: tensor {names}"
        with locate_error(tensor, ValueError, remedy="; download the file again"):
            return self.linear(weight, bias, layout)

    def _blocks(
        self, sources: Sequence[CheckpointTensor], layout: WeightLayout
    ) -> list[BlockMatrix] | None:
        """Return tensors as blocks of a GGUF file, neighbours of one quantization type stacked.

        ``None`` if that is impossible.

        The kernels take one matrix of one type, except in layers that may have several.
        """
        if self.split is not None:
            return None
        matrices = [self.inventory.blocks(source) for source in sources]
        stacked = list[BlockMatrix]()
        for matrix in matrices:
            if matrix is None:
                return None
            if stacked and stacked[-1].type == matrix.type:
                stacked[-1] = replace(stacked[-1], parts=stacked[-1].parts + matrix.parts)
            else:
                stacked.append(matrix)
        return stacked if len(stacked) == 1 or layout.several else None

    def _weights(self, part: DecoderPart, layout: WeightLayout) -> list[_Matrix]:
        """Return a layer's weight: one matrix stacked of all its tensors, or several matrices.

        Several matrices are for qkv layers whose tensors have different quantization formats.
        """
        if not any(self.inventory.is_quantized(source) for source in part.weight):
            return [self._plain_weight(part, layout)]
        sizes = [source.part_shape for source in part.weight]
        shapes = [size[::-1] if part.transposed else size for size in sizes]
        rows = [shape[0] for shape in shapes]
        inputs = shapes[0][1]
        # All codes (quantized integers) are read into one allocation, so that stacking needs no
        # copy.
        codes = mapped_zeros((sum(rows), inputs), UINT8)
        weights = list[_Matrix]()
        for source, codes_of_source in zip(part.weight, split_rows(codes, rows), strict=True):
            weights.append(self._read(source, codes_of_source))
        if self.split is not None:
            weights, codes = self._shard_codes(part, weights)
            rows = [weight.shape[0] for weight in weights]
        runs = [slice(0, len(weights))]
        if layout.several:
            runs = fusible_runs(weights)
        fused = list[_Matrix]()
        for run in runs:
            codes_of_run = codes[sum(rows[: run.start]) : sum(rows[: run.stop])]
            fused.append(self._fuse(weights[run], codes_of_run, transposed=part.transposed))
        return fused

    def _plain_weight(self, part: DecoderPart, layout: WeightLayout) -> Array:
        """Return a layer's weight ``[outputs, inputs]``, stacked of unquantized tensors.

        A tied LM head has no tensors of its own; its weight is the embedding.
        """
        weights = [self.inventory.tensor(source) for source in part.weight]
        if not weights:
            weights = [self.decoder.embedding]
        shards = [self._shard(part, number, weight) for number, weight in enumerate(weights)]
        dtype = FLOAT32 if layout.exact else None
        return self._stack(shards, transposed=part.transposed, dtype=dtype)

    def _fuse(self, weights: Sequence[_Matrix], codes: Array, *, transposed: bool) -> _Matrix:
        """Stack weights along the outputs, whose quantized integers ``codes`` are already stacked.

        The result is quantized if all weights are quantized and have the same order of inputs.
        Otherwise it is dequantized.
        """
        quantized = [weight for weight in weights if isinstance(weight, QuantizedMatrix)]
        if quantized:
            stacked = stack_matrices(quantized, codes) if len(quantized) == len(weights) else None
            if stacked is not None:
                return stacked
            self._num_unfused += 1
        return self._stack(weights, transposed=transposed)

    def _read(self, source: CheckpointTensor, codes: Array) -> _Matrix:
        if not self.inventory.is_quantized(source):
            return self.inventory.tensor(source)
        weight = self.inventory.weight(source, codes)
        self.inventory.checkpoint.release()
        return weight

    def _shard(self, part: DecoderPart, number: int, weight: _Matrix) -> _Matrix:
        if self.split is None:
            return weight
        if part.transposed and isinstance(weight, np.ndarray):
            return self.split.shard(part, number, weight.T).T
        return self.split.shard(part, number, weight)

    def _shard_codes(
        self, part: DecoderPart, weights: Sequence[_Matrix]
    ) -> tuple[list[_Matrix], Array]:
        """Return this process's shards of the weights, and a new array with all their codes.

        Codes are the integers of quantized weights.
        """
        shards = [self._shard(part, number, weight) for number, weight in enumerate(weights)]
        inputs = next(
            (weight.shape[1] for weight in shards if isinstance(weight, QuantizedMatrix)), 0
        )
        num_rows = [weight.shape[0] for weight in shards]
        codes = mapped_zeros((sum(num_rows), inputs), UINT8)
        for number, rows in enumerate(split_rows(codes, num_rows)):
            weight = shards[number]
            if isinstance(weight, QuantizedMatrix):
                rows[:] = weight.codes
                shards[number] = replace(weight, codes=rows)
        return shards, codes

    def _bias(self, part: DecoderPart, layout: WeightLayout) -> Array | None:
        biases = [self.inventory.tensor(source) for source in part.bias]
        if self.split is not None:
            shards = [
                self.split.shard_bias(part, number, bias) for number, bias in enumerate(biases)
            ]
            biases = [shard for shard in shards if shard is not None]
        return self._stack(biases, dtype=FLOAT32 if layout.exact else None) if biases else None

    def _stack(
        self, weights: Sequence[_Matrix], *, transposed: bool = False, dtype: DType | None = None
    ) -> Array:
        """Stack weights along the outputs, by default in ``self.dtype``.

        A single array that already has the dtype is returned without a copy.
        """
        single = weights[0] if len(weights) == 1 and not transposed else None
        dtype = dtype or self.dtype
        if isinstance(single, np.ndarray) and single.dtype == dtype:
            return single
        # Quantized matrices are always ``[outputs, inputs]``, even if the checkpoint stores its
        # other matrices as ``[inputs, outputs]``.
        weights = [
            weight.T if transposed and isinstance(weight, np.ndarray) else weight
            for weight in weights
        ]
        rows = [weight.shape[0] for weight in weights]
        # Each weight is converted directly into its rows of one allocation, without temporary
        # copies.
        stacked = mapped_zeros((sum(rows), *weights[0].shape[1:]), dtype)
        for target, weight in zip(split_rows(stacked, rows), weights, strict=True):
            _fill(target, weight)
            self.inventory.checkpoint.release()
        return stacked


def _separate_halves(weight: Any) -> Any:
    """Return outputs in the order ``gate 0, gate 1, …, up 0, up 1, …``.

    The outputs of ``weight`` are in the order ``gate 0, up 0, gate 1, up 1, …``.
    """
    if isinstance(weight, QuantizedMatrix):
        return replace(
            weight, codes=_separate_halves(weight.codes), scale=_separate_halves(weight.scale)
        )
    return np.concatenate((weight[0::2], weight[1::2]))


def _fill(target: Array, weight: _Matrix) -> None:
    """Copy a weight into the rows of ``target``.

    A quantized weight is dequantized slice by slice, to save peak memory.
    """
    if isinstance(weight, np.ndarray):
        # A weight too large for float16 becomes infinity without a warning; then the logits are not
        # finite, and sampling raises an error.
        with np.errstate(over="ignore"):
            target[:] = weight
        return
    for start in range(0, len(target), _OUTPUTS_PER_SLICE):
        rows = weight.slice_outputs(start, min(start + _OUTPUTS_PER_SLICE, len(target)))
        target[start : start + _OUTPUTS_PER_SLICE] = rows.dequantize()
