"""Rounding of weights to codes, and tensors in compressed-tensors' format ``pack-quantized``.

Scales are first rounded to the dtype of the file, then codes are chosen for the rounded scales.
Perplexity is therefore measured with exactly the weights that are written. The unsigned codes of a
row are packed into 32-bit words, the first code in the lowest bits. The value of a code is
``weight_scale[output, group] * (code - 2 ** (bits - 1))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from pronk import OptionError
from pronk.backends import DEFAULT_GROUPS, Kernels, round_weights
from pronk.base import refuse
from pronk.base.arrays import FLOAT32, UINT8, Array, DType, largest_number
from pronk.checkpoint import Bits, ModelConfig, QuantizedMatrix

LINEARS = ("qkv", "out", "up", "down")  # names of the linear modules in a layer
WHOLE_ROW = 0  # group size that means all inputs of a matrix
_KERNEL_WHOLE_ROW = 1 << 20  # group size for the kernel that means all inputs: larger than any row


class RoundingRule(NamedTuple):
    """How the matrices of a model are rounded: to ``scale * code`` with signed codes."""

    kernels: Kernels  # compiled kernels, which choose the scales
    bits: Bits  # number of bits per code
    # Number of inputs per scale: a multiple of 8 that divides the inputs of each matrix, or
    # ``WHOLE_ROW``.
    group: int
    dtype: DType  # dtype of the scales in the file

    @property
    def zero(self) -> int:
        """Number that is added to signed codes, because the file has unsigned codes."""
        return 1 << (self.bits - 1)

    def scales(self, weight: Array) -> Array:
        """Return the scales ``[outputs, groups]`` with which rounding changes the weights least.

        They minimize the squared error of each group. They are float32, with values of ``dtype``.
        """
        group = self.group or _KERNEL_WHOLE_ROW
        scale = round_weights(self.kernels, weight, self.bits, group).scale
        largest = largest_number(self.dtype)
        return np.clip(scale, -largest, largest).astype(self.dtype).astype(FLOAT32)

    def nearest(self, weight: Array) -> QuantizedMatrix:
        """Quantize ``weight`` ``[outputs, inputs]``: each weight gets the nearest code.

        The scales are those of :meth:`scales`.
        """
        scale = self.scales(weight)
        group = self.group or weight.shape[1]
        codes = self.codes(weight, np.repeat(scale, group, axis=1)) + self.zero
        with np.errstate(invalid="ignore"):  # NaN becomes a code that QuantizedMatrix refuses
            return QuantizedMatrix(codes.astype(UINT8), scale, None, self.bits, group)

    def codes(self, weight: Array, scale: Array) -> Array:
        """Return ``round(weight / scale)``, limited to the range of signed codes, as floats.

        Weights with scale 0 have the code 0.
        """
        with np.errstate(all="ignore"):  # the inverse of a tiny scale may be infinite
            codes = weight * np.where(scale == 0, np.float32(0), 1 / scale)
        np.rint(codes, out=codes)
        return np.clip(codes, -self.zero, self.zero - 1, out=codes)


def choose_group(inputs: Sequence[int], bits: int, group: int | None) -> tuple[Bits, int]:
    """Return the number of bits and the group size of a rounding, checked or chosen.

    Args:
        inputs: number of inputs of each matrix.
        bits: number of bits per code, 8 or 4.
        group: number of inputs per scale, or 0 for a whole row. ``None`` chooses the largest power
            of two that divides the inputs of all matrices and is between 8 and the default for
            ``bits``.

    Raises OptionError if ``bits`` is invalid, or ``group`` does not divide the inputs of a matrix.
    """
    if bits not in DEFAULT_GROUPS:
        refuse("bits", f"expected 4 or 8, found {bits}", OptionError)
    checked_bits: Bits = 4 if bits == 4 else 8
    common_divisor = reduce(gcd, inputs)
    sizes = [size for size in (128, 64, 32, 16, 8) if common_divisor % size == 0]
    if group is None:
        group = next((size for size in sizes if size <= DEFAULT_GROUPS[bits]), None)
    if group == WHOLE_ROW and all(size % 8 == 0 for size in inputs):
        return checked_bits, group
    if group is None or group < 8 or group % 8 or common_divisor % group:
        found = "inputs of no common multiple of 8" if group is None else str(group)
        all_inputs = " and ".join(map(str, inputs))
        expected = f"a multiple of 8 that divides the matrices' {all_inputs} inputs"
        choices = ", ".join([*map(str, sizes), "or 0 for a whole row"])
        remedy = f"use {choices}"
        refuse("group", f"expected {expected}, found {found}; {remedy}", OptionError)
    return checked_bits, group


def matrix_inputs(config: ModelConfig) -> list[int]:
    """Return the different numbers of inputs that a layer's matrices have, in increasing order."""
    attention_size = config.num_heads * config.head_dim
    return sorted({config.hidden_size, attention_size, config.intermediate_size})


_VERSION = "0.20.0"  # version of compressed-tensors with which reading the output was tested

_WORD = np.dtype(np.int32)  # type of the words into which codes are packed in the file
_SIZE = np.dtype(np.int64)  # type of the shapes of matrices in the file


def pack_codes(prefix: str, weight: QuantizedMatrix, dtype: DType) -> dict[str, Array]:
    """Return the tensors in the file for a quantized matrix; their names begin with ``prefix``.

    Scales are stored in ``dtype``, which must represent them exactly.
    """
    packed = weight.codes
    if weight.bits == 4:
        packed = _pad(packed, 2)
        packed = packed[:, ::2] | packed[:, 1::2] << 4
    return {
        f"{prefix}weight_packed": np.ascontiguousarray(_pad(packed, 4)).view(_WORD),
        f"{prefix}weight_scale": weight.scale.astype(dtype),
        f"{prefix}weight_shape": np.array(weight.shape, _SIZE),
    }


def _pad(codes: Array, multiple: int) -> Array:
    """Append zeros to each row, so that its length is a multiple of ``multiple``."""
    return np.pad(codes, ((0, 0), (0, -codes.shape[1] % multiple)))


def packed_shapes(
    prefix: str, shape: tuple[int, int], rule: RoundingRule
) -> dict[str, tuple[tuple[int, ...], DType]]:
    """Return shapes and dtypes of the tensors that :func:`pack_codes` returns, by name.

    ``shape`` is that of the matrix: outputs and inputs.
    """
    outputs, inputs = shape
    num_groups = inputs // (rule.group or inputs)
    return {
        f"{prefix}weight_packed": ((outputs, -(-inputs * rule.bits // 32)), _WORD),
        f"{prefix}weight_scale": ((outputs, num_groups), rule.dtype),
        f"{prefix}weight_shape": ((2,), _SIZE),
    }


def quantization_config(rule: RoundingRule, ignore: Sequence[str]) -> dict[str, Any]:
    """Return the ``quantization_config`` for config.json.

    ``ignore`` are the names of modules that are not quantized.
    """
    is_whole_row = rule.group == WHOLE_ROW
    weights: dict[str, Any] = {
        "num_bits": rule.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if is_whole_row else "group",
        "group_size": None if is_whole_row else rule.group,
        "dynamic": False,
        "actorder": None,
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "version": _VERSION,
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
