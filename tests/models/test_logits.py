"""Logits of each family against transformers."""

import json
import random
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from checkpoints import (
    GEMMA4_EXPERTS,
    MakeCheckpoint,
    transformers_choices,
    transformers_logits,
)
from oracle import torch_dtype
from pronk import LLM, SamplingParams
from pronk.base.arrays import BFLOAT16, FLOAT16, FLOAT32, Array, DType
from pronk.base.errors import OptionError, PromptError
from pronk.models.loader import load_decoder, read_config
from quantized_formats import read_tensors, write_tensors
from tiny_models import kernels, text_logits

TOLERANCE = 1e-4


class Case(NamedTuple):
    name: str
    family: str
    overrides: dict[str, Any]
    length: int = 40


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


def window(size: int, **values: Any) -> dict[str, Any]:
    return {"use_sliding_window": True, "sliding_window": size, **values}


TIED = {"tie_word_embeddings": True}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
# Enough frequencies for YaRN's ramp to matter.
WIDE = {"head_dim": 32}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA_LINEAR = {
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    },
}
GEMMA_CAPPED = {
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 20,
    "final_logit_softcapping": 2.0,
    "tie_word_embeddings": False,
}
GEMMA4_NEITHER = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "num_global_key_value_heads": 3,
    "sliding_window": 3,
}
LFM2_LAST = ["full_attention", "conv", "conv"]
LFM2_BIASED = {
    "layer_types": LFM2_LAST,
    "conv_L_cache": 4,
    "conv_bias": True,
    "num_key_value_heads": 6,
    "tie_word_embeddings": False,
}
SMALL_CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}
OLMO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": rope("yarn", **YARN)["rope_parameters"],
}


