"""Invalid numbers in quantized weights give errors of one line; incomplete files are in
``tests/models``.
"""

from collections.abc import Callable

import numpy as np
import pytest
from ml_dtypes import float8_e4m3fn

from pronk.base.errors import CheckpointError
from pronk.checkpoint.formats.matrix import QuantizedMatrix
from pronk.checkpoint.formats.scheme import LinearModule, parse_scheme
from quantized_formats import FORMATS, Array, Format, Tensors, gptq, ints, pack


def damaged(kind: Format, change: Callable[[Tensors], object], message: str) -> None:
    tensors = kind.make(np.random.default_rng(0), 32, 64)
    weight = parse_scheme(kind.config).weight(LinearModule("model.layers.0.mlp.up_proj", 32, 64))
    assert weight is not None
    change(tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        weight.read(tensors, np.empty((32, 64), np.uint8))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("gptq-4", "scales"),
        ("gptq-8-zeros", "scales"),
        ("awq", "scales"),
        ("packed-4-group-zeros", "weight_scale"),
        ("packed-8-tensor", "weight_scale"),
        ("int-8-channel", "weight_scale"),
        ("float-channel", "weight_scale"),
        ("fp8-block", "weight_scale_inv"),
    ],
)
def test_scales_that_are_not_finite(name: str, scale: str, value: float) -> None:
    damaged(
        FORMATS[name],
        lambda tensors: tensors[scale].reshape(-1).put(0, value),
        "expected finite numbers in",
    )


def test_weights_of_nan() -> None:
    def spoil(tensors: Tensors) -> None:
        tensors["weight"].view(np.uint8)[3, 5] = 0xFF

    damaged(
        FORMATS["fp8-block"],
        spoil,
        "expected finite numbers in weight and weight_scale_inv, found NaN or infinity",
    )


def test_scales_of_nvfp4() -> None:
    nan = np.full((32, 4), 0x7F, np.uint8).view(float8_e4m3fn)
    for name in ("nvfp4-packed", "nvfp4-modelopt"):
        message = "expected finite numbers in scale, found NaN or infinity"
        damaged(FORMATS[name], lambda tensors: tensors.update(weight_scale=nan), message)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("name", "scale"),
    [("nvfp4-packed", "weight_global_scale"), ("nvfp4-modelopt", "weight_scale_2")],
)
def test_global_scales_of_nvfp4(name: str, scale: str, value: float) -> None:
    message = rf"^{scale}: expected a finite number above 0, found {value:g}; download"
    damaged(FORMATS[name], lambda tensors: tensors[scale].fill(value), message)


def test_nvfp4_needs_whole_groups() -> None:
    module = LinearModule("model.layers.0.mlp.up_proj", 32, 40)
    weight = parse_scheme(FORMATS["nvfp4-packed"].config).weight(module)
    assert weight is not None
    with pytest.raises(
        CheckpointError, match=r"up_proj: expected a multiple of 16 inputs, found 40; use the"
    ):
        _ = weight.tensors


def test_zero_points_out_of_range_for_gptq_v1() -> None:
    for bits in (4, 8):
        full = pack(np.full((4, 32), 2**bits - 1), bits, axis=1)
        message = rf"qzeros: expected 0..{2**bits - 1}, found {2**bits}; use .* gptq_v2"
        damaged(
            gptq(bits, sym=False), lambda tensors, full=full: tensors.update(qzeros=full), message
        )


