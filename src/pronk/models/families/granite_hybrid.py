"""Granite 4 hybrids and Bamba's GGUF files: Mamba 2 in most layers, attention in the others.

The hybrid Granites have the four factors of Granite and, apart from the dense ones without Mamba
layers, no rotary embedding. With experts, a shared MLP is added to their output; without, it is the
only MLP. llama.cpp stores Bamba as a hybrid Granite with a rotary embedding.

Sources: ``models/granitemoehybrid`` of transformers, ``conversion/granite.py`` of llama.cpp.
"""

from __future__ import annotations

from dataclasses import replace

from pronk.base.checks import check_choice
from pronk.base.errors import ConfigError
from pronk.checkpoint.config import MixtureConfig, ModelConfig
from pronk.checkpoint.rope import refuse_config
from pronk.models.config_reader import ConfigReader
from pronk.models.families.granite import parse_granite, parse_granite_gguf
from pronk.models.family import (
    LLAMA_LAYER,
    LLAMA_NAMES,
    MAMBA_LAYER,
    PERMUTED_GGUF_NAMES,
    Family,
    GgufArchitecture,
)
from pronk.models.gguf_reader import GgufReader

# Values of ``layer_types``, in older checkpoints and as transformers 5 writes them.
_RECURRENT = ("mamba", "linear_attention")
_ATTENTION = ("attention", "full_attention")


def _parse(keys: ConfigReader) -> ModelConfig:
    num_layers = keys.layers("num_hidden_layers")
    kinds = keys.list_of("layer_types", str, ["linear_attention"] * num_layers)
    if len(kinds) != num_layers or not {*kinds} <= {*_RECURRENT, *_ATTENTION}:
        expected = f"expected {num_layers} layer_types, each mamba or attention"
        refuse_config(f"{expected}, found {kinds!r:.80}")
    layers = tuple(kind in _RECURRENT for kind in kinds)
    inner = keys.integer("mamba_expand", 2) * keys.integer("hidden_size")
    recurrent = keys.mamba2(layers, inner) if any(layers) else None
    mixture = _mixture(keys)
    position = keys.get("position_embedding_type", "nope")
    position = check_choice(
        "config.json: position_embedding_type", position, ("nope", "rope"), error=ConfigError
    )
    width = keys.integer("shared_intermediate_size")
    plain = ConfigReader({**keys.raw, "intermediate_size": width}, keys.family, keys.used)
    config = parse_granite(plain, (None,) * num_layers)
    ropes = () if position == "rope" else (None,) * num_layers
    return replace(config, recurrent=recurrent, mixture=mixture, layer_ropes=ropes)


def _mixture(keys: ConfigReader) -> MixtureConfig | None:
    """Return the experts of all layers, beside the shared MLP; ``None`` if there are none."""
    if not keys.integer("num_local_experts", low=0):
        return None
    mixture = keys.mixture()
    assert mixture is not None, "expected experts in all layers"
    return replace(mixture, shared_width=keys.integer("shared_intermediate_size"))


def _parse_gguf(keys: GgufReader, config: ModelConfig) -> ModelConfig:
    """Return the config of a hybrid Granite or a Bamba; Mamba layers have 0 key/value heads."""
    num_layers = config.num_layers
    counts = keys.per_layer("attention.head_count_kv", num_layers)
    layers = tuple(count == 0 for count in counts)
    recurrent = keys.recurrence(layers) if any(layers) else None
    if recurrent is not None:
        recurrent = replace(recurrent, rule="mamba2", norm="after_gate")
    # Without experts, the shared MLP is the only one, of the width ``feed_forward_length``.
    keys.used.add("expert_shared_feed_forward_length")
    mixture = keys.mixture(num_layers)
    if mixture is not None:
        mixture = replace(mixture, shared_width=keys.integer("expert_shared_feed_forward_length"))
    return replace(parse_granite_gguf(keys, config), recurrent=recurrent, mixture=mixture)


FAMILIES = (
    Family(
        "granitemoehybrid",
        _parse,
        replace(
            LLAMA_NAMES,
            layer={
                **LLAMA_LAYER,
                **MAMBA_LAYER,
                "up": ("shared_mlp.input_linear",),
                "down": ("shared_mlp.output_linear",),
                "router": ("block_sparse_moe.router.layer",),
                "experts.up": ("block_sparse_moe.input_linear.weight",),
                "experts.down": ("block_sparse_moe.output_linear.weight",),
                "shared_up": ("shared_mlp.input_linear",),
                "shared_down": ("shared_mlp.output_linear",),
            },
            log_decay=True,
        ),
        defaults={
            "mamba_d_state": 256,
            "mamba_n_heads": 128,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "shared_intermediate_size": 1024,
        },
        gguf=(
            GgufArchitecture(
                "granitehybrid",
                _parse_gguf,
                replace(
                    PERMUTED_GGUF_NAMES,
                    layer={**PERMUTED_GGUF_NAMES.layer, "mixer_in": ("ssm_in",)},
                ),
                partial_rope=True,
                skips_attention=True,
            ),
        ),
    ),
)
