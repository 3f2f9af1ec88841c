"""Packing: all elements are restored in every type and layout, and the padding is zero."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pronk.kernels import weights
from pronk.kernels.library import candidates
from pronk.kernels.rounding import round_weights
from pronk.kernels.weights import PackedMatrix, mapped_zeros, pack
from pronk.quantization.formats.matrix import Bits, QuantizedMatrix
from quantization.formats.codes import CODED, Minima, some_codes

KERNELS = candidates()[-1]  # packing does not depend on the instruction set
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (16, 32), (17, 33), (15, 31), (97, 52), (300, 70), (64, 576), (131, 2)]


def some_weight(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(dtype)


def num_nonzero(packed: PackedMatrix) -> int:
    """Return the number of nonzero elements, padding included."""
    return int(packed.data.float().count_nonzero())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_round_trip(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = some_weight(shape, dtype)
    packed = pack(KERNELS, weight)
    assert packed.shape == shape
    assert packed.data.dtype == dtype
    assert packed.data.shape[0] == -(-shape[0] // 16)
    assert torch.equal(packed.unpack(), weight.float())
    assert num_nonzero(packed) == int(weight.count_nonzero())  # the padding is zero


@pytest.mark.parametrize("unit", [2, 10, 16, 20, 64, 80])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_units_begin_blocks_of_their_own(dtype: torch.dtype, unit: int) -> None:
    weight, bias = some_weight((5 * unit, 37), dtype), torch.arange(1.0, 5 * unit + 1)
    packed = pack(KERNELS, weight, bias, unit=unit)
    each = -(-unit // 16)
    assert packed.data.shape[0] == 5 * each
    assert torch.equal(packed.unpack(), weight.float())
    for number in range(5):
        alone = pack(KERNELS, weight[number * unit : (number + 1) * unit])
        assert torch.equal(packed.data[number * each : (number + 1) * each], alone.data)
        assert packed.bias is not None
        own = packed.bias[number * each * 16 : (number + 1) * each * 16]
        assert own[:unit].tolist() == bias[number * unit : (number + 1) * unit].tolist()
        assert not own[unit:].any()


@pytest.mark.parametrize("half", [1, 7, 16, 40, 112])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_halves_of_a_gated_matrix_alternate(dtype: torch.dtype, half: int) -> None:
    weight, bias = some_weight((2 * half, 37), dtype), torch.arange(1.0, 2 * half + 1)
    packed = pack(KERNELS, weight, bias, gated=True)
    assert packed.shape == (2 * half, 37)
    assert packed.data.shape[0] == 2 * -(-half // 16)
    assert torch.equal(packed.unpack(), weight.float())
    assert num_nonzero(packed) == int(weight.count_nonzero())
    for number, part in enumerate((weight[:half], weight[half:])):
        assert torch.equal(packed.data[number::2], pack(KERNELS, part).data)
        assert packed.bias is not None
        placed = packed.bias.view(-1, 2, 16)[:, number].flatten()
        assert placed[:half].tolist() == bias.chunk(2)[number].tolist()
        assert not placed[half:].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_number(dtype: torch.dtype) -> None:
    """Zeros of both signs, subnormal numbers, infinities and NaN."""
    weight = torch.arange(1 << 16).to(torch.uint16).view(dtype).view(256, 256)
    found = pack(KERNELS, weight).unpack()
    numbers = ~weight.isnan()
    assert torch.equal(found.isnan(), weight.isnan())
    assert torch.equal(found[numbers].view(torch.int32), weight.float()[numbers].view(torch.int32))


@pytest.mark.parametrize("layout", [{}, {"unit": 10}, {"gated": True}], ids=str)
@pytest.mark.parametrize("group", [8, 16, 32, 72])
@pytest.mark.parametrize("kind", CODED, ids=str)
def test_round_trip_of_codes(kind: tuple[Bits, Minima, bool], group: int, layout: dict[str, int]) -> None:
    weight = some_codes((60, 45), *kind, group)
    packed = pack(KERNELS, weight, **layout)  # type: ignore[arg-type]
    assert torch.equal(packed.unpack(), weight.dequantize())


@pytest.mark.parametrize("layout", [{}, {"unit": 20}, {"unit": 24}, {"gated": True}], ids=str)
@pytest.mark.parametrize("kind", CODED, ids=str)
def test_codes_are_packed_by_slabs(
    kind: tuple[Bits, Minima, bool], layout: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes are packed in slabs of rows; the packed bytes do not depend on the size of a slab."""
    weight = some_codes((120, 75), *kind, 32)
    sizes: list[int] = []

    class Recording:
        shape, scale_format = weight.shape, weight.scale_format

        def slice_outputs(self, start: int, stop: int) -> QuantizedMatrix:
            sizes.append(stop - start)
            return weight.slice_outputs(start, stop)

    whole = pack(KERNELS, weight, **layout)
    for slab in (1, 75 * 48, 75 * 64):
        sizes.clear()
        monkeypatch.setattr(weights, "_SLAB", slab)
        found = pack(KERNELS, Recording(), **layout)
        assert torch.equal(found.data, whole.data)
        assert (found.order is None) == (whole.order is None)
        assert sum(sizes) == 120
        assert max(sizes) <= max(layout.get("unit", 16), slab // 75)


def test_fewer_bits_take_less_memory() -> None:
    weight = some_weight((512, 1024))
    every = (round_weights(KERNELS, weight, 4), round_weights(KERNELS, weight, 8), weight)
    sizes = [pack(KERNELS, each).data.nbytes for each in every]
    assert [size / weight.numel() for size in sizes] == [0.625, 1 + 4 / 128, 4.0]


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_pack_the_same(threads: int) -> None:
    for weight in (
        *(some_weight((131, 70), dtype) for dtype in FLOATS),
        *(round_weights(KERNELS, some_weight((131, 70)), bits) for bits in (4, 8)),
    ):
        alone = pack(KERNELS, weight)
        torch.set_num_threads(threads)
        assert torch.equal(pack(KERNELS, weight).data, alone.data)
        torch.set_num_threads(1)


def test_the_source_may_be_a_view_and_freed_afterwards() -> None:
    weight = some_weight((40, 60))
    views = [weight.t().contiguous().t(), torch.cat((weight, weight), dim=1)[:, :60], weight.clone().requires_grad_()]
    for view in views:
        packed = pack(KERNELS, view)
        with torch.no_grad():
            view.zero_()
        assert torch.equal(packed.unpack(), weight)


@pytest.mark.parametrize("size", [0, 1, 5, (1 << 21) - 1, 1 << 21, (1 << 21) + 3, 5 << 20])
def test_pages_are_zero_and_separate(size: int) -> None:
    first, second = mapped_zeros((size,), torch.int8), mapped_zeros((size,), torch.int8)
    assert first.shape == (size,)
    assert not first.any()
    first.fill_(1)
    gc.collect()
    assert not second.any()
    assert int(first.sum(dtype=torch.int64)) == size


def test_pages_of_any_shape() -> None:
    made = mapped_zeros((3, 1000, 700), torch.bfloat16)
    assert (made.shape, made.dtype, made.is_contiguous()) == ((3, 1000, 700), torch.bfloat16, True)
    part = made[1]
    del made
    gc.collect()
    part.fill_(2.0)  # the view keeps the deleted tensor's memory mapped
    assert float(part.float().mean()) == 2.0


@pytest.mark.parametrize(
    ("dtype", "zeros", "minima"), [(torch.float16, 48, 128), (torch.bfloat16, 48, 128), (torch.float32, 128, 128)]
)
def test_zero_points_take_a_byte(dtype: torch.dtype, zeros: int, minima: int) -> None:
    """With 16-bit scales, minima that are multiples of the scales are stored as zero points.

    The sizes are those of the scales and zero points, or minima, of 16 outputs in a group.
    """
    plain = some_codes((32, 128), 4, True, False, 32)
    scale = plain.scale.to(dtype).float()
    minimum = -scale * torch.randint(16, scale.shape, generator=torch.Generator().manual_seed(1))
    weight = replace(plain, scale=scale, minimum=minimum)
    packed = pack(KERNELS, weight)
    assert packed.data.nbytes == 2 * 4 * (zeros + 16 * 32 // 2)
    assert torch.equal(packed.unpack(), weight.dequantize())
    minimum[5, 2] += 1e-3  # no longer a multiple
    assert pack(KERNELS, replace(weight, minimum=minimum)).data.nbytes == 2 * 4 * (minima + 16 * 32 // 2)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_zero_points_take_little_more_than_in_the_file(group: int) -> None:
    """Checkpoints of GPTQ and AWQ have a scale of 16 bits and a zero point of 4 bits per group."""
    packed = pack(KERNELS, some_codes((64, 512), 4, "zeros", False, group)).data.nbytes
    assert packed <= 1.06 * 64 * 512 / group * (group / 2 + 2 + 0.5)
