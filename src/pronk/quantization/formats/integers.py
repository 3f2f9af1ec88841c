"""Weights of compressed-tensors with integer codes, packed into 32-bit words or stored as int8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import numpy as np

from pronk.arrays import INT8, UINT8, Array
from pronk.errors import CheckpointError
from pronk.quantization.formats.matrix import Bits, QuantizedMatrix
from pronk.quantization.formats.packing import group_size, input_order, to_quantized_matrix, unpack, unpack_into
from pronk.quantization.formats.scheme import FLOATS, LinearModule, StoredTensor, check_zeros

__all__ = ["PackedIntegers"]


@dataclass(frozen=True)
class PackedIntegers:
    """Weight of a linear module, stored as integer codes, scales and perhaps zero points.

    If packed, the codes ``weight_packed`` are int32 ``[outputs, inputs * bits / 32]``, the first code in the lowest
    bits, and the zero points are int32 ``[outputs * bits / 32, groups]``. Otherwise, both tensors are int8.
    """

    module: LinearModule
    bits: Bits  # number of bits per code
    config_group: int  # number of inputs per group in the config; -1 means all inputs
    packed: bool  # whether codes are packed into 32-bit words
    symmetric: bool  # whether the zero points of the signed codes are all 0
    single_scale: bool  # whether the matrix has only one scale; if not, one per output and group

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Expected tensors in the checkpoint, by name without the module's name, such as ``weight_scale``."""
        _, outputs, inputs, *_ = self.module
        num_groups = ceil(inputs / self._group)
        shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1)) if self.single_scale else ((outputs, num_groups),)
        packed_shapes = ((ceil(outputs * self.bits / 32), num_groups),) if self.packed and not self.single_scale else ()
        tensors = {
            "weight_scale": StoredTensor(shapes),
            # compressed-tensors packs this tensor since version 0.9. For symmetric weights, older versions write zeros.
            "weight_zero_point": StoredTensor(shapes + packed_shapes, ("I8", "I32"), required=not self.symmetric),
            "input_scale": StoredTensor(None, FLOATS, required=False),
            "input_zero_point": StoredTensor(None, ("I8", "I32", "I64", *FLOATS), required=False),
            "weight_g_idx": StoredTensor(((inputs,),), ("I32", "I64"), required=False),
        }
        if not self.packed:
            return {"weight": StoredTensor(((outputs, inputs),), ("I8",)), **tensors}
        tensors["weight_shape"] = StoredTensor(((2,),), ("I64", "I32"))
        return {"weight_packed": StoredTensor(((outputs, ceil(inputs * self.bits / 32)),), ("I32",)), **tensors}

    @property
    def _group(self) -> int:
        return group_size(self.config_group, self.module.inputs)

    def read(self, tensors: Mapping[str, Array], codes: Array) -> QuantizedMatrix:
        """Implement :meth:`StoredWeight.read <pronk.quantization.formats.scheme.StoredWeight.read>`."""
        _, outputs, inputs, *_ = self.module
        if self.packed:
            if tensors["weight_shape"].tolist() != [outputs, inputs]:
                shape = tensors["weight_shape"].tolist()
                msg = f"weight_shape: expected [{outputs}, {inputs}] from config.json, found {shape}"
                raise CheckpointError(msg)
            unpack_into(codes, tensors["weight_packed"], self.bits)
        else:
            self._to_unsigned("weight", tensors["weight"], codes)
        index = tensors.get("weight_g_idx")
        order = None if index is None else input_order("weight_g_idx", index, self._group)
        scale = tensors["weight_scale"]
        if self.single_scale:
            scale = np.broadcast_to(scale.reshape(1, 1), (outputs, 1))
        return to_quantized_matrix(codes, self._zeros(tensors), scale, self.bits, self._group, order)

    def _zeros(self, tensors: Mapping[str, Array]) -> Array | None:
        """Return zero points of unsigned codes, ``[outputs, groups]``; ``None`` if all are ``2**(bits - 1)``."""
        outputs = self.module.outputs
        if self.symmetric:
            check_zeros("weight_zero_point", tensors, "as the weights are symmetric")
            return None
        zeros = tensors["weight_zero_point"]
        if self.packed and not self.single_scale and zeros.dtype == np.int32:
            return unpack(zeros.T, self.bits, outputs).T
        unsigned = np.empty(zeros.shape, UINT8)
        self._to_unsigned("weight_zero_point", zeros, unsigned)
        return np.broadcast_to(unsigned.reshape(1, 1), (outputs, 1)) if self.single_scale else unsigned

    def _to_unsigned(self, name: str, integers: Array, codes: Array) -> None:
        """Write ``integers + 2**(bits - 1)`` to ``codes``, uint8; refuse integers of more than ``bits`` bits."""
        middle = 1 << (self.bits - 1)
        low, high = int(integers.min()), int(integers.max())
        if low < -middle or high >= middle:
            msg = f"{name}: expected {self.bits}-bit integers of {-middle}..{middle - 1}, found {low}..{high}"
            raise CheckpointError(msg)
        # The sum is in 0 .. 255, so uint8 addition, which is modulo 256, needs no temporary array of wider integers.
        np.add(integers.astype(INT8, copy=False).view(UINT8), middle, out=codes)
