"""Unpacked blocks give the bits of llama.cpp's own dequantization."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES

from gguf_files import QUANTIZED, SCALES, decode, random_blocks
from pronk.quantization.formats.matrix import QuantizedMatrix
from pronk.quantization.gguf import blocks
from pronk.quantization.gguf.blocks import BLOCKS, PACKED_BLOCKS, unpack
from pronk.quantization.gguf.layout import TENSOR_TYPES, TensorType


def type_of(kind: str) -> TensorType:
    return next(each for each in TENSOR_TYPES.values() if each.name == kind)


def unpacked(kind: str, stored: np.ndarray, rows: np.ndarray | None = None) -> QuantizedMatrix:
    values, size = GGML_QUANT_SIZES[Type[kind]]
    codes = np.empty((len(stored), stored.shape[1] // size * values), np.uint8)
    return unpack(stored, type_of(kind), codes, rows)


def same_bits(found: QuantizedMatrix, expected: np.ndarray) -> bool:
    return np.array_equal(found.dequantize().view(np.uint32), expected.view(np.uint32))


def test_all_types_are_here() -> None:
    assert set(BLOCKS) == {*QUANTIZED, "MXFP4"}
    assert set(QUANTIZED) == PACKED_BLOCKS


def test_blocks_with_a_power_of_two_as_scale() -> None:
    """MXFP4: every code and every exponent that gives a finite float32."""
    stored = np.random.default_rng(0).integers(0, 256, (253, 16 * 17), dtype=np.uint8)
    stored.reshape(253, 16, 17)[..., 0] = np.arange(253)[:, None]
    found = unpacked("MXFP4", stored)
    assert (found.group, found.bits) == (32, 5)
    assert same_bits(found, decode("MXFP4", stored))


@pytest.mark.parametrize("kind", QUANTIZED)
def test_bits_equal_those_of_gguf(kind: str) -> None:
    for seed in range(4):
        stored = random_blocks(kind, 7, 512, seed)
        found = unpacked(kind, stored)
        assert found.group == (16 if kind == "Q6_K" else 32)
        assert found.bits == (4 if kind.startswith("Q4") else 8)
        assert same_bits(found, decode(kind, stored))


@pytest.mark.parametrize("kind", QUANTIZED)
def test_scales_of_any_size(kind: str) -> None:
    """Finite float16 scales, also subnormal, negative and zero."""
    _, size = GGML_QUANT_SIZES[Type[kind]]
    stored = np.random.default_rng(1).integers(0, 256, (64, 4, size), dtype=np.uint8)
    for at in SCALES.get(kind, (0,)):
        stored[..., at + 1] &= 0xBF  # clears a bit of the exponent, so that no scale is infinite or NaN
    stored[0, 0] = 0
    stored = stored.reshape(64, -1)
    assert same_bits(unpacked(kind, stored), decode(kind, stored))


@pytest.mark.parametrize("kind", QUANTIZED)
def test_rows_in_another_order_and_in_parts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = random_blocks(kind, 37, 256, 5)
    order = np.random.default_rng(0).permutation(37)
    monkeypatch.setattr(blocks, "_CHUNK_BYTES", 4 * stored.shape[1])
    found = unpacked(kind, stored, order)
    assert same_bits(found, decode(kind, stored)[order])


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scales_that_are_not_finite(kind: str, bad: float) -> None:
    stored = random_blocks(kind, 3, 256, 0)
    at = SCALES.get(kind, (0,))[-1]
    stored[1, at : at + 2] = np.frombuffer(np.float16(bad).tobytes(), np.uint8)
    if kind == "Q6_K":
        stored[1, 192:208] = 1
    with pytest.raises(ValueError, match="finite"):
        unpacked(kind, stored)
