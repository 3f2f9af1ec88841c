"""Unpacked blocks give the bits of llama.cpp's own dequantization."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES

from gguf_files import (
    CONVERTED,
    QUANTIZED,
    SCALES,
    STORED,
    decode,
    random_blocks,
    set_scattered_scale,
)
from pronk.checkpoint.formats.matrix import QuantizedMatrix
from pronk.checkpoint.gguf import blocks
from pronk.checkpoint.gguf.blocks import (
    BLOCKS,
    PACKED_BLOCKS,
    STORED_BLOCKS,
    TENSOR_TYPES,
    TensorType,
    unpack,
)

KINDS = pytest.mark.parametrize("kind", [*QUANTIZED, *CONVERTED, *STORED])
STORED_KINDS = pytest.mark.parametrize("kind", STORED)
# the others: 32
GROUPS = {
    "Q2_K": 16,
    "Q3_K": 16,
    "Q6_K": 16,
    "IQ1_M": 16,
    "IQ2_XS": 16,
    "IQ2_S": 16,
    "TQ1_0": 256,
    "TQ2_0": 256,
    "NVFP4": 16,
}
BITS = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q2_K": 4, "Q3_K": 4}  # the others: 8


def type_of(kind: str) -> TensorType:
    return next(each for each in TENSOR_TYPES.values() if each.name == kind)


def unpacked(kind: str, stored: np.ndarray, rows: np.ndarray | None = None) -> QuantizedMatrix:
    values, size = GGML_QUANT_SIZES[Type[kind]]
    codes = np.empty((len(stored), stored.shape[1] // size * values), np.uint8)
    return unpack(stored, type_of(kind), codes, rows)


def same_bits(found: QuantizedMatrix, expected: np.ndarray) -> bool:
    return np.array_equal(found.dequantize().view(np.uint32), expected.view(np.uint32))


def test_all_types_are_here() -> None:
    assert set(BLOCKS) == {*QUANTIZED, *CONVERTED, *STORED, "MXFP4"}
    assert set(STORED) == set(STORED_BLOCKS)
    assert {*QUANTIZED, *STORED} == PACKED_BLOCKS


def test_blocks_with_a_power_of_two_as_scale() -> None:
    """MXFP4: every code and every exponent that gives a finite float32."""
    stored = np.random.default_rng(0).integers(0, 256, (253, 16 * 17), dtype=np.uint8)
    stored.reshape(253, 16, 17)[..., 0] = np.arange(253)[:, None]
    found = unpacked("MXFP4", stored)
    assert (found.group, found.bits) == (32, 5)
    assert same_bits(found, decode("MXFP4", stored))


@KINDS
def test_bits_equal_those_of_gguf(kind: str) -> None:
    for seed in range(4):
        stored = random_blocks(kind, 7, 512, seed)
        found = unpacked(kind, stored)
        assert found.group == GROUPS.get(kind, 32)
        assert found.bits == BITS.get(kind, 8)
        assert same_bits(found, decode(kind, stored))


def test_every_scale_of_q2_k_and_q3_k() -> None:
    """All 256 bytes of scales and minima of Q2_K, all 64 scales of Q3_K in each of their sixteen
    places.
    """
    two = random_blocks("Q2_K", 256, 256, 0)
    two[:, :16] = np.arange(256)[:, None]
    assert same_bits(unpacked("Q2_K", two), decode("Q2_K", two))
    three = random_blocks("Q3_K", 64, 256, 0)
    three[:, 96:104] = (np.arange(64) % 16 * 17)[:, None]
    three[:, 104:108] = (np.arange(64) // 16 * 85)[:, None]
    found = unpacked("Q3_K", three)
    factor = three[:, 108:].copy().view(np.float16).astype(np.float32)
    assert np.array_equal(
        found.scale, factor * (np.arange(64, dtype=np.float32)[:, None] - 32) + np.zeros((1, 16))
    )
    assert same_bits(found, decode("Q3_K", three))


@STORED_KINDS
def test_any_bytes(kind: str) -> None:
    """Every entry of a codebook, every scale and sign: blocks of random bytes, with a scale of 1."""
    _, size = GGML_QUANT_SIZES[Type[kind]]
    stored = np.random.default_rng(2).integers(0, 256, (2000, 1, size), dtype=np.uint8)
    one = np.float16([1.0])
    if kind == "IQ1_M":
        set_scattered_scale(stored, np.broadcast_to(one, (2000, 1)).copy())
    elif kind == "NVFP4":
        stored[:256, 0, 2] = np.arange(256)
    else:
        (at,) = SCALES.get(kind, (0,))
        stored[..., at : at + 2] = one.view(np.uint8)
    stored = stored.reshape(2000, size)
    assert same_bits(unpacked(kind, stored), decode(kind, stored))


@KINDS
def test_scales_of_any_size(kind: str) -> None:
    """Finite float16 scales, also subnormal, negative and zero."""
    _, size = GGML_QUANT_SIZES[Type[kind]]
    stored = np.random.default_rng(1).integers(0, 256, (64, 4, size), dtype=np.uint8)
    for at in (54,) if kind == "IQ1_M" else SCALES.get(kind, (0,)):
        # clears a bit of the exponent, so that no scale is infinite or NaN
        stored[..., at + 1] &= 0xBF
    stored[0, 0] = 0
    stored = stored.reshape(64, -1)
    assert same_bits(unpacked(kind, stored), decode(kind, stored))


@KINDS
def test_rows_in_another_order_and_in_parts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = random_blocks(kind, 37, 256, 5)
    order = np.random.default_rng(0).permutation(37)
    monkeypatch.setattr(blocks, "_CHUNK_BYTES", 4 * stored.shape[1])
    found = unpacked(kind, stored, order)
    assert same_bits(found, decode(kind, stored)[order])


# NVFP4 has no scale that is not finite
@pytest.mark.parametrize("kind", sorted({*QUANTIZED, *CONVERTED, *STORED} - {"NVFP4"}))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scales_that_are_not_finite(kind: str, bad: float) -> None:
    stored = random_blocks(kind, 3, 256, 0)
    at = SCALES.get(kind, (0,))[-1]
    if kind == "IQ1_M":
        set_scattered_scale(stored[1], np.float16(bad))
    else:
        stored[1, at : at + 2] = np.frombuffer(np.float16(bad).tobytes(), np.uint8)
    # no scale of 0, whose product with infinity would be NaN either way
    if kind in ("Q2_K", "Q3_K", "Q6_K"):
        stored[1, {"Q2_K": slice(0, 16), "Q3_K": slice(96, 108), "Q6_K": slice(192, 208)}[kind]] = (
            17
        )
    with pytest.raises(ValueError, match="finite"):
        unpacked(kind, stored)