def test_symmetric_weights_with_other_zero_points() -> None:
    """If a GPTQ v2 checkpoint is read as v1, which adds 1 to zero points, they are 9 instead of
    8.
    """
    other = pack(np.full((4, 32), 8), 4, axis=1)
    message = (
        r"qzeros: expected zero points of 8, as sym is true, found 9..9; check sym and "
        r"checkpoint_format"
    )
    damaged(gptq(4), lambda tensors: tensors.update(qzeros=other), message)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([0] * 16 + [1] * 16 + [2] * 16 + [4] * 16, r"found groups 0..4 of other sizes"),
        (
            [0] * 17 + [1] * 15 + [2] * 16 + [3] * 16,
            r"expected 16 inputs in each of the groups 0..3, found groups 0..3",
        ),
        ([0] * 16 + [1] * 16 + [2] * 16 + [-1] * 16, r"found groups -1..2"),
        ([0] * 32 + [1] * 32, r"found groups 0..1"),
        ([3] * 64, r"found groups 3..3"),
        ([0] * 63 + [2**31 - 1], r"found groups 0..2147483647"),
    ],
)
def test_groups_that_do_not_match(index: list[int], message: str) -> None:
    tensor = np.array(index, np.int32)
    damaged(
        gptq(4, order=True), lambda tensors: tensors.update(g_idx=tensor), rf"^g_idx: .*{message}"
    )
    kind = ints(4, "group", order=True)
    damaged(
        kind, lambda tensors: tensors.update(weight_g_idx=tensor), rf"^weight_g_idx: .*{message}"
    )


@pytest.mark.parametrize("value", [0, -1])
def test_an_input_order_that_was_never_set(value: int) -> None:
    """An index with one value for all inputs is refused, unless the weight has a single group."""
    index = np.full(64, value, np.int32)
    message = (
        rf"^g_idx: expected the group of each input, 0..3, found {value} for all as desc_act is "
        r"true; use anot"
    )
    damaged(gptq(4, order=True), lambda tensors: tensors.update(g_idx=index), message)
    whole = gptq(4, -1, order=True)
    tensors = whole.make(np.random.default_rng(0), 32, 64)
    weight = parse_scheme(whole.config).weight(LinearModule("model.layers.0.mlp.up_proj", 32, 64))
    assert weight is not None
    read = weight.read(tensors | {"g_idx": index}, np.empty((32, 64), np.uint8))
    assert isinstance(read, QuantizedMatrix)
    assert read.order is None
    assert np.array_equal(read.dequantize(), whole.rule(tensors))


def test_a_bias_in_a_model_without_biases() -> None:
    damaged(
        gptq(4),
        lambda tensors: tensors.update(bias=np.ones(32)),
        r"^bias: expected zeros, .*no bias, found",
    )


@pytest.mark.parametrize("value", [8, -9, 127])
def test_integers_of_more_bits(value: int) -> None:
    kind = ints(4, "group", packed=False, sym=False)
    for name in ("weight", "weight_zero_point"):
        message = rf"{name}: expected 4-bit integers of -8..7, found "
        damaged(kind, lambda tensors, name=name: tensors[name].reshape(-1).put(0, value), message)


ONE_SCALE = "expected one of weight_scale_inv and weight_scale, found"


@pytest.mark.parametrize(
    ("kind", "replaced", "message"),
    [
        (ints(4, "group", packed=False), {"weight_zero_point": np.ones((32, 4), np.int8)},
         r"^weight_zero_point: expected zeros"),
        (ints(8, "channel", packed=False, sym=False), {"weight_zero_point": np.full((32, 1), 200)},
         r"weight_zero_point: expected 8-bit integers of -128..127, found 200..200"),
        (ints(4, "group"), {"weight_shape": np.array([32, 60])},
         r"weight_shape: expected \[32, 64\] from config.json, found \[32, 60\]"),
        (FORMATS["fp8-tensor"], {"weight_scale": None}, rf"{ONE_SCALE} 0"),
        (FORMATS["fp8-tensor"], {"weight_scale_inv": np.ones(1)}, rf"{ONE_SCALE} 2"),
    ],
    ids=[("zero points of symmetric "
        "weights"), "wide zero points", "another shape", "no scale", "two scales"],
)  # fmt: skip
def test_wrong_tensors(kind: Format, replaced: dict[str, Array | None], message: str) -> None:
    def change(tensors: Tensors) -> None:
        for name, tensor in replaced.items():
            if tensor is None:
                del tensors[name]
            else:
                tensors[name] = tensor

    damaged(kind, change, message)
