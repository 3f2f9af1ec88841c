"""Quantizing to 8 and 4 bits: equal on every instruction set, and the best of the tried scales."""

import pytest
import torch
from torch import Tensor

from pronk.kernels.library import TYPES, Kernels, candidates
from pronk.kernels.rounding import default_group, round_weights
from pronk.kernels.weights import pack
from pronk.quantization.formats.matrix import Bits

SETS = candidates()
BITS = pytest.mark.parametrize("bits", [8, 4])


def some_weight(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs))


@BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_instruction_set_quantizes_alike(dtype: torch.dtype, bits: Bits) -> None:
    for shape in ((1, 8), (7, 45), (40, 200), (33, 1100)):
        for group in (8, 24, 32, 128, 4096):
            weight = some_weight(*shape).to(dtype)
            made = [round_weights(kernels, weight, bits, group) for kernels in SETS]
            torch.set_num_threads(3)
            made.append(round_weights(SETS[0], weight, bits, group))
            torch.set_num_threads(1)
            for each in made[1:]:
                assert torch.equal(each.codes, made[0].codes)
                assert torch.equal(each.scale, made[0].scale)


@BITS
@pytest.mark.parametrize("group", [None, 8, 32, 64, 128, 1024])
def test_codes_are_nearest_and_no_tried_scale_is_better(bits: Bits, group: int | None) -> None:
    weight = some_weight(40, 200) * torch.logspace(-3, 2, 40)[:, None]
    weight[5], weight[6, 3], weight[7] = 0.0, 9.0, -weight[7].abs()
    made = round_weights(SETS[0], weight, bits, group)
    assert made.group == min(group or default_group(bits, 200), 224)
    zero = 1 << (bits - 1)
    for start in range(0, 200, made.group):
        part, scale = weight[:, start : start + made.group], made.scale[:, start // made.group, None]
        codes = made.codes[:, start : start + made.group].float() - zero
        wanted = torch.where(scale == 0, 0.0, part * (1 / scale)).round().clamp(-zero, zero - 1)
        assert torch.equal(codes, wanted)
        mine = (codes * scale - part).double().square().sum(1)
        farthest = part.gather(1, part.abs().argmax(1, keepdim=True))
        for step in range(6 if bits == 4 else 0):
            for tried in (farthest.abs() * (1 - 0.05 * step) / (zero - 1), -farthest * (1 - 0.05 * step) / zero):
                other = (part / tried).nan_to_num().round().clamp(-zero, zero - 1) * tried - part
                assert bool((mine <= other.double().square().sum(1) * 1.0001).all())
    assert not made.dequantize()[5].any()


def test_a_row_too_large_for_memory() -> None:
    """The float32 copy of a bfloat16 row cannot be allocated; with 0 rows the null pointers are not read."""
    asked = (None, TYPES[torch.bfloat16], 0, 1 << 55, 1 << 55, 4, 32, 0, None, None, 1, 0)
    assert SETS[0].library.pronk_round(*asked) == -1


def test_a_failed_allocation_raises() -> None:
    class Full:
        def pronk_round(self, *_: object) -> int:
            return -1

    full = Kernels(Full(), SETS[0].path, SETS[0].isa)
    with pytest.raises(MemoryError, match="rounding a matrix of 3 by 8 failed"):
        round_weights(full, some_weight(3, 8), 4)


@pytest.mark.parametrize(
    ("inputs", "group"),
    # In turn: whole groups, smaller groups that save padding, padding below the cost of more scales, short rows.
    [(128, 128), (896, 128), (320, 64), (576, 64), (160, 32), (200, 32), (250, 128), (12832, 128), (80, 96), (8, 32)],
)
def test_default_groups_take_the_fewest_bytes(inputs: int, group: int) -> None:
    assert default_group(8, inputs) == group
    assert default_group(4, inputs) == 32
    sizes = {size: kernels_bytes(inputs, size) for size in (32, 64, 128)}
    assert kernels_bytes(inputs, group) <= min(sizes.values())
    assert round_weights(SETS[0], some_weight(3, inputs), 8).group == group


def kernels_bytes(inputs: int, group: int) -> int:
    """Return the bytes of 16 packed rows of 8-bit codes with their scales."""
    weight = round_weights(SETS[0], some_weight(16, inputs), 8, group)
    return pack(SETS[0], weight).data.nbytes


def test_weights_on_the_grid_are_exact() -> None:
    for bits in (8, 4):
        most = (1 << (bits - 1)) - 1
        weight = torch.arange(-most, most + 1).float().repeat(3, 1) * 0.25
        made = round_weights(SETS[0], weight, bits, 1024)
        torch.testing.assert_close(made.dequantize(), weight, rtol=1e-6, atol=0.0)


def test_clipping_has_a_smaller_error_than_the_full_range() -> None:
    """The best scale may clip the largest weight, because a smaller scale rounds all other weights less."""
    weight = some_weight(300, 256)
    made = round_weights(SETS[0], weight, 4)
    grouped = weight.view(300, -1, 32)
    scale = grouped.abs().amax(-1, keepdim=True) / 7
    whole = ((grouped / scale).round() * scale).view_as(weight)
    mine, plain = ((each - weight).norm() for each in (made.dequantize(), whole))
    assert float(mine) < 0.92 * float(plain)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    weight = some_weight(4, 64)
    weight[2, 3] = bad
    with pytest.raises(ValueError, match="expected finite numbers"):
        round_weights(SETS[0], weight, 8)
