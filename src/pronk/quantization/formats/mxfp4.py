"""MXFP4 checkpoints (gpt-oss): experts of 4-bit floats (e2m1) in groups of 32 with a scale.

A scale is a power of two. Twice a float of e2m1 is an integer from -12 to 12. Loading keeps these integers as codes of
5 bits, and half of the scale as their scale, so that the weights are exact. Two floats are a byte, the first one in its
low half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pronk.arrays import FLOAT32, UINT8, Array
from pronk.errors import CheckpointError
from pronk.quantization.formats.matrix import QuantizedMatrix
from pronk.quantization.formats.scheme import MATCHES_NOTHING, LinearModule, StoredTensor

__all__ = ["MXFP4", "MXFP4_CODES", "mxfp4_scale"]

_GROUP = 32
_ZERO = 16  # code of the weight 0
_MAGNITUDES = np.array([0, 1, 2, 3, 4, 6, 8, 12])  # twice the floats 0, 0.5, 1, 1.5, 2, 3, 4, 6
# By the four bits of a float, of which the highest is the sign.
MXFP4_CODES = (_ZERO + np.concatenate((_MAGNITUDES, -_MAGNITUDES))).astype(UINT8)
_BIAS = 127  # of the stored exponents of scales


@dataclass(frozen=True)
class MXFP4:
    """Scheme of a checkpoint whose experts are in MXFP4, and nothing else."""

    name = "mxfp4"
    ignored = MATCHES_NOTHING
    notes: tuple[str, ...] = ()

    @classmethod
    def parse(cls, _: Mapping[str, Any]) -> MXFP4:
        """Ignore the entries of ``quantization_config``: tensor names show which matrices are quantized."""
        return cls()

    def weight(self, module: LinearModule) -> _Weight | None:
        """Implement :meth:`Scheme.weight <pronk.quantization.formats.scheme.Scheme.weight>`."""
        return _Weight(module) if module.experts else None


@dataclass(frozen=True)
class _Weight:
    """Matrix of an expert, in two tensors with those of all experts."""

    module: LinearModule

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Expected tensors in the checkpoint; a shape is that of all experts."""
        _, name = self.module.name.rsplit(".", 1)
        if self.module.inputs % _GROUP:
            msg = f"{self.module.name}: expected a multiple of {_GROUP} inputs, found {self.module.inputs}"
            raise CheckpointError(msg)
        shape = self.module.experts, self.module.outputs, self.module.inputs // _GROUP
        blocks = StoredTensor(((*shape, _GROUP // 2),), ("U8",))
        return {f"{name}_blocks": blocks, f"{name}_scales": StoredTensor((shape,), ("U8",))}

    def read(self, tensors: Mapping[str, Array], codes: Array) -> QuantizedMatrix:
        """Return the weight of an expert, of which ``tensors`` has the blocks, then the scales."""
        blocks, exponents = tensors.values()
        pairs = blocks.reshape(len(codes), -1)
        codes[:, 0::2], codes[:, 1::2] = MXFP4_CODES[pairs & 15], MXFP4_CODES[pairs >> 4]
        return QuantizedMatrix(codes, mxfp4_scale(exponents), None, 5, _GROUP)


def mxfp4_scale(exponents: Array) -> Array:
    """Return the scales of codes, float32, by the stored exponents of their groups."""
    return np.ldexp(np.float32(0.5), exponents.astype(np.int32) - _BIAS).astype(FLOAT32)
