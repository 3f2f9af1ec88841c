"""Parsing of ``config.json``: one function per family of models returns its :class:`ModelConfig`.

A key of ``config.json`` that turns on an unsupported computation raises a ConfigError that names the key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pronk.base.checks import check_choice, check_number
from pronk.base.errors import ConfigError, refuse
from pronk.checkpoint.config import MAX_EXPERTS, MAX_TAPS, ConvolutionConfig, MixtureConfig, ModelConfig
from pronk.checkpoint.rope import parse_rope, refuse_config
from pronk.models import config_reader
from pronk.models.config_reader import ConfigReader, llama_like


def _llama(keys: ConfigReader, windows: tuple[int | None, ...] | None = None) -> ModelConfig:
    windows = keys.windows(None) if windows is None else windows
    return llama_like(keys, windows=windows, mlp_bias=keys.flag("mlp_bias"), **keys.attention_bias())


def _mistral(keys: ConfigReader) -> ModelConfig:
    size = None if keys.get("sliding_window") is None else keys.integer("sliding_window")
    windows = keys.windows(size)
    if None in windows and size is not None:
        refuse_config("layer_types asks for full attention in some layers; expected sliding_attention in all")
    return llama_like(keys, windows=windows)


def _qwen_windows(keys: ConfigReader) -> tuple[int | None, ...]:
    if not keys.get("use_sliding_window", False) or keys.get("sliding_window") is None:
        return keys.windows(None)
    first = keys.integer("max_window_layers", 28, low=0)
    return keys.windows(keys.integer("sliding_window"), lambda layer: layer >= first)


def _qwen2(keys: ConfigReader) -> ModelConfig:
    return llama_like(keys, windows=_qwen_windows(keys), qkv_bias=True)


def _qwen3(keys: ConfigReader) -> ModelConfig:
    return llama_like(keys, windows=_qwen_windows(keys), qk_norm=True, **keys.attention_bias())


def _periodic_windows(keys: ConfigReader, period: int) -> tuple[int | None, ...]:
    """Return the windows: every layer has one, but each ``period``-th."""
    return keys.windows(keys.integer("sliding_window"), lambda layer: (layer + 1) % period > 0)


def _gemma(keys: ConfigReader, *, windows: tuple[int | None, ...], **features: Any) -> ModelConfig:
    """Parse the keys of Gemma 2 and 3; the weights of norms are stored as ``weight - 1``."""
    return llama_like(
        keys,
        windows=windows,
        context=keys.integer("max_position_embeddings"),  # the length after scaling
        norm_places="both",
        norm_offset=1.0,
        activation=keys.activation("hidden_activation", "gelu_pytorch_tanh"),
        attention_scale=keys.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_cap=keys.optional_number("attn_logit_softcapping"),
        logits_cap=keys.optional_number("final_logit_softcapping"),
        embedding_scale=keys.integer("hidden_size") ** 0.5,
        **keys.attention_bias(),
        **features,
    )


def _gemma3(keys: ConfigReader) -> ModelConfig:
    """Parse Gemma 3, which rotates the layers with a window by a base of their own, without scaling."""
    windows = _periodic_windows(keys, keys.integer("sliding_window_pattern"))
    ropes = _ropes(keys, windows, keys.number("rope_theta", 1e6), keys.number("rope_local_base_freq", 1e4))
    return _gemma(keys, windows=windows, qk_norm=True, **ropes)


def _ropes(keys: ConfigReader, windows: tuple[int | None, ...], theta: float, sliding_theta: float) -> dict[str, Any]:
    """Return the fields ``rope`` and ``layer_ropes``: layers with and without a window have their own.

    ``rope`` is that of the layers with full attention. Older checkpoints have one scaling, for these layers; the bases
    are then ``theta`` and, in the layers with a window, ``sliding_theta``.
    """
    both = keys.mapping("rope_parameters")
    if "full_attention" not in both:
        scaling = {"rope_theta": theta, "rope_type": "default", **(keys.mapping("rope_scaling") or both)}
        both = {"full_attention": scaling, "sliding_attention": {"rope_theta": sliding_theta}}
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    head_dim, context = keys.integer("head_dim", hidden // heads), keys.integer("max_position_embeddings", 2048)
    full, sliding = (
        parse_rope({"rope_parameters": both.get(kind)}, head_dim, context)
        for kind in ("full_attention", "sliding_attention")
    )
    return {"rope": full, "layer_ropes": tuple(full if window is None else sliding for window in windows)}


def _granite(keys: ConfigReader) -> ModelConfig:
    return replace(
        _llama(keys),
        attention_scale=keys.number("attention_multiplier", 1.0),
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        residual_scale=keys.number("residual_multiplier", 1.0),
        logits_scale=1.0 / keys.number("logits_scaling", 1.0),
    )


def _granite_hybrid(keys: ConfigReader) -> ModelConfig:
    """Parse Granite 4.0 without experts and Mamba layers: a Granite under the name of the hybrid family."""
    num_layers, kinds = keys.layers("num_hidden_layers"), keys.get("layer_types", [])
    is_dense = isinstance(kinds, list) and all(kind in ("attention", "full_attention") for kind in kinds)
    if not is_dense or len(kinds) != num_layers:
        refuse_config(f"expected {num_layers} layer_types, each attention, found {kinds!r:.80}; use a dense Granite")
    if experts := keys.integer("num_local_experts", 8, low=0):
        refuse_config(f"expected a hybrid Granite without experts, found {experts}; use a dense one or granitemoe")
    check_choice(
        "config.json: position_embedding_type", keys.get("position_embedding_type"), ("rope",), error=ConfigError
    )
    size = {"intermediate_size": keys.integer("shared_intermediate_size", 1024), "layer_types": None}
    return _granite(ConfigReader({**keys.raw, **size}, keys.family, keys.used))


def _gpt_oss(keys: ConfigReader) -> ModelConfig:
    """Parse gpt-oss; every second layer has a window, from the first one on."""
    for key, expected in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if keys.number(key, expected) != expected:
            refuse_config(f"expected {key} = {expected}, found {keys.get(key)}; other values are not supported")
    return llama_like(
        keys,
        windows=keys.windows(keys.integer("sliding_window"), lambda layer: layer % 2 == 0),
        clamped_gate=True,
        attention_sinks=True,
        mixture=_mixture(keys, bias=True),
        **keys.attention_bias(),
    )


def _qwen3_moe(keys: ConfigReader) -> ModelConfig:
    """Parse Qwen3-MoE: layers of ``mlp_only_layers``, and those between the steps, have a plain MLP."""
    plain = keys.list_of("mlp_only_layers", int, ())
    step = keys.integer("decoder_sparse_step", 1)
    sums_to_1 = keys.flag("norm_topk_prob")
    renamed = keys.get("num_experts") is None and keys.get("num_local_experts") is not None  # by transformers 5
    mixture = _mixture(
        keys,
        "num_local_experts" if renamed else "num_experts",
        "moe_intermediate_size",
        normalized=sums_to_1,
        is_mixture=lambda layer: layer not in plain and (layer + 1) % step == 0,
    )
    return replace(_qwen3(keys), mixture=mixture)


def _mixture(
    keys: ConfigReader,
    experts: str = "num_local_experts",
    width: str = "intermediate_size",
    *,
    normalized: bool = True,
    bias: bool = False,
    is_mixture: Callable[[int], bool] = lambda _: True,
) -> MixtureConfig | None:
    """Return the mixtures of experts; ``experts`` and ``width`` are keys. ``None`` if no layer has one."""
    count = keys.integer(experts, 128, high=MAX_EXPERTS)
    layers = tuple(is_mixture(layer) for layer in range(keys.layers("num_hidden_layers")))
    chosen = keys.integer("num_experts_per_tok", high=count)
    return MixtureConfig(count, chosen, keys.integer(width), normalized, layers, bias) if any(layers) else None


def _ministral3(keys: ConfigReader) -> ModelConfig:
    """Parse Ministral 3: the keys of its query scaling are among those of the rotary embedding."""
    rope = dict(keys.mapping("rope_parameters"))
    growth, _ = rope.pop("llama_4_scaling_beta", None), rope.pop("max_position_embeddings", None)
    config = _mistral(ConfigReader({**keys.raw, "rope_parameters": rope}, keys.family, keys.used))
    if growth is None or config.rope is None:
        return config
    growth = check_number("config.json: llama_4_scaling_beta", growth, 0, error=ConfigError)
    return replace(config, query_growth=(growth, config.rope.original))


def _olmo3(keys: ConfigReader) -> ModelConfig:
    """Parse OLMo 3: three of four layers have a window, and do not scale the rotations."""
    windows, theta = _periodic_windows(keys, 4), keys.number("rope_theta", 500000.0)
    return llama_like(
        keys,
        windows=windows,
        norm_places="output",
        qk_norm=True,
        whole_qk_norm=True,
        **_ropes(keys, windows, theta, theta),
        **keys.attention_bias(),
    )


def _phi3(keys: ConfigReader) -> ModelConfig:
    """Parse Phi-3 and Phi-4; early configs have other names for *longrope*."""
    for key in ("rope_scaling", "rope_parameters"):
        scaling = keys.get(key)
        if isinstance(scaling, Mapping):
            kind = scaling.get("rope_type", scaling.get("type", "default"))
            keys.raw = {**keys.raw, key: {**scaling, "rope_type": "longrope" if kind in ("su", "yarn") else kind}}
    size = None if keys.get("sliding_window") is None else keys.integer("sliding_window")
    return llama_like(keys, windows=keys.windows(size), partial_rope=True)


def _smollm3(keys: ConfigReader) -> ModelConfig:
    """Parse SmolLM3: layers with a 0 in ``no_rope_layers``, by default every fourth, do not rotate."""
    config = _llama(keys, _qwen_windows(keys))
    period = keys.integer("no_rope_layer_interval", 4)
    rotates = keys.get("no_rope_layers", [(layer + 1) % period for layer in range(config.num_layers)])
    if not isinstance(rotates, list) or len(rotates) != config.num_layers:
        refuse_config(f"expected {config.num_layers} numbers in no_rope_layers, found {rotates!r:.80}")
    return replace(config, layer_ropes=tuple(config.rope if each else None for each in rotates))


def _lfm2(keys: ConfigReader) -> ModelConfig:
    """Parse LFM2 and LFM2.5; early configs have other names for some keys."""
    num_layers = keys.layers("num_hidden_layers")
    attends = keys.list_of("full_attn_idxs", int, range(num_layers))
    implied = ["full_attention" if layer in attends else "conv" for layer in range(num_layers)]
    kinds = keys.list_of("layer_types", str, implied)
    if len(kinds) != num_layers or not {*kinds} <= {"conv", "full_attention"}:
        expected = f"expected {num_layers} layer_types, each conv or full_attention"
        refuse_config(f"{expected}, found {kinds!r:.80}; use a dense LFM2")
    layers = tuple(kind == "conv" for kind in kinds)
    taps, bias = keys.integer("conv_L_cache", 3, high=MAX_TAPS), keys.flag("conv_bias")
    width = keys.integer("block_ff_dim", keys.integer("intermediate_size"))
    if keys.flag("block_auto_adjust_ff_dim", default=True):
        width, factor = int(2 * width / 3), keys.optional_number("block_ffn_dim_multiplier")
        unit = 1 if factor is None else keys.integer("block_multiple_of", 256)
        width = -(-int((factor or 1.0) * width) // unit) * unit
    return llama_like(
        keys,
        windows=(None,) * num_layers,
        intermediate_size=width,
        norm_eps=keys.number("norm_eps", 1e-5),
        activation="silu",
        qk_norm=True,
        convolution=ConvolutionConfig(taps, layers, bias) if any(layers) else None,
        tied=keys.flag("tie_embedding", default=keys.flag("tie_word_embeddings")),
    )


def _gpt2(keys: ConfigReader) -> ModelConfig:
    if not keys.get("scale_attn_weights", True):
        refuse_config("scale_attn_weights = false is not supported")
    hidden, heads, layers = keys.integer("n_embd"), keys.integer("n_head"), keys.layers("n_layer")
    if hidden % heads:
        refuse_config(f"{heads} heads do not divide the hidden size {hidden}")
    bos, eos = keys.special_ids()
    return ModelConfig(
        family=keys.family,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.integer("n_inner", 4 * hidden),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        context=keys.integer("n_positions", 1024),
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        norm="layer",
        activation=keys.activation("activation_function", "gelu_new"),
        gated=False,
        windows=(None,) * layers,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=keys.flag("tie_word_embeddings", default=True),
        bos_id=bos,
        eos_ids=eos,
        dtype=keys.dtype(),
    )


FAMILIES: dict[str, Callable[[ConfigReader], ModelConfig]] = {
    "gemma2": lambda keys: _gemma(keys, windows=_periodic_windows(keys, keys.integer("sliding_window_pattern"))),
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "gpt_oss": _gpt_oss,
    "granite": _granite,
    "granitemoehybrid": _granite_hybrid,
    "granitemoe": lambda keys: replace(_granite(keys), mixture=_mixture(keys)),
    "lfm2": _lfm2,
    "llama": _llama,
    "mimo": _qwen2,  # Qwen 2 with an MTP head
    "ministral3": _ministral3,
    "mistral": _mistral,
    "mixtral": lambda keys: replace(_mistral(keys), mixture=_mixture(keys)),
    "olmo2": lambda keys: replace(_llama(keys), norm_places="output", qk_norm=True, whole_qk_norm=True),
    "olmo3": _olmo3,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "smollm3": _smollm3,
}


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Parse a ``config.json`` document; raise a ConfigError if it is invalid or not supported.

    The result is for the longest context, see :meth:`ModelConfig.for_context`.
    """
    raw = config_reader.text_config(raw)
    family = raw.get("model_type")
    if isinstance(family, str) and family in config_reader.REFUSED:
        refuse(f"config.json has model_type {family!r}", config_reader.REFUSED[family], ConfigError)
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(sorted([*FAMILIES, *config_reader.MULTIMODAL]))
        refuse("unknown architecture", f"config.json has model_type {family!r}; supported are {known}", ConfigError)
    # Early versions of compressed-tensors wrote compression_config.
    quantization = raw.get("quantization_config") or raw.get("compression_config")
    if quantization and not isinstance(quantization, Mapping):
        refuse_config(f"expected an object as quantization_config, found {quantization!r:.80}")
    keys = ConfigReader({**config_reader.DEFAULTS.get(family, {}), **raw}, family)
    config = FAMILIES[family](keys)
    unsupported = [key for key in config_reader.UNSUPPORTED_KEYS if raw.get(key) and key not in keys.used]
    unsupported += ["is_causal"] * (raw.get("is_causal") is False)
    if unsupported:
        refuse_config(f"{unsupported[0]} = {raw[unsupported[0]]!r} is not supported; expected a plain {family} model")
    if config.num_heads % config.num_kv_heads:
        found = f"{config.num_heads} attention heads cannot share {config.num_kv_heads} key/value heads"
        refuse_config(f"{found}; expected a divisor")
    return replace(config, quantization=quantization or None)
