"""config.json, read as transformers reads it, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from pronk.base.arrays import BFLOAT16
from pronk.base.errors import CheckpointError, ConfigError, OptionError
from pronk.checkpoint.rope import RopeConfig
from pronk.models.families import SUPPORTED, parse_config
from pronk.models.loader import parse_dtype, read_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 100,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
}


# Transformers lacks MiMo, the default sizes of Mamba layers need a hidden size of thousands, and the
# layers of Nemotron-H have no default. The defaults of multimodal models are those of their
# ``text_config``. test_gemma4.py compares the sizes of layers of Gemma 4, and test_deepseek.py
# those of latent attention.
NOT_COMPARED = {
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "gemma4", "gemma4_text"),
    *("mimo", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h"),
    *("gemma3", "mistral3", "qwen3_5", "qwen3_5_moe"),
}


# Keys that a family needs besides: of heads of two values, half cannot rotate; by default, the first
# two layers have no experts.
MORE: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 8},
    "lfm2_moe": {"num_dense_layers": 1},
}


def of(family: str, **values: Any) -> dict[str, Any]:
    base = GPT2 if family == "gpt2" else LLAMA
    return base | {"model_type": family, "bos_token_id": None, "eos_token_id": None} | values


def hybrid(family: str, **values: Any) -> dict[str, Any]:
    """Return the config of a model with Mamba layers of four heads of eight numbers."""
    sizes = {"hidden_size": 16, "mamba_n_heads": 4, "mamba_d_ssm": 32, "num_local_experts": 0}
    return of(family, **(sizes | values))


@pytest.mark.parametrize("family", [name for name in SUPPORTED if name not in NOT_COMPARED])
def test_absent_keys_mean_what_transformers_takes(family: str) -> None:
    from transformers import AutoConfig

    raw = (
        of(family)
        if family == "gpt2"
        else of(family, num_attention_heads=32, **MORE.get(family, {}))
    )
    theirs = AutoConfig.for_model(**raw)
    ours = parse_config(raw)
    assert ours.context == theirs.max_position_embeddings
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.tied == theirs.tie_word_embeddings
    widths = {"gpt2": 128, "lfm2": 256}  # that of LFM2 is rounded up
    assert ours.intermediate_size == (widths.get(family) or theirs.intermediate_size)
    if family == "gpt2":
        assert ours.norm_eps == theirs.layer_norm_epsilon
        return
    assert ours.rope is not None
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 2)
    eps = theirs.norm_eps if family.startswith("lfm") else theirs.rms_norm_eps
    assert ours.norm_eps == eps
    parameters = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    share = parameters.get("partial_rotary_factor", 1.0)
    if family == "glm4":  # the frequencies of a half are those of a whole head, with another base
        assert ours.rope == RopeConfig(64, parameters["rope_theta"]).over_whole_heads(128)
    elif family == "lfm3":
        pairs = int(share * ours.head_dim) // 2
        assert ours.rope == RopeConfig(ours.head_dim, parameters["rope_theta"]).limited_to(pairs)
    else:
        assert ours.rope.theta == parameters["rope_theta"]
        assert ours.rope.dim == int(share * ours.head_dim)
        assert (ours.rope.kind, ours.rope.factor) == (
            parameters["rope_type"],
            parameters.get("factor", 1.0),
        )
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 2
    size = getattr(theirs, "sliding_window", None)
    assert ours.windows == tuple(size if kind == "sliding_attention" else None for kind in types)
    scale = (
        256**-0.5 if family.startswith("gemma") else 1.0 if family.startswith("granite") else None
    )
    assert ours.attention_scale == scale
    assert (ours.mixture is not None) == hasattr(theirs, "num_experts_per_tok")
    if ours.mixture is not None:
        width = getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
        found = (
            ours.mixture.experts,
            ours.mixture.per_row,
            ours.mixture.width,
            ours.mixture.normalized,
        )
        normalized = getattr(theirs, "norm_topk_prob", True)
        experts = getattr(theirs, "num_local_experts", None) or theirs.num_experts
        assert found == (experts, theirs.num_experts_per_tok, width, normalized)
    assert ours.attention_cap == getattr(theirs, "attn_logit_softcapping", None)
    assert ours.logits_cap == getattr(theirs, "final_logit_softcapping", None)
    assert ours.query_growth == ((0.1, 16384) if family == "ministral3" else None)


def test_null_is_not_absent() -> None:
    assert parse_config(of("mistral", num_key_value_heads=2)).window == 4096
    config = parse_config(of("mistral", num_key_value_heads=None, sliding_window=None))
    assert (config.window, config.num_kv_heads) == (None, 4)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, 4096),
        ({"type": "linear", "factor": 4.0}, 16384),
        ({"type": "dynamic", "factor": 2.5}, 10240),
        ({"type": "yarn", "factor": 4.0}, 16384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 4096),
    ],
)
def test_context_includes_scaling(scaling: dict[str, Any] | None, expected: int) -> None:
    """Configs may state the length before scaling: Vicuna's 16k checkpoints state 4096 and a factor
    of 4.
    """
    assert (
        parse_config(LLAMA | {"max_position_embeddings": 4096, "rope_scaling": scaling}).context
        == expected
    )


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_under_both_names(key: str) -> None:
    config = parse_config(LLAMA | {key: "bfloat16"})
    assert config.dtype == "bfloat16"
    assert parse_dtype("auto", config) == BFLOAT16


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_dtype_option(name: str) -> None:
    assert str(parse_dtype(name, parse_config(LLAMA))) == name


@pytest.mark.parametrize("name", ["int8", "float64", "", "half"])
def test_unknown_dtype_option_lists_the_known(name: str) -> None:
    with pytest.raises(
        OptionError, match=rf"expected one of auto, float32, bfloat16, float16, found '{name}'"
    ):
        parse_dtype(name, parse_config(LLAMA))


YARN = {"rope_type": "yarn", "factor": 2.0}
REFUSED = [
    (
        {"model_type": "retnet"},
        (
            r"'retnet'; supported are bamba, deepseek_v2, deepseek_v3, falcon_h1, gemma2, gemma3, "
            r"gemma3_text, gemma4, gemma4_text, glm4, glm4_moe, glm4_moe_lite, gpt2, gpt_oss, gra"
        ),
    ),
    ({"model_type": "lfm2_vl"}, r"'lfm2_vl': images are not supported; use the text model LFM2"),
    (
        {"model_type": "mamba2"},
        r"'mamba2': layers with a recurrent state of this kind are .*; use a model with attention",
    ),
    (
        {"model_type": "kimi_k2"},
        r"'kimi_k2': latent attention of this kind is not supported; use GLM-4.7-Flash",
    ),
    (
        {"model_type": "llama4"},
        r"'llama4': attention in chunks and a router that scales the inputs .*; use Mixtral, Qwen3",
    ),
    (
        {"model_type": "olmoe"},
        r"'olmoe': this mixture of experts has no reader of its config yet; use Mixtral",
    ),
    ({"model_type": "gemma3n"}, r"'gemma3n': the layers of Gemma 3n are not .*; use Gemma 4"),
    ({"model_type": "minimax"}, r"'minimax': layers with a recurrent state"),
    ({"model_type": "kimi_linear"}, r"'kimi_linear': layers with a recurrent state"),
    ({"model_type": None}, r"model_type None; supported are bamba"),
    ({"model_type": ["llama"]}, r"\['llama'\]; supported are bamba"),
    ({"quantization_config": "awq"}, r"expected an object as quantization_config, found 'awq'"),
    (
        {"compression_config": ["awq"]},
        r"expected an object as quantization_config, found \['awq'\]",
    ),
    ({"hidden_size": None}, r"hidden_size: expected an integer in 1..2147483647, found None"),
    ({"vocab_size": "100"}, r"vocab_size: expected an integer .* found '100'"),
    (
        {"num_hidden_layers": True},
        r"num_hidden_layers: expected an integer in 1..10000, found True",
    ),
    ({"rms_norm_eps": "small"}, r"rms_norm_eps: expected a finite number above 0, found 'small'"),
    ({"num_attention_heads": 5}, r"num_attention_heads to divide hidden_size = 64, found 5"),
    ({"num_key_value_heads": 3}, r"4 attention heads cannot share 3"),
    ({"head_dim": 7}, r"expected an even head_dim .* found 7"),
    ({"hidden_act": "relu"}, r"hidden_act: expected one of silu, .* found 'relu'"),
    ({"dtype": "int8"}, r"dtype: expected one of float32, float16, bfloat16, found 'int8'"),
    ({"rope_theta": 1}, r"rope_theta: expected a finite number above 1, found 1.0"),
    (
        {"layer_types": ["full_attention"]},
        r"expected 2 layer_types, each full_attention, found \['full_attention'\]",
    ),
    (
        {"layer_types": ["full_attention", "linear_attention"]},
        r"found \['full_attention', 'linear_attention'\]",
    ),
    ({"attn_logit_softcapping": 30.0}, r"attn_logit_softcapping = 30.0 is not supported"),
    ({"is_causal": False}, r"is_causal = False is not supported"),
    ({"num_experts": 8}, r"num_experts = 8 is not supported"),
    ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0.5 is not supported"),
    (
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        r"partial_rotary_factor = 0.5 is not supported",
    ),
    (
        {"rope_scaling": {"type": "ntk", "factor": 2.0}},
        r"'ntk' is not supported; supported are default",
    ),
    (
        {"rope_scaling": {"type": "longrope"}},
        r"long_factor \(longrope\): expected a list of 8 numbers, found None",
    ),
    (
        {"rope_scaling": {"type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0] * 7}},
        r"short_factor \(longrope\): expected a list of 8 numbers, found \[1.0",
    ),
    (
        {"rope_scaling": {"type": "longrope", "long_factor": [0.0] * 8, "short_factor": [1.0] * 8}},
        r"long_factor \(longrope\): expected a number above 0 .*found 0",
    ),
    ({"model_type": "gemma3"}, r"expected an object as text_config, found None"),
    (
        {"rope_scaling": {"type": "linear"}},
        r"factor \(linear rope\): expected a number above 0 and at most 1e\+15, found None",
    ),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, r"factor .*found 0"),
    ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, r"low_freq_factor .*found None"),
    ({"rope_scaling": YARN | {"beta_fast": "x"}}, r"beta_fast .*found 'x'"),
    ({"rope_scaling": YARN | {"mrope_section": [1, 2]}}, r"'mrope_section' is not supported"),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
        r"'full_attention' is not supported",
    ),
    ({"rope_parameters": "linear"}, r"expected an object for the rotary embedding, found 'linear'"),
    ({"rope_theta": -1.0}, r"rope_theta .*expected a number above 0 .*found -1.0"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_config(LLAMA | values)
    assert "\n" not in str(caught.value)


SLIDING = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            of("mistral", layer_types=SLIDING),
            r"full attention in some layers; expected sliding_attention in all",
        ),
        (of("mistral", sliding_window=None, layer_types=SLIDING), r"each full_attention, found"),
        (of("mistral", sliding_window=0), r"sliding_window: expected an integer .*, found 0"),
        (of("qwen2", layer_types=SLIDING), r"each full_attention, found"),
        (
            of("qwen2", use_sliding_window=True, layer_types=["x", "y"]),
            r"full_attention or sliding_attention, found",
        ),
        (
            of("qwen2", use_sliding_window=True, max_window_layers="x"),
            r"max_window_layers: expected an integer in 0.*, found 'x'",
        ),
        (
            of("lfm2", layer_types=["conv", "mamba"]),
            r"2 layer_types, each conv or full_attention, found \['conv', 'mamba'",
        ),
        (
            of("lfm2", layer_types=["conv"]),
            r"expected 2 layer_types, each conv or full_attention, found \['conv'\]",
        ),
        *(
            (of(family, rope_parameters=value), "rope_parameters: expected an object, found")
            for family in ("gemma3_text", "ministral3", "olmo3")
            for value in (1, 0.5, True, "linear", [], [None], [["a", 1]])
        ),
        *(
            (
                of(family, rope_parameters=None, rope_scaling=value),
                "rope_scaling: expected an object, found",
            )
            for family in ("gemma3_text", "olmo3")
            for value in (1, "linear", [None])
        ),
        *(
            (
                of("lfm2", layer_types=None, full_attn_idxs=value),
                "full_attn_idxs: expected a list of values of type int",
            )
            for value in (1, "x", {}, ["x"], [[]])
        ),
        *(
            (of("lfm2", layer_types=value), "layer_types: expected a list of values of type str")
            for value in (1, {}, [[]], ["conv", {}])
        ),
        *(
            (
                of("qwen3_moe", mlp_only_layers=value),
                "mlp_only_layers: expected a list of values of type int",
            )
            for value in (1, "x", ["x"])
        ),
        (of("lfm2", conv_L_cache=17), r"conv_L_cache: expected an integer in 1..16, found 17"),
        *(
            (hybrid(family, **{key: value}), message)
            for family in ("granitemoehybrid", "bamba", "falcon_h1")
            for key, value, message in (
                ("mamba_n_groups", 3, "mamba_n_groups: expected a divisor of 4 heads, found 3"),
                ("mamba_d_head", 9, "mamba_d_head: expected a size of at most 576 of 32 / 4"),
                ("mamba_d_state", 577, r"mamba_d_state: expected an integer in 1..576, found 577"),
                ("mamba_d_conv", 17, r"mamba_d_conv: expected an integer in 1..16, found 17"),
                ("mamba_proj_bias", True, "mamba_proj_bias = true is not supported"),
                ("time_step_limit", [0.001, 0.1], r"time_step_limit: expected no limits, .*0.001"),
            )
        ),
        (
            hybrid("granitemoehybrid", layer_types=["attention", "rwkv"]),
            r"expected 2 layer_types, each mamba or attention, found \['attention', 'rwkv'\]",
        ),
        (
            hybrid("granitemoehybrid", position_embedding_type="alibi"),
            r"position_embedding_type: expected one of nope, rope, found 'alibi'",
        ),
        (
            hybrid("falcon_h1", mamba_rms_norm=True, mamba_norm_before_gate=True),
            "mamba_norm_before_gate: expected false with mamba_rms_norm, found true",
        ),
        (
            hybrid("falcon_h1", ssm_multipliers=[1.0] * 4),
            "ssm_multipliers: expected 5 numbers, found 4",
        ),
        (hybrid("falcon_h1", mlp_multipliers=["x", 1.0]), "mlp_multipliers: expected a .*number"),
        (hybrid("falcon_h1", mlp_bias=True), "mlp_bias = true is not supported; expected false"),
        (
            of("granite_swa", layer_rope_theta=[0.0]),
            "layer_rope_theta: expected 2 numbers, found 1",
        ),
        (
            of("granite_swa", layer_rope_theta=[0.0, 1.0]),
            "layer_rope_theta: expected a number above 1 .*found 1.0",
        ),
        (of("granite_swa", layer_rope_theta="x"), "layer_rope_theta: expected a list of values"),
        (
            of("granite_swa", layer_rope_theta=[3.0, 4.0, 5.0], num_hidden_layers=3),
            "layer_rope_theta: expected at most 2 bases, found 3",
        ),
        (
            GPT2 | {"scale_attn_by_inverse_layer_idx": True},
            r"scale_attn_by_inverse_layer_idx = True is not supported",
        ),
        (GPT2 | {"add_cross_attention": True}, r"add_cross_attention = True is not supported"),
        (GPT2 | {"scale_attn_weights": False}, r"scale_attn_weights = false is not supported"),
        (GPT2 | {"n_head": 5}, r"5 heads do not divide the hidden size 32"),
    ],
)
def test_refused_in_other_families(raw: dict[str, Any], message: str) -> None:
    raw = {"num_key_value_heads": 4} | raw
    with pytest.raises(ConfigError, match=message):
        parse_config(raw)


def write(folder: Path, config: object, generation: object = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, (7,)),
        ({"eos_token_id": [3, 4]}, (3, 4)),
        ({"eos_token_id": 3}, (3,)),
        ({"eos_token_id": None}, (7,)),
        ({}, (7,)),
    ],
)
def test_end_of_text_of_generation_config_wins(
    generation: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    assert read_config(write(tmp_path, LLAMA | {"eos_token_id": 7}, generation)).eos_ids == expected


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"suppress_tokens": [1], "stop_strings": ["a"], "temperature": 0.5},
            "suppress_tokens, stop_strings",
        ),
        ({"min_new_tokens": 5}, "min_new_tokens"),
        ({"no_repeat_ngram_size": 3, "num_beams": 4}, "no_repeat_ngram_size, num_beams"),
        (
            {
                "num_beams": 1,
                "suppress_tokens": [],
                "min_length": 0,
                "typical_p": 1.0,
                "stop_strings": None,
            },
            None,
        ),
    ],
)
def test_options_of_generation_config_that_are_not_read_are_named(
    options: dict[str, Any], named: str | None, tmp_path: Path
) -> None:
    folder = write(tmp_path, LLAMA, options)
    if named is None:
        read_config(folder)  # a warning would be an error
    else:
        with pytest.warns(
            UserWarning,
            match=rf"generation_config.json: {named}: ignored; give options of requests",
        ):
            read_config(folder)


@pytest.mark.parametrize("wrong", [100, -1, "x", True, 1.5])
def test_ids_that_are_no_tokens_are_ignored_with_a_warning(wrong: Any) -> None:
    for key in ("bos_token_id", "eos_token_id"):
        with pytest.warns(
            UserWarning,
            match=rf"config.json: {key}: expected the id of a token in 0..99, found {wrong!r}",
        ):
            config = parse_config(
                LLAMA | {"bos_token_id": 5, "eos_token_id": [6, 7], key: [wrong, 8]}
            )
        assert (config.bos_id, config.eos_ids) == (
            (8, (6, 7)) if key == "bos_token_id" else (5, (8,))
        )
    unused = {
        f"{name}_token_id": wrong for name in ("pad", "unk", "sep", "cls", "mask", "decoder_start")
    }
    assert parse_config(LLAMA | unused) == parse_config(LLAMA)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a model folder with config.json, found none"):
        read_config(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"no such folder: '.*absent'; expected a folder with config.json"
    ):
        read_config(tmp_path / "absent")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config.json: expected JSON, found a mistake at line 1, column 2"),
        ("", r"config.json: expected JSON"),
        ("[1]", r"config.json: expected a JSON object, found list"),
        ("null", r"config.json: expected a JSON object, found NoneType"),
    ],
)
def test_damaged_config(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_message_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"{tmp_path.name}: config.json has model_type .mamba.: "
        r"layers with a recurrent state",
    ):
        read_config(write(tmp_path, {"model_type": "mamba"}))


def test_keys_of_early_lfm2_configs() -> None:
    """As in the files of LFM2-1.2B."""
    early = {
        "block_auto_adjust_ff_dim": True,
        "block_ff_dim": 12288,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": 3,
        "full_attn_idxs": [1],
        "norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "tie_embedding": False,
    }
    config = parse_config(of("lfm2", num_key_value_heads=2, **early))
    assert (config.intermediate_size, config.tied, config.qk_norm) == (8192, False, True)
    assert config.convolution is not None
    assert (config.convolution.taps, config.convolution.layers, config.convolution.bias) == (
        3,
        (True, False),
        False,
    )
    assert config.convolution_of(0) is config.convolution
    assert config.convolution_of(1) is None
    assert (
        parse_config(
            of("lfm2", num_key_value_heads=2, block_ffn_dim_multiplier=None)
        ).intermediate_size
        == 64
    )
    assert parse_config(of("lfm2", num_key_value_heads=2)).convolution is None
