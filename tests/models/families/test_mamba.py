"""Granite 4 H, Bamba and Falcon-H1: values and refusals of configs, and factors of weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import MakeCheckpoint
from mamba_models import FAMILIES, overrides_of, write_gguf
from models.test_loader import load
from models.test_quantized_loading import warned
from pronk.base.errors import ConfigError
from pronk.checkpoint.config import ModelConfig, RecurrentConfig
from pronk.models.families import parse_config
from pronk.models.loader import read_config
from quantized_formats import FORMATS, write_quantized
from tiny_models import text_logits

TEXT: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "mamba_n_heads": 48,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
}
# Published configs say ``mamba`` and ``attention``, transformers 5 writes other words.
GRANITE = {"layer_types": ["mamba", "mamba", "attention", "mamba"], "num_local_experts": 0}


def parse(family: str, **values: Any) -> ModelConfig:
    return parse_config({"model_type": family, **TEXT, **values})


def test_values_of_a_hybrid_granite() -> None:
    config = parse("granitemoehybrid", **GRANITE, shared_intermediate_size=4096)
    assert config.recurrent == RecurrentConfig(
        layers=(True, True, False, True),
        key_heads=1,
        value_heads=48,
        key_dim=128,
        value_dim=64,
        taps=4,
        rule="mamba2",
        norm="after_gate",
        filter_bias=True,
    )
    assert config.layer_ropes == (None,) * 4
    assert (config.mixture, config.intermediate_size) == (None, 4096)
    assert [config.has_attention(layer) for layer in range(4)] == [False, False, True, False]


def test_experts_of_a_hybrid_granite() -> None:
    values = GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 3}
    mixture = parse("granitemoehybrid", **values, shared_intermediate_size=24).mixture
    assert mixture is not None
    assert (mixture.experts, mixture.per_row, mixture.width) == (8, 3, 4096)
    assert (mixture.shared_width, mixture.shared_gate, mixture.normalized) == (24, False, True)
    assert mixture.layers == (True,) * 4


def test_values_of_bamba() -> None:
    config = parse("bamba", attn_layer_indices=[2], rope_theta=1e4)
    assert config.recurrent == parse("granitemoehybrid", **GRANITE).recurrent
    assert config.rope is not None
    assert (config.head_dim, config.rope.dim) == (128, 64)


def test_values_of_falcon_h1() -> None:
    values = {"mamba_d_ssm": 3072, "ssm_in_multiplier": 0.5, "ssm_multipliers": [1, 2, 3, 4, 5]}
    config = parse("falcon_h1", **values, key_multiplier=0.25, attention_in_multiplier=2.0)
    recurrent = config.recurrent
    assert recurrent is not None
    assert (recurrent.layers, recurrent.parallel, recurrent.norm) == ((True,) * 4, True, "none")
    assert all(config.has_attention(layer) for layer in range(4))
    # the stored rows are z, x, B, C and dt
    assert config.weight_factors["mixer_in"] == (2.0, 1.5, 1.0, 0.5)
    assert config.weight_factors["mixer_gates"] == (2.5,)
    assert config.weight_factors["qkv"] == (2.0, 0.5, 2.0)
    # A drafter has weights of its own.
    assert not config.plain_layers(0).weight_factors


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("granitemoehybrid", "hidden_act"),
        ("bamba", "hidden_act"),
        ("falcon_h1", "hidden_act"),
        ("nemotron_h", "mamba_hidden_act"),
        ("qwen3_5_text", "hidden_act"),
    ],
)
def test_another_activation_of_convolutions_is_refused(
    family: str, key: str, checkpoint: MakeCheckpoint
) -> None:
    """It is that of MLPs, too, which may have others."""
    folder = checkpoint(family, **overrides_of(family, {}))
    raw = json.loads((folder / "config.json").read_text())
    assert parse_config(raw | {key: "swish"}).recurrent is not None
    with pytest.raises(ConfigError, match=f"{key}: expected silu with recurrent .* found gelu"):
        parse_config(raw | {key: "gelu"})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_has_the_config_of_the_folder(
    family: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = checkpoint(family, **overrides_of(family, {}))
    config = read_config(folder)
    found = read_config(write_gguf(folder, tmp_path / "a.gguf"))
    assert found.recurrent == config.recurrent
    assert found.mixture == config.mixture
    assert found.ropes == config.ropes or family == "granitemoehybrid"
    assert [found.rope_of(i) for i in range(3)] == [config.rope_of(i) for i in range(3)]
    assert found.residual_scale == pytest.approx(config.residual_scale)
    assert not found.weight_factors


@pytest.mark.parametrize("name", ["gptq-4-zeros", "awq", "packed-8-group"])
def test_factors_of_quantized_weights(
    name: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The scales are multiplied, and the codes are those of the file."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "mamba_n_heads": 8}
    sizes |= {"mamba_d_ssm": 128}
    plain = checkpoint("falcon_h1", **sizes)
    quantized, twin = write_quantized(plain, tmp_path, FORMATS[name])
    with warned(FORMATS[name]):
        found = text_logits(load(quantized), range(40))
    expected = text_logits(load(twin), range(40))
    assert np.abs(found - expected).max() < 1e-4 * expected.std()


def test_a_tied_falcon_in_a_gguf_file_is_refused(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    path = write_gguf(checkpoint("falcon_h1", tie_word_embeddings=True), tmp_path / "a.gguf")
    with pytest.raises(ConfigError, match=r"expected a tensor output.weight, found none"):
        read_config(path)
