"""Families with latent attention: values and refusals of configs, equal weights from folders and
GGUF files, and greedy texts of transformers.
"""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from safetensors.numpy import load_file, save_file

from checkpoints import MakeCheckpoint, transformers_cached_greedy, transformers_logits
from latent_models import BLOCKS, FAMILIES, write_gguf
from models.test_loader import load
from models.test_quantized_loading import warned
from pronk import LLM, SamplingParams
from pronk.base.arrays import Array
from pronk.base.errors import ConfigError, OptionError
from pronk.checkpoint.config import LatentConfig, ModelConfig
from pronk.models.families import parse_config
from pronk.models.linear import Experts, Linear, StackedLinear
from pronk.models.loader import read_config
from quantized_formats import FORMATS, write_quantized
from tiny_models import kernels, text_logits

RAW: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
}
# Sizes that are multiples of the groups of quantized formats.
QUANTIZED_SIZES = {"q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
TOKENS = [int(token) for token in np.random.default_rng(5).integers(1, 256, 40)]


def parse(**values: Any) -> ModelConfig:
    return parse_config(RAW | values)


def test_values_of_config_json() -> None:
    config = parse(q_lora_rank=None)
    assert config.latent == LatentConfig(rank=512, rope_dim=64, plain_dim=128, value_dim=128)
    assert (config.head_dim, config.num_kv_heads, config.value_dim) == (576, 1, 512)
    assert config.has_values_in_keys
    assert config.attention_scale == 1.0 / math.sqrt(192)
    assert config.rope is not None
    assert config.rope.dim == 64
    mixture = config.mixture
    assert mixture is not None
    assert (mixture.experts, mixture.per_row, mixture.width) == (64, 6, 1407)
    assert (mixture.shared_width, mixture.normalized) == (2814, False)
    assert mixture.layers == (False, True, True, True)
    latent = parse(q_lora_rank=32).latent
    assert latent is not None
    assert latent.query_rank == 32


def test_sizes_of_heads_do_not_follow_from_the_hidden_size() -> None:
    """GLM-4.7-Flash has 20 heads and a hidden size of 2,048, which 20 does not divide."""
    raw = {"model_type": "glm4_moe_lite", "hidden_size": 2048, "num_attention_heads": 20}
    config = parse(**raw)
    assert config.latent == LatentConfig(512, 64, 192, 256, query_rank=768)
    assert (config.num_heads, config.head_dim) == (20, 576)


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_mean_what_transformers_takes(family: str) -> None:
    from transformers import AutoConfig

    raw = {key: value for key, value in RAW.items() if key != "first_k_dense_replace"}
    raw |= {"model_type": family, "num_experts_per_tok": 4, "num_hidden_layers": 8}
    theirs = AutoConfig.for_model(**raw)
    ours = parse_config(raw)
    assert ours.latent == LatentConfig(
        theirs.kv_lora_rank,
        theirs.qk_rope_head_dim,
        theirs.qk_nope_head_dim,
        theirs.v_head_dim,
        theirs.q_lora_rank,
    )
    assert ours.context == theirs.max_position_embeddings
    assert (ours.norm_eps, ours.tied) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert ours.rope is not None
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    mixture = ours.mixture
    assert mixture is not None
    assert (mixture.experts, mixture.width) == (
        theirs.n_routed_experts,
        theirs.moe_intermediate_size,
    )
    assert mixture.shared_width == theirs.n_shared_experts * theirs.moe_intermediate_size
    assert (mixture.scale, mixture.normalized) == (
        theirs.routed_scaling_factor,
        theirs.norm_topk_prob,
    )
    assert (mixture.groups, mixture.row_groups) == (theirs.n_group or 1, theirs.topk_group or 1)
    dense = getattr(theirs, "first_k_dense_replace", 1)
    assert mixture.layers == tuple(layer >= dense for layer in range(8))


def test_routers_of_config_json() -> None:
    grouped = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    v2 = parse(**grouped, routed_scaling_factor=16.0).mixture
    assert v2 is not None
    assert (v2.scores, v2.groups, v2.row_groups, v2.group_best) == ("softmax", 8, 3, 1)
    assert (v2.scale, v2.normalized, v2.correction) == (16.0, False, False)
    v3 = parse(model_type="deepseek_v3").mixture
    assert v3 is not None
    assert (v3.experts, v3.scores, v3.groups, v3.row_groups) == (256, "sigmoid", 8, 4)
    assert (v3.scale, v3.normalized, v3.correction) == (2.5, True, True)
    glm = parse(model_type="glm4_moe_lite")
    assert glm.mixture is not None
    assert glm.latent == LatentConfig(512, 64, 192, 256, query_rank=768)
    assert (glm.mixture.experts, glm.mixture.groups, glm.mixture.scale) == (64, 1, 1.8)
    assert glm.mixture.layers == (False, True, True, True)


def test_yarn_scales_scores() -> None:
    """As in DeepSeek's code: by the square of 0.1 · mscale_all_dim · log(factor) + 1."""
    scaling = {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }
    config = parse(rope_scaling=scaling)
    assert config.attention_scale == pytest.approx(192**-0.5 * 1.2608**2, rel=1e-4)
    assert config.rope is not None
    assert config.rope.attention_scale == 1.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kv_lora_rank": 40}, "kv_lora_rank: expected a multiple of 16, found 40"),
        ({"v_head_dim": 24}, "v_head_dim: expected a multiple of 16, found 24"),
        ({"kv_lora_rank": 528}, "expected at most 576, found 592"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"norm_topk_prob": True}, "norm_topk_prob"),
        ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, "scoring_func"),
        ({"mlp_layer_types": ["dense"] * 3}, "expected 4 mlp_layer_types"),
    ],
)
def test_refusals(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(**values)


def test_several_processes_are_refused(checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(OptionError, match="expected 1 for a model with latent attention"):
        LLM(checkpoint("deepseek_v2"), workers=2)


def logits_of(path: Path, tokens: list[int] = TOKENS) -> Array:
    return text_logits(load(path), tokens)


@pytest.mark.few(4)
@pytest.mark.parametrize("rank", [24, None], ids=["latents of queries", "plain queries"])
@pytest.mark.parametrize("older", [False, True], ids=["new file", "old file"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_has_the_logits_of_its_folder(
    family: str, rank: int | None, tmp_path: Path, checkpoint: MakeCheckpoint, *, older: bool
) -> None:
    folder = checkpoint(family, q_lora_rank=rank)
    path = write_gguf(folder, tmp_path / "m.gguf", older=older)
    assert read_config(path).latent == read_config(folder).latent
    assert read_config(path).mixture == read_config(folder).mixture
    assert logits_of(path).tobytes() == logits_of(folder).tobytes()


@pytest.mark.parametrize("older", [False, True], ids=["new file", "old file"])
def test_yarn_of_a_gguf_file(tmp_path: Path, checkpoint: MakeCheckpoint, *, older: bool) -> None:
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,
    }
    folder = checkpoint("deepseek_v2", rope_parameters=yarn, qk_rope_head_dim=32)
    path = write_gguf(folder, tmp_path / "m.gguf", older=older)
    np.testing.assert_allclose(logits_of(path), logits_of(folder), atol=1e-4)
    np.testing.assert_allclose(logits_of(path), transformers_logits(folder, TOKENS), atol=1e-4)


def weights(decoder: Any) -> dict[str, Array]:
    """Return the matrices of all layers, by number and name."""
    return {
        f"{number}.{name}.{index}": part.packed.unpack()
        for number, layer in enumerate(decoder.layers)
        for name, value in vars(layer).items()
        if isinstance(value, Linear | StackedLinear | Experts)
        for index, part in enumerate(value.parts)
    }


@pytest.mark.few(2)
@pytest.mark.parametrize("older", [False, True], ids=["new file", "old file"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q6_K"])
def test_quantized_gguf_files(
    kind: str, tmp_path: Path, checkpoint: MakeCheckpoint, *, older: bool
) -> None:
    """All matrices stay in their blocks, but the transposed ones of keys of an old file."""
    folder = checkpoint("deepseek_v2", **BLOCKS, num_hidden_layers=2)
    twin = tmp_path / "twin"
    path = write_gguf(folder, tmp_path / "m.gguf", kind, twin=twin, older=older)
    packed = load(path, kernels=kernels())
    expected = weights(load(twin))
    for found in (weights(packed), weights(load(path))):
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
    layer = packed.layers[1]
    for linear in (layer.q_a, layer.q_b, layer.kv_a, layer.v_b, layer.out):
        assert "int" in linear.packed.format
    has_blocks = not older and 64 % GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0] == 0
    assert ("int" in layer.k_b.packed.format) == has_blocks


@pytest.mark.parametrize("name", ["gptq-4-zeros", "awq", "packed-8-group", "float-channel"])
def test_quantized_folders(name: str, tmp_path: Path, checkpoint: MakeCheckpoint) -> None:
    """Rows of quantized matrices are selected; those of keys are dequantized and transposed."""
    plain = checkpoint("deepseek_v2", first_k_dense_replace=3, **QUANTIZED_SIZES)
    quantized, twin = write_quantized(plain, tmp_path, FORMATS[name])
    expected = weights(load(twin))
    with warned(FORMATS[name]):
        decoders = [load(quantized), load(quantized, kernels=kernels())]
    for decoder in decoders:
        found = weights(decoder)
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_norms_of_latents_have_an_epsilon_of_their_own(checkpoint: MakeCheckpoint) -> None:
    made = load(checkpoint("deepseek_v2", rms_norm_eps=1e-2))
    layer = made.layers[0]
    assert [layer.q_a_norm.eps, layer.kv_a_norm.eps] == [1e-6, 1e-6]
    assert layer.attention_norm.eps == made.norm.eps == 1e-2


def test_mtp_heads_are_ignored(tmp_path: Path, checkpoint: MakeCheckpoint) -> None:
    """They have the numbers of the layers that follow the model's."""
    folder = checkpoint("deepseek_v2")
    changed = tmp_path / "with heads"
    shutil.copytree(folder, changed)
    tensors = load_file(folder / "model.safetensors")
    more = {
        name.replace("layers.2.", "layers.3."): each
        for name, each in tensors.items()
        if "layers.2." in name
    }
    more["model.layers.3.eh_proj.weight"] = np.zeros((48, 96), np.float32)
    save_file({**tensors, **more}, changed / "model.safetensors")
    assert logits_of(changed).tobytes() == logits_of(folder).tobytes()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        ("deepseek_v2", "autoregressive"),
        ("deepseek_v3", "prompt_lookup(min_ngram=1)"),
        ("glm4_moe_lite", "recycling"),
    ],
)
def test_greedy_texts_are_those_of_transformers(
    family: str, drafter: str, checkpoint: MakeCheckpoint
) -> None:
    folder = checkpoint(family, max_position_embeddings=512)
    llm = LLM(folder, drafter=drafter)
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    output = llm.generate([TOKENS], params)[0]
    assert list(output.token_ids) == transformers_cached_greedy(folder, TOKENS, 200)
