"""Types of GGUF tensors, and the exact conversion of quantized blocks.

A GGUF block holds the codes of 32 or 256 consecutive weights of a row, with their scales. Functions
such as :func:`_q4_0` convert blocks, uint8 ``[..., bytes of a block]``, to codes ``[..., weights of
a block]``, scales ``[..., groups]``, and minima ``[..., groups]`` or ``None``. The weights that
result are equal to those of llama.cpp:

- 2-bit and 3-bit codes become 4-bit codes.
- 5-bit and 6-bit codes become 8-bit codes, as do the integers that the codes of IQ4_NL and IQ4_XS
  stand for.
- In formats without minima, codes are shifted to a zero point of 8 (4-bit codes) or 128.
- The floats of MXFP4 become 5-bit codes with a zero point of 16.
- All codes of :mod:`~pronk.checkpoint.gguf.stored_blocks` have 8 bits and a zero point of 128.

Source: ``ggml-quants.c``, ``gguf/quants.py`` and ``gguf/constants.py`` of llama.cpp. Bytes of a
block, in order (scale and minimum are float16)::

    MXFP4  exponent of the scale 1, nibbles 16
    Q8_0  scale 2, codes 32                     Q5_0  scale 2, high bits 4, nibbles 16
    Q4_0  scale 2, nibbles 16                   Q5_1  scale 2, minimum 2, high bits 4, nibbles 16
    Q4_1  scale 2, minimum 2, nibbles 16        Q6_K  nibbles 128, high bits 64, scales 16, factor 2
    IQ4_NL  scale 2, nibbles 16
    IQ4_XS  factor 2, high bits of scales 2, low bits of scales 4, nibbles 128
    Q2_K  4-bit scales and minima 16, codes 64, factors 4
    Q3_K  high bits 32, codes 64, 6-bit scales 12, factor 2
    Q4_K  factors 4, 6-bit scales and minima 12, nibbles 128
    Q5_K  factors 4, 6-bit scales and minima 12, high bits 32, nibbles 128
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pronk.base.arrays import FLOAT16, FLOAT32, INT8, UINT8, Array, split_rows
from pronk.checkpoint.formats.floats import MXFP4_CODES, mxfp4_scale
from pronk.checkpoint.formats.matrix import Bits, QuantizedMatrix
from pronk.checkpoint.gguf import stored_blocks
from pronk.checkpoint.rows import HeadRows

# Format character of Python's module ``struct`` for each type of a metadata value that is a number
# or bool; the keys are the numbers of the types in a file.
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
# Numbers of some types of metadata values in a file; BOOL is also in SCALARS.
BOOL = 7
STRING = 8
ARRAY = 9


class TensorType(NamedTuple):
    """Type of a tensor, each of whose rows is a sequence of blocks.

    Attributes:
        name: name of the type, such as ``Q4_0``.
        values: number of values in a block.
        size: number of bytes of a block.
    """

    name: str
    values: int
    size: int


# Types of tensors, by their numbers in a GGUF file.
TENSOR_TYPES = {
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

# Types that llama.cpp had under these numbers, and reads no more.
REMOVED_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}

# Result of a conversion of blocks: codes ``[..., weights of a block]``, scales ``[..., groups]``,
# and minima ``[..., groups]`` or ``None``.
Unpacked = tuple[Array, Array, Array | None]

# Number of bytes of a file that are converted at a time, because the temporary arrays need a few
# times as much memory.
_CHUNK_BYTES = 1 << 20

# The integers that the codes 0..15 of IQ4_NL and IQ4_XS stand for (``kvalues_iq4nl`` of llama.cpp).
_IQ4_VALUES = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
_IQ4_CODES = np.array([128 + value for value in _IQ4_VALUES], UINT8)


@dataclass(frozen=True, eq=False)
class BlockRows:
    """Rows of a matrix in quantized blocks, as a GGUF file stores them.

    Attributes:
        stored: uint8 ``[rows, bytes of a row]``, a view of the mapped file.
        heads: number of heads whose rows are in the order of interleaved RoPE
            (:attr:`~pronk.checkpoint.rows.HeadRows.pairs`); 0: the rows are in order.
        name: name of the tensor in the file; with the expert's number for the rows of an expert,
            as in ``…_exps.weight[3]``, and with the rows of each head if only some are taken.
    """

    stored: Array
    heads: int = 0
    name: str = ""

    @property
    def order(self) -> Array:
        """Stored row of each output, int64."""
        count = len(self.stored)
        return HeadRows(self.heads, pairs=True).order(count) if self.heads else np.arange(count)


@dataclass(frozen=True, eq=False)
class BlockMatrix:
    """A matrix ``[outputs, inputs]`` in GGUF blocks; the kernels pack the blocks as they are.

    The number of inputs has no limit, because an integer sum is over 32 or 256 inputs only. (The
    sum of a ``QuantizedMatrix`` may be over a whole row.)

    Attributes:
        type: GGUF type of all blocks, one of :data:`PACKED_BLOCKS`.
        inputs: number of inputs.
        parts: the rows, in the order of the outputs.
        release: frees the memory of the file's pages that were read. A later access reads a page
            again.
    """

    type: str
    inputs: int
    parts: tuple[BlockRows, ...]
    release: Callable[[], None] = field(default=lambda: None, repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""
        outputs = sum(len(part.stored) for part in self.parts)
        return outputs, self.inputs

    def dequantize_rows(self, rows: NDArray[np.int32]) -> Array:
        """Return outputs of a matrix with one part, float32 ``[len(rows), inputs]``."""
        (part,) = self.parts
        codes = np.empty((len(rows), self.inputs), UINT8)
        return unpack(part.stored, self._tensor_type, codes, rows).dequantize()

    def unpack(self) -> QuantizedMatrix:
        """Return the codes, scales and minima of all outputs, in their order."""
        codes = np.empty(self.shape, UINT8)
        counts = [len(part.stored) for part in self.parts]
        unpacked = [
            unpack(part.stored, self._tensor_type, own, part.order)
            for part, own in zip(self.parts, split_rows(codes, counts), strict=True)
        ]
        self.release()
        scale = np.concatenate([part.scale for part in unpacked])
        minima = [part.minimum for part in unpacked if part.minimum is not None]
        minimum = np.concatenate(minima) if minima else None
        return QuantizedMatrix(codes, scale, minimum, unpacked[0].bits, unpacked[0].group)

    def blocks(self) -> Array:
        """Return the stored blocks of all outputs, uint8 ``[outputs, blocks, bytes]``."""
        rows = [part.stored[part.order] for part in self.parts]
        return np.concatenate(rows).reshape(self.shape[0], -1, self._tensor_type.size)

    @property
    def _tensor_type(self) -> TensorType:
        return next(each for each in TENSOR_TYPES.values() if each.name == self.type)


class _BlockFormat(NamedTuple):
    """Conversion of the blocks of one GGUF format.

    Attributes:
        convert: function from blocks to codes, scales and minima.
        bits: number of bits per resulting code.
        group: number of inputs per scale.
    """

    convert: Callable[[Array], Unpacked]
    bits: Bits | Literal[5]
    group: int


def unpack(
    stored: Array, type_: TensorType, codes: Array, rows: Array | None = None
) -> QuantizedMatrix:
    """Convert a stored matrix to a QuantizedMatrix.

    Args:
        stored: uint8 ``[stored rows, bytes of a row]``.
        type_: type of the blocks, one of :data:`BLOCKS`.
        codes: uint8 ``[outputs, inputs]``, which receives the codes.
        rows: index in ``stored`` of each output, int64 ``[outputs]``; ``None``: all rows, in their
            order.

    Raises:
        ValueError: a scale is not finite, or the matrix has more inputs than the kernels support.
    """
    block_format = BLOCKS[type_.name]
    scales = []
    minima = []
    step = max(1, _CHUNK_BYTES // stored.shape[1])
    for start in range(0, len(codes), step):
        stop = start + step
        chunk = stored[start:stop] if rows is None else stored[rows[start:stop]]
        count = len(chunk)
        blocks = chunk.reshape(count, -1, type_.size)
        with np.errstate(invalid="ignore"):  # scales that are not finite are refused below
            chunk_codes, scale, minimum = block_format.convert(blocks)
        codes[start:stop] = chunk_codes.reshape(count, -1)
        scales.append(scale.reshape(count, -1))
        if minimum is not None:
            minima.append(minimum.reshape(count, -1))
    scale = np.concatenate(scales)
    minimum = np.concatenate(minima) if minima else None
    return QuantizedMatrix(codes, scale, minimum, block_format.bits, block_format.group)


def _to_float32(stored: Array) -> Array:
    """Convert the bytes of float16 numbers, uint8 ``[..., 2n]``, to float32 ``[..., n]``."""
    return np.ascontiguousarray(stored).view(FLOAT16).astype(FLOAT32)


def _unpack_nibbles(stored: Array, run: int) -> Array:
    """Unpack bytes with two 4-bit codes each, ``[..., n]``, to codes ``[..., 2n]``.

    The codes of each ``run`` bytes are first all low halves, then all high halves.
    """
    runs = stored.reshape(*stored.shape[:-1], -1, run)
    return np.stack((runs & 15, runs >> 4), axis=-2).reshape(*stored.shape[:-1], -1)


def _unpack_two_bits(stored: Array) -> Array:
    """Unpack bytes with four 2-bit codes each, ``[..., n]``, to codes ``[..., 4n]``.

    The codes of each 32 bytes are first the bits 0 and 1 of all bytes, then the bits 2 and 3, ….
    """
    shifts = np.arange(0, 8, 2, dtype=np.uint8)
    runs = stored.reshape(*stored.shape[:-1], -1, 1, 32)
    codes = runs >> shifts[:, None] & 3
    return codes.reshape(*stored.shape[:-1], -1)


def _unpack_bit_planes(stored: Array) -> Array:
    """Unpack bytes ``[..., n]`` to bits ``[..., 8n]``: bit 0 of all bytes, then bit 1, ….

    The bits are uint8, 0 or 1.
    """
    shifts = np.arange(8, dtype=np.uint8)
    bits = stored[..., None, :] >> shifts[:, None] & 1
    return bits.reshape(*stored.shape[:-1], -1)


def _unpack_fifth_bits(stored: Array) -> Array:
    """Unpack the fifth bits of 32 codes from 4 bytes, ``[..., 4]`` to ``[..., 32]``.

    Each is 0 or 16, to be added to a 4-bit code.
    """
    return np.unpackbits(stored, axis=-1, bitorder="little") << 4


def _q8_0(blocks: Array) -> Unpacked:
    return blocks[..., 2:] ^ 128, _to_float32(blocks[..., :2]), None


def _q4_0(blocks: Array) -> Unpacked:
    return _unpack_nibbles(blocks[..., 2:], 16), _to_float32(blocks[..., :2]), None


def _q4_1(blocks: Array) -> Unpacked:
    codes = _unpack_nibbles(blocks[..., 4:], 16)
    return codes, _to_float32(blocks[..., :2]), _to_float32(blocks[..., 2:4])


def _q5_0(blocks: Array) -> Unpacked:
    codes = _unpack_nibbles(blocks[..., 6:], 16) | _unpack_fifth_bits(blocks[..., 2:6])
    return codes + (128 - 16), _to_float32(blocks[..., :2]), None


def _q5_1(blocks: Array) -> Unpacked:
    codes = _unpack_nibbles(blocks[..., 8:], 16) | _unpack_fifth_bits(blocks[..., 4:8])
    return codes, _to_float32(blocks[..., :2]), _to_float32(blocks[..., 2:4])


def _unpack_k_scales(blocks: Array) -> tuple[Array, Array]:
    """Unpack the scales and minima of the eight groups of a Q4_K or Q5_K block.

    The first four bytes of the block are two factors, float16. The next twelve, with the high bits
    on the left and i = 0..3, are::

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
    # llama.cpp subtracts a block's minimum, but QuantizedMatrix adds it.
    return scale_factor * scales, -(minimum_factor * minima)


