"""Exact conversion of GGUF blocks of 1 to 4 bits per weight that the kernels keep as they are.

Functions such as :func:`iq2_xxs` convert blocks, uint8 ``[..., bytes of a block]``, to codes
``[..., weights of a block]`` with a zero point of 128, and scales ``[..., groups]``. The weights
that result are equal to those of llama.cpp: a weight is a float16 factor times two small integers,
and such a product is exact. The kernels decode the same blocks (``kernels/csrc/decode.inc``, which
lists the bytes of each).
"""

from __future__ import annotations

from typing import cast

import numpy as np

from pronk.base.arrays import FLOAT16, FLOAT32, UINT8, Array
from pronk.checkpoint.gguf.codebooks import codebook

# Codes, and scales.
Converted = tuple[Array, Array]

_ZERO = 128  # the code of the weight 0

# NVFP4's 4-bit floats (E2M1), doubled, by their bits.
_NVFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def iq2_xxs(blocks: Array) -> Converted:
    """Convert IQ2_XXS: per 32 weights four indices, 7 sign bits for each, and a 4-bit scale."""
    groups = blocks[..., 2:].reshape(*blocks.shape[:-1], 8, 8)
    words = _words(groups[..., 4:], "<u4")
    signs = words >> np.array([0, 7, 14, 21], np.uint32) & 127
    magnitudes = _entries("IQ2_XXS", groups[..., :4])
    codes = _signed_codes(magnitudes, _even_signs(signs))
    return _flat(codes), _odd_scales(blocks[..., :2], words[..., 0] >> 28, 1 / 8)


def iq2_xs(blocks: Array) -> Converted:
    """Convert IQ2_XS: an index and 7 sign bits per 8 weights, a 4-bit scale per 16."""
    entries = _words(blocks[..., 2:66], "<u2")
    codes = _signed_codes(_entries("IQ2_XS", entries & 511), _even_signs(entries >> 9))
    return _flat(codes), _odd_scales(blocks[..., :2], _nibbles(blocks[..., 66:]), 1 / 8)


def iq2_s(blocks: Array) -> Converted:
    """Convert IQ2_S: an index of 10 bits and 8 sign bits per 8 weights, a 4-bit scale per 16."""
    high = _fields(blocks[..., 66:74], 2)
    indices = blocks[..., 2:34] | high.astype(np.uint16) << 8
    codes = _signed_codes(_entries("IQ2_S", indices), blocks[..., 34:66])
    return _flat(codes), _odd_scales(blocks[..., :2], _nibbles(blocks[..., 74:]), 1 / 8)


def iq3_xxs(blocks: Array) -> Converted:
    """Convert IQ3_XXS: an index per 4 weights, 7 sign bits per 8, a 4-bit scale per 32."""
    words = _words(blocks[..., 66:], "<u4")
    signs = words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & 127
    magnitudes = _entries("IQ3_XXS", blocks[..., 2:66])
    codes = _signed_codes(magnitudes, _even_signs(_flat(signs)))
    return _flat(codes), _odd_scales(blocks[..., :2], words >> 28, 1 / 4)


def iq3_s(blocks: Array) -> Converted:
    """Convert IQ3_S: an index of 9 bits per 4 weights, 8 sign bits per 8, a 4-bit scale per 32."""
    high = _fields(blocks[..., 66:74], 1)
    indices = blocks[..., 2:66] | high.astype(np.uint16) << 8
    codes = _signed_codes(_entries("IQ3_S", indices), blocks[..., 74:106])
    return _flat(codes), _odd_scales(blocks[..., :2], _nibbles(blocks[..., 106:]), 1)


def iq1_s(blocks: Array) -> Converted:
    """Convert IQ1_S: an index of 11 bits per 8 weights, a 3-bit scale and a shift per 32."""
    words = _words(blocks[..., 34:], "<u2")
    high = words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7
    indices = blocks[..., 2:34] | _flat(high) << 8
    shifts = np.repeat(words >> 15, 4, axis=-1)
    codes = _shifted_codes(_entries("IQ1_S", indices), shifts)
    return _flat(codes), _odd_scales(blocks[..., :2], words >> 12 & 7, 1 / 8)


def iq1_m(blocks: Array) -> Converted:
    """Convert IQ1_M: an index of 11 bits and a shift per 8 weights, a 3-bit scale per 16.

    Each of the last four 16-bit words has four scales, and above them 4 bits of the factor.
    """
    words = _words(blocks[..., 48:], "<u2")
    parts = words >> 12 << np.array([0, 4, 8, 12], np.uint16)
    factor = np.bitwise_or.reduce(parts, axis=-1, keepdims=True).view(UINT8)
    scales = _flat(words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7)
    high = _nibbles(blocks[..., 32:48])
    indices = blocks[..., :32] | (high & 7).astype(np.uint16) << 8
    codes = _shifted_codes(_entries("IQ1_M", indices), high >> 3)
    return _flat(codes), _odd_scales(factor, scales, 1 / 8)


