"""Families with multi-head latent attention: DeepSeek-V2, DeepSeek-V3 and GLM-4.7-Flash.

The first layers have a plain MLP, the others a mixture with shared experts. MTP heads, which follow
the layers, are not used. GGUF files of all three have the architecture ``deepseek2``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from pronk.base.checks import check_integer
from pronk.base.errors import ConfigError
from pronk.base.exact_math import log
from pronk.checkpoint.config import (
    MAX_HEAD_DIM,
    LatentConfig,
    MixtureConfig,
    ModelConfig,
    RouterScores,
)
from pronk.checkpoint.rope import RopeConfig, parse_rope, refuse_config, yarn_scale
from pronk.models.config_reader import ConfigReader, llama_like
from pronk.models.family import (
    DEEPSEEK_EXPERTS,
    FUSED_EXPERTS,
    GGUF_NAMES,
    LLAMA_LAYER,
    LLAMA_NAMES,
    Family,
    GgufArchitecture,
)
from pronk.models.gguf_reader import GgufReader

_MULTIPLE = 16  # of the sizes of a latent and of values: kernels compute 16 outputs at a time


def _parse_v2(keys: ConfigReader) -> ModelConfig:
    """Parse DeepSeek-V2: scores are a softmax, and the best expert of a group ranks the group."""
    if keys.flag("norm_topk_prob"):
        refuse_config("norm_topk_prob = true is not supported; expected false")
    router: dict[str, Any] = {
        "normalized": False,
        "scale": keys.number("routed_scaling_factor", 1.0),
        "group_best": 1,
    }
    if keys.get("topk_method", "greedy") != "greedy":
        router["groups"] = keys.integer("n_group")
        router["row_groups"] = keys.integer("topk_group")
    return _parse(keys, _mixture(keys, router))


def _parse_v3(keys: ConfigReader) -> ModelConfig:
    """Parse DeepSeek-V3, Moonlight and GLM-4.7-Flash, whose scores of experts are sigmoids."""
    function = keys.get("scoring_func", "sigmoid")
    if function != "sigmoid":
        refuse_config(f"scoring_func = {function!r:.80} is not supported; expected sigmoid")
    return _parse(keys, _mixture(keys, keys.grouped_router()))


def _mixture(keys: ConfigReader, router: dict[str, Any]) -> MixtureConfig | None:
    """Return the mixtures; ``router`` are the fields that describe the router.

    ``mlp_layer_types`` says which layers have a plain MLP, by default the first
    ``first_k_dense_replace``.
    """
    num_layers = keys.layers("num_hidden_layers")
    num_dense = keys.integer("first_k_dense_replace", 0, low=0)
    implied = ["dense" if layer < num_dense else "sparse" for layer in range(num_layers)]
    kinds = keys.list_of("mlp_layer_types", str, implied)
    if len(kinds) != num_layers or not {*kinds} <= {"dense", "sparse"}:
        expected = f"expected {num_layers} mlp_layer_types, each dense or sparse"
        refuse_config(f"{expected}, found {kinds!r:.80}")
    mixture = keys.mixture(
        "n_routed_experts",
        "moe_intermediate_size",
        is_mixture=lambda layer: kinds[layer] == "sparse",
    )
    if mixture is None:
        return None
    shared_width = mixture.width * keys.integer("n_shared_experts", 0, low=0)
    return replace(mixture, **router, shared_width=shared_width)


def _parse(keys: ConfigReader, mixture: MixtureConfig | None) -> ModelConfig:
    """Parse the keys that all families share."""
    if not keys.flag("rope_interleave", default=True):
        refuse_config("rope_interleave = false is not supported; expected true")
    latent = _latent(keys)
    context = keys.integer("max_position_embeddings", 2048)
    rope = parse_rope(keys.raw, latent.rope_dim, context)
    scaling = keys.mapping("rope_scaling") or keys.mapping("rope_parameters")
    return llama_like(
        keys,
        windows=(None,) * keys.layers("num_hidden_layers"),
        rope=rope,
        head_dim=latent.rank + latent.rope_dim,
        num_kv_heads=1,
        latent=latent,
        attention_scale=_attention_scale(latent, rope, scaling.get("mscale_all_dim") or 0.0),
        mixture=mixture,
        **keys.attention_bias(),
    )


def _latent(keys: ConfigReader) -> LatentConfig:
    latent = LatentConfig(
        rank=keys.integer("kv_lora_rank", high=MAX_HEAD_DIM),
        rope_dim=keys.integer("qk_rope_head_dim", high=MAX_HEAD_DIM),
        plain_dim=keys.integer("qk_nope_head_dim"),
        value_dim=keys.integer("v_head_dim"),
        query_rank=None if keys.get("q_lora_rank") is None else keys.integer("q_lora_rank"),
    )
    for key, size in (("kv_lora_rank", latent.rank), ("v_head_dim", latent.value_dim)):
        if size % _MULTIPLE:
            refuse_config(f"{key}: expected a multiple of {_MULTIPLE}, found {size}")
    if latent.rank + latent.rope_dim > MAX_HEAD_DIM:
        refuse_config(
            f"kv_lora_rank + qk_rope_head_dim: expected at most {MAX_HEAD_DIM}, "
            f"found {latent.rank + latent.rope_dim}"
        )
    return latent


def _attention_scale(latent: LatentConfig, rope: RopeConfig, mscale_all_dim: float) -> float:
    """Return the factor of scores.

    With YaRN, it has the factor ``(0.1 · mscale_all_dim · log(factor) + 1) ** 2``, as in DeepSeek's
    own code.
    """
    scale = 1.0 / math.sqrt(latent.query_dim)
    if rope.kind != "yarn" or rope.factor <= 1:
        return scale
    growth = 0.1 * mscale_all_dim * float(log(rope.factor)) + 1.0
    return scale * growth * growth


def _parse_gguf(keys: GgufReader, config: ModelConfig) -> ModelConfig:
    """Return the config of a model in a GGUF file, old or new.

    Old files have the sizes of a query and of a head's value as ``attention.key_length`` and
    ``value_length``. New files have those of the cache's row and of a latent there, and the others
    in keys that end in ``_mla``.
    """
    rank = keys.integer("attention.kv_lora_rank", maximum=MAX_HEAD_DIM)
    rope = config.rope
    assert rope is not None
    query_dim = keys.integer("attention.key_length_mla", keys.integer("attention.key_length"))
    value_dim = keys.integer("attention.value_length_mla", keys.integer("attention.value_length"))
    plain_dim = check_integer(
        keys.label("attention.key_length"), query_dim - rope.dim, 1, error=ConfigError
    )
    query_rank = keys.get("attention.q_lora_rank")
    latent = LatentConfig(
        rank=rank,
        rope_dim=rope.dim,
        plain_dim=plain_dim,
        value_dim=value_dim,
        query_rank=keys.integer("attention.q_lora_rank") if query_rank else None,
    )
    for key, size in (("attention.kv_lora_rank", rank), ("attention.value_length", value_dim)):
        if size % _MULTIPLE:
            keys.refuse(key, f"expected a multiple of {_MULTIPLE}, found {size}")
    if rank + rope.dim > MAX_HEAD_DIM:
        expected = f"expected at most {MAX_HEAD_DIM} with rope.dimension_count"
        keys.refuse("attention.kv_lora_rank", f"{expected}, found {rank + rope.dim}")
    # The file has a tenth of mscale_all_dim.
    mscale_all_dim = 10.0 * (keys.optional_number("rope.scaling.yarn_log_multiplier") or 0.0)
    if rope.kind == "yarn" and mscale_all_dim:
        scale = yarn_scale(rope.factor, mscale_all_dim, mscale_all_dim)
        rope = replace(rope, attention_scale=scale)
    return replace(
        config,
        rope=rope,
        head_dim=rank + rope.dim,
        num_kv_heads=1,
        latent=latent,
        attention_scale=_attention_scale(latent, rope, mscale_all_dim),
        mixture=_mixture_gguf(keys, config.num_layers),
        qkv_bias="blk.0.attn_kv_a_mqa.bias" in keys.checkpoint,
    )


def _mixture_gguf(keys: GgufReader, num_layers: int) -> MixtureConfig | None:
    # Old files do not state the scores. Only routers with sigmoids have a correction.
    has_correction = any(name.endswith(".exp_probs_b.bias") for name in keys.checkpoint)
    scores: RouterScores = "sigmoid" if has_correction else "softmax"
    mixture = keys.mixture(num_layers, normalized=False, scores=scores)
    if mixture is None:
        return None
    if mixture.scores == "softmax":
        return replace(mixture, group_best=1)
    return replace(mixture, epsilon=1e-20)


_DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_NAMES = replace(
    LLAMA_NAMES,
    layer={
        **LLAMA_LAYER,
        "q_a": ("self_attn.q_a_proj",),
        "q_a_norm": ("self_attn.q_a_layernorm",),
        "q_b": ("self_attn.q_b_proj",),
        "q": ("self_attn.q_proj",),
        "kv_a": ("self_attn.kv_a_proj_with_mqa",),
        "kv_a_norm": ("self_attn.kv_a_layernorm",),
        "k_b": ("self_attn.kv_b_proj",),
        "v_b": ("self_attn.kv_b_proj",),
        **DEEPSEEK_EXPERTS,
    },
    alternatives=(FUSED_EXPERTS,),
    permuted_heads=True,
    skips_heads=True,
)
_GGUF_NAMES = replace(
    GGUF_NAMES,
    alternatives=(*GGUF_NAMES.alternatives, {"k_b": ("attn_kv_b",), "v_b": ("attn_kv_b",)}),
    permuted_heads=True,
)

FAMILIES = (
    Family(
        "deepseek_v2",
        _parse_v2,
        _NAMES,
        defaults={
            **_DEFAULTS,
            "moe_intermediate_size": 1407,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "q_lora_rank": 1536,
        },
        gguf=(
            GgufArchitecture(
                "deepseek2",
                _parse_gguf,
                _GGUF_NAMES,
                partial_rope=True,
                has_own_values=True,
                skips_heads=True,
            ),
        ),
    ),
    Family(
        "deepseek_v3",
        _parse_v3,
        _NAMES,
        defaults={
            **_DEFAULTS,
            "first_k_dense_replace": 3,
            "max_position_embeddings": 4096,
            "moe_intermediate_size": 2048,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "q_lora_rank": 1536,
            "routed_scaling_factor": 2.5,
            "topk_group": 4,
        },
    ),
    Family(
        "glm4_moe_lite",
        _parse_v3,
        _NAMES,
        defaults={
            **_DEFAULTS,
            "first_k_dense_replace": 1,
            "max_position_embeddings": 202752,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 1.8,
            "v_head_dim": 256,
        },
    ),
)