def _q2_k(blocks: Array) -> Unpacked:
    scales = blocks[..., :16] & 15
    minima = blocks[..., :16] >> 4
    factors = _to_float32(blocks[..., 80:])
    codes = _unpack_two_bits(blocks[..., 16:80])
    return codes, factors[..., :1] * scales, -(factors[..., 1:] * minima)


def _q3_k(blocks: Array) -> Unpacked:
    codes = _unpack_two_bits(blocks[..., 32:96]) | _unpack_bit_planes(blocks[..., :32]) << 2
    # Bytes 96..103 hold the low 4 bits of the sixteen scales, bytes 104..107 the high 2 bits.
    stored_low = blocks[..., 96:104]
    low = np.concatenate((stored_low & 15, stored_low >> 4), axis=-1)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)
    high = blocks[..., None, 104:108] >> shifts[:, None] & 3
    scales = low | high.reshape(*blocks.shape[:-1], 16) << 4
    factor = _to_float32(blocks[..., 108:])
    return codes + (8 - 4), factor * (scales.astype(FLOAT32) - 32), None


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
    return _IQ4_CODES[_unpack_nibbles(blocks[..., 2:], 16)], _to_float32(blocks[..., :2]), None


def _iq4_xs(blocks: Array) -> Unpacked:
    # Bytes 4..7 hold the low 4 bits of the eight scales, bytes 2 and 3 their high 2 bits.
    shifts = np.arange(0, 8, 2, dtype=np.uint8)
    low = _unpack_nibbles(blocks[..., 4:8], 1)
    high = blocks[..., 2:4, None] >> shifts & 3
    scales = low | high.reshape(low.shape) << 4
    codes = _IQ4_CODES[_unpack_nibbles(blocks[..., 8:], 16)]
    return codes, _to_float32(blocks[..., :2]) * (scales.astype(FLOAT32) - 32), None


