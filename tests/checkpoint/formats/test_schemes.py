"""Modules that a config quantizes, and their schemes."""

from typing import Any

import pytest

from pronk.base.errors import CheckpointError
from pronk.checkpoint.formats.scheme import LinearModule, parse_scheme
from quantized_formats import FORMATS, awq, gptq, ints

UP, GATE, DOWN = (
    LinearModule(f"model.layers.1.mlp.{name}_proj", 64, 64) for name in ("up", "gate", "down")
)
TENTH = LinearModule("model.layers.10.mlp.up_proj", 64, 64)
HEAD = LinearModule("lm_head", 64, 64, head=True)
OF_GPT2 = LinearModule("transformer.h.0.mlp.c_fc", 64, 64, transposed=True)
ALL = (UP, GATE, DOWN, TENTH, HEAD, OF_GPT2)


def quantized(config: dict[str, Any]) -> list[LinearModule]:
    scheme = parse_scheme(config)
    return [module for module in ALL if scheme.weight(module) is not None]


INTS = ints(4, "group").config
FP8 = FORMATS["fp8-block"].config
MODELOPT = FORMATS["nvfp4-modelopt"].config


def targets(*targets: str, ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    group = INTS["config_groups"]["group_0"]
    return INTS | {
        "config_groups": {"group_0": group | {"targets": list(targets)}},
        "ignore": list(ignore),
    }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (gptq(4).config, [UP, GATE, DOWN, TENTH, OF_GPT2]),
        (gptq(4).config | {"lm_head": True}, list(ALL)),
        (gptq(4).config | {"lm_head": True, "dynamic": {"-:lm_head": {}}}, [UP, GATE, DOWN, TENTH, OF_GPT2]),
        (gptq(4).config | {"dynamic": {r"-:.*\.1\.mlp\.(up|gate)_proj": {}}}, [DOWN, TENTH, OF_GPT2]),
        (gptq(4).config | {"modules_in_block_to_quantize": [["mlp.up_proj"], ["mlp.c_fc"]]}, [UP, TENTH, OF_GPT2]),
        (awq().config, [UP, GATE, DOWN, TENTH]),
        (awq().config | {"modules_to_not_convert": ["down_proj"]}, [UP, GATE, TENTH]),
        (awq().config | {"modules_to_not_convert": ["layers.1.", "gate"]}, [TENTH]),
        (awq().config | {"modules_to_not_convert": ["layers.1", "self"]}, []),
        (awq().config | {"modules_to_not_convert": ["ate_pr", "down.*"]}, [UP, DOWN, TENTH]),
        (awq().config | {"modules_to_not_convert": None}, [UP, GATE, DOWN, TENTH]),
        (FP8, [UP, GATE, DOWN, TENTH]),
        (FP8 | {"modules_to_not_convert": ["model.layers.1.mlp.gate", "layers.1.mlp.down_proj"]}, [UP, GATE, TENTH]),
        (FP8 | {"modules_to_not_convert": ["model.layers.1"]}, [TENTH]),
        (FP8 | {"modules_to_not_convert": ["model.layers.*.mlp.up_proj", "("]}, [GATE, DOWN]),
        (FP8 | {"ignored_layers": ["lm_head", "model.layers.10.mlp.up_proj"]}, [UP, GATE, DOWN]),
        (targets("Linear"), [UP, GATE, DOWN, TENTH, HEAD]),
        (targets("Linear", ignore=("lm_head", r"re:.*layers\.1\..*")), [TENTH]),
        (targets(r"re:.*(up|gate)_proj$"), [UP, GATE, TENTH]),
        (targets("model.layers.1.mlp.up_proj", "LlamaAttention"), [UP]),
        (targets("Embedding"), []),
        (MODELOPT, [UP, GATE, DOWN, TENTH]),
        (MODELOPT | {"ignore": []}, [UP, GATE, DOWN, TENTH, HEAD]),
        (MODELOPT | {"ignore": ["lm_head", "model.layers.1.*", "up_proj"]}, [TENTH]),
        (MODELOPT | {"ignore": ["*.up_proj", "model.layers.1"]}, [GATE, DOWN, HEAD]),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head", "*gate*"]}},
         [UP, DOWN, TENTH]),
    ],
)  # fmt: skip
def test_modules(config: dict[str, Any], expected: list[LinearModule]) -> None:
    assert quantized(config) == expected


