"""The language model of Gemma 4, dense (E2B, E4B, 12B, 31B) or with experts (26B-A4B).

Layers with a sliding window and layers with full attention have heads of different sizes and
rotations. The last layers may read the keys and values of earlier ones, and have wider MLPs. Small
models have an embedding for each layer. Models with experts compute them beside a plain MLP, with
norms of their own. Images and sound are not supported.

Source: ``models/gemma4`` of transformers; ``conversion/gemma.py`` of llama.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pronk.base.checks import check_integer
from pronk.base.errors import ConfigError
from pronk.checkpoint.config import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    AttentionShape,
    MixtureConfig,
    ModelConfig,
)
from pronk.checkpoint.rope import RopeConfig, parse_rope, refuse_config
from pronk.models.config_reader import ConfigReader, llama_like
from pronk.models.family import GGUF_NAMES, OUTPUT_NORM_NAMES, Family, GgufArchitecture
from pronk.models.gguf_reader import GgufReader

# Sizes of a layer in ``per_layer_config``.
_LAYER_KEYS = frozenset({"head_dim", "num_key_value_heads"})


def _parse(keys: ConfigReader) -> ModelConfig:
    direction = keys.get("use_bidirectional_attention")
    if direction not in (None, "vision"):
        refuse_config(
            f"use_bidirectional_attention = {direction!r:.40} is not supported; expected null"
        )
    windows = keys.periodic_windows(6)
    num_layers = len(windows)
    num_shared = keys.integer("num_kv_shared_layers", 0, low=0, high=num_layers)
    width = keys.integer("intermediate_size")
    widths = _widths(width, num_layers, num_shared) if keys.flag("use_double_wide_mlp") else ()
    sizes = [_layer_sizes(keys, layer, window) for layer, window in enumerate(windows)]
    tied = keys.flag("attention_k_eq_v")
    ties = [tied and window is None for window in windows]
    features = {
        "attention_shapes": _shapes(windows, sizes, ties, num_shared),
        "intermediate_sizes": widths,
        "mixture": _mixture(keys, num_layers, width),
        "layer_input_size": keys.integer("hidden_size_per_layer_input", 0, low=0),
        "activation": keys.activation("hidden_activation", "gelu_pytorch_tanh"),
        "logits_cap": keys.optional_number("final_logit_softcapping"),
        **_features(keys.integer("hidden_size")),
        **_ropes(keys, windows, sizes),
        **keys.attention_bias(),
    }
    if widths and features["mixture"] is not None:
        refuse_config("use_double_wide_mlp with experts is not supported; expected false")
    vocab_size = keys.integer("vocab_size")
    if features["layer_input_size"]:
        table_size = keys.integer("vocab_size_per_layer_input", vocab_size)
        if table_size != vocab_size:
            expected = f"expected {vocab_size} as vocab_size"
            refuse_config(f"vocab_size_per_layer_input: {expected}, found {table_size}")
    return llama_like(keys, windows=windows, **features)


def _features(hidden: int) -> dict[str, Any]:
    """Return the fields of ModelConfig that are the same in every Gemma 4."""
    return {
        "norm_places": "both",
        "qk_norm": True,
        "value_norm": True,
        "layer_scalars": True,
        "attention_scale": 1.0,
        "embedding_scale": math.sqrt(hidden),
    }


def _layer_sizes(keys: ConfigReader, layer: int, window: int | None) -> tuple[int, int]:
    """Return the number of key/value heads of a layer, and their size.

    ``per_layer_config`` has the sizes of layers that differ, in files of transformers 5.24 and
    later. Earlier files have the sizes of full attention under keys of their own.
    """
    head_dim = keys.integer("head_dim", high=MAX_HEAD_DIM)
    kv_heads = keys.integer("num_key_value_heads")
    if keys.get("per_layer_config") is None:
        if window is not None:
            return kv_heads, head_dim
        tied = keys.flag("attention_k_eq_v")
        full_heads = keys.integer("num_global_key_value_heads", kv_heads) if tied else kv_heads
        return full_heads, keys.integer("global_head_dim", high=MAX_HEAD_DIM)
    own = _own_sizes(keys).get(layer, {})
    return own.get("num_key_value_heads", kv_heads), own.get("head_dim", head_dim)


def _own_sizes(keys: ConfigReader) -> dict[int, dict[str, int]]:
    """Return the sizes of layers in ``per_layer_config``, by the number of the layer.

    The numbers are written with leading zeros: ``{"05": {"head_dim": 512}}``.
    """
    found = dict[int, dict[str, int]]()
    for number, sizes in keys.mapping("per_layer_config").items():
        label = f"per_layer_config: {number:.40}"
        if not number.isdecimal():
            refuse_config(f"{label}: expected the number of a layer, found a name")
        if not isinstance(sizes, dict) or not _LAYER_KEYS.issuperset(sizes):
            expected = " and ".join(sorted(_LAYER_KEYS))
            refuse_config(f"{label}: expected {expected}, found {sizes!r:.80}")
        for name, size in sizes.items():
            check_integer(f"config.json: {label}: {name}", size, 1, MAX_HEAD_DIM, error=ConfigError)
        found[int(number)] = sizes
    return found


def _shapes(
    windows: Sequence[int | None],
    sizes: Sequence[tuple[int, int]],
    ties: Sequence[bool],
    num_shared: int,
) -> tuple[AttentionShape, ...]:
    """Return the sizes of the attention of each layer.

    Each of the last ``num_shared`` layers reads the keys and values of the last layer before them
    that has the same kind of attention.

    Args:
        windows: window of each layer; ``None``: full attention.
        sizes: number of key/value heads, and their size, of each layer.
        ties: whether the values of a layer are outputs of its key projection.
        num_shared: number of layers without keys of their own.
    """
    num_own = len(windows) - num_shared
    last = {window: layer for layer, window in enumerate(windows[:num_own])}
    missing = {*windows[num_own:]} - {*last}
    if missing:
        kind = "full attention" if None in missing else "a sliding window"
        refuse_config(f"num_kv_shared_layers: expected a layer with {kind} before them, found none")
    return tuple(
        AttentionShape(*sizes[layer], reads=last[window])
        if layer >= num_own
        else AttentionShape(*sizes[layer], tied_values=ties[layer])
        for layer, window in enumerate(windows)
    )


def _widths(width: int, num_layers: int, num_shared: int) -> tuple[int, ...]:
    """Return the width of each MLP: layers without keys of their own have doubled ones."""
    num_own = num_layers - num_shared
    return (width,) * num_own + (2 * width,) * num_shared


def _mixture(keys: ConfigReader, num_layers: int, width: int) -> MixtureConfig | None:
    if not keys.flag("enable_moe_block"):
        keys.get("num_experts")  # other models have the key, too
        return None
    experts = keys.integer("num_experts", high=MAX_EXPERTS)
    return MixtureConfig(
        experts=experts,
        per_row=keys.integer("top_k_experts", high=experts),
        width=keys.integer("moe_intermediate_size"),
        normalized=True,
        layers=(True,) * num_layers,
        shared_width=width,
        separate_norms=True,
        expert_scales=True,
    )


def _ropes(
    keys: ConfigReader, windows: Sequence[int | None], sizes: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Return the fields ``rope`` (that of full attention) and ``layer_ropes``."""
    both = keys.mapping("rope_parameters")
    context = keys.integer("max_position_embeddings")
    ropes = dict[int | None, RopeConfig]()
    for window, (_, head_dim) in zip(windows, sizes, strict=True):
        kind = "full_attention" if window is None else "sliding_attention"
        ropes[window] = parse_rope({"rope_parameters": both.get(kind)}, head_dim, context)
    layer_ropes = tuple(ropes[window] for window in windows)
    return {"rope": layer_ropes[-1], "layer_ropes": layer_ropes}


