"""Qwen3.5 and Qwen3-Next: values and refusals of configs, the rows of stored matrices, and equal
weights from folders and GGUF files.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import MakeCheckpoint
from covering import covering
from gguf_files import QUANTIZED
from models.test_loader import load
from models.test_quantized_loading import warned
from pronk.base.arrays import BFLOAT16, Array
from pronk.base.errors import CheckpointError, ConfigError
from pronk.checkpoint.config import ModelConfig, RecurrentConfig
from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint
from pronk.checkpoint.rope import RopeConfig
from pronk.checkpoint.rows import HeadRows
from pronk.kernels.weight_cache import WeightCache
from pronk.models.families import parse_config
from pronk.models.families.qwen3_5 import FAMILIES as ALL
from pronk.models.gguf_config import parse_architecture
from pronk.models.inventory import tensor_names
from pronk.models.loader import read_config
from pronk.models.tensor_plan import CheckpointTensor, DecoderPart, plan_tensors
from quantized_formats import FORMATS, write_quantized
from recurrent_models import BLOCKS, FAMILIES, HEADS, with_mtp, write_gguf
from tiny_models import kernels

TEXT: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WITHOUT_EXPERTS = {"qwen3_next": {"mlp_only_layers": [0, 1, 2, 3]}}
OUTER = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
ARCHITECTURES = {each.name: (family, each) for family in ALL for each in family.gguf}


def parse(family: str, **values: Any) -> ModelConfig:
    return parse_config({"model_type": family, **TEXT, **values})


@pytest.mark.parametrize("family", FAMILIES)
def test_values_of_config_json(family: str) -> None:
    config = parse(family, rope_parameters={"rope_theta": 1e7, "mrope_section": [11, 11, 10]})
    assert config.recurrent == RecurrentConfig(
        layers=(True, True, True, False) * 2,
        key_heads=16,
        value_heads=32,
        key_dim=128,
        value_dim=128,
        taps=4,
    )
    assert config.rope == RopeConfig(64, 1e7)  # a quarter of each head
    assert (config.head_dim, config.norm_offset) == (256, 1.0)
    assert config.gated_attention
    assert config.qk_norm
    assert [config.has_attention(layer) for layer in range(4)] == [False] * 3 + [True]


def test_experts_of_config_json() -> None:
    values = {"num_experts": 8, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 24}
    mixture = parse("qwen3_5_moe_text", moe_intermediate_size=16, **values).mixture
    assert mixture is not None
    assert (mixture.experts, mixture.per_row, mixture.width) == (8, 3, 16)
    assert (mixture.shared_width, mixture.shared_gate, mixture.normalized) == (24, True, True)
    assert mixture.layers == (True,) * 8
    options = {"norm_topk_prob": False, "mlp_only_layers": [1], "decoder_sparse_step": 2}
    other = parse("qwen3_next", moe_intermediate_size=16, **values, **options).mixture
    layers = (False, False, False, True, False, True, False, True)
    assert other == replace(mixture, normalized=False, layers=layers)
    assert parse("qwen3_next", decoder_sparse_step=9).mixture is None


def test_a_mixture_needs_no_width_of_mlps() -> None:
    config = parse("qwen3_5_moe_text", intermediate_size=None, moe_intermediate_size=16)
    assert config.intermediate_size == 16
    with pytest.raises(ConfigError, match="intermediate_size: expected an integer"):
        parse("qwen3_5_text", intermediate_size=None)


@pytest.mark.parametrize("outer", OUTER)
def test_the_language_model_of_a_multimodal_config(outer: str) -> None:
    text = {"model_type": OUTER[outer], **TEXT}
    raw = {"model_type": outer, "text_config": text, "vision_config": {}, "image_token_id": 9}
    assert parse_config(raw) == parse_config(text)
    assert parse_config(raw | {"tie_word_embeddings": True}).tied


def test_places_of_attention() -> None:
    kinds = ["full_attention", "linear_attention"] * 4
    for values in ({"layer_types": kinds}, {"full_attention_interval": 2}):
        recurrent = parse("qwen3_5_text", **values).recurrent
        assert recurrent is not None
        swapped = "full_attention_interval" in values
        assert recurrent.layers == ((swapped, not swapped) * 4)
    assert parse("qwen3_5_text", layer_types=["full_attention"] * 8).recurrent is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"linear_num_value_heads": 24},
            "linear_num_value_heads: expected a multiple of linear_num_key_heads = 16, found 24",
        ),
        ({"linear_key_head_dim": 577}, r"linear_key_head_dim: expected an integer in 1..576"),
        ({"linear_value_head_dim": 0}, r"linear_value_head_dim: expected an integer in 1..576"),
        ({"linear_conv_kernel_dim": 17}, r"linear_conv_kernel_dim: expected an integer in 1..16"),
        ({"linear_num_key_heads": "2"}, "linear_num_key_heads: expected an integer"),
        ({"full_attention_interval": 0}, "full_attention_interval: expected an integer"),
        (
            {"layer_types": ["linear_attention"]},
            "expected 8 layer_types, each linear_attention or full_attention, found",
        ),
        ({"layer_types": ["mamba"] * 8}, r"expected 8 layer_types, .* found \['mamba'"),
        ({"attn_output_gate": False}, "expected attn_output_gate = true, found false"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor: expected"),
        ({"rope_parameters": {"rope_type": "ntk"}}, "'ntk' is not supported"),
        ({"rope_parameters": 3}, "rope_parameters: expected an object"),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_refused(family: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse(family, **values)
    assert "\n" not in str(caught.value)


def as_in_gguf(config: ModelConfig) -> ModelConfig:
    """Return the config that a GGUF file of a folder has."""
    recurrent = config.recurrent
    assert recurrent is not None
    is_tiled = config.family != "qwen3_next" and recurrent.key_heads != recurrent.value_heads
    return replace(config, norm_offset=0.0, recurrent=replace(recurrent, tiled_heads=is_tiled))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("form", ["older", "mtp"])
def test_config_of_a_gguf_file_equals_that_of_the_folder(
    family: str, heads: str, form: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = checkpoint(family, **HEADS[heads])
    if form == "mtp":
        folder = with_mtp(folder, tmp_path / "mtp")
    path = write_gguf(folder, tmp_path / "a.gguf", older=form == "older")
    assert read_config(path) == as_in_gguf(read_config(folder))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ssm.time_step_rank", 3, "expected a multiple of ssm.group_count = 2, found 3"),
        ("ssm.inner_size", 33, "ssm.inner_size: expected 4 times at most 576, found 33"),
        ("ssm.inner_size", 4 * 577, "ssm.inner_size: expected 4 times at most 576, found 2308"),
        ("ssm.state_size", 1024, r"ssm.state_size: expected an integer in 1..576"),
        ("ssm.conv_kernel", 17, r"ssm.conv_kernel: expected an integer in 1..16"),
        ("ssm.group_count", None, "ssm.group_count: expected an integer"),
        ("full_attention_interval", 0, "full_attention_interval: expected an integer"),
        ("nextn_predict_layers", 4, "block_count: expected an integer"),
        ("nextn_predict_layers", "1", "block_count: expected an integer"),
        ("attention.recurrent_layers", [True], "expected a boolean for each of 4 layers, found"),
        ("attention.recurrent_layers", True, "expected a boolean for each of 4 layers, found"),
    ],
)
def test_refused_values_of_gguf_files(
    key: str, value: Any, message: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    opened = GgufCheckpoint(write_gguf(checkpoint("qwen3_5_text"), tmp_path / "a.gguf"))
    stored = opened.header.get
    opened.header.get = lambda name: value if name == f"qwen35.{key}" else stored(name)  # type: ignore[method-assign]
    family, architecture = ARCHITECTURES["qwen35"]
    with pytest.raises(ConfigError, match=message) as caught:
        parse_architecture(opened, architecture, family.model_type)
    assert "\n" not in str(caught.value)


def planned(folder: Path) -> dict[str, DecoderPart]:
    config = read_config(folder)
    return {part.target: part for part in plan_tensors(config)}


def test_rows_of_gated_attention(checkpoint: MakeCheckpoint) -> None:
    parts = planned(checkpoint("qwen3_5_text"))
    name = "layers.3.self_attn.q_proj.weight"
    (queries, _, _) = parts["layers.3.qkv"].weight
    (gates,) = parts["layers.3.attention_gate"].weight
    assert queries == CheckpointTensor(name, (128, 32), rows=HeadRows(4, stop=16))
    assert gates == CheckpointTensor(name, (128, 32), rows=HeadRows(4, start=16))
    assert (queries.part_shape, gates.part_shape) == ((64, 32), (64, 32))


def test_rows_of_interleaved_projections(checkpoint: MakeCheckpoint) -> None:
    """A key head has 8 queries, 8 keys, 2 · 8 values and 2 · 8 gates; 2 betas and 2 decays."""
    parts = planned(checkpoint("qwen3_next"))
    inputs = parts["layers.0.mixer_in"].weight
    assert {each.name for each in inputs} == {"layers.0.linear_attn.in_proj_qkvz.weight"}
    bounds = [(0, 8), (8, 16), (16, 32), (32, 48)]
    assert [each.rows for each in inputs] == [HeadRows(2, *each) for each in bounds]
    numbers = parts["layers.0.mixer_gates"].weight
    assert [each.rows for each in numbers] == [HeadRows(2, 0, 2), HeadRows(2, 2, 4)]


def weights(decoder: Any) -> dict[str, Array]:
    """Return all weights of a decoder's layers, dequantized, by path."""
    found = {}
    for index, layer in enumerate(decoder.layers):
        for name, value in vars(layer).items():
            path = f"{index}.{name}"
            if isinstance(value, np.ndarray):
                found[path] = value.reshape(len(value), -1)
            elif hasattr(value, "parts"):
                unpacked = [part.packed.unpack() for part in value.parts]
                found[path] = np.concatenate(unpacked)
            elif hasattr(value, "weight"):
                found[path] = value.weight
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_has_the_weights_of_the_folder(
    family: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = checkpoint(family, **HEADS["equal heads"])
    expected = weights(load(folder))
    found = weights(load(write_gguf(folder, tmp_path / "a.gguf")))
    assert found.keys() == expected.keys()
    names = "mixer_in mixer_gates filter decay_rate decay_bias mixer_norm mixer_out".split()
    assert {f"0.{name}" for name in names} <= found.keys()
    assert {"3.attention_gate", "3.qkv", "3.q_norm"} <= found.keys()
    for name, value in found.items():
        # 1 is added to the weights of norms before they are rounded to float32, or after. The
        # exponential of decays is rounded to float32 in one step, or computed in float32.
        assert np.allclose(value, expected[name], rtol=2e-7, atol=2e-7), name


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_value_heads_of_a_gguf_file_are_tiled(
    family: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The value heads 0 to 5 of the folder belong to the key heads 0 0 0 1 1 1."""
    folder = checkpoint(family, **HEADS["three values"])
    expected = weights(load(folder))
    found = weights(load(write_gguf(folder, tmp_path / "a.gguf")))
    order = [0, 3, 1, 4, 2, 5]
    for name in ("decay_rate", "decay_bias"):
        assert np.allclose(found[f"0.{name}"], expected[f"0.{name}"][order])
    gates = expected["0.mixer_gates"].reshape(2, 6, -1)[:, order]
    assert np.array_equal(found["0.mixer_gates"], gates.reshape(12, -1))
    inputs = expected["0.mixer_in"]
    heads = inputs[32:].reshape(2, 6, 8, -1)[:, order].reshape(96, -1)  # values, then gates
    assert np.array_equal(found["0.mixer_in"], np.concatenate([inputs[:32], heads]))


def test_precision_of_small_projections(checkpoint: MakeCheckpoint) -> None:
    """The gate of the shared expert, beta and decay are not rounded, and not quantized."""
    folder = checkpoint("qwen3_5_moe_text")
    layer = load(folder, kernels=kernels(), dtype=BFLOAT16, weights="int4").layers[0]
    exact = (layer.mixer_gates, layer.shared_gate, layer.router)
    assert [each.packed.format for each in exact] == ["float32"] * 3
    assert "int4" in layer.mixer_in.packed.format
    assert layer.decay_rate.dtype == layer.decay_bias.dtype == np.float32
    assert (layer.decay_rate < 0).all()


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
@pytest.mark.parametrize("name", ["gptq-4-zeros", "awq", "packed-8-group", "float-channel"])
def test_quantized_folders(
    family: str, name: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Rows of quantized matrices are selected as those of others."""
    plain = checkpoint(family, linear_num_value_heads=8, **WITHOUT_EXPERTS.get(family, {}))
    quantized, twin = write_quantized(plain, tmp_path, FORMATS[name])
    expected = weights(load(twin))
    with warned(FORMATS[name]):
        decoders = [load(quantized), load(quantized, kernels=kernels())]
    for decoder in decoders:
        found = weights(decoder)
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.few(4)
@pytest.mark.parametrize(("family", "kind"), covering(FAMILIES, [*QUANTIZED], strength=1))
def test_rows_of_blocks(family: str, kind: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Packed blocks have the numbers of the dequantized weights, whatever rows a layer takes."""
    twin = tmp_path / "twin"
    path = write_gguf(checkpoint(family, **BLOCKS), tmp_path / "a.gguf", kind, twin=twin)
    found = weights(load(path, kernels=kernels()))
    expected = weights(load(path))
    for name in ("0.mixer_in", "0.mixer_gates", "3.attention_gate", "3.qkv"):
        assert np.array_equal(found[name], expected[name]), name


def test_a_weight_cache_tells_queries_from_their_gates(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The queries have a matrix of their own if keys and values have other formats."""
    one_head = {**BLOCKS, "num_attention_heads": 1, "num_key_value_heads": 1}
    kinds = {"": "Q8_0", "attn_k": "Q4_0", "attn_v": "Q5_0"}
    path = write_gguf(checkpoint("qwen3_5_text", **one_head), tmp_path / "a.gguf", kinds)
    for _ in range(2):
        cache = WeightCache.open(tmp_path / "cache", GgufCheckpoint(path).identity)
        decoder = load(path, kernels=kernels(), cache=cache)
    found = weights(decoder)
    expected = weights(load(path, kernels=kernels()))
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert not np.array_equal(found["3.attention_gate"], found["3.qkv"][:64])


def test_the_tensors_of_an_mtp_head_are_those_behind_the_layers(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = with_mtp(checkpoint("qwen3_5_text"), tmp_path / "mtp")
    path = write_gguf(folder, tmp_path / "a.gguf")
    opened = GgufCheckpoint(path)
    ignored = tensor_names(opened, read_config(path)).ignored
    assert ignored.fullmatch("blk.4.nextn.eh_proj.weight")
    assert ignored.fullmatch("blk.4.attn_q.weight")
    assert not ignored.fullmatch("blk.3.attn_q.weight")
    assert not ignored.fullmatch("blk.5.attn_q.weight")
    assert not ignored.fullmatch("blk.40.attn_q.weight")


def test_a_missing_tensor_is_named(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("qwen3_5_text"), tmp_path / "changed"))
    raw = json.loads((folder / "config.json").read_text())
    raw["layer_types"] = ["full_attention", *raw["layer_types"][1:]]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"missing tensors: layers.0.self_attn.q_proj.weight"):
        load(folder)


def test_layers_of_drafters_are_plain() -> None:
    """A drafter that takes over the target's sizes has attention without gates."""
    config = parse("qwen3_next")
    drafter = config.plain_layers(0, 2)
    assert drafter.is_plain
    assert not config.is_plain
    assert [drafter.has_attention(layer) for layer in range(2)] == [True, True]
    assert (drafter.norm_offset, drafter.rope) == (0.0, config.rope)