def longrope(dim: int, **values: Any) -> dict[str, Any]:
    """Return rotations of ``dim`` dimensions of each head, with divisors that grow with the
    number of the frequency.
    """
    short, long = ([1 + growth * i for i in range(dim // 2)] for growth in (0.2, 3.1))
    return rope("longrope", short_factor=short, long_factor=long, **values)


LONGROPE = {"original_max_position_embeddings": 32, **longrope(8)}
PARTIAL_LONGROPE = LONGROPE | {
    "hidden_size": 96,
    **longrope(12, attention_factor=1.3, partial_rotary_factor=0.75),
}
# The factor of scores, that of cosines and sines, and the ramp of the frequencies.
LATENT_YARN = {"qk_rope_head_dim": 32, **rope("yarn", mscale=0.7, mscale_all_dim=1.3, **YARN)}
CASES = [
    Case("latents of queries", "deepseek_v2", {}),
    Case("queries without latents", "deepseek_v2", {"q_lora_rank": None}),
    Case("latent attention, yarn", "deepseek_v2", LATENT_YARN, 100),
    Case("latent attention, biases", "deepseek_v2", {"attention_bias": True}),
    Case("latent attention, dense", "deepseek_v2", {"first_k_dense_replace": 3}),
    Case(
        "softmax in groups",
        "deepseek_v2",
        {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.6,
        },
    ),
    Case("sigmoids in groups", "deepseek_v3", {}),
    Case(
        "sigmoids, not normalized",
        "deepseek_v3",
        {"norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    ),
    Case("kinds of layers", "glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    Case("grouped", "llama", {}),
    Case("one head each", "llama", {"num_key_value_heads": 6}),
    Case("multi-query attention, one KV head", "llama", {"num_key_value_heads": 1}),
    Case("a single head", "llama", {"num_attention_heads": 1, "num_key_value_heads": 1}),
    Case("tied", "llama", {"tie_word_embeddings": True}),
    Case("attention bias", "llama", {"attention_bias": True}),
    Case("mlp bias", "llama", {"mlp_bias": True}),
    Case(
        "all biases, tied",
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    Case("head_dim of its own", "llama", {"head_dim": 20}),
    Case("gelu, eps", "llama", {"hidden_act": "gelu", "rms_norm_eps": 1e-3}),
    Case("theta", "llama", rope("default", rope_theta=500000.0)),
    Case("linear", "llama", rope("linear", factor=4.0)),
    Case(
        "dynamic, long text",
        "llama",
        {"max_position_embeddings": 32, **rope("dynamic", factor=2.0)},
        80,
    ),
    Case(
        "dynamic, short text",
        "llama",
        {"max_position_embeddings": 64, **rope("dynamic", factor=2.0)},
    ),
    Case(
        "llama3",
        "llama",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
        100,
    ),
    Case("yarn", "llama", rope("yarn", **YARN), 100),
    Case("yarn, attention_factor", "llama", rope("yarn", attention_factor=1.7, **YARN)),
    Case("yarn, mscale", "llama", rope("yarn", mscale=0.7, mscale_all_dim=1.3, **YARN)),
    Case("yarn, mscale alone", "llama", rope("yarn", mscale=0.7, **YARN)),
    Case("yarn, betas", "llama", WIDE | rope("yarn", beta_fast=8.0, beta_slow=2.0, **YARN)),
    Case("yarn, not truncated", "llama", WIDE | rope("yarn", truncate=False, **YARN)),
    Case("yarn, context as original", "llama", rope("yarn", factor=4.0)),
    Case("plain", "mistral", {}),
    Case("window", "mistral", {"sliding_window": 8}),
    Case("window of one", "mistral", {"sliding_window": 1}),
    Case(
        "window, one head each",
        "mistral",
        {"sliding_window": 16, "num_key_value_heads": 6, "head_dim": 12},
    ),
    Case("biases", "qwen2", {}),
    Case("tied", "qwen2", {"tie_word_embeddings": True}),
    Case("window switched off", "qwen2", {"sliding_window": 4}),
    Case("window in upper layers", "qwen2", window(8, max_window_layers=1)),
    Case("window in named layers", "qwen2", window(8, layer_types=MIXED)),
    Case("window everywhere", "qwen2", window(8, max_window_layers=0)),
    Case("yarn", "qwen2", rope("yarn", **YARN)),
    Case("query and key norms", "qwen3", {}),
    Case("attention bias", "qwen3", {"attention_bias": True}),
    Case("tied, window", "qwen3", {"tie_word_embeddings": True, **window(8, layer_types=MIXED)}),
    Case("learned positions", "gpt2", {}),
    Case("not tied", "gpt2", {"tie_word_embeddings": False}),
    Case("inner size, gelu", "gpt2", {"n_inner": 72, "activation_function": "gelu"}),
    Case("windows and full attention", "gemma3_text", {}),
    Case("one window, linear scaling", "gemma3_text", GEMMA_LINEAR, 60),
    Case("one head, soft-cap, not tied", "gemma3_text", GEMMA_CAPPED),
    Case("soft-caps", "gemma2", {}),
    Case("small caps, one head each", "gemma2", {"num_key_value_heads": 6, **SMALL_CAPS}),
    Case("multipliers", "granite", {"embedding_multiplier": 3.0}),
    Case(
        "biases, tied",
        "granite",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    Case(
        "windows, sinks, rotations of each layer", "granite_swa", {"embedding_multiplier": 3.0}, 60
    ),
    Case("one base, tied", "granite_swa", {"layer_types": None, "layer_rope_theta": None, **TIED}),
    Case(
        "one layer rotates",
        "granite_swa",
        {"layer_rope_theta": [0.0, 0.0, 10000.0], "num_key_value_heads": 6},
    ),
    Case("dense", "granitemoehybrid", {"embedding_multiplier": 3.0, "tie_word_embeddings": True}),
    Case("norms of outputs", "olmo2", {}),
    Case(
        "norms of outputs, one head each",
        "olmo2",
        {"num_key_value_heads": 6, "attention_bias": True},
    ),
    Case("layers without rotations", "smollm3", {}),
    Case(
        "not tied",
        "smollm3",
        {"tie_word_embeddings": False, "no_rope_layer_interval": 2, "no_rope_layers": None},
    ),
    Case("fused matrices", "phi3", {}),
    Case(
        "half of a head is rotated",
        "phi3",
        {"hidden_size": 96, **rope("default", partial_rotary_factor=0.75)},
    ),
    Case("window, tied", "phi3", {"sliding_window": 8, "tie_word_embeddings": True}),
    Case("queries scaled by position", "ministral3", {}, 100),
    Case("window, tied", "ministral3", {"sliding_window": 8, "tie_word_embeddings": True}),
    Case("windows and full attention", "olmo3", {}),
    Case("scaling in layers without a window", "olmo3", {"rope_parameters": OLMO_ROPES}, 80),
    Case("text beyond pre-training", "phi3", LONGROPE, 40),
    Case("factor of its own, a part of a head", "phi3", PARTIAL_LONGROPE, 40),
    Case("language model of a multimodal model", "gemma3", {}),
    Case("language model of a multimodal model", "mistral3", {}, 100),
    Case("experts", "mixtral", {}),
    Case(
        "experts, window, tied", "mixtral", {"sliding_window": 8, "num_experts_per_tok": 4, **TIED}
    ),
    Case("weights of all experts", "qwen3_moe", {"norm_topk_prob": False}),
    Case(
        "layers without experts",
        "qwen3_moe",
        {"mlp_only_layers": [0], "num_experts": 20, "attention_bias": True},
    ),
    Case("experts in every second layer", "qwen3_moe", {"decoder_sparse_step": 2, **TIED}),
    Case("experts", "granitemoe", {}),
    Case("one expert", "granitemoe", {"num_local_experts": 1, "num_experts_per_tok": 1, **TIED}),
    Case("sinks, clamped experts with biases", "gpt_oss", {}),
    Case(
        "one head each, tied",
        "gpt_oss",
        {"num_key_value_heads": 6, "num_experts_per_tok": 1, **TIED},
    ),
    Case(
        "experts in bfloat16 shards",
        "qwen3_moe",
        {"save_dtype": torch.bfloat16, "shard_size": "20KB"},
    ),
    Case("inputs of layers, shared keys", "gemma4_text", {}),
    Case("one token", "gemma4_text", {}, 1),
    Case("experts, values that are keys", "gemma4_text", GEMMA4_EXPERTS),
    Case("neither", "gemma4_text", GEMMA4_NEITHER | {"tie_word_embeddings": False}),
    Case("experts in bfloat16", "gemma4_text", GEMMA4_EXPERTS | {"save_dtype": torch.bfloat16}),
    Case("a layer stores keys, all others share", "gemma4_text", {"num_kv_shared_layers": 4}),
    Case("short convolutions", "lfm2", {}),
    Case("four taps, biases, one head each, not tied", "lfm2", LFM2_BIASED),
    Case(
        "two convolutions in a row, given width",
        "lfm2",
        {"layer_types": LFM2_LAST, "block_auto_adjust_ff_dim": False},
    ),
    Case(
        "one tap, short text",
        "lfm2",
        {"conv_L_cache": 1, "layer_types": None, "full_attn_idxs": [0]},
        2,
    ),
    Case("attention only", "lfm2", {"layer_types": ["full_attention"] * 3}),
    Case("shared expert with a gate", "qwen2_moe", {}),
    Case(
        "layers without experts, windows, tied",
        "qwen2_moe",
        {
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "qkv_bias": False,
            **window(8, max_window_layers=2),
            **TIED,
        },
    ),
    Case("half of consecutive values rotates", "glm4", {}, 100),
    Case("no biases, one head each", "glm4", {"attention_bias": False, "num_key_value_heads": 6}),
    Case("groups, a shared expert", "glm4_moe", {}),
    Case(
        "two shared experts, one group, norms, biases",
        "glm4_moe",
        {
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    Case("experts", "lfm2_moe", {}),
    Case(
        "no correction, no norm, no dense layers",
        "lfm2_moe",
        {
            "num_dense_layers": 0,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "tie_word_embeddings": False,
        },
    ),
    Case("gates of heads, seven taps, windows", "lfm3", {}, 60),
    Case(
        "plain norms, no gates, biases",
        "lfm3",
        {
            "use_sandwich_norm": False,
            "use_attention_gate": False,
            "conv_bias": True,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    Case("shards", "llama", {"shard_size": "40KB"}),
    Case("bfloat16 file", "llama", {"save_dtype": torch.bfloat16}),
    Case("float16 file, tied", "llama", {"save_dtype": torch.float16, "tie_word_embeddings": True}),
    Case("bfloat16 file", "gpt2", {"save_dtype": torch.bfloat16}),
    Case("bfloat16 shards", "qwen3", {"save_dtype": torch.bfloat16, "shard_size": "20KB"}),
]


def tokens(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(300) for _ in range(length)]


@cache
def reference(folder: Path, length: int) -> Array:
    """Return the logits of transformers for :func:`tokens`."""
    return transformers_logits(folder, tokens(length))


def logits(folder: Path, length: int, context: int | None = None) -> Array:
    """Return the logits of :func:`tokens`."""
    config = read_config(folder, context=context)
    return text_logits(
        load_decoder(folder, config, dtype=FLOAT32, kernels=kernels()), tokens(length)
    )


@pytest.mark.parametrize("case", CASES, ids=[f"{case.family}: {case.name}" for case in CASES])
def test_logits_equal_transformers(case: Case, checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint(case.family, **case.overrides)
    expected = reference(folder, case.length)
    assert expected.std() > 0.5, "logits too flat to show anything"
    assert np.abs(logits(folder, case.length) - expected).max() < TOLERANCE


def test_context_chooses_the_rotations_of_longrope(checkpoint: MakeCheckpoint) -> None:
    """transformers chooses by the length of each text, pronk by the context that the model is
    opened with.
    """
    folder = checkpoint("phi3", **LONGROPE)
    short = reference(folder, 32)
    long = reference(folder, 33)
    assert np.abs(logits(folder, 32, 32) - short).max() < TOLERANCE
    assert np.abs(logits(folder, 33) - long).max() < TOLERANCE
    assert np.abs(logits(folder, 32) - short).max() > 100 * TOLERANCE


def test_context_is_limited(checkpoint: MakeCheckpoint) -> None:
    llm = LLM(checkpoint("llama"), threads=1, context=40)
    assert llm.config.context == 40
    with pytest.raises(PromptError, match=r"expected at most 39 tokens \(context 40\), found 40"):
        llm.generate(tokens(40), SamplingParams(max_tokens=1))
    with pytest.raises(OptionError, match=r"^context: expected an integer of at least 1, found 0$"):
        LLM("no such model", context=0)
    with pytest.raises(OptionError, match=r"^context: expected an integer in 1\.\.256, found 257$"):
        LLM(checkpoint("llama"), context=257)
    with pytest.raises(
        OptionError, match="context: expected no limit with learned positions, found 40"
    ):
        LLM(checkpoint("gpt2"), context=40)


@pytest.mark.parametrize("family", ["gemma3", "mistral3"])
def test_names_of_multimodal_checkpoints(
    family: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Models on the Hub have the names of older versions of transformers."""
    original = checkpoint(family)
    folder = tmp_path / "model"
    names = set()
    shutil.copytree(original, folder)
    stored = read_tensors(folder)
    for name in list(stored):
        for old, new in (
            ("model.language_model.", "language_model.model."),
            ("lm_head", "language_model.lm_head"),
        ):
            if name.startswith(old):
                stored[name.replace(old, new)] = stored.pop(name)
    write_tensors(folder, stored)
    names = {name.split(".")[0] for name in read_tensors(folder)}
    assert names >= {"language_model", "vision_tower"}
    assert np.array_equal(logits(folder, 20), logits(original, 20))


DENSE = [
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "glm4",
    "granite",
    "granite_swa",
    "lfm3",
    "ministral3",
    "olmo2",
    "olmo3",
    "phi3",
    "smollm3",
]
MIXTURES = ["glm4_moe", "gpt_oss", "granitemoe", "lfm2_moe", "mixtral", "qwen2_moe", "qwen3_moe"]
GREEDY = [*DENSE, *MIXTURES, "lfm2"]


@pytest.mark.few(7)
@pytest.mark.parametrize("family", GREEDY)
def test_200_greedy_tokens_equal_transformers(family: str, checkpoint: MakeCheckpoint) -> None:
    """Also with draft tokens: the prompt repeats itself, so prompt lookup proposes some."""
    # With a tied head a random Gemma, whose embeddings are scaled, repeats its last token.
    folder = checkpoint(family, max_position_embeddings=512, tie_word_embeddings=False)
    prompt = tokens(12) * 2
    llm = LLM(folder, threads=1, dtype="float32")
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    outputs = list[list[int]]()
    for drafter in ("autoregressive", "prompt_lookup(min_ngram=1)", "recycling"):
        output = list(llm.generate([prompt], params, drafter=drafter)[0].token_ids)
        assert len(output) == 200
        outputs.append(output)
    assert outputs[1:] == [outputs[0]] * 2
    assert len(set(outputs[0])) > 5
    assert transformers_choices(folder, prompt, outputs[0]) == outputs[0]


@pytest.mark.parametrize(
    ("family", "changed", "plain"),
    [
        ("mistral", {"sliding_window": 8}, {}),
        ("qwen2", window(8, layer_types=MIXED), {}),
        ("llama", rope("yarn", **YARN), {}),
        ("llama", rope("yarn", mscale=0.7, mscale_all_dim=1.3, **YARN), rope("yarn", **YARN)),
        (
            "llama",
            WIDE | rope("yarn", beta_fast=8.0, beta_slow=2.0, **YARN),
            WIDE | rope("yarn", **YARN),
        ),
        ("llama", WIDE | rope("yarn", truncate=False, **YARN), WIDE | rope("yarn", **YARN)),
        ("llama", {"max_position_embeddings": 32, **rope("dynamic", factor=2.0)}, {}),
        ("llama", {"rms_norm_eps": 1e-3}, {}),
    ],
)
def test_options_change_the_logits(
    family: str, changed: dict[str, Any], plain: dict[str, Any], checkpoint: MakeCheckpoint
) -> None:
    with_option, without = (logits(checkpoint(family, **values), 80) for values in (changed, plain))
    assert np.abs(with_option - without).max() > 100 * TOLERANCE


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_matrices_of_all_experts_in_one_tensor(
    family: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    original, folder = write_joined_experts(family, checkpoint, tmp_path)
    assert np.array_equal(logits(folder, 20), logits(original, 20))


def write_joined_experts(
    family: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> tuple[Path, Path]:
    """Return a checkpoint, and a copy as transformers 5 writes it with
    ``save_original_format=False``.
    """
    original = checkpoint(family)
    folder = tmp_path / "model"
    stored = dict[str, Any]()
    shutil.copytree(original, folder)
    experts: dict[str, dict[tuple[int, str], Array]] = {}
    for name, tensor in read_tensors(original).items():
        layer, is_expert, rest = name.replace("block_sparse_moe", "mlp").partition("experts.")
        if is_expert:
            number, _, kind = rest.removesuffix(".weight").partition(".")
            experts.setdefault(layer, {})[int(number), kind] = tensor
        else:
            stored[layer] = tensor
    gate, up, down = (
        ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    )
    for layer, found in experts.items():
        numbers = range(len(found) // 3)
        both = [np.concatenate((found[number, gate], found[number, up])) for number in numbers]
        stored[f"{layer}experts.gate_up_proj"] = np.stack(both)
        stored[f"{layer}experts.down_proj"] = np.stack([found[number, down] for number in numbers])
    assert len(experts) == 3
    write_tensors(folder, stored)
    return original, folder


def write_mxfp4(checkpoint: MakeCheckpoint, tmp_path: Path) -> tuple[Path, Path, dict[str, Array]]:
    """Return a checkpoint with experts in MXFP4, one with the same numbers as floats, and the
    floats.
    """
    sizes = {"hidden_size": 96, "intermediate_size": 64}
    original = checkpoint("gpt_oss", **sizes)
    plain = tmp_path / "plain"
    coded = tmp_path / "coded"
    shutil.copytree(original, plain)
    shutil.copytree(original, coded)
    dice = np.random.default_rng(0)
    floats = dict[str, Array]()
    codes = dict[str, Array]()
    for name, tensor in read_tensors(original).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            floats[name] = codes[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        four = dice.integers(16, size=(experts, outputs, inputs // 32, 32), dtype=np.uint8)
        exponents = dice.integers(122, 126, size=(experts, outputs, inputs // 32), dtype=np.uint8)
        codes[f"{name}_blocks"] = four[..., 0::2] | four[..., 1::2] << 4
        codes[f"{name}_scales"] = exponents
        values = np.array(
            [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
        )[four]
        values *= np.float32(2.0) ** (exponents[..., None].astype(np.float32) - 127)
        floats[name] = values.reshape(experts, outputs, inputs).transpose(0, 2, 1).copy()
    write_tensors(plain, floats)
    write_tensors(coded, codes)
    document = json.loads((coded / "config.json").read_text())
    document["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["self_attn", "lm_head"],
    }
    (coded / "config.json").write_text(json.dumps(document))
    return coded, plain, floats


def test_experts_in_mxfp4(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """The weights are those of a checkpoint with the same numbers as floats."""
    coded, plain, floats = write_mxfp4(checkpoint, tmp_path)
    expected = transformers_logits(plain, tokens(40))
    assert expected.std() > 0.5
    found = logits(coded, 40)  # rows are rounded to 8 bits
    assert np.abs(found - expected).mean() < 0.05 * np.abs(expected).mean()
    decoder = load_decoder(coded, read_config(coded), dtype=FLOAT32, kernels=kernels())
    for layer in decoder.layers:
        packed = [linear.packed for linear in (*layer.up.parts, *layer.down.parts)]
        assert {each.format for each in packed} == {"int5 in groups of 32"}
    up = decoder.layers[1].up.parts[4].packed.unpack()
    stored = floats["model.layers.1.mlp.experts.gate_up_proj"][4].T
    assert np.array_equal(up, np.concatenate((stored[0::2], stored[1::2])))


def test_shards_are_several_files(checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("llama", shard_size="40KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2


OLD_FORMS = [
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32},
    {"rope_scaling": {"type": "yarn", "finetuned": True, **YARN}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 32},
    {"rope_scaling": None},
]


@pytest.mark.parametrize("old", OLD_FORMS)
def test_older_config_keys(old: dict[str, Any], checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), folder)
    document = json.loads((folder / "config.json").read_text())
    del document["rope_parameters"], document["dtype"]
    document |= {"rope_theta": 5000.0, "torch_dtype": "float32", **old}
    (folder / "config.json").write_text(json.dumps(document))
    assert read_config(folder).dtype == "float32"
    assert np.abs(logits(folder, 60) - transformers_logits(folder, tokens(60))).max() < TOLERANCE


def write_short_names(original: Path, folder: Path, prefix: str, buffers: Iterable[str]) -> Path:
    """Write a copy of a tied model with names without a prefix, buffers, and a copy of the table."""
    shutil.copytree(original, folder)
    stored = {name.removeprefix(prefix): tensor for name, tensor in read_tensors(folder).items()}
    stored |= {name: np.ones(3, np.uint8) for name in buffers}
    table = "embed_tokens.weight" if prefix == "model." else "wte.weight"
    stored["lm_head.weight"] = stored[table].copy()
    write_tensors(folder, stored)
    return folder


@pytest.mark.parametrize(
    ("family", "prefix", "buffers"),
    [
        ("llama", "model.", ["layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"]),
        ("gpt2", "transformer.", ["h.0.attn.bias", "h.1.attn.masked_bias"]),
    ],
)
def test_names_without_prefix_and_saved_buffers(
    family: str,
    prefix: str,
    buffers: list[str],
    checkpoint: MakeCheckpoint,
    tmp_path: Path,
) -> None:
    original = checkpoint(family, tie_word_embeddings=True)
    folder = write_short_names(original, tmp_path / "model", prefix, buffers)
    assert np.array_equal(logits(folder, 20), logits(original, 20))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_half_precision(family: str, dtype: DType, checkpoint: MakeCheckpoint) -> None:
    """The kernels are at least as exact as transformers."""
    folder = checkpoint(family, tie_word_embeddings=True)
    expected = reference(folder, 30)
    theirs = transformers_logits(folder, tokens(30), torch_dtype(dtype))
    decoder = load_decoder(folder, read_config(folder), dtype=dtype, kernels=kernels())
    mine = text_logits(decoder, tokens(30), dtype)
    assert mine.dtype == np.float32
    assert np.abs(theirs - expected).max() < 0.1 * np.abs(expected).max()
    assert np.linalg.norm(mine - expected) < 1.05 * np.linalg.norm(theirs - expected)
