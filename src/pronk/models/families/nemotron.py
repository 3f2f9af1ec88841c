"""Nemotron-H and Nemotron 3: each layer is a Mamba 2, an attention, an MLP or a mixture of experts.

Attention has no rotary embedding. MLPs and experts have no gate; their activation is relu2. The
router is that of DeepSeek-V3, and a shared expert is added to the chosen ones.

Sources: ``models/nemotron_h`` of transformers, ``conversion/nemotron.py`` of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from pronk.checkpoint.config import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_TAPS,
    MixtureConfig,
    ModelConfig,
    RecurrentConfig,
    Sublayers,
)
from pronk.checkpoint.rope import refuse_config
from pronk.models.config_reader import ConfigReader, llama_like
from pronk.models.family import GGUF_NAMES, Family, GgufArchitecture, TensorNames
from pronk.models.gguf_reader import GgufReader

# Kinds of layers by their names: letters of ``hybrid_override_pattern``, and entries of
# ``layers_block_type`` in older checkpoints and as transformers 5 writes them.
_KINDS = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}
# Keys of biases that no published model has.
_BIASES = ("attention_bias", "mamba_proj_bias", "mlp_bias", "use_bias")


def _parse(keys: ConfigReader) -> ModelConfig:
    for key in _BIASES:
        if keys.flag(key):
            refuse_config(f"{key}: expected false, found true; use a model without these biases")
    if (size := keys.get("moe_latent_size")) is not None:
        refuse_config(f"moe_latent_size: expected null, found {size}; use a Nemotron 3 Nano")
    kinds = _layer_kinds(keys)
    config = llama_like(
        ConfigReader({**keys.raw, "num_hidden_layers": len(kinds)}, keys.family, keys.used),
        windows=(None,) * len(kinds),
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        activation=keys.activation("mlp_hidden_act", "relu2"),
        gated=False,
        tied=keys.flag("tie_word_embeddings"),
    )
    recurrent = _recurrence(keys, kinds) if "mamba" in kinds else None
    mixture = _mixture(keys, kinds) if "moe" in kinds else None
    return _with_kinds(config, kinds, recurrent, mixture)


def _with_kinds(
    config: ModelConfig,
    kinds: Sequence[str],
    recurrent: RecurrentConfig | None,
    mixture: MixtureConfig | None,
) -> ModelConfig:
    """Return a config whose layers have one sublayer each, and no rotary embedding."""
    sublayers: list[Sublayers] = ["mlp" if kind in ("mlp", "moe") else "mixer" for kind in kinds]
    return replace(
        config,
        sublayers=tuple(sublayers),
        recurrent=recurrent,
        mixture=mixture,
        layer_ropes=(None,) * len(kinds),
    )


def _layer_kinds(keys: ConfigReader) -> list[str]:
    """Return the kind of each layer, a value of :data:`_KINDS`."""
    pattern = keys.get("hybrid_override_pattern", "")
    stated = keys.get("layers_block_type", [*pattern] if isinstance(pattern, str) else pattern)
    is_known = isinstance(stated, list) and all(kind in _KINDS for kind in stated)
    if not is_known or not 1 <= len(stated) <= MAX_LAYERS:
        known = ", ".join(sorted(_KINDS))
        refuse_config(f"layers_block_type: expected a list of {known}, found {stated!r:.80}")
    return [_KINDS[kind] for kind in stated]


def _recurrence(keys: ConfigReader, kinds: Sequence[str]) -> RecurrentConfig:
    keys.require_silu("mamba_hidden_act")
    heads = keys.integer("mamba_num_heads")
    groups = keys.integer("n_groups")
    if heads % groups:
        refuse_config(f"n_groups: expected a divisor of {heads} Mamba heads, found {groups}")
    return RecurrentConfig(
        layers=tuple(kind == "mamba" for kind in kinds),
        key_heads=groups,
        value_heads=heads,
        key_dim=keys.integer("ssm_state_size", high=MAX_HEAD_DIM),
        value_dim=keys.integer("mamba_head_dim", high=MAX_HEAD_DIM),
        taps=keys.integer("conv_kernel", high=MAX_TAPS),
        rule="mamba2",
        norm="after_gate",
        filter_bias=keys.flag("use_conv_bias", default=True),
    )


def _mixture(keys: ConfigReader, kinds: Sequence[str]) -> MixtureConfig:
    raw = {**keys.raw, "num_hidden_layers": len(kinds)}
    mixture = ConfigReader(raw, keys.family, keys.used).mixture(
        "n_routed_experts",
        "moe_intermediate_size",
        is_mixture=lambda layer: kinds[layer] == "moe",
    )
    assert mixture is not None, "expected layers with experts"
    width = keys.integer("moe_shared_expert_intermediate_size")
    return replace(mixture, **keys.grouped_router(), shared_width=width)


def _parse_gguf(keys: GgufReader, config: ModelConfig) -> ModelConfig:
    """Return the config of a Nemotron-H.

    A layer has attention if it has key/value heads, an MLP or experts if it has a width, and a
    Mamba 2 otherwise.
    """
    if keys.get("moe_latent_size"):
        keys.refuse("moe_latent_size", "expected none, found one; use a Nemotron 3 Nano")
    num_layers = keys.num_layers()
    heads = keys.per_layer("attention.head_count_kv", config.num_layers)[:num_layers]
    widths = keys.per_layer("feed_forward_length", config.num_layers)[:num_layers]
    pairs = zip(heads, widths, strict=True)
    kinds = ["attention" if count else "mlp" if width else "mamba" for count, width in pairs]
    recurrent = None
    if "mamba" in kinds:
        recurrent = keys.recurrence(tuple(kind == "mamba" for kind in kinds))
        recurrent = replace(recurrent, rule="mamba2", norm="after_gate")
    mixture = keys.mixture(num_layers, scores="sigmoid", epsilon=1e-20)
    if mixture is not None:
        routers = [f"blk.{layer}.ffn_gate_inp.weight" for layer in range(num_layers)]
        layers = tuple(router in keys.checkpoint for router in routers)
        mixture = replace(mixture, layers=layers, correction=True)
    config = replace(
        config,
        num_layers=num_layers,
        windows=(None,) * num_layers,
        activation="relu2",
        gated=False,
    )
    return _with_kinds(config, kinds, recurrent, mixture)


_NAMES = TensorNames(
    prefix="backbone.",
    layers="layers",
    layer={
        "attention_norm": ("norm",),
        "qkv": ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        "out": ("mixer.o_proj",),
        "mixer_in": ("mixer.in_proj",),
        "mixer_filter": ("mixer.conv1d",),
        "decay_rate": ("mixer.A_log",),
        "decay_bias": ("mixer.dt_bias",),
        "skip": ("mixer.D",),
        "mixer_norm": ("mixer.norm",),
        "mixer_out": ("mixer.out_proj",),
        "mlp_norm": ("norm",),
        "up": ("mixer.up_proj",),
        "down": ("mixer.down_proj",),
        "router": ("mixer.gate",),
        "correction": ("mixer.gate.e_score_correction_bias",),
        "experts.up": ("mixer.experts.{}.up_proj.weight",),
        "experts.down": ("mixer.experts.{}.down_proj.weight",),
        "shared_up": ("mixer.shared_experts.up_proj",),
        "shared_down": ("mixer.shared_experts.down_proj",),
    },
    alternatives=(
        {
            "experts.up": ("mixer.experts.up_proj",),
            "experts.down": ("mixer.experts.down_proj",),
        },
    ),
    embedding="embeddings",
    norm="norm_f",
    log_decay=True,
    ignored=re.compile(r"mtp\..*"),
)
_GGUF_NAMES = replace(
    GGUF_NAMES,
    layer={
        **GGUF_NAMES.layer,
        "mixer_in": ("ssm_in",),
        "mlp_norm": ("attn_norm",),
        "up": ("ffn_up",),
        "experts.up": ("ffn_up_exps.weight",),
        "shared_up": ("ffn_up_shexp",),
    },
    alternatives=(),
)

FAMILIES = (
    Family(
        "nemotron_h",
        _parse,
        _NAMES,
        defaults={
            "conv_kernel": 4,
            "head_dim": 128,
            "intermediate_size": 21504,
            "mamba_head_dim": 64,
            "mamba_num_heads": 128,
            "max_position_embeddings": 4096,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "n_groups": 8,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 8,
            "ssm_state_size": 128,
        },
        gguf=tuple(
            GgufArchitecture(
                name,
                _parse_gguf,
                _GGUF_NAMES,
                partial_rope=True,
                skips_attention=True,
                skips_mlps=True,
                skips_heads=True,
            )
            for name in ("nemotron_h", "nemotron_h_moe")
        ),
    ),
)
