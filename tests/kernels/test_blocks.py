"""GEMM with the blocks of GGUF files: packed as they are, with the bits of an exact loop on every
instruction set.
"""

import ctypes

import numpy as np
import pytest

from checkpoint.formats.codes import coded_product, fused
from gguf_files import (
    QUANTIZED,
    SCALES,
    STORED,
    SUPER_BLOCKS,
    decode,
    random_blocks,
    set_scattered_scale,
)
from kernels.test_products import ROWS, same, some_rows
from own_process import in_own_process
from pronk.base.arrays import Array
from pronk.checkpoint.gguf.blocks import TENSOR_TYPES, BlockMatrix, BlockRows, unpack
from pronk.kernels import weights
from pronk.kernels.library import candidates
from pronk.kernels.threads import set_threads
from pronk.kernels.weights import pack
from pronk.models.linear import Linear, WeightLayout

SETS = candidates()
KINDS = pytest.mark.parametrize("kind", [*QUANTIZED, *STORED])
SUPER = pytest.mark.parametrize("kind", SUPER_BLOCKS)
STORED_SUPER = pytest.mark.parametrize("kind", [kind for kind in STORED if kind != "NVFP4"])
TYPES = {each.name: each for each in TENSOR_TYPES.values()}
# the others: 352, an odd number of groups of 32
INPUTS = dict.fromkeys([*SUPER_BLOCKS, *STORED], 768) | {"NVFP4": 448}
# the zero of codes without minima, in the codes of ``unpack``
ZEROS = {"Q3_K": 8, "Q6_K": 128, "IQ4_XS": 128}
# Scales of stored blocks are an integer times the float16 scale of the block times this number.
SCALE_UNITS = {
    "IQ1_S": 1 / 8,
    "IQ1_M": 1 / 8,
    "IQ2_XXS": 1 / 8,
    "IQ2_XS": 1 / 8,
    "IQ2_S": 1 / 8,
    "IQ3_XXS": 1 / 4,
}


def blocks(kind: str, outputs: int, inputs: int, seed: int = 0, heads: int = 0) -> BlockMatrix:
    return BlockMatrix(
        kind, inputs, (BlockRows(random_blocks(kind, outputs, inputs, seed), heads),)
    )


def dequantized(matrix: BlockMatrix) -> Array:
    return np.concatenate([decode(matrix.type, part.stored) for part in matrix.parts])


def linears(weight: BlockMatrix, bias: Array | None = None) -> list[Linear]:
    return [Linear(kernels, weight, bias, WeightLayout(), None) for kernels in SETS]


def check_products(weight: BlockMatrix, x: Array, expected: Array) -> None:
    """Check a few rows on every instruction set, then 20 copies of them, for which AMX uses
    tiles.
    """
    for linear in linears(weight):
        for copies in (1, 20):
            found = linear.logits(np.tile(x, (copies, 1)))
            assert same(found, np.tile(expected, (copies, 1))), (linear.packed.kernels.name, copies)


def super_block_product(matrix: BlockMatrix, x: Array) -> Array:
    """Return the product ``[rows, outputs]`` by the rule of ``kernels/README.md``, in integers as
    far as possible.
    """
    stored = matrix.parts[0].stored
    codes = np.empty((len(stored), matrix.inputs), np.uint8)
    unpacked = unpack(stored, TYPES[matrix.type], codes)
    values = codes.astype(np.int64) - ZEROS.get(matrix.type, 0)
    group = unpacked.group
    size = TYPES[matrix.type].size
    raw = stored.reshape(len(stored), -1, size)
    out = np.zeros((len(x), len(stored)), np.float32)
    for r, row in enumerate(x):
        for b, start in enumerate(range(0, matrix.inputs, 256)):
            part = row[start : start + 256]
            top = np.abs(part).max()
            inverse = np.float32(127) / np.maximum(top, np.float32(1e-30))
            own = np.rint(part * inverse).clip(-127, 127).astype(np.int64)
            step = top * (np.float32(1) / np.float32(127))
            for n in range(len(stored)):
                factor, factor_min, scales, minima = super_block_scales(matrix.type, raw[n, b])
                sums = np.zeros(2, np.int64)
                for g, (scale, minimum) in enumerate(zip(scales, minima, strict=True)):
                    at = slice(g * group, (g + 1) * group)
                    code = values[n, start : start + 256][at]
                    sums += scale * int(own[at] @ code), minimum * int(own[at].sum())
                y = fused(np.float32(sums[0]), np.float32(factor) * step, out[r, n])
                if matrix.type not in ZEROS:
                    y = fused(np.float32(sums[1]), -(np.float32(factor_min) * step), y)
                out[r, n] = y
    return out