def _stored(convert: Callable[[Array], stored_blocks.Converted], group: int) -> _BlockFormat:
    """Return the format of a type of :mod:`~pronk.checkpoint.gguf.stored_blocks`."""
    return _BlockFormat(lambda blocks: (*convert(blocks), None), 8, group)


# Types whose blocks the kernels keep as they are, and decode when they multiply.
STORED_BLOCKS = {
    "IQ1_S": _stored(stored_blocks.iq1_s, 32),
    "IQ1_M": _stored(stored_blocks.iq1_m, 16),
    "IQ2_XXS": _stored(stored_blocks.iq2_xxs, 32),
    "IQ2_XS": _stored(stored_blocks.iq2_xs, 16),
    "IQ2_S": _stored(stored_blocks.iq2_s, 16),
    "IQ3_XXS": _stored(stored_blocks.iq3_xxs, 32),
    "IQ3_S": _stored(stored_blocks.iq3_s, 32),
    "TQ1_0": _stored(stored_blocks.tq1_0, 256),
    "TQ2_0": _stored(stored_blocks.tq2_0, 256),
    "NVFP4": _stored(stored_blocks.nvfp4, 16),
}
# Supported types of quantized blocks, with their conversions.
BLOCKS = STORED_BLOCKS | {
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
    "IQ4_XS": _BlockFormat(_iq4_xs, 8, 32),
    "MXFP4": _BlockFormat(_mxfp4, 5, 32),
}
# Types whose blocks the kernels pack without a conversion of numbers; blocks of the other types are
# converted first.
PACKED_BLOCKS = frozenset(BLOCKS) - {"IQ4_NL", "MXFP4"}