def tq1_0(blocks: Array) -> Converted:
    """Convert TQ1_0: five ternary digits per byte, four in each of the last four bytes."""
    runs = (
        _ternary_digits(blocks[..., :32], 5),
        _ternary_digits(blocks[..., 32:48], 5),
        _ternary_digits(blocks[..., 48:52], 4),
    )
    digits = np.concatenate(runs, axis=-1)
    return digits + UINT8.type(_ZERO - 1), _factor(blocks[..., 52:])


def tq2_0(blocks: Array) -> Converted:
    """Convert TQ2_0: four 2-bit codes per byte; those of 32 bytes are 128 weights."""
    halves = blocks[..., :64].reshape(*blocks.shape[:-1], 2, 1, 32)
    digits = halves >> np.array([0, 2, 4, 6], UINT8)[:, None] & 3
    codes = digits.reshape(*blocks.shape[:-1], -1) + UINT8.type(_ZERO - 1)
    return codes, _factor(blocks[..., 64:])


def nvfp4(blocks: Array) -> Converted:
    """Convert NVFP4: four scales (E4M3 without a sign), and the nibbles of four times 16 floats."""
    exponent = (blocks[..., :4] >> 3 & 15).astype(np.int32)
    mantissa = (blocks[..., :4] & 7) + 8 * (exponent > 0)
    # The scale is halved, because the values are doubled. What would be NaN is 0.
    scale = np.ldexp(mantissa.astype(FLOAT32), np.maximum(exponent, 1) - 11)
    scale[blocks[..., :4] == 0x7F] = 0
    nibbles = blocks[..., 4:].reshape(*blocks.shape[:-1], 4, 8)
    floats = np.concatenate((nibbles & 15, nibbles >> 4), axis=-1)
    codes = np.array(_NVFP4_VALUES, np.int16) + _ZERO
    return _flat(codes.astype(UINT8)[floats]), scale


def _flat(numbers: Array) -> Array:
    """Join the last two axes."""
    return numbers.reshape(*numbers.shape[:-2], -1)


def _words(stored: Array, dtype: str) -> Array:
    """Read little-endian words from bytes, uint8 ``[..., n]``."""
    return np.ascontiguousarray(stored).view(dtype)


def _factor(stored: Array) -> Array:
    """Read float16 numbers, as float32."""
    return np.ascontiguousarray(stored).view(FLOAT16).astype(FLOAT32)


def _fields(stored: Array, bits: int) -> Array:
    """Return the fields of ``bits`` bits of each byte, the lowest first."""
    shifts = np.arange(0, 8, bits, dtype=UINT8)
    return _flat(stored[..., None] >> shifts & ((1 << bits) - 1))


def _nibbles(stored: Array) -> Array:
    """Return the halves of each byte, the low one first."""
    return _fields(stored, 4)


def _entries(type_: str, indices: Array) -> Array:
    """Return entries of a codebook, int8 ``[..., n, 8]``: the values of every eight weights."""
    entries = cast(Array, codebook(type_))[indices]
    return entries.reshape(*indices.shape[:-1], -1, 8)


def _even_signs(signs: Array) -> Array:
    """Add to seven sign bits the eighth one that makes their number even."""
    parity = signs ^ signs >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    return (signs | (parity & 1) << 7).astype(UINT8)


def _signed_codes(magnitudes: Array, signs: Array) -> Array:
    """Return codes of eight magnitudes each, with the sign bits of a byte of ``signs``."""
    negative = signs[..., None] >> np.arange(8, dtype=UINT8) & 1
    values = np.where(negative, -magnitudes, magnitudes)
    return (values.astype(np.int16) + _ZERO).astype(UINT8)


def _shifted_codes(values: Array, negative: Array) -> Array:
    """Return codes of values plus an eighth, or minus an eighth where ``negative`` is not 0."""
    shifts = np.where(negative, -1, 1).astype(np.int16)
    return (values + shifts[..., None] + _ZERO).astype(UINT8)


def _odd_scales(factor: Array, scales: Array, unit: float) -> Array:
    """Return ``factor * unit * (2 * scales + 1)``, where ``factor`` is stored as float16."""
    odd = 2 * scales.astype(FLOAT32) + 1
    return _factor(factor) * FLOAT32.type(unit) * odd


def _ternary_digits(stored: Array, count: int) -> Array:
    """Return the first ``count`` ternary digits of fractions of 256: digit 0 of all bytes, ….

    A digit is the integer part of three times the fraction.
    """
    powers = np.array([3**i for i in range(count)], UINT8)
    fractions = stored[..., None, :] * powers[:, None]
    return _flat((fractions.astype(np.uint16) * 3 >> 8).astype(UINT8))