def stored_product(matrix: BlockMatrix, x: Array) -> Array:
    """Return the product ``[rows, outputs]`` of stored super-blocks, in integers as far as
    possible.
    """
    stored = matrix.parts[0].stored
    outputs = len(stored)
    codes = np.empty((outputs, matrix.inputs), np.uint8)
    unpacked = unpack(stored, TYPES[matrix.type], codes)
    values = codes.astype(np.int64) - 128
    raw = stored.reshape(outputs, -1, TYPES[matrix.type].size)
    factors = stored_factors(matrix.type, raw) * np.float32(SCALE_UNITS.get(matrix.type, 1))
    per_block = 256 // unpacked.group
    scales = unpacked.scale / np.repeat(factors, per_block, axis=1)
    assert (scales == np.rint(scales)).all()
    out = np.zeros((len(x), outputs), np.float32)
    for r, row in enumerate(x):
        for b, start in enumerate(range(0, matrix.inputs, 256)):
            part = row[start : start + 256]
            top = np.abs(part).max()
            inverse = np.float32(127) / np.maximum(top, np.float32(1e-30))
            own = np.rint(part * inverse).clip(-127, 127).astype(np.int64)
            step = top * (np.float32(1) / np.float32(127))
            for n in range(outputs):
                products = (own * values[n, start : start + 256]).reshape(per_block, -1).sum(axis=1)
                total = int(products @ scales[n, b * per_block :][:per_block].astype(np.int64))
                out[r, n] = fused(np.float32(total), factors[n, b] * step, out[r, n])
    return out


def stored_factors(kind: str, raw: np.ndarray) -> Array:
    """Return the float16 scales of blocks ``[outputs, blocks, bytes]``, as float32."""
    if kind == "IQ1_M":
        words = np.ascontiguousarray(raw[..., 48:]).view(np.uint16) >> 12
        bits = words[..., 0] | words[..., 1] << 4 | words[..., 2] << 8 | words[..., 3] << 12
        return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)
    (at,) = SCALES.get(kind, (0,))
    scales = np.ascontiguousarray(raw[..., at : at + 2]).view(np.float16)
    return scales[..., 0].astype(np.float32)


