"""Packing: all elements are restored in every type and layout, and the padding is zero."""

import gc
from dataclasses import replace

import numpy as np
import pytest

from checkpoint.formats.codes import CODED, Minima, some_codes
from own_process import in_own_process
from pronk.base.arrays import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT8,
    Array,
    DType,
    MemoryPool,
    as_bytes,
    mapped_zeros,
)
from pronk.checkpoint.formats.matrix import Bits, QuantizedMatrix
from pronk.kernels import weights
from pronk.kernels.library import candidates
from pronk.kernels.rounding import round_weights
from pronk.kernels.threads import set_threads
from pronk.kernels.weights import PackedMatrix, pack

KERNELS = candidates()[-1]  # packing does not depend on the instruction set
FLOATS = [FLOAT32, BFLOAT16, FLOAT16]
SHAPES = [(1, 1), (16, 32), (17, 33), (15, 31), (97, 52), (300, 70), (64, 576), (131, 2)]


def some_weight(shape: tuple[int, int], dtype: DType = FLOAT32) -> Array:
    return np.random.default_rng(shape[0]).standard_normal(shape, np.float32).astype(dtype)


def numbers(count: int) -> Array:
    return np.arange(1, count + 1, dtype=np.float32)


def num_nonzero(packed: PackedMatrix) -> int:
    """Return the number of nonzero elements, padding included."""
    return np.count_nonzero(packed.data.astype(np.float32))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_round_trip(dtype: DType, shape: tuple[int, int]) -> None:
    weight = some_weight(shape, dtype)
    packed = pack(KERNELS, weight)
    assert packed.shape == shape
    assert packed.data.dtype == dtype
    assert packed.data.shape[0] == -(-shape[0] // 16)
    assert np.array_equal(packed.unpack(), weight.astype(np.float32))
    assert num_nonzero(packed) == np.count_nonzero(weight.astype(np.float32))  # the padding is zero


@pytest.mark.parametrize("unit", [2, 10, 16, 20, 64, 80])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_units_begin_blocks_of_their_own(dtype: DType, unit: int) -> None:
    weight = some_weight((5 * unit, 37), dtype)
    bias = numbers(5 * unit)
    packed = pack(KERNELS, weight, bias, unit=unit)
    each = -(-unit // 16)
    assert packed.data.shape[0] == 5 * each
    assert np.array_equal(packed.unpack(), weight.astype(np.float32))
    for number in range(5):
        alone = pack(KERNELS, weight[number * unit : (number + 1) * unit])
        assert np.array_equal(packed.data[number * each : (number + 1) * each], alone.data)
        assert packed.bias is not None
        own = packed.bias[number * each * 16 : (number + 1) * each * 16]
        assert own[:unit].tolist() == bias[number * unit : (number + 1) * unit].tolist()
        assert not own[unit:].any()


@pytest.mark.parametrize("half", [1, 7, 16, 40, 112])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_halves_of_a_gated_matrix_alternate(dtype: DType, half: int) -> None:
    weight = some_weight((2 * half, 37), dtype)
    bias = numbers(2 * half)
    packed = pack(KERNELS, weight, bias, gated=True)
    assert packed.shape == (2 * half, 37)
    assert packed.data.shape[0] == 2 * -(-half // 16)
    assert np.array_equal(packed.unpack(), weight.astype(np.float32))
    assert num_nonzero(packed) == np.count_nonzero(weight.astype(np.float32))
    for number, part in enumerate((weight[:half], weight[half:])):
        assert np.array_equal(packed.data[number::2], pack(KERNELS, part).data)
        assert packed.bias is not None
        placed = packed.bias.reshape(-1, 2, 16)[:, number].flatten()
        assert placed[:half].tolist() == np.split(bias, 2)[number].tolist()
        assert not placed[half:].any()


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_every_16_bit_number(dtype: DType) -> None:
    """Zeros of both signs, subnormal numbers, infinities and NaN."""
    weight = np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(256, 256)
    found = pack(KERNELS, weight).unpack()
    with np.errstate(invalid="ignore"):  # signaling NaN
        is_nan = np.isnan(weight)
    assert np.array_equal(np.isnan(found), is_nan)
    assert np.array_equal(
        found[~is_nan].view(np.int32), weight[~is_nan].astype(np.float32).view(np.int32)
    )


@pytest.mark.parametrize("layout", [{}, {"unit": 10}, {"gated": True}], ids=str)
@pytest.mark.parametrize("group", [8, 16, 32, 72])
@pytest.mark.parametrize("kind", CODED, ids=str)
def test_round_trip_of_codes(
    kind: tuple[Bits, Minima, bool], group: int, layout: dict[str, int]
) -> None:
    weight = some_codes((60, 45), *kind, group)
    packed = pack(KERNELS, weight, **layout)  # type: ignore[arg-type]
    assert np.array_equal(packed.unpack(), weight.dequantize())


@pytest.mark.parametrize("layout", [{}, {"unit": 20}, {"unit": 24}, {"gated": True}], ids=str)
@pytest.mark.parametrize("kind", CODED, ids=str)
def test_codes_are_packed_by_slabs(
    kind: tuple[Bits, Minima, bool], layout: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes are packed in slabs of rows; the packed bytes do not depend on the size of a slab."""
    weight = some_codes((120, 75), *kind, 32)
    sizes: list[int] = []

    class Recording:
        shape = weight.shape
        scale_format = weight.scale_format

        def slice_outputs(self, start: int, stop: int) -> QuantizedMatrix:
            sizes.append(stop - start)
            return weight.slice_outputs(start, stop)

    whole = pack(KERNELS, weight, **layout)
    for slab in (1, 75 * 48, 75 * 64):
        sizes.clear()
        monkeypatch.setattr(weights, "_SLAB", slab)
        found = pack(KERNELS, Recording(), **layout)
        assert np.array_equal(found.data, whole.data)
        assert (found.order is None) == (whole.order is None)
        assert sum(sizes) == 120
        assert max(sizes) <= max(layout.get("unit", 16), slab // 75)


# Whole blocks of 16 outputs, outputs of several blocks, and fewer outputs than a block has.
TAKEN = np.array([*range(16, 48), 3, 99, 5, 59, 96, 0, 119])


def check_taken(packed: PackedMatrix, direct: PackedMatrix) -> None:
    """Compare chosen outputs of a matrix with a matrix that was packed from these outputs."""
    taken = packed.take_outputs(TAKEN)
    assert taken.shape == direct.shape
    assert taken.format == packed.format
    assert as_bytes(taken.data).tobytes() == as_bytes(direct.data).tobytes()
    assert np.array_equal(taken.unpack(), packed.unpack()[TAKEN])
    (own, expected) = (each.bias for each in (taken, direct))
    assert own is None or (expected is not None and own.tolist() == expected.tolist())
    assert len(packed.unpack()) == 120, "expected the matrix to stay as it was"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_chosen_outputs(dtype: DType) -> None:
    weight = some_weight((120, 37), dtype)
    bias = numbers(120)
    check_taken(pack(KERNELS, weight, bias), pack(KERNELS, weight[TAKEN], bias[TAKEN]))


@pytest.mark.parametrize("group", [8, 32])
@pytest.mark.parametrize("kind", CODED, ids=str)
def test_chosen_outputs_of_codes(kind: tuple[Bits, Minima, bool], group: int) -> None:
    weight = some_codes((120, 75), *kind, group)
    check_taken(pack(KERNELS, weight), pack(KERNELS, weight.take_outputs(TAKEN)))


def test_fewer_bits_take_less_memory() -> None:
    weight = some_weight((512, 1024))
    every = (round_weights(KERNELS, weight, 4), round_weights(KERNELS, weight, 8), weight)
    sizes = [pack(KERNELS, each).data.nbytes for each in every]
    assert [size / weight.size for size in sizes] == [0.625, 1 + 4 / 128, 4.0]


@pytest.mark.parametrize("threads", [2, 3, 8])
@in_own_process
def test_threads_pack_the_same(threads: int) -> None:
    for weight in (
        *(some_weight((131, 70), dtype) for dtype in FLOATS),
        *(round_weights(KERNELS, some_weight((131, 70)), bits) for bits in (4, 8)),
    ):
        alone = pack(KERNELS, weight)
        set_threads(threads, 1)
        assert np.array_equal(pack(KERNELS, weight).data, alone.data)
        set_threads(1, 1)


def test_the_source_may_be_a_view_and_freed_afterwards() -> None:
    weight = some_weight((40, 60))
    for view in (
        weight.T.copy().T,
        np.concatenate((weight, weight), axis=1)[:, :60],
        weight.copy(),
    ):
        packed = pack(KERNELS, view)
        view[...] = 0.0
        assert np.array_equal(packed.unpack(), weight)


@pytest.mark.parametrize("size", [0, 1, 5, (1 << 21) - 1, 1 << 21, (1 << 21) + 3, 5 << 20])
def test_pages_are_zero_and_separate(size: int) -> None:
    first = mapped_zeros((size,), INT8)
    second = mapped_zeros((size,), INT8)
    assert first.shape == (size,)
    assert not first.any()
    first[...] = 1
    assert not second.any()
    assert first.sum(dtype=np.int64) == size


def test_pages_of_any_shape() -> None:
    made = mapped_zeros((3, 1000, 700), BFLOAT16)
    assert (made.shape, made.dtype, made.flags.c_contiguous) == ((3, 1000, 700), BFLOAT16, True)
    part = made[1]
    del made
    gc.collect()
    part[...] = 2.0  # the view keeps the deleted array's memory mapped
    assert part.astype(np.float32).mean() == 2.0


@pytest.mark.parametrize(
    ("dtype", "zeros", "minima"), [(FLOAT16, 48, 128), (BFLOAT16, 48, 128), (FLOAT32, 128, 128)]
)
def test_zero_points_take_a_byte(dtype: DType, zeros: int, minima: int) -> None:
    """With 16-bit scales, minima that are multiples of the scales are stored as zero points.

    The sizes are those of the scales and zero points, or minima, of 16 outputs in a group.
    """
    plain = some_codes((32, 128), 4, True, False, 32)
    scale = plain.scale.astype(dtype).astype(np.float32)
    minimum = -scale * np.random.default_rng(1).integers(16, size=scale.shape).astype(np.float32)
    weight = replace(plain, scale=scale, minimum=minimum)
    packed = pack(KERNELS, weight)
    assert packed.data.nbytes == 2 * 4 * (zeros + 16 * 32 // 2)
    assert np.array_equal(packed.unpack(), weight.dequantize())
    minimum[5, 2] += 1e-3  # no longer a multiple
    assert pack(KERNELS, replace(weight, minimum=minimum)).data.nbytes == 2 * 4 * (
        minima + 16 * 32 // 2
    )


@pytest.mark.parametrize("group", [32, 64, 128])
def test_zero_points_take_little_more_than_in_the_file(group: int) -> None:
    """Checkpoints of GPTQ and AWQ have a scale of 16 bits and a zero point of 4 bits per group."""
    packed = pack(KERNELS, some_codes((64, 512), 4, "zeros", False, group)).data.nbytes
    assert packed <= 1.06 * 64 * 512 / group * (group / 2 + 2 + 0.5)


def test_matrices_share_memory() -> None:
    """Each array has bytes of its own, from the beginning of a cache line on, also when a mapping
    is full.
    """
    pool = MemoryPool()
    dice = np.random.default_rng(0)
    arrays = list[Array]()
    for number in range(60):
        array = pool.zeros((int(dice.integers(1, 1000)), 999), BFLOAT16)
        assert not array.any()
        assert array.ctypes.data % 64 == 0
        array[:] = number
        arrays.append(array)
    assert sum(array.nbytes for array in arrays) > 2**25, "expected more than one mapping"
    assert all((array == number).all() for number, array in enumerate(arrays))
    medium = [pool.zeros((3, 1 << 20), INT8) for _ in range(2)]
    assert medium[1].ctypes.data - medium[0].ctypes.data == 3 << 20, (
        "expected no rounding to huge pages"
    )
    assert pool.zeros((33, 1 << 20), INT8).shape == (33, 1 << 20)
