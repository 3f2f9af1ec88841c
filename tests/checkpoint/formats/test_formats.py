"""Weights of every format against an independent rule, and refused configs."""

from typing import Any

import numpy as np
import pytest

from pronk.base.arrays import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, INT8, UINT8
from pronk.base.errors import ConfigError
from pronk.checkpoint.formats.matrix import QuantizedMatrix
from pronk.checkpoint.formats.scheme import LinearModule, StoredWeight, parse_scheme
from quantized_formats import FORMATS, Array, Tensors, awq, gptq, ints, pack

NAME = "model.layers.0.self_attn.k_proj"
_DTYPES = {
    UINT8: "U8", FLOAT32: "F32", FLOAT16: "F16", BFLOAT16: "BF16", FLOAT8: "F8_E4M3",
    INT8: "I8", np.dtype(np.int32): "I32", np.dtype(np.int64): "I64",
}  # fmt: skip


def weight_of(config: dict[str, Any], outputs: int, inputs: int, name: str = NAME) -> StoredWeight:
    weight = parse_scheme(config).weight(LinearModule(name, outputs, inputs))
    assert weight is not None
    return weight


def numbers(weight: StoredWeight, tensors: Tensors, *shape: int) -> Array:
    """Return the dequantized weight; check that the scheme allows the tensors' names, shapes and
    dtypes.
    """
    for key, stored in weight.tensors.items():
        assert key in tensors or not stored.required
    for key, tensor in tensors.items():
        stored = weight.tensors[key]
        assert stored.shapes is None or tensor.shape in stored.shapes
        assert _DTYPES[tensor.dtype] in stored.dtypes
    read = weight.read(tensors, np.empty(shape, np.uint8))
    if isinstance(read, QuantizedMatrix):
        return read.dequantize()
    assert read.dtype == BFLOAT16
    return read.astype(np.float32)