def _parse_gguf(keys: GgufReader, config: ModelConfig) -> ModelConfig:
    """Return the config of a Gemma 4.

    ``config`` has the sizes of full attention; those of layers with a window have keys of their own
    (``…_swa``).
    """
    num_layers = config.num_layers
    windows = keys.windows(num_layers, 6)
    sliding_dim = keys.integer("attention.key_length_swa", config.head_dim, MAX_HEAD_DIM)
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if (found := keys.integer(key, sliding_dim)) != sliding_dim:
            keys.refuse(key, f"expected {sliding_dim} as attention.key_length_swa, found {found}")
    kv_heads = keys.per_layer("attention.head_count_kv", num_layers, varies=True)
    dims = [config.head_dim if window is None else sliding_dim for window in windows]
    sizes = list(zip(kv_heads, dims, strict=True))
    for count, _ in sizes:
        if not count or config.num_heads % count:
            expected = f"expected divisors of {config.num_heads} heads"
            keys.refuse("attention.head_count_kv", f"{expected}, found {count}")
    num_shared = _num_shared(keys, num_layers)
    ties = [f"blk.{layer}.attn_v.weight" not in keys.checkpoint for layer in range(num_layers)]
    sliding = RopeConfig(sliding_dim, keys.number("rope.freq_base_swa", 10000.0, bound=1))
    ropes = tuple(config.rope if window is None else sliding for window in windows)
    mixture = keys.mixture(num_layers)
    if mixture is not None:
        width = config.intermediate_size
        mixture = replace(mixture, shared_width=width, separate_norms=True, expert_scales=True)
    return replace(
        config,
        windows=windows,
        attention_shapes=_shapes(windows, sizes, ties, num_shared),
        intermediate_sizes=tuple(keys.per_layer("feed_forward_length", num_layers, varies=True)),
        layer_ropes=ropes,
        mixture=mixture,
        activation="gelu_tanh",
        layer_input_size=keys.get("embedding_length_per_layer_input", 0),
        logits_cap=keys.optional_number("final_logit_softcapping"),
        **_features(config.hidden_size),
    )


