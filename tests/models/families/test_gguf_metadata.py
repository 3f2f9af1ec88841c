"""Configs of GGUF files equal those of the converted folders; unsupported values give errors of one
line.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from checkpoints import MakeCheckpoint
from gguf_files import LLAMA3, QUANTIZED, convert, llama3_divisors
from pronk.base.errors import CheckpointError, ConfigError
from pronk.models.loader import read_config

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA = {"query_pre_attn_scalar": 16}  # files lack this number: it is the size of a head
GEMMA_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
}
OUTPUT_SCALED = {"attention_factor": 0.1 * math.log(4.0) + 1.0, "beta_fast": 16.0}
OLMO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": YARN | OUTPUT_SCALED,
}
GROWING = YARN | {
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
    "beta_slow": 2.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.25, 1.5, 2.0],
    "long_factor": [1.0, 2.5, 4.0, 16.5],
}
# These lengths give the factor 1.5 of cosines and sines, which float32 has.
LONG = {
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 512,
    "rope_parameters": LONGROPE,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    ("llama", {"head_dim": 20, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}}),
    ("llama", {"rope_parameters": YARN}),
    ("mistral", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen2", {"rope_parameters": YARN}),
    ("qwen3", {}),
    ("qwen3_moe", {}),
    ("gemma2", GEMMA),
    ("gemma3_text", GEMMA | {"layer_types": None, "num_hidden_layers": 7}),
    ("gemma3_text", GEMMA | {"layer_types": None, "rope_parameters": GEMMA_ROPES}),
    ("gpt_oss", {"layer_types": None}),
    ("granite", {"embedding_multiplier": 3.0}),
    ("granitemoe", {}),
    ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("lfm2", {}),
    (
        "lfm2",
        {
            "layer_types": ["full_attention", "conv", "conv"],
            "conv_L_cache": 4,
            "tie_word_embeddings": False,
        },
    ),
    ("lfm2", {"layer_types": ["full_attention"] * 3}),
    ("ministral3", {}),
    ("ministral3", {"rope_parameters": GROWING}),
    ("olmo2", {}),
    ("olmo2", {"num_key_value_heads": 6}),
    ("olmo3", {}),
    ("olmo3", {"rope_parameters": OLMO_ROPES}),
    ("phi3", {}),
    ("phi3", {"sliding_window": 8, "tie_word_embeddings": True}),
    (
        "phi3",
        {"hidden_size": 96, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    ("phi3", LONG),
    ("smollm3", {"num_hidden_layers": 5, "no_rope_layers": None}),
]


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_config_equals_that_of_the_folder(
    family: str, overrides: dict[str, Any], checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = checkpoint(family, **overrides)
    found = read_config(convert(folder, tmp_path / "a.gguf"))
    expected = read_config(folder)
    # GGUF files of Gemma store 1 + weight for norms.
    expected = replace(expected, family="llama" if family == "mistral" else family, norm_offset=0.0)
    assert found == expected


def test_rotations_of_llama_3(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    rope = read_config(
        convert(checkpoint("llama", rope_parameters=LLAMA3), tmp_path / "a.gguf")
    ).rope
    assert rope is not None
    assert rope.kind == "factors"
    assert rope.theta == 500000.0
    assert rope.divisors == tuple(llama3_divisors(LLAMA3, 8).tolist())
    assert len(set(rope.divisors)) > 1


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [
        ("F32", "float32"),
        ("F16", "float16"),
        ("BF16", "bfloat16"),
        *((kind, "bfloat16") for kind in QUANTIZED),
    ],
)
def test_dtype(kinds: str, dtype: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = checkpoint(
        "llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4
    )
    assert read_config(convert(folder, tmp_path / "a.gguf", kinds)).dtype == dtype


def number(key: str, value: float) -> Any:
    return lambda w: (w.add_uint32 if isinstance(value, int) else w.add_float32)(
        f"llama.{key}", value
    )


REFUSED: dict[str, tuple[Any, str]] = {
    "experts": (
        number("expert_count", 8),
        "llama.expert_used_count: expected an integer in 1..8, found None",
    ),
    "shared experts": (
        number("expert_shared_count", 1),
        "llama.expert_shared_count = 1 is not supported",
    ),
    "sigmoid of scores": (
        number("expert_gating_func", 2),
        "llama.expert_gating_func = 2 is not supported",
    ),
    "softcap": (
        number("attn_logit_softcapping", 50.0),
        "llama.attn_logit_softcapping = 50.0 is not supported",
    ),
    "window": (
        number("attention.sliding_window", 64),
        "llama.attention.sliding_window = 64 is not supported",
    ),
    "scale": (number("logit_scale", 0.5), "llama.logit_scale = 0.5 is not supported"),
    "dense layers": (
        number("leading_dense_block_count", 1),
        "llama.leading_dense_block_count = 1 is not supported",
    ),
    "more layers": (
        number("nextn_predict_layers", 1),
        "llama.nextn_predict_layers = 1 is not supported",
    ),
    "sections": (
        lambda w: w.add_array("llama.rope.dimension_sections", [16, 24, 24, 0]),
        (
            r"llama.rope.dimension_sections = \[16, 24, 24, 0\] is not supported; "
            r"expected a plain llama model"
        ),
    ),
    "clamped": (
        lambda w: w.add_array("llama.swiglu_clamp_exp", [7.0] * 100),
        r"llama.swiglu_clamp_exp = \[7.0, 7.0, .* is not supported",
    ),
    "value length": (
        number("attention.value_length", 4),
        "attention.value_length: expected 8 as attention.key_l",
    ),
    "a part of a head": (
        number("rope.dimension_count", 4),
        "rope.dimension_count: expected 8 as attention.key_length, found 4",
    ),
    "odd head": (
        number("attention.key_length", 7),
        "rope.dimension_count: expected 7 as attention.key_length",
    ),
    "longrope": (
        lambda w: w.add_string("llama.rope.scaling.type", "longrope"),
        "llama.rope.scaling.type: expected none, linear or yarn, found 'longrope'",
    ),
    "one half of longrope": (
        lambda w: w.add_tensor("rope_factors_long.weight", np.ones(4, np.float32)),
        (
            "tensor rope_factors_short.weight: expected 4 divisors of RoPE frequencies, "
            "found no tensor"
        ),
    ),
    "stretched": (
        number("rope.scaling.factor", float("inf")),
        "rope.scaling.factor: expected .*found inf",
    ),
    "divisors": (
        lambda w: w.add_tensor("rope_freqs.weight", np.ones(5, np.float32)),
        r"tensor rope_freqs.weight: expected \[4\] in F32, found \[5\] in F32",
    ),
    "divisors of nothing": (
        lambda w: w.add_tensor("rope_freqs.weight", np.array([1, 0, 1, 1], np.float32)),
        "tensor rope_freqs.weight: expected finite numbers above 0",
    ),
}


def test_neutral_values_are_accepted(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        for key in ("leading_dense_block_count", "nextn_predict_layers", "expert_count"):
            writer.add_uint32(f"llama.{key}", 0)
        writer.add_array("llama.rope.dimension_sections", [0, 0, 0, 0])
        writer.add_float32("llama.logit_scale", 1.0)
        writer.add_string("llama.tensor_data_layout", "Meta AI original pth")

    folder = checkpoint("llama")
    assert read_config(convert(folder, tmp_path / "a.gguf", change=change)) == read_config(folder)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    path = convert(checkpoint("llama"), tmp_path / "a.gguf", change=change)
    refuse(path, message)


def refuse(path: Path, message: str, error: type[CheckpointError] = CheckpointError) -> None:
    with pytest.raises(error, match=message) as caught:
        read_config(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def replaced(key: str, value: Any, kind: gguf.GGUFValueType | None = None) -> Any:
    def change(writer: gguf.GGUFWriter) -> None:
        known = writer.kv_data[0]
        known[key] = gguf.gguf_writer.GGUFValue(value, kind or known[key].type, known[key].sub_type)

    return change


WRONG: dict[str, tuple[str, Any, gguf.GGUFValueType | None, str]] = {
    "architecture": ("general.architecture", "other", None, ("unknown architecture 'other'; supported .*llama, "
        "")),
    "no "
    "layers": ("llama.block_count", 0, None, ("llama.block_count: expected an integer in 1..10000, "
        "found 0")),
    "layers without end": ("llama.block_count", 2**31, None, "in 1..10000, found 2147483648"),
    "heads": ("llama.attention.head_count", 5, None, ("head_count: expected a divisor of embedding_length "
        "48")),
    "shared "
    "heads": ("llama.attention.head_count_kv", 4, None, ("head_count_kv: expected a divisor of 6 heads, "
        "found 4")),
    "epsilon": ("llama.attention.layer_norm_rms_epsilon", float("nan"), None, ("rms_epsilon: expected .* found "
        "nan")),
    "a "
    "text": ("llama.context_length", "much", gguf.GGUFValueType.STRING, ("context_length: expected an "
        "integer")),
    "theta": ("llama.rope.freq_base", -1.0, None, "rope.freq_base: expected .* found -1.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values(name: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    key, value, kind, message = WRONG[name]
    refuse(
        convert(checkpoint("llama"), tmp_path / "a.gguf", change=replaced(key, value, kind)),
        message,
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([80, 80, 80], None),
        (
            [80, 80, 96],
            "llama.feed_forward_length: expected the same value in all layers, found several",
        ),
        ([], r"llama.feed_forward_length: expected an integer .*, found None"),
    ],
)
def test_one_value_for_each_layer(
    values: list[int], message: str | None, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("llama.feed_forward_length")
        if values:
            writer.add_array("llama.feed_forward_length", values)

    path = convert(checkpoint("llama"), tmp_path / "a.gguf", change=change)
    if message is None:
        assert read_config(path).intermediate_size == 80
    else:
        refuse(path, message, ConfigError)
