"""Conversion of GGUF metadata to a :class:`~pronk.checkpoint.config.ModelConfig`.

A key that turns on a computation raises an error, unless the architecture's function reads the key; unknown keys are
ignored. Mistral models in GGUF files have the architecture ``llama``, Ministral 3 and Mistral Small 3 ``mistral3``.

Source of keys and rules: ``conversion/*.py``, ``src/models/*.cpp`` and ``src/llama-context.cpp`` of llama.cpp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from pronk.base.checks import check_integer
from pronk.base.errors import ConfigError
from pronk.checkpoint.config import MAX_EXPERTS, MAX_LAYERS, MAX_TAPS, ConvolutionConfig, MixtureConfig, ModelConfig
from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint
from pronk.checkpoint.gguf.keys import Keys, read_rope
from pronk.checkpoint.rope import RopeConfig, yarn_scale

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def parse_gguf(checkpoint: GgufCheckpoint) -> ModelConfig:
    """Return the configuration of the model in a GGUF file; ``dtype`` is bfloat16 for quantized weights.

    Raises:
        ConfigError: the architecture is not supported, or a value is missing, contradictory or not supported.
        TokenizerError: the tokens of the file are inconsistent.
    """
    architecture = checkpoint.header.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        msg = f"{checkpoint.folder}: unknown architecture {architecture!r:.40}; supported in GGUF files are {supported}"
        raise ConfigError(msg)
    keys = Keys(checkpoint, architecture)
    vocabulary = checkpoint.vocabulary
    num_layers, context = keys.integer("block_count", maximum=MAX_LAYERS), keys.integer("context_length")
    head_dim = _head_dim(keys)
    rope = read_rope(keys, head_dim, context, partial=architecture == "phi3")
    config = ModelConfig(
        family=architecture,
        vocab_size=_vocab_size(checkpoint),
        hidden_size=keys.integer("embedding_length"),
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=keys.integer("attention.head_count"),
        num_kv_heads=_num_kv_heads(keys),
        head_dim=head_dim,
        context=rope.extend(context),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        windows=(None,) * num_layers,
        qkv_bias="blk.0.attn_q.bias" in checkpoint or "blk.0.attn_qkv.bias" in checkpoint,
        out_bias="blk.0.attn_output.bias" in checkpoint,
        mlp_bias="blk.0.ffn_down.bias" in checkpoint,
        tied="output.weight" not in checkpoint,
        bos_id=vocabulary.special_ids.get("bos"),
        eos_ids=vocabulary.eos_ids,
        dtype=_dtype(checkpoint),
    )
    config = _ARCHITECTURES[architecture](keys, config)
    keys.check_unsupported()
    return config


def _gemma(keys: Keys, config: ModelConfig, *, period: int, whole_model: int) -> ModelConfig:
    """Return a Gemma, whose layers have a sliding window, but each ``period``-th.

    The files lack the attention scale: as in llama.cpp, the largest model, of ``whole_model`` layers, has another one.
    The norms' weights are stored as in Llama, with the 1 that Gemma adds.
    """
    largest = config.num_layers == whole_model
    return replace(
        config,
        norm_places="both",
        activation="gelu_tanh",
        windows=keys.windows(config.num_layers, period, 4096),
        embedding_scale=config.hidden_size**0.5,
        attention_scale=(config.hidden_size / config.num_heads if largest else config.head_dim) ** -0.5,
    )


def _gemma2(keys: Keys, config: ModelConfig) -> ModelConfig:
    attention_cap, logits_cap = keys.number("attn_logit_softcapping", 50), keys.number("final_logit_softcapping", 30)
    return replace(_gemma(keys, config, period=2, whole_model=46), attention_cap=attention_cap, logits_cap=logits_cap)


def _gemma3(keys: Keys, config: ModelConfig) -> ModelConfig:
    config = _gemma(keys, config, period=6, whole_model=62)
    sliding = RopeConfig(config.head_dim, keys.number("rope.freq_base_swa", 10000.0, bound=1))
    ropes = tuple(config.rope if window is None else sliding for window in config.windows)
    cap = keys.optional_number("final_logit_softcapping")
    context = keys.integer("context_length")  # the length after scaling
    return replace(config, family="gemma3_text", qk_norm=True, layer_ropes=ropes, logits_cap=cap, context=context)


def _granite(keys: Keys, config: ModelConfig) -> ModelConfig:
    """Return a Granite; files of the hybrid family's dense models have unused keys of Mamba."""
    keys.used.add("ssm.conv_kernel")
    if keys.get("rope.scaling.finetuned") is False:
        msg = f"{keys.label('rope.scaling.finetuned')} = False is not supported; expected a rotary embedding"
        raise ConfigError(msg)
    return replace(
        config,
        attention_scale=keys.optional_number("attention.scale"),
        embedding_scale=keys.optional_number("embedding_scale") or 1.0,
        residual_scale=keys.optional_number("residual_scale") or 1.0,
        logits_scale=1.0 / keys.number("logit_scale"),
    )


def _with_experts(keys: Keys, config: ModelConfig, *, bias: bool = False) -> ModelConfig:
    """Return a model with mixtures of experts, if the file has experts; their weights sum to 1."""
    if not keys.get("expert_count"):
        return config
    count = keys.integer("expert_count", maximum=MAX_EXPERTS)
    width = keys.integer("expert_feed_forward_length", config.intermediate_size)
    per_row = keys.integer("expert_used_count", maximum=count)
    layers = (True,) * config.num_layers
    return replace(config, mixture=MixtureConfig(count, per_row, width, normalized=True, layers=layers, bias=bias))


