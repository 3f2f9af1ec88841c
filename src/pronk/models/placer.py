"""Builds the modules of a decoder from the tensors of a checkpoint, one module at a time."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from pronk.errors import CheckpointError
from pronk.kernels.weights import mapped_zeros
from pronk.models.decoder import Decoder, Layer
from pronk.models.families import CheckpointTensor, DecoderPart
from pronk.models.inventory import Inventory
from pronk.models.linear import KernelLinear, Linear, LinearFactory, StackedLinear, WeightLayout
from pronk.models.split import TensorSplit
from pronk.quantization.formats.fuse import fusible_runs, stack_matrices
from pronk.quantization.formats.matrix import QuantizedMatrix
from pronk.quantization.gguf.blocks import BlockMatrix

__all__ = ["WeightPlacer"]

_MIN_MAPPED_BYTES = 1 << 20  # matrices of at least 1 MiB get a separate memory mapping
_OUTPUTS_PER_SLICE = 1024  # number of rows of a matrix that are dequantized at a time


class WeightPlacer:
    """Builds the modules of a decoder from checkpoint tensors; ``linear`` is a function for linear layers.

    With ``keep_quantized``, quantized weights stay quantized; otherwise they are dequantized to ``dtype``. ``split``
    selects the shard of this process in tensor parallelism.
    """

    def __init__(
        self,
        decoder: Decoder,
        inventory: Inventory,
        dtype: torch.dtype,
        device: torch.device,
        linear: LinearFactory,
        split: TensorSplit | None,
        *,
        keep_quantized: bool,
    ) -> None:
        self.decoder, self.inventory, self.keep_quantized, self.split = decoder, inventory, keep_quantized, split
        self.dtype, self.device, self.linear = dtype, device, linear
        self._num_unfused = 0

    @property
    def notes(self) -> list[str]:
        """List of one warning, if gated matrices had to be dequantized; else empty."""
        subject = f"{self._num_unfused} gated matrices whose halves order or quantize their inputs differently"
        return [f"{subject}, and are dequantized to {self.dtype}".replace("torch.", "")] if self._num_unfused else []

    def place(self, part: DecoderPart) -> None:
        """Load a part of the decoder, and set it in the decoder."""
        path, _, name = part.target.rpartition(".")
        parent = self.decoder.get_submodule(path)
        if part.kind == "table":
            setattr(parent, name, nn.Parameter(self._table(part.weight[0]), requires_grad=False))
        elif not part.weight and self.decoder.table is not None:  # an LM head tied to a quantized embedding
            setattr(parent, name, self.decoder.table)
        elif part.kind == "linear":
            layout = parent.layout(name) if isinstance(parent, Layer) else WeightLayout(head=True)
            setattr(parent, name, self._linear(part, layout))
        else:
            for key, sources in (("weight", part.weight), ("bias", part.bias)):
                vector = self._stack([self.inventory.tensor(source) for source in sources]) if sources else None
                if vector is not None:
                    setattr(parent.get_submodule(name), key, nn.Parameter(vector, requires_grad=False))
        self.inventory.checkpoint.release()

    def _table(self, source: CheckpointTensor) -> Tensor:
        """Load an embedding; if it stays quantized, set ``decoder.table`` and return an empty tensor."""
        if not self.inventory.is_quantized(source):
            table = self.inventory.tensor(source)
            return table if self.device.type == "cpu" else table.to(self.device, self.dtype)
        blocks = self._blocks([source], WeightLayout(head=True))
        if blocks is None:
            stored = self._read(source, mapped_zeros(source.shape, torch.uint8))
            if not self.keep_quantized:
                return self._stack([stored])
        packed = self._pack(stored if blocks is None else blocks[0], None, WeightLayout(head=True))
        assert isinstance(packed, KernelLinear)
        self.decoder.table = packed
        return torch.empty(0, source.shape[1], dtype=self.dtype)

    def _linear(self, part: DecoderPart, layout: WeightLayout) -> Linear:
        blocks = self._blocks(part.weight, layout)
        weights, bias = self._weights(part, layout) if blocks is None else blocks, self._bias(part)
        if len(weights) == 1:
            return self._pack(weights[0], bias, layout)
        rows = [weight.shape[0] for weight in weights]
        biases = [None] * len(rows) if bias is None else bias.split(rows)
        pairs = zip(weights, biases, strict=True)
        return StackedLinear([self._pack(weight, b, layout) for weight, b in pairs])

    def _pack(
        self,
        weight: Tensor | QuantizedMatrix | BlockMatrix,
        bias: Tensor | None,
        layout: WeightLayout,
    ) -> Linear:
        """Build a linear layer; raise a CheckpointError if blocks of a file are damaged."""
        if not isinstance(weight, BlockMatrix):
            return self.linear(weight, bias, layout)
        try:
            return self.linear(weight, bias, layout)
        except ValueError as error:
            names = " or ".join(rows.name for rows in weight.parts)
            msg = f"{self.inventory.checkpoint.folder}: tensor {names}: {error}; download the file again"
            raise CheckpointError(msg) from error

    def _blocks(self, sources: Sequence[CheckpointTensor], layout: WeightLayout) -> list[BlockMatrix] | None:
        """Return matrices in the blocks of a GGUF file, stacked by type; ``None`` if that is impossible.

        The kernels take one matrix of one type, except in qkv layers.
        """
        if not self.keep_quantized or self.split is not None:
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
        return stacked if len(stacked) == 1 or layout.unit is not None else None

    def _weights(self, part: DecoderPart, layout: WeightLayout) -> list[Tensor | QuantizedMatrix]:
        """Return a linear layer's weight: one stacked matrix, or several if their formats differ."""
        if not any(self.inventory.is_quantized(source) for source in part.weight):
            plain = [self.inventory.tensor(source) for source in part.weight] or [self.decoder.embedding.detach()]
            shards = [self._shard(part, number, weight) for number, weight in enumerate(plain)]
            return [self._stack(shards, transposed=part.transposed)]
        shapes = [source.shape[::-1] if part.transposed else source.shape for source in part.weight]
        rows, inputs = [shape[0] for shape in shapes], shapes[0][1]
        # All codes are read into one allocation, so that stacking needs no copy.
        codes = mapped_zeros((sum(rows), inputs), torch.uint8)
        weights = list(map(self._read, part.weight, codes.split(rows)))
        if self.split is not None:
            weights, codes = self._shard_codes(part, weights)
            rows = [weight.shape[0] for weight in weights]
        # In qkv layers (`unit` is set) the kernels accept several matrices, in all other layers only one.
        runs = fusible_runs(weights) if self.keep_quantized and layout.unit is not None else [slice(0, len(weights))]
        row_slices = [slice(sum(rows[: run.start]), sum(rows[: run.stop])) for run in runs]
        slices = zip(runs, row_slices, strict=True)
        return [self._fuse(weights[run], codes[rows_of_run], transposed=part.transposed) for run, rows_of_run in slices]

    def _fuse(
        self, weights: Sequence[Tensor | QuantizedMatrix], codes: Tensor, *, transposed: bool
    ) -> Tensor | QuantizedMatrix:
        """Stack weights into one matrix, quantized if all are quantized with the same order of inputs."""
        quantized = [weight for weight in weights if isinstance(weight, QuantizedMatrix)]
        if self.keep_quantized and quantized:
            stacked = stack_matrices(quantized, codes) if len(quantized) == len(weights) else None
            if stacked is not None:
                return stacked
            self._num_unfused += 1
        return self._stack(weights, transposed=transposed)

    def _read(self, source: CheckpointTensor, codes: Tensor) -> Tensor | QuantizedMatrix:
        if not self.inventory.is_quantized(source):
            return self.inventory.tensor(source)
        weight = self.inventory.weight(source, codes)
        self.inventory.checkpoint.release()
        return weight

    def _shard(self, part: DecoderPart, number: int, weight: Tensor) -> Tensor:
        if self.split is None:
            return weight
        if part.transposed:
            return self.split.shard(part, number, weight.t()).t()
        return self.split.shard(part, number, weight)

    def _shard_codes(
        self, part: DecoderPart, weights: Sequence[Tensor | QuantizedMatrix]
    ) -> tuple[list[Tensor | QuantizedMatrix], Tensor]:
        """Return this process's shards of the weights, and one tensor that holds the codes of these shards."""
        assert self.split is not None
        shards = list[Tensor | QuantizedMatrix]()
        for number, weight in enumerate(weights):
            if isinstance(weight, Tensor):
                shards.append(self._shard(part, number, weight))
            else:
                shards.append(self.split.shard(part, number, weight))
        inputs = next((weight.shape[1] for weight in shards if isinstance(weight, QuantizedMatrix)), 0)
        codes = mapped_zeros((sum(weight.shape[0] for weight in shards), inputs), torch.uint8)
        for number, rows in enumerate(codes.split([weight.shape[0] for weight in shards])):
            weight = shards[number]
            if isinstance(weight, QuantizedMatrix):
                shards[number] = replace(weight, codes=rows.copy_(weight.codes))
        return shards, codes

    def _bias(self, part: DecoderPart) -> Tensor | None:
        biases = [self.inventory.tensor(source) for source in part.bias]
        if self.split is not None:
            shards = [self.split.shard_bias(part, number, bias) for number, bias in enumerate(biases)]
            biases = [shard for shard in shards if shard is not None]
        return self._stack(biases) if biases else None

    def _stack(self, weights: Sequence[Tensor | QuantizedMatrix], *, transposed: bool = False) -> Tensor:
        """Stack weights along the outputs, in ``dtype``; a single tensor of this dtype is not copied."""
        single = weights[0] if len(weights) == 1 and not transposed else None
        if isinstance(single, Tensor) and (self.device.type != "cpu" or single.dtype == self.dtype):
            return single.to(self.device, self.dtype)
        # Quantized matrices are ``[outputs, inputs]`` even if the checkpoint's other matrices are transposed.
        weights = [weight.t() if transposed and isinstance(weight, Tensor) else weight for weight in weights]
        rows = [weight.shape[0] for weight in weights]
        # Each weight is converted directly into its rows of one allocation, without temporary copies.
        stacked = self._empty(sum(rows), *weights[0].shape[1:])
        for target, weight in zip(stacked.split(rows), weights, strict=True):
            _fill(target, weight)
            self.inventory.checkpoint.release()
        return stacked

    def _empty(self, *shape: int) -> Tensor:
        """Allocate a tensor; a large one on a CPU gets a separate memory mapping, to avoid heap fragmentation."""
        size = math.prod(shape) * self.dtype.itemsize
        if self.device.type != "cpu" or size < _MIN_MAPPED_BYTES:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        return torch.frombuffer(mmap.mmap(-1, size), dtype=self.dtype).view(shape)


def _fill(target: Tensor, weight: Tensor | QuantizedMatrix) -> None:
    """Copy a weight into ``target``; dequantize a quantized one slice by slice, to save peak memory."""
    if isinstance(weight, Tensor):
        target.copy_(weight)
        return
    for start in range(0, len(target), _OUTPUTS_PER_SLICE):
        rows = weight.slice_outputs(start, min(start + _OUTPUTS_PER_SLICE, len(target)))
        target[start : start + _OUTPUTS_PER_SLICE].copy_(rows.dequantize())