def super_block_scales(
    kind: str, block: np.ndarray
) -> tuple[np.float16, np.float16, list[int], list[int]]:
    """Return the factors and the integer scales and minima of a block, read bit by bit."""
    if kind == "Q6_K":
        scales = block[192:208].view(np.int8).astype(int).tolist()
        return block[208:210].view(np.float16)[0], np.float16(0), scales, [0] * 16
    if kind == "Q2_K":
        factor, factor_min = block[80:].view(np.float16)
        return factor, factor_min, (block[:16] & 15).tolist(), (block[:16] >> 4).tolist()
    if kind == "Q3_K":
        s = block[96:108].astype(int)
        low = [*(s[:8] & 15), *(s[:8] >> 4)]
        scales = [int(low[i] + (s[8 + i % 4] >> i // 4 * 2 & 3) * 16 - 32) for i in range(16)]
        return block[108:].view(np.float16)[0], np.float16(0), scales, [0] * 16
    if kind == "IQ4_XS":
        high = int(block[2]) + 256 * int(block[3])
        scales = [
            (int(block[4 + i // 2]) >> i % 2 * 4 & 15) + (high >> 2 * i & 3) * 16 - 32
            for i in range(8)
        ]
        return block[:2].view(np.float16)[0], np.float16(0), scales, [0] * 8
    factor, factor_min = block[:4].view(np.float16)
    s = block[4:16].astype(int)
    scales = [s[i] & 63 for i in range(4)] + [(s[i + 8] & 15) | (s[i] >> 6) << 4 for i in range(4)]
    minima = [s[i + 4] & 63 for i in range(4)] + [
        s[i + 8] >> 4 | (s[i + 4] >> 6) << 4 for i in range(4)
    ]
    return factor, factor_min, [int(each) for each in scales], [int(each) for each in minima]


@KINDS
def test_chosen_outputs(kind: str) -> None:
    """The rows of a draft head: copies of packed rows are the rows packed alone."""
    rows = np.array([*range(16, 48), 3, 99, 5, 59, 96, 0, 98])
    whole = blocks(kind, 100, INPUTS.get(kind, 352))
    (part,) = whole.parts
    alone = BlockMatrix(kind, whole.inputs, (BlockRows(part.stored[rows]),))
    for all_outputs, direct in zip(linears(whole), linears(alone), strict=True):
        taken = all_outputs.packed.take_outputs(rows)  # type: ignore[attr-defined]
        assert taken.format == direct.packed.format
        assert np.array_equal(taken.data, direct.packed.data)  # type: ignore[attr-defined]


@KINDS
def test_packed_weights_are_those_of_the_file(kind: str) -> None:
    weight = blocks(kind, 37, INPUTS.get(kind, 352))
    for linear in linears(weight):
        assert same(linear.packed.unpack(), dequantized(weight))


@KINDS
def test_packed_weights_take_the_space_of_the_file(kind: str) -> None:
    weight = blocks(kind, 64, 2048)
    stored = weight.parts[0].stored.nbytes
    assert stored <= pack(SETS[0], weight).data.nbytes <= 1.03 * stored


def extreme_rows(width: int) -> Array:
    """Return four rows: small numbers, large ones, mostly zeros, and those of the largest sums."""
    x = some_rows(4, width)
    x[1] *= 1000.0
    x[2, :300] = 0.0
    x[3] = np.sign(x[3]) * 5.0  # codes of 127 only
    return x


@SUPER
def test_super_blocks_equal_the_loop(kind: str) -> None:
    weight = blocks(kind, 21, 512, seed=3)
    x = extreme_rows(512)
    check_products(weight, x, super_block_product(weight, x))


@STORED_SUPER
def test_stored_super_blocks_equal_the_loop(kind: str) -> None:
    weight = blocks(kind, 21, 512, seed=3)
    x = extreme_rows(512)
    check_products(weight, x, stored_product(weight, x))


@STORED_SUPER
@pytest.mark.parametrize("fill", [0, 255])
def test_the_largest_sums_of_stored_blocks_do_not_overflow(kind: str, fill: int) -> None:
    """Equal bytes: all scales and all codes are the same, and inputs have their signs."""
    weight = blocks(kind, 16, 512, seed=1)
    raw = weight.parts[0].stored.reshape(16, -1, TYPES[kind].size)
    factors = stored_factors(kind, raw).astype(np.float16)
    raw[:] = fill
    if kind == "IQ1_M":
        set_scattered_scale(raw, factors)
    else:
        (at,) = SCALES.get(kind, (0,))
        raw[..., at : at + 2] = factors[..., None].view(np.uint8)
    signs = np.sign(dequantized(weight)[:1])
    x = np.concatenate((signs, -signs, np.ones_like(signs)))
    check_products(weight, x, stored_product(weight, x))


@SUPER
def test_the_largest_sums_do_not_overflow(kind: str) -> None:
    """All codes and scales are the largest, and all inputs equal, so that no product cancels
    another.
    """
    stored = random_blocks(kind, 16, 512, 1)
    raw = stored.reshape(16, -1, TYPES[kind].size)
    factors = [slice(at, at + 2) for at in SCALES.get(kind, (0,))]
    kept = [raw[:, :, factor].copy() for factor in factors]
    raw[:] = 255
    for factor, value in zip(factors, kept, strict=True):
        raw[:, :, factor] = value
    if kind == "Q6_K":
        raw[:, :, 192:208] = 127  # the scales are signed
    weight = BlockMatrix(kind, 512, (BlockRows(stored),))
    x = np.array([[1.0], [-1.0]], np.float32).repeat(512, axis=1)
    check_products(weight, x, super_block_product(weight, x))


@pytest.mark.parametrize("code_bytes", [0, 255], ids=["smallest codes", "largest codes"])
def test_the_smallest_scale_of_six_bits(code_bytes: int) -> None:
    """Scales of Q6_K are signed: -128 times the extreme codes, with alternating signs of the scales
    of a pair.
    """
    stored = random_blocks("Q6_K", 16, 512, 1)
    raw = stored.reshape(16, -1, TYPES["Q6_K"].size)
    raw[:, :, :192] = code_bytes
    raw[:, :, 192:208:2] = 128
    raw[:, :, 193:208:2] = 127
    weight = BlockMatrix("Q6_K", 512, (BlockRows(stored),))
    x = np.array([[1.0], [-1.0]], np.float32).repeat(512, axis=1)
    check_products(weight, x, super_block_product(weight, x))


@pytest.mark.parametrize("scale", ["smallest", "largest"])
@pytest.mark.parametrize("code_bytes", [0, 255], ids=["smallest codes", "largest codes"])
@pytest.mark.parametrize("kind", ["Q3_K", "IQ4_XS"])
def test_extreme_scales_of_six_bits(kind: str, code_bytes: int, scale: str) -> None:
    """Scales of Q3_K and IQ4_XS are -32 to 31: the largest sums of both signs."""
    stored = random_blocks(kind, 16, 512, 1)
    raw = stored.reshape(16, -1, TYPES[kind].size)
    codes = slice(96) if kind == "Q3_K" else slice(8, None)
    scales = slice(96, 108) if kind == "Q3_K" else slice(2, 8)
    raw[:, :, codes] = code_bytes
    raw[:, :, scales] = 0 if scale == "smallest" else 255
    weight = BlockMatrix(kind, 512, (BlockRows(stored),))
    x = np.array([[1.0], [-1.0]], np.float32).repeat(512, axis=1)
    check_products(weight, x, super_block_product(weight, x))


@pytest.mark.parametrize(
    "kind", [*(kind for kind in QUANTIZED if kind not in SUPER_BLOCKS), "NVFP4"]
)
def test_groups_equal_the_loop(kind: str) -> None:
    inputs = INPUTS.get(kind, 352)
    weight = blocks(kind, 21, inputs)
    stored = weight.parts[0].stored
    unpacked = unpack(stored, TYPES[kind], np.empty((21, inputs), np.uint8))
    x = some_rows(3, inputs)
    check_products(weight, x, coded_product(unpacked, x))


@pytest.mark.few(7)
@KINDS
@in_own_process
def test_a_row_depends_on_neither_the_batch_nor_the_instruction_set(
    kind: str, *, is_sanitized: bool
) -> None:
    inputs = INPUTS.get(kind, 352)
    most = 70 if is_sanitized else 600
    weight = blocks(kind, 97, inputs)
    bias = some_rows(1, 97, seed=2)[0]
    x = some_rows(most, inputs)
    set_threads(1, 1)
    whole = linears(weight, bias)[0].logits(x)
    for linear in linears(weight, bias):
        assert same(linear.logits(x), whole), linear.packed.kernels.name
        for rows in () if is_sanitized else (*ROWS[::3], 511):
            assert same(linear.logits(x[:rows]), whole[:rows]), rows
        for rows in (1, 5, 33):
            assert same(linear.logits(x[-rows:]), whole[-rows:]), rows
    for threads in (3,) if is_sanitized else (2, 3, 5):
        set_threads(threads, 1)
        for rows in (4, most):
            assert same(linears(weight, bias)[0].logits(x[:rows]), whole[:rows]), (rows, threads)


@KINDS
def test_every_number_of_rows_up_to_three_groups_of_tiles(kind: str, *, is_sanitized: bool) -> None:
    weight = blocks(kind, 37, INPUTS.get(kind, 352))
    x = some_rows(70, INPUTS.get(kind, 352))
    best = linears(weight)[0]
    portable = linears(weight)[-1]
    expected = portable.logits(x)
    # Sanitized: every number of rows of a partial tile, and those at the bounds of further tiles.
    few = (*range(1, 18), 31, 32, 33, 47, 48, 49, 63, 64, 65, 70)
    for rows in few if is_sanitized else range(1, 71):
        assert same(best.logits(x[:rows]), expected[:rows]), rows


def test_many_rows_use_tiles() -> None:
    """The emulation of AMX counts its products of tiles: of 16 rows, 16 outputs and 32 or 64
    inputs.
    """
    try:
        counter = ctypes.c_int64.in_dll(SETS[0].library, "pronk_emulated_products")
    except ValueError:
        pytest.skip("expected a library with emulated instructions (--library), found another")
    for kind in QUANTIZED:
        inputs = INPUTS.get(kind, 352)
        linear = linears(blocks(kind, 37, inputs))[0]
        steps = 2 * inputs // 64 if kind[-1] == "K" else inputs // 32  # super-blocks: two planes
        for rows, row_tiles in ((1, 0), (64, 4)):
            before = counter.value
            linear.logits(some_rows(rows, inputs))
            assert counter.value - before == row_tiles * 3 * steps, (kind, rows)


@KINDS
def test_rows_that_are_not_finite_leave_the_others_alone(kind: str) -> None:
    bad = [3, 20, 40]  # AMX tiles of super-blocks compute row 20 in two groups of rows
    for linear in linears(blocks(kind, 20, 768)):
        x = some_rows(41, 768)
        expected = linear.logits(x)
        x[3] = float("inf")
        x[20, 5] = float("nan")
        x[40] = float("-inf")
        found = linear.logits(x)
        finite = [row for row in range(41) if row not in bad]
        assert same(found[finite], expected[finite])
        assert not np.isfinite(found[bad]).any()


@KINDS
def test_rows_of_heads_parts_and_gates(kind: str) -> None:
    """Permuted rows of heads, stacked parts padded by head, and gate and up projections find their
    places.
    """
    one = blocks(kind, 48, 256, 1, heads=2)
    two = blocks(kind, 72, 256, 2)
    order = np.arange(48).reshape(2, 12, 2).swapaxes(1, 2).reshape(-1)
    expected = np.concatenate([dequantized(one)[order], dequantized(two)])
    stacked = BlockMatrix(kind, 256, one.parts + two.parts)
    assert same(pack(SETS[0], stacked, unit=24).unpack(), expected)
    assert same(pack(SETS[0], stacked).unpack(), expected)
    gate = BlockMatrix(kind, 256, two.parts + blocks(kind, 72, 256, 3).parts)
    assert same(pack(SETS[0], gate, gated=True).unpack(), dequantized(gate))


@KINDS
def test_slabs_of_a_matrix_have_the_bits_of_the_whole(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large matrix is packed by slabs; after each, the pages of the file are freed."""
    one = blocks(kind, 48, 256, 1, heads=2)
    other = blocks(kind, 80, 256, 2)
    released = list[int]()
    stacked = BlockMatrix(kind, 256, one.parts + other.parts, lambda: released.append(1))
    whole = [pack(SETS[0], stacked, unit=unit) for unit in (None, 24)]
    whole.append(pack(SETS[0], stacked, gated=True))
    assert not released
    per_block = whole[0].nbytes // whole[0].struct.blocks
    for blocks_per_slab in (1, 3):
        monkeypatch.setattr(weights, "_SLAB_BYTES", blocks_per_slab * per_block)
        parts = [pack(SETS[0], stacked, unit=unit) for unit in (None, 24)]
        parts.append(pack(SETS[0], stacked, gated=True))
        for expected, found in zip(whole, parts, strict=True):
            assert np.array_equal(found.data, expected.data)
        slabs = [-(-each.struct.blocks // blocks_per_slab) for each in parts]
        assert len(released) == sum(slabs) - len(slabs)
        released.clear()


# NVFP4 has no scale that is not finite
@pytest.mark.parametrize("kind", sorted({*QUANTIZED, *STORED} - {"NVFP4"}))
def test_damaged_scales_are_refused(kind: str) -> None:
    for at in SCALES.get(kind, (0,)):
        weight = blocks(kind, 20, 512)
        raw = weight.parts[0].stored.reshape(20, -1, TYPES[kind].size)
        if kind == "IQ1_M":
            set_scattered_scale(raw[17, 1], np.float16(np.inf))
        else:
            raw[17, 1, at : at + 2] = 0, 0x7C
        with pytest.raises(ValueError, match="expected finite scales, found NaN or infinity"):
            pack(SETS[0], weight)
