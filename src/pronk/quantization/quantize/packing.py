"""Output in the format ``pack-quantized`` of compressed-tensors: tensors and ``quantization_config``.

The unsigned codes of a row are packed into 32-bit words, the first code in the lowest bits. A weight is
``weight_scale[output, group] * (code - 2 ** (bits - 1))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pronk.arrays import Array, DType
from pronk.quantization.formats.matrix import QuantizedMatrix
from pronk.quantization.quantize.rounding import WHOLE_ROW, RoundingRule

__all__ = ["pack_codes", "packed_shapes", "quantization_config"]

_VERSION = "0.20.0"  # version of compressed-tensors that has been tested to read the output

_WORD, _SIZE = np.dtype(np.int32), np.dtype(np.int64)  # types of packed codes and of shapes in the file


def pack_codes(prefix: str, weight: QuantizedMatrix, dtype: DType) -> dict[str, Array]:
    """Return the tensors of ``weight``, by name with ``prefix``.

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
    """Append zeros to the rows, so that their length is a multiple of ``multiple``."""
    return np.pad(codes, ((0, 0), (0, -codes.shape[1] % multiple)))


def packed_shapes(prefix: str, shape: tuple[int, int], rule: RoundingRule) -> dict[str, tuple[tuple[int, ...], DType]]:
    """Return shape and dtype of each tensor that :func:`pack_codes` makes for a matrix of ``shape``."""
    outputs, inputs = shape
    num_groups = inputs // (rule.group or inputs)
    return {
        f"{prefix}weight_packed": ((outputs, -(-inputs * rule.bits // 32)), _WORD),
        f"{prefix}weight_scale": ((outputs, num_groups), rule.dtype),
        f"{prefix}weight_shape": ((2,), _SIZE),
    }


def quantization_config(rule: RoundingRule, ignore: Sequence[str]) -> dict[str, Any]:
    """Return the ``quantization_config``; the linear modules ``ignore`` are not quantized."""
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
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
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
