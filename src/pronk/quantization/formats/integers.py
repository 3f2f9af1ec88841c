"""Integer weights of compressed-tensors: packed into words of 32 bits, or one in each byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from pronk.errors import CheckpointError
from pronk.quantization.formats.matrix import Bits, QuantizedMatrix
from pronk.quantization.formats.packing import affine, group_size, order_of, unpack, unpack_into
from pronk.quantization.formats.scheme import FLOATS, LinearModule, StoredTensor, check_zeros

__all__ = ["PackedIntegers"]


@dataclass(frozen=True)
class PackedIntegers:
    """A weight of integers.

    Packed, ``weight_packed`` is ``[outputs, inputs * bits / 32]``, the lowest bits first, and zero points lie together
    along the outputs, ``[outputs * bits / 32, groups]``; else all are int8.

    Attributes:
        module: whose weight it is.
        bits: of an integer.
        size: inputs of a group; -1 is all of them.
        packed: whether they are packed.
        symmetric: whether there are no zero points.
        whole: whether the matrix has one scale.
    """

    module: LinearModule
    bits: Bits
    size: int
    packed: bool
    symmetric: bool
    whole: bool

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """See :class:`~pronk.quantization.formats.scheme.StoredWeight`."""
        _, outputs, inputs, *_ = self.module
        groups = ceil(inputs / self._group)
        shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1)) if self.whole else ((outputs, groups),)
        words = ((ceil(outputs * self.bits / 32), groups),)
        found = {
            "weight_scale": StoredTensor(shapes),
            # Packed since compressed-tensors 0.9; symmetric weights have had one of zeros.
            "weight_zero_point": StoredTensor(
                shapes + (words if self.packed and not self.whole else ()), ("I8", "I32"), required=not self.symmetric
            ),
            "input_scale": StoredTensor(None, FLOATS, required=False),
            "input_zero_point": StoredTensor(None, ("I8", "I32", "I64", *FLOATS), required=False),
            "weight_g_idx": StoredTensor(((inputs,),), ("I32", "I64"), required=False),
        }
        if not self.packed:
            return {"weight": StoredTensor(((outputs, inputs),), ("I8",)), **found}
        found["weight_shape"] = StoredTensor(((2,),), ("I64", "I32"))
        return {"weight_packed": StoredTensor(((outputs, ceil(inputs * self.bits / 32)),), ("I32",)), **found}

    @property
    def _group(self) -> int:
        return group_size(self.size, self.module.inputs)

    def read(self, tensors: Mapping[str, Tensor], codes: Tensor) -> QuantizedMatrix:
        """See :class:`~pronk.quantization.formats.scheme.StoredWeight`."""
        _, outputs, inputs, *_ = self.module
        if self.packed:
            if tensors["weight_shape"].tolist() != [outputs, inputs]:
                found = tensors["weight_shape"].tolist()
                msg = f"weight_shape: expected [{outputs}, {inputs}] from config.json, found {found}"
                raise CheckpointError(msg)
            unpack_into(codes, tensors["weight_packed"], self.bits)
        else:
            self._count("weight", tensors["weight"], codes)
        index = tensors.get("weight_g_idx")
        order = None if index is None else order_of("weight_g_idx", index, self._group)
        scale = tensors["weight_scale"]
        if self.whole:
            scale = scale.reshape(1, 1).expand(outputs, 1)
        return affine(codes, self._zeros(tensors), scale, self.bits, self._group, order)

    def _zeros(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Zero points ``[outputs, groups]``, counted from 0; ``None``: all in the middle."""
        outputs = self.module.outputs
        if self.symmetric:
            check_zeros("weight_zero_point", tensors, "as the weights are symmetric")
            return None
        zeros = tensors["weight_zero_point"]
        if self.packed and not self.whole and zeros.dtype == torch.int32:
            return unpack(zeros.t(), self.bits, outputs).t()
        found = torch.empty(zeros.shape, dtype=torch.uint8)
        self._count("weight_zero_point", zeros, found)
        return found.reshape(1, 1).expand(outputs, 1) if self.whole else found

    def _count(self, name: str, integers: Tensor, codes: Tensor) -> None:
        """Write signed integers into ``codes``, counted from 0."""
        middle = 1 << (self.bits - 1)
        low, high = int(integers.min()), int(integers.max())
        if low < -middle or high >= middle:
            msg = f"{name}: expected {self.bits}-bit integers of {-middle}..{middle - 1}, found {low}..{high}"
            raise CheckpointError(msg)
        # Both are modulo 256, so that nothing wider is needed on the way.
        codes.copy_(integers.to(torch.int8).view(torch.uint8)).add_(middle)