def _gpt_oss(keys: Keys, config: ModelConfig) -> ModelConfig:
    """Return a gpt-oss; its files lack YaRN's key ``truncate``, which is false in these models."""
    return replace(
        _with_experts(keys, config, bias=True),
        rope=config.rope and replace(config.rope, truncate=False),
        windows=keys.windows(config.num_layers, 2),
        attention_sinks=True,
        clamped_gate=True,
    )


def _lfm2(keys: Keys, config: ModelConfig) -> ModelConfig:
    """Return an LFM2, whose layers without key/value heads have a short convolution."""
    counts = keys.per_layer("attention.head_count_kv", config.num_layers)
    layers, taps = tuple(count == 0 for count in counts), keys.integer("shortconv.l_cache", maximum=MAX_TAPS)
    return replace(config, qk_norm=True, convolution=ConvolutionConfig(taps, layers) if any(layers) else None)


def _mistral3(keys: Keys, config: ModelConfig) -> ModelConfig:
    """Return a Ministral 3 or Mistral Small 3; cosines have a factor of their own, and queries may grow."""
    rope, growth = config.rope, keys.optional_number("attention.temperature_scale")
    multiplier = keys.optional_number("rope.scaling.yarn_log_multiplier")  # mscale_all_dim; mscale is taken to be 1
    if rope is not None and rope.kind == "yarn":
        rope = replace(rope, attention_scale=yarn_scale(rope.factor, 1.0, multiplier or 0.0))
    query_growth = None if rope is None or growth is None else (growth, rope.original)
    return replace(config, family="ministral3", rope=rope, query_growth=query_growth)


def _olmo2(keys: Keys, config: ModelConfig) -> ModelConfig:
    """Return an OLMo 2; or an OLMo 3, whose layers with a window do not scale the rotations."""
    config = replace(config, norm_places="output", qk_norm=True, whole_qk_norm=True)
    windows = keys.windows(config.num_layers, 4)
    if config.rope is None or all(window is None for window in windows):
        return config
    sliding = RopeConfig(config.head_dim, keys.number("rope.freq_base_swa", config.rope.theta, bound=1))
    ropes = tuple(config.rope if window is None else sliding for window in windows)
    return replace(config, family="olmo3", windows=windows, layer_ropes=ropes)


def _smollm3(_: Keys, config: ModelConfig) -> ModelConfig:
    """Return a SmolLM3. Its files do not say which layers do not rotate: every fourth, as in llama.cpp."""
    return replace(config, layer_ropes=tuple(config.rope if (i + 1) % 4 else None for i in range(config.num_layers)))


# By architecture: what to change in the configuration of a Llama.
_ARCHITECTURES: dict[str, Callable[[Keys, ModelConfig], ModelConfig]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "granitemoe": lambda keys, config: _with_experts(keys, _granite(keys, config)),
    "lfm2": _lfm2,
    "llama": _with_experts,  # also Mixtral
    "mistral3": _mistral3,
    "olmo2": _olmo2,
    "phi3": lambda keys, config: replace(config, windows=keys.windows(config.num_layers, config.num_layers + 1)),
    "qwen2": lambda _, config: config,
    "qwen3": lambda _, config: replace(config, qk_norm=True),
    "qwen3moe": lambda keys, config: replace(_with_experts(keys, config), qk_norm=True),
    "smollm3": _smollm3,
}


def _head_dim(keys: Keys) -> int:
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    size = keys.integer("attention.key_length", max(1, hidden // heads))
    if keys.get("attention.key_length") is None and hidden % heads:
        keys.refuse("attention.head_count", f"expected a divisor of embedding_length {hidden}, found {heads}")
    if (found := keys.integer("attention.value_length", size)) != size:
        keys.refuse("attention.value_length", f"expected {size} as attention.key_length, found {found}")
    return size


def _num_kv_heads(keys: Keys) -> int:
    heads = keys.integer("attention.head_count")
    key = "attention.head_count_kv"
    if keys.architecture == "lfm2":  # 0 for layers without attention
        kv_heads = max(keys.per_layer(key, keys.integer("block_count", maximum=MAX_LAYERS)))
        kv_heads = check_integer(keys.label(key), kv_heads, 1, error=ConfigError)
    else:
        kv_heads = keys.integer(key, heads)
    if heads % kv_heads:
        keys.refuse("attention.head_count_kv", f"expected a divisor of {heads} heads, found {kv_heads}")
    return kv_heads


def _vocab_size(checkpoint: GgufCheckpoint) -> int:
    """Return the number of rows of the embedding; the tokens in the metadata may be fewer, or missing."""
    if "token_embd.weight" not in checkpoint or len(checkpoint.shape("token_embd.weight")) != 2:
        msg = f"{checkpoint.folder}: expected a matrix token_embd.weight, found none; is it a language model?"
        raise ConfigError(msg)
    return checkpoint.shape("token_embd.weight")[0]


def _dtype(checkpoint: GgufCheckpoint) -> str:
    """Return ``bfloat16`` if a matrix is quantized, else the dtype with the most bytes in matrices."""
    sizes: Counter[str] = Counter()
    for name in checkpoint:
        if len(checkpoint.shape(name)) > 1:
            sizes[checkpoint.type(name)] += checkpoint.nbytes(name)
    return _DTYPES.get(sizes.most_common(1)[0][0], "bfloat16") if set(sizes) <= set(_DTYPES) else "bfloat16"