# (128, 896) is the key projection of Qwen2.5-0.5B; (40, 96) has no whole blocks.
@pytest.mark.parametrize("shape", [(48, 64), (40, 96), (128, 896)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_weights_equal_those_of_the_rule(name: str, shape: tuple[int, int]) -> None:
    kind = FORMATS[name]
    tensors = kind.make(np.random.default_rng(len(name)), *shape)
    found = numbers(weight_of(kind.config, *shape), tensors, *shape)
    expected = kind.rule(tensors)
    assert found.shape == shape
    assert np.array_equal(found, expected)
    assert np.abs(expected).max() > 0.01


def test_groups_need_not_divide_the_inputs() -> None:
    kind = gptq(4, 64, sym=False)
    tensors = kind.make(np.random.default_rng(0), 32, 96)
    assert np.array_equal(
        numbers(weight_of(kind.config, 32, 96), tensors, 32, 96), kind.rule(tensors)
    )


def test_nvfp4_equals_the_package() -> None:
    """compressed-tensors dequantizes to bfloat16 at the end."""
    torch = pytest.importorskip("torch")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    kind = FORMATS["nvfp4-packed"]
    tensors = kind.make(np.random.default_rng(0), 48, 96)
    group = kind.config["config_groups"]["group_0"]
    state = {
        name: torch.from_numpy(tensors[name]) for name in ("weight_packed", "weight_global_scale")
    }
    scale = torch.from_numpy(tensors["weight_scale"].view(np.uint8))
    state["weight_scale"] = scale.view(torch.float8_e4m3fn)
    compressor = compressors.BaseCompressor.get_value_from_registry(kind.config["format"])
    expected = compressor.decompress(state, quantization.QuantizationScheme(**group))["weight"]
    found = numbers(weight_of(kind.config, 48, 96), tensors, 48, 96).astype(BFLOAT16)
    assert np.array_equal(found.astype(np.float32), expected.to(torch.float32).numpy())


def test_huge_group_sizes_allocate_no_memory() -> None:
    kind = FORMATS["fp8-tensor"]
    tensors = kind.make(np.random.default_rng(0), 32, 64)
    scale = tensors["weight_scale"].reshape(1, 1)
    config = {"quant_method": "fp8", "weight_block_size": [10**12, 10**12]}
    found = numbers(
        weight_of(config, 32, 64), {"weight": tensors["weight"], "weight_scale_inv": scale}, 32, 64
    )
    assert np.array_equal(found, kind.rule(tensors))
    rows = ints(4, "channel")
    weights = rows.config["config_groups"]["group_0"]["weights"] | {
        "strategy": "group",
        "group_size": 8 * 10**12,
    }
    for kind, config in (
        (gptq(4, -1), gptq(4).config | {"group_size": 8 * 10**12}),
        (awq(-1), awq().config | {"group_size": 8 * 10**12}),
        (rows, grouped(weights=weights)),
    ):
        tensors = kind.make(np.random.default_rng(0), 32, 64)
        found = numbers(weight_of(config, 32, 64), tensors, 32, 64)
        assert np.array_equal(found, kind.rule(tensors))


def test_zero_points_in_the_middle_need_no_minimum() -> None:
    for kind in (gptq(4), gptq(8), ints(4, "group"), ints(8, "channel", packed=False)):
        tensors = kind.make(np.random.default_rng(0), 32, 64)
        read = weight_of(kind.config, 32, 64).read(tensors, np.empty((32, 64), np.uint8))
        assert isinstance(read, QuantizedMatrix)
        assert read.minimum is None
        assert read.order is None


def test_an_index_that_was_never_set_is_no_order() -> None:
    """Without an order, AutoGPTQ writes zeros and compressed-tensors -1."""
    for kind, name, value in ((gptq(4), "g_idx", 0), (ints(4, "group"), "weight_g_idx", -1)):
        tensors = kind.make(np.random.default_rng(0), 32, 64)
        expected = kind.rule(tensors)
        tensors[name] = np.full(64, value, np.int32)
        assert np.array_equal(numbers(weight_of(kind.config, 32, 64), tensors, 32, 64), expected)


def test_zero_points_in_bytes_of_older_compressed_tensors() -> None:
    new = ints(4, "group", sym=False)
    old = ints(4, "group", sym=False, packed=False)
    tensors = new.make(np.random.default_rng(0), 32, 64)
    expected = new.rule(tensors)
    tensors["weight_zero_point"] = old.make(np.random.default_rng(1), 32, 64)["weight_zero_point"]
    words = tensors["weight_zero_point"].astype(np.int64) + 8
    found = numbers(weight_of(new.config, 32, 64), tensors, 32, 64)
    assert not np.array_equal(found, expected)
    tensors["weight_zero_point"] = pack(words, 4, axis=0)
    assert np.array_equal(found, new.rule(tensors))


GPTQ = gptq(4).config
AWQ = awq().config
INTS = ints(4, "group").config
FP8 = FORMATS["fp8-block"].config
MODELOPT = FORMATS["nvfp4-modelopt"].config


def packed(**weights: Any) -> dict[str, Any]:
    """Return the compressed-tensors config INTS with other values for its weights."""
    group = INTS["config_groups"]["group_0"]
    return INTS | {"config_groups": {"group_0": group | {"weights": group["weights"] | weights}}}


def blocks(structure: object, **weights: Any) -> dict[str, Any]:
    """Return the config of 8-bit floats with the ``block_structure`` in ``structure``."""
    config = FORMATS["float-block"].config
    group = config["config_groups"]["group_0"]
    changed = group["weights"] | {"block_structure": structure} | weights
    return config | {"config_groups": {"group_0": group | {"weights": changed}}}


def nvfp4(**weights: Any) -> dict[str, Any]:
    """Return the compressed-tensors config of NVFP4 with other values for its weights."""
    config = FORMATS["nvfp4-packed"].config
    group = config["config_groups"]["group_0"]
    return config | {"config_groups": {"group_0": group | {"weights": group["weights"] | weights}}}


def grouped(**values: Any) -> dict[str, Any]:
    return INTS | {"config_groups": {"group_0": INTS["config_groups"]["group_0"] | values}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, (r"the quant_method compressed-tensors, gptq, .* 'bitsandbytes'; "
            r"use")),
        ({"quant_method": ["gptq"]}, r"expected the quant_method .* found \['gptq'\]"),
        ({"bits": 4}, r"expected the quant_method .* found None"),
        (GPTQ | {"bits": 3}, (r"expected bits of 4 or 8, found 3; use a GPTQ checkpoint with 4 or 8 "
            r"bits")),
        (GPTQ | {"bits": 2}, r"found 2; use a GPTQ"),
        (GPTQ | {"bits": True}, r"found True"),
        (GPTQ | {"bits": 4.0}, r"bits of 4 or 8, found 4.0"),
        (GPTQ | {"bits": None}, r"found None"),
        (GPTQ | {"checkpoint_format": "marlin"}, (r"checkpoint_format gptq or gptq_v2, found "
            r"'marlin'")),
        (GPTQ | {"checkpoint_format": ["gptq"]}, r"found \['gptq'\]"),
        (GPTQ | {"group_size": 20}, r"a multiple of 8, or -1, found 20"),
        (GPTQ | {"group_size": 0}, r"group_size: expected an integer of at least 8, found 0"),
        (GPTQ | {"group_size": "128"}, (r"group_size: expected an integer of at least 8, "
            r"found '128'")),
        (GPTQ | {"sym": 1}, r"sym: expected true or false, found 1"),
        (GPTQ | {"pack_dtype": "int8"}, r"pack_dtype int32, found 'int8'"),
        (GPTQ | {"is_marlin_format": True}, r"expected no is_marlin_format"),
        (GPTQ | {"rotation": "hadamard"}, r"expected no rotation"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, (r"only rules in dynamic that exclude .*found "
            r"'\+:\.\*down")),
        (GPTQ | {"dynamic": {".*down.*": {"bits": 8}}}, (r"only rules in dynamic that exclude "
            r"modules")),
        (GPTQ | {"dynamic": {"-:(": {}}}, r"regular expressions in dynamic, found '-:\('"),
        (GPTQ | {"dynamic": ["-:x"]}, r"an object of rules as dynamic"),
        (GPTQ | {"modules_in_block_to_quantize": [[1]]}, (r"lists of names as "
            r"modules_in_block_to_quantize")),
        (GPTQ | {"modules_in_block_to_quantize": 5}, (r"lists of names as modules_in_block_to_quantize, "
            r"found 5")),
        (GPTQ | {"modules_in_block_to_quantize": {"mlp.up_proj": 1}}, (r"modules_in_block_to_quantize, found "
            r"\{'mlp")),
        (GPTQ | {"modules_in_block_to_quantize": "mlp.up_proj"}, (r"modules_in_block_to_quantize, found "
            r"'mlp")),
        (GPTQ | {"dynamic": {"-:" + "(" * 9999 + ")" * 9999: {}}}, (r"regular expressions in dynamic, found "
            r"'-:\(\(")),
        (GPTQ | {"dynamic": {"-:a{99999999999}": {}}}, (r"regular expressions in dynamic, found "
            r"'-:a\{9")),
        (AWQ | {"version": "gemv"}, (r"expected the version gemm, found 'gemv'; use an AWQ "
            r"checkpoint")),
        (AWQ | {"version": "gemv_fast"}, r"found 'gemv_fast'"),
        (AWQ | {"backend": "llm-awq"}, r"the backend autoawq, found 'llm-awq'"),
        (AWQ | {"bits": 8}, r"bits of 4, found 8"),
        (AWQ | {"bits": 4.0}, r"bits of 4, found 4.0"),
        (AWQ | {"bits": [4]}, r"bits of 4, found \[4\]"),
        (AWQ | {"zero_point": False}, r"zero_point true, found False"),
        (AWQ | {"group_size": 12}, r"a multiple of 8, or -1, found 12"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, (r"a list of names as modules_to_not_convert, "
            r"found 'lm_head'")),
        (FP8 | {"fmt": "e5m2"}, r"fmt e4m3, found 'e5m2'"),
        (FP8 | {"weight_block_size": [128]}, r"two sizes as weight_block_size, found \[128\]"),
        (FP8 | {"weight_block_size": [0, 128]}, r"two sizes as weight_block_size"),
        (FP8 | {"modules_to_convert": ["embed_tokens"]}, r"expected no modules_to_convert"),
        (INTS | {"format": "marlin-24"}, (r"the format pack-quantized or .* found 'marlin-24'; "
            r"use a checkpoint")),
        (INTS | {"format": "nvfp4-pack-quantized"}, (r"weights of the type float for nvfp4-pack-quantized, "
            r"found 'int'")),
        (nvfp4(num_bits=8), r"num_bits 4 for nvfp4-pack-quantized, found 8; use a checkpoint"),
        (nvfp4(group_size=32), r"group_size 16 for nvfp4-pack-quantized, found 32"),
        (nvfp4(strategy="group"), r"strategy tensor_group for nvfp4-pack-quantized, found 'group'"),
        (nvfp4(symmetric=False), r"expected symmetric floats"),
        (MODELOPT | {"quant_algo": "FP8"}, r"the quant_algo NVFP4 or W4A16_NVFP4, found 'FP8'; use a ModelOpt"),
        (MODELOPT | {"quant_algo": ["NVFP4"]}, r"the quant_algo .* found \['NVFP4'\]"),
        (MODELOPT | {"group_size": 32}, r"a group_size of 16, found 32"),
        (MODELOPT | {"ignore": "lm_head"}, r"a list of names as ignore, found 'lm_head'"),
        ({"quant_method": "modelopt", "quantization": []}, r"an object as quantization, found \[\]"),
        (INTS | {"format": "dense"}, r"found 'dense'"),
        (INTS | {"format": None}, r"found None"),
        (INTS | {"format": "mixed-precision"}, r"found 'mixed-precision'"),
        (INTS | {"sparsity_config": {"format": "sparse-24-bitmask"}}, (r"no sparse weights in "
            r"sparsity_config")),
        (INTS | {"transform_config": {"config_groups": {"a": {}}}}, r"expected no transform_config"),
        (INTS | {"config_groups": {}}, r"an object of rules as config_groups, found \{\}"),
        (INTS | {"config_groups": {"W4A16": ["Linear"]}}, (r"objects in config_groups, found \['Linear'\]; "
            r"write")),
        (INTS | {"ignore": ["re:a{99999999999}"]}, (r"regular expressions after re:, found "
            r"'re:a\{9")),
        (INTS | {"ignore": ["re:("]}, r"regular expressions after re:, found 're:\('"),
        (grouped(targets="Linear"), r"a list of names as targets"),
        (grouped(weights=4), r"an object as weights, found 4"),
        (grouped(output_activations={"num_bits": 8}), r"expected no output_activations"),
        (grouped(format="float-quantized"), (r"weights of the type float for float-quantized, "
            r"found 'int'")),
        (packed(num_bits=3), r"int weights with num_bits of 4 or 8, found 3"),
        (packed(num_bits=4.0), r"num_bits of 4 or 8, found 4.0"),
        (blocks("9" * 5000 + "x1"), r"two sizes as block_structure, found '99999"),
        (blocks("axb1c2"), r"two sizes as block_structure, found 'axb1c2'"),
        (blocks("32x16x8"), r"two sizes as block_structure, found '32x16x8'"),
        (blocks("²x1"), r"two sizes as block_structure, found '²x1'"),
        (blocks("0x16"), r"block_structure: expected an integer of at least 1, found 0"),
        (blocks(["32", 16]), r"block_structure: expected an integer of at least 1, found '32'"),
        (blocks([32, 1.5]), r"block_structure: expected an integer of at least 1, found 1.5"),
        (blocks(None), r"two sizes as block_structure, found None"),
        (blocks([32, 16], num_bits=8.0), r"float weights with num_bits of 8, found 8.0"),
        (packed(type="float", num_bits=4), (r"weights of the type int for pack-quantized, "
            r"found 'float'")),
        (packed(type="bool"), r"type: expected one of int, float, found 'bool'"),
        (packed(strategy="token"), (r"strategy: expected one of tensor, channel, group, "
            r"found 'token'")),
        (packed(strategy="tensor_group"), r"found 'tensor_group'"),
        (packed(group_size=20), r"a group_size of a multiple of 8, found 20"),
        (packed(group_size=None), r"group_size: expected an integer of at least 8, found None"),
        (packed(dynamic=True), r"weights that are not dynamic, found True"),
        (packed(symmetric="yes"), r"symmetric: expected true or false, found 'yes'"),
    ],
)  # fmt: skip
def test_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_scheme(config)
    assert "\n" not in str(caught.value)
