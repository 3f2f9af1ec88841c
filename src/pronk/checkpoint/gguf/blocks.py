"""Types of GGUF tensors, and the exact conversion of their blocks; weights equal llama.cpp's.

A GGUF block holds the codes of 32 or 256 consecutive weights of a row, with their scales. Functions
such as :func:`_q4_0` convert blocks, uint8 ``[..., bytes of a block]``, to codes ``[..., weights of
a block]``, scales ``[..., groups]``, and minima ``[..., groups]`` or ``None``. 2-bit and 3-bit
codes become 4-bit codes; 5-bit and 6-bit codes, and the integers that IQ4_NL's codes stand for,
become 8-bit codes. Codes of formats without minima are shifted to a zero point of 8 (4-bit codes)
or 128; the floats of MXFP4 become 5-bit codes with a zero point of 16. Source: ``ggml-quants.c``,
``gguf/quants.py`` and ``gguf/constants.py`` of llama.cpp. Bytes of a block, in order (scale and
minimum are float16)::

    MXFP4  exponent of the scale 1, nibbles 16
    Q8_0  scale 2, codes 32                     Q5_0  scale 2, high bits 4, nibbles 16
    Q4_0  scale 2, nibbles 16                   Q5_1  scale 2, minimum 2, high bits 4, nibbles 16
    Q4_1  scale 2, minimum 2, nibbles 16        Q6_K  nibbles 128, high bits 64, scales 16, factor 2
    IQ4_NL  scale 2, nibbles 16
    Q2_K  4-bit scales and minima 16, codes 64, factors 4
    Q3_K  high bits 32, codes 64, 6-bit scales 12, factor 2
    Q4_K  factors 4, 6-bit scales and minima 12, nibbles 128
    Q5_K  factors 4, 6-bit scales and minima 12, high bits 32, nibbles 128
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from pronk.base.arrays import FLOAT16, FLOAT32, INT8, UINT8, Array
from pronk.checkpoint.formats.floats import MXFP4_CODES, mxfp4_scale
from pronk.checkpoint.formats.matrix import Bits, QuantizedMatrix

# Format characters of Python's module `struct`, by type number of a metadata value that is a number
# or bool.
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}
# type numbers of metadata values; BOOL is also in SCALARS
BOOL = 7
STRING = 8
ARRAY = 9


class TensorType(NamedTuple):
    """Type of a tensor: each row is a sequence of blocks, with ``values`` numbers in ``size`` bytes."""

    name: str
    values: int
    size: int


TENSOR_TYPES = {  # type number of a tensor to the type
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 40),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
}

# codes, scales, and minima or None, in the shapes above
Unpacked = tuple[Array, Array, Array | None]

# Number of bytes of a file that are converted at a time; the temporary arrays need a few times as
# much memory.
_CHUNK_BYTES = 1 << 20

# Integers that the codes 0 .. 15 of IQ4_NL stand for, plus the zero point (``kvalues_iq4nl`` of
# llama.cpp).
_IQ4_NL_CODES = np.array(
    [
        128 + value
        for value in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    ],
    UINT8,
)


@dataclass(frozen=True, eq=False)
class BlockRows:
    """Rows of a matrix as a file stores them."""

    stored: Array  # uint8 ``[rows, bytes of a row]``, a view of the mapped file
    # Number of heads whose rows are in the order of interleaved RoPE (see
    # :mod:`~pronk.checkpoint.gguf.checkpoint`); 0: the rows are in order.
    heads: int = 0
    # name of the tensor in the file; of an expert's rows with its number, as in
    # ``…_exps.weight[3]``
    name: str = ""


@dataclass(frozen=True, eq=False)
class BlockMatrix:
    """A matrix ``[outputs, inputs]`` in GGUF blocks; the kernels pack the blocks as they are.

    The number of inputs has no limit, unlike that of a ``QuantizedMatrix``: sums are over 32 or 256
    inputs.
    """

    type: str  # GGUF type of all blocks, one of :data:`PACKED_BLOCKS`
    inputs: int
    parts: tuple[BlockRows, ...]  # in the order of the outputs

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""
        return sum(len(part.stored) for part in self.parts), self.inputs


class _BlockFormat(NamedTuple):
    """How to convert the blocks of one GGUF format to codes, scales and minima."""

    convert: Callable[[Array], Unpacked]  # function from blocks to codes, scales and minima
    bits: Bits | Literal[5]  # number of bits per resulting code
    group: int  # number of inputs per scale


def unpack(
    stored: Array, type_: TensorType, codes: Array, rows: Array | None = None
) -> QuantizedMatrix:
    """Convert a stored matrix, uint8 ``[outputs, bytes of a row]``, to a QuantizedMatrix.

    ``type_`` is one of :data:`BLOCKS`. The codes are written to ``codes``, uint8 ``[outputs,
    inputs]``. ``rows`` has the index in ``stored`` of each output, int64 ``[outputs]``; ``None``
    keeps the order.

    Raises:
        ValueError: a scale is not finite, or the matrix has more inputs than the kernels support.
    """
    block_format = BLOCKS[type_.name]
    scales = []
    minima = []
    step = max(1, _CHUNK_BYTES // stored.shape[1])
    for start in range(0, len(stored), step):
        chunk = stored[start : start + step] if rows is None else stored[rows[start : start + step]]
        count = len(chunk)
        with np.errstate(invalid="ignore"):  # scales that are not finite are refused below
            chunk_codes, scale, minimum = block_format.convert(chunk.reshape(count, -1, type_.size))
        codes[start : start + step] = chunk_codes.reshape(count, -1)
        scales.append(scale.reshape(count, -1))
        minima += [] if minimum is None else [minimum.reshape(count, -1)]
    minimum = np.concatenate(minima) if minima else None
    return QuantizedMatrix(
        codes, np.concatenate(scales), minimum, block_format.bits, block_format.group
    )


def _to_float32(stored: Array) -> Array:
    """Convert bytes of float16 ``[..., 2n]`` to float32 ``[..., n]``."""
    return np.ascontiguousarray(stored).view(FLOAT16).astype(FLOAT32)


def _unpack_nibbles(stored: Array, run: int) -> Array:
    """Unpack 4-bit codes: of each ``run`` bytes first all low nibbles, then all high nibbles."""
    runs = stored.reshape(*stored.shape[:-1], -1, run)
    return np.stack((runs & 15, runs >> 4), axis=-2).reshape(*stored.shape[:-1], -1)


def _unpack_two_bits(stored: Array) -> Array:
    """Unpack 2-bit codes: of each 32 bytes first all bits 0 and 1, then bits 2 and 3, and so on."""
    runs = stored.reshape(*stored.shape[:-1], -1, 1, 32)
    return (runs >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(*stored.shape[:-1], -1)


def _unpack_bit_planes(stored: Array) -> Array:
    """Unpack bytes ``[..., n]`` to bits ``[..., 8n]``: bit 0 of all bytes, then bit 1, and so on."""
    return (stored[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(
        *stored.shape[:-1], -1
    )


def _q8_0(blocks: Array) -> Unpacked:
    return blocks[..., 2:] ^ 128, _to_float32(blocks[..., :2]), None


def _q4_0(blocks: Array) -> Unpacked:
    return _unpack_nibbles(blocks[..., 2:], 16), _to_float32(blocks[..., :2]), None


def _q4_1(blocks: Array) -> Unpacked:
    return (
        _unpack_nibbles(blocks[..., 4:], 16),
        _to_float32(blocks[..., :2]),
        _to_float32(blocks[..., 2:4]),
    )


def _q5_0(blocks: Array) -> Unpacked:
    codes = (
        _unpack_nibbles(blocks[..., 6:], 16)
        | np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little") << 4
    )
    return codes + (128 - 16), _to_float32(blocks[..., :2]), None


def _q5_1(blocks: Array) -> Unpacked:
    codes = (
        _unpack_nibbles(blocks[..., 8:], 16)
        | np.unpackbits(blocks[..., 4:8], axis=-1, bitorder="little") << 4
    )
    return codes, _to_float32(blocks[..., :2]), _to_float32(blocks[..., 2:4])


def _unpack_k_scales(blocks: Array) -> tuple[Array, Array]:
    """Unpack the scales and minima of the eight groups of a Q4_K or Q5_K block from its first 16 bytes.

    With the high bits on the left, and i = 0 .. 3::

        byte i + 4     scale i + 4, bits 5-4       scale i, 6 bits
        byte i + 8     minimum i + 4, bits 5-4     minimum i, 6 bits
        byte i + 12    minimum i + 4, bits 3-0     scale i + 4, bits 3-0
    """
    scale_factor = _to_float32(blocks[..., :2])
    minimum_factor = _to_float32(blocks[..., 2:4])
    scale = blocks[..., 4:8]
    minimum = blocks[..., 8:12]
    rest = blocks[..., 12:16]
    scales = np.concatenate((scale & 63, (rest & 15) | (scale >> 2 & 48)), axis=-1)
    minima = np.concatenate((minimum & 63, rest >> 4 | (minimum >> 2 & 48)), axis=-1)
    # llama.cpp subtracts the minimum; QuantizedMatrix adds it
    return scale_factor * scales, -(minimum_factor * minima)


def _q2_k(blocks: Array) -> Unpacked:
    scales = blocks[..., :16] & 15
    minima = blocks[..., :16] >> 4
    factors = _to_float32(blocks[..., 80:])
    return (
        _unpack_two_bits(blocks[..., 16:80]),
        factors[..., :1] * scales,
        -(factors[..., 1:] * minima),
    )


def _q3_k(blocks: Array) -> Unpacked:
    codes = _unpack_two_bits(blocks[..., 32:96]) | _unpack_bit_planes(blocks[..., :32]) << 2
    # Bytes 96 .. 103 hold the low 4 bits of the sixteen scales, bytes 104 .. 107 the high 2 bits.
    low = blocks[..., 96:104]
    high = blocks[..., None, 104:108] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    scales = (
        np.concatenate((low & 15, low >> 4), axis=-1) | high.reshape(*blocks.shape[:-1], 16) << 4
    )
    return codes + (8 - 4), _to_float32(blocks[..., 108:]) * (scales.astype(FLOAT32) - 32), None


def _q4_k(blocks: Array) -> Unpacked:
    return _unpack_nibbles(blocks[..., 16:], 32), *_unpack_k_scales(blocks)


def _q5_k(blocks: Array) -> Unpacked:
    codes = _unpack_nibbles(blocks[..., 48:], 32)
    return codes | _unpack_bit_planes(blocks[..., 16:48]) << 4, *_unpack_k_scales(blocks)


def _q6_k(blocks: Array) -> Unpacked:
    codes = _unpack_nibbles(blocks[..., :128], 64) | _unpack_two_bits(blocks[..., 128:192]) << 4
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(INT8).astype(FLOAT32)
    return codes + (128 - 32), _to_float32(blocks[..., 208:]) * scales, None


def _mxfp4(blocks: Array) -> Unpacked:
    return MXFP4_CODES[_unpack_nibbles(blocks[..., 1:], 16)], mxfp4_scale(blocks[..., :1]), None


def _iq4_nl(blocks: Array) -> Unpacked:
    return _IQ4_NL_CODES[_unpack_nibbles(blocks[..., 2:], 16)], _to_float32(blocks[..., :2]), None


# Supported types of GGUF blocks.
BLOCKS = {
    "Q8_0": _BlockFormat(_q8_0, 8, 32),
    "Q4_0": _BlockFormat(_q4_0, 4, 32),
    "Q4_1": _BlockFormat(_q4_1, 4, 32),
    "Q5_0": _BlockFormat(_q5_0, 8, 32),
    "Q5_1": _BlockFormat(_q5_1, 8, 32),
    "IQ4_NL": _BlockFormat(_iq4_nl, 8, 32),
    "Q2_K": _BlockFormat(_q2_k, 4, 16),
    "Q3_K": _BlockFormat(_q3_k, 4, 16),
    "Q4_K": _BlockFormat(_q4_k, 4, 32),
    "Q5_K": _BlockFormat(_q5_k, 8, 32),
    "Q6_K": _BlockFormat(_q6_k, 8, 16),
    "MXFP4": _BlockFormat(_mxfp4, 5, 32),
}
# Types whose blocks the kernels pack as they are; others are converted first.
PACKED_BLOCKS = frozenset(BLOCKS) - {"IQ4_NL", "Q2_K", "Q3_K", "MXFP4"}