def _num_shared(keys: GgufReader, num_layers: int) -> int:
    """Return the number of layers without keys of their own."""
    key = "attention.shared_kv_layers"
    if not keys.get(key):
        return 0
    return keys.integer(key, maximum=num_layers)


# Layers that read the keys of another one may still have tensors of their own, which are not used.
_HF_NAMES = replace(
    OUTPUT_NORM_NAMES,
    layer={
        **OUTPUT_NORM_NAMES.layer,
        "shared_up": ("mlp.gate_proj", "mlp.up_proj"),
        "shared_down": ("mlp.down_proj",),
        "shared_output_norm": ("post_feedforward_layernorm_1",),
        "router": ("router.proj",),
        "router_norm": ("router.scale",),
        "expert_scale": ("router.per_expert_scale",),
        "expert_norm": ("pre_feedforward_layernorm_2",),
        "experts.up": ("experts.gate_up_proj",),
        "experts.down": ("experts.down_proj",),
        "expert_output_norm": ("post_feedforward_layernorm_2",),
        "input_gate": ("per_layer_input_gate",),
        "input_projection": ("per_layer_projection",),
        "input_norm": ("post_per_layer_input_norm",),
        "scalar": ("layer_scalar",),
    },
    layer_inputs={
        "table": "embed_tokens_per_layer",
        "projection": "per_layer_model_projection",
        "norm": "per_layer_projection_norm",
    },
    ignored=re.compile(
        r"layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight"
        r"|(vision_tower|audio_tower|embed_vision|embed_audio|multi_modal_projector)\..*"
    ),
)
_GGUF_NAMES = replace(
    GGUF_NAMES,
    layer={
        **GGUF_NAMES.layer,
        "shared_up": ("ffn_gate", "ffn_up"),
        "shared_down": ("ffn_down",),
        "shared_output_norm": ("post_ffw_norm_1",),
        "router_norm": ("ffn_gate_inp.scale",),
        "expert_scale": ("ffn_down_exps.scale",),
        "expert_norm": ("pre_ffw_norm_2",),
        "expert_output_norm": ("post_ffw_norm_2",),
        "input_gate": ("inp_gate",),
        "input_projection": ("proj",),
        "input_norm": ("post_norm",),
        "scalar": ("layer_output_scale.weight",),
    },
    layer_inputs={
        "table": "per_layer_token_embd",
        "projection": "per_layer_model_proj",
        "norm": "per_layer_proj_norm",
    },
    ignored=re.compile(
        rf"{GGUF_NAMES.ignored.pattern}|blk\.\d+\.attn_(k|v|k_norm)\.weight",
    ),
)

FAMILIES = (
    Family(
        "gemma4_text",
        _parse,
        _HF_NAMES,
        defaults={
            "vocab_size": 262144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "global_head_dim": 512,
            "max_position_embeddings": 131072,
            "sliding_window": 512,
            "hidden_size_per_layer_input": 256,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1000000.0,
                },
            },
        },
        multimodal=("gemma4",),
        gguf=(GgufArchitecture("gemma4", _parse_gguf, _GGUF_NAMES, varies=True),),
    ),
)