def test_precedence_of_rules() -> None:
    """A name precedes a regular expression, which precedes a class; each rule may have its own
    format.
    """
    four = INTS["config_groups"]["group_0"]
    eight = ints(8, "channel", packed=False).config["config_groups"]["group_0"]
    config = INTS | {
        "format": "mixed-precision",
        "config_groups": {
            "group_0": four | {"format": "pack-quantized"},
            "group_1": eight | {"format": "int-quantized", "targets": [r"re:.*down_proj", UP.name]},
            "group_2": {"targets": [r"re:.*"], "weights": None},
            "group_3": four | {"format": "pack-quantized", "targets": [UP.name + "x"]},
        },
    }
    scheme = parse_scheme(config)
    kinds = {module.name: scheme.weight(module) for module in (UP, GATE, DOWN)}
    assert "weight_packed" not in kinds[UP.name].tensors  # type: ignore[union-attr]
    assert kinds[GATE.name] is None
    config["config_groups"].pop("group_2")
    scheme = parse_scheme(config)
    assert "weight_packed" not in scheme.weight(DOWN).tensors  # type: ignore[union-attr]
    assert "weight_packed" in scheme.weight(GATE).tensors  # type: ignore[union-attr]


def test_older_configs() -> None:
    assert (
        parse_scheme({"config_groups": INTS["config_groups"], "format": "pack-quantized"}).name
        == "compressed-tensors"
    )
    assert (
        parse_scheme(
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}
        ).name
        == "AWQ"
    )
    assert parse_scheme({"quant_method": "gptq", "bits": 4}).weight(UP).tensors[
        "scales"
    ].shapes == ((1, 64),)  # type: ignore[union-attr]
    config = FORMATS["float-block"].config
    group = config["config_groups"]["group_0"]
    assert group["weights"]["block_structure"] == [32, 16]
    weights = group["weights"] | {"block_structure": "32x16"}
    config = config | {"config_groups": {"group_0": group | {"weights": weights}}}
    assert parse_scheme(config).weight(UP).tensors["weight_scale"].shapes == ((2, 4),)  # type: ignore[union-attr]


def test_notes_about_ignored_values() -> None:
    assert not parse_scheme(INTS).notes
    cache = parse_scheme(INTS | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}})
    assert cache.notes == ("scales of a quantized KV cache are not used",)
    assert cache.ignored.fullmatch("layers.3.self_attn.k_scale")
    assert cache.ignored.fullmatch("layers.3.self_attn.v_proj.output_scale")
    assert not cache.ignored.fullmatch("layers.3.self_attn.k_proj.weight_scale")
    group = INTS["config_groups"]["group_0"] | {
        "input_activations": {"num_bits": 8, "type": "int", "dynamic": False}
    }
    static = parse_scheme(INTS | {"config_groups": {"group_0": group}})
    assert len(static.notes) == 1
    assert "static scales of activations are not used" in static.notes[0]
    assert "bfloat16" in parse_scheme(FP8).notes[0]
    assert (
        "static scales of activations"
        in parse_scheme(FP8 | {"activation_scheme": "static"}).notes[1]
    )


def test_awq_packs_eight_outputs() -> None:
    with pytest.raises(
        CheckpointError, match=r"up_proj: expected a multiple of 8 outputs, found 12; use an AWQ"
    ):
        parse_scheme(awq().config).weight(LinearModule("model.layers.0.mlp.up_proj", 12, 64))
