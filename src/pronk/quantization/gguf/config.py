"""Conversion of GGUF metadata to a :class:`~pronk.architecture.config.ModelConfig`.

Keys in ``_UNSUPPORTED_KEYS`` raise an error if they turn on a computation that the architecture's function does not
read; unknown keys are ignored. Mistral models in GGUF files have the architecture ``llama``.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pronk.architecture.config import ModelConfig
from pronk.architecture.rope import RopeConfig
from pronk.checks import check_integer, check_number
from pronk.errors import ConfigError
from pronk.quantization.gguf.checkpoint import GgufCheckpoint

__all__ = ["parse_gguf"]

_MAX_LAYERS = 10_000  # more layers than any model has; limits memory and time for damaged files
_MAX_NUMBER = 1e15  # larger RoPE bases, scaling factors and epsilons are refused; no model has them
_ROPE_FREQUENCIES = "rope_freqs.weight"  # name of the tensor of divisors, one per RoPE frequency
# Keys that turn on computations, with the values that turn them off. Other values raise an error, unless the function
# of the architecture reads the key.
_UNSUPPORTED_KEYS: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.kv_lora_rank": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.q_lora_rank": (0,),
    "attention.relative_buckets_count": (0,),
    "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_length_per_layer_input": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "final_logit_softcapping": (0,),
    "full_attention_interval": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "n_deepstack_layers": (0,),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.dimension_sections": (0,),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "shortconv.l_cache": (0,),
    "ssm.conv_kernel": (0,),
    "swiglu_clamp_exp": (0,),
    "swiglu_clamp_shexp": (0,),
    "swin_norm": (False,),
    "use_parallel_residual": (False,),
}
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
    keys = _Keys(checkpoint, architecture)
    vocabulary = checkpoint.vocabulary
    num_layers, context = keys.integer("block_count", maximum=_MAX_LAYERS), keys.integer("context_length")
    head_dim = _head_dim(keys)
    rope = _rope(keys, checkpoint, head_dim, context)
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
        qkv_bias="blk.0.attn_q.bias" in checkpoint,
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


def _gemma(keys: _Keys, config: ModelConfig, *, period: int, whole_model: int) -> ModelConfig:
    """Return a Gemma, whose layers have a sliding window, but each ``period``-th.

    The files lack the attention scale: as in llama.cpp, the largest model, of ``whole_model`` layers, has another one.
    The norms' weights are stored as in Llama, with the 1 that Gemma adds.
    """
    size = keys.integer("attention.sliding_window", 4096)
    period = keys.integer("attention.sliding_window_pattern", period)
    windows = tuple(size if (layer + 1) % period else None for layer in range(config.num_layers))
    largest = config.num_layers == whole_model
    return replace(
        config,
        norm_places="both",
        activation="gelu_tanh",
        windows=windows,
        embedding_scale=config.hidden_size**0.5,
        attention_scale=(config.hidden_size / config.num_heads if largest else config.head_dim) ** -0.5,
    )


def _gemma2(keys: _Keys, config: ModelConfig) -> ModelConfig:
    caps = (
        keys.number(key, default) for key, default in (("attn_logit_softcapping", 50), ("final_logit_softcapping", 30))
    )
    attention_cap, logits_cap = caps
    return replace(_gemma(keys, config, period=2, whole_model=46), attention_cap=attention_cap, logits_cap=logits_cap)


def _gemma3(keys: _Keys, config: ModelConfig) -> ModelConfig:
    config = _gemma(keys, config, period=6, whole_model=62)
    sliding = RopeConfig(config.head_dim, keys.number("rope.freq_base_swa", 10000.0, bound=1))
    ropes = tuple(config.rope if window is None else sliding for window in config.windows)
    cap = keys.number("final_logit_softcapping") if keys.get("final_logit_softcapping") else None
    context = keys.integer("context_length")  # the length after scaling
    return replace(config, family="gemma3_text", qk_norm=True, layer_ropes=ropes, logits_cap=cap, context=context)


# By architecture: what to change in the configuration of a Llama.
_ARCHITECTURES: dict[str, Callable[[_Keys, ModelConfig], ModelConfig]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "llama": lambda _, config: config,
    "qwen2": lambda _, config: config,
    "qwen3": lambda _, config: replace(config, qk_norm=True),
}


class _Keys:
    """Typed access to the metadata keys ``ARCHITECTURE.KEY``; invalid values raise a ConfigError."""

    def __init__(self, checkpoint: GgufCheckpoint, architecture: str) -> None:
        self.checkpoint, self.architecture = checkpoint, architecture
        self.used: set[str] = set()  # keys that were read

    def label(self, key: str) -> str:
        """Return the path of the file and the full key, for error messages."""
        return f"{self.checkpoint.folder}: {self.architecture}.{key}"

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or ``default`` if absent; an array must hold the same value for all layers."""
        self.used.add(key)
        value = self.checkpoint.header.get(f"{self.architecture}.{key}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                msg = f"{self.label(key)}: expected the same value in all layers, found several"
                raise ConfigError(msg)
            value = value[0]
        value = value[:80] if isinstance(value, str) else value
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, maximum: int = 2**31 - 1) -> int:
        return check_integer(self.label(key), self.get(key, default), 1, maximum, error=ConfigError)

    def number(self, key: str, default: float | None = None, bound: float = 0) -> float:
        value = check_number(
            self.label(key), self.get(key, default), bound, _MAX_NUMBER, exclusive_min=True, error=ConfigError
        )
        return _decimal(value)

    def check_unsupported(self) -> None:
        """Raise a ConfigError if a key that was not read turns on a computation."""
        for key, off_values in _UNSUPPORTED_KEYS.items():
            if key in self.used:
                continue
            value = self.checkpoint.header.get(f"{self.architecture}.{key}")
            values = value if isinstance(value, list) else [value]
            if value is not None and any(item not in off_values for item in values):
                msg = f"{self.label(key)} = {value!r:.80} is not supported; expected a plain {self.architecture} model"
                raise ConfigError(msg)
        if "attention.sliding_window" in self.used:
            return
        window = self.get("attention.sliding_window", 0)
        if isinstance(window, int) and 0 < window < self.integer("context_length"):
            msg = f"{self.label('attention.sliding_window')} = {window} is not supported; expected full attention"
            raise ConfigError(msg)


def _decimal(value: float) -> float:
    """Return 7 digits of ``value`` if their float32 is the same: 1e-05 for 9.999999747378752e-06."""
    decimal = float(f"{value:.7g}")
    return decimal if struct.pack("<f", decimal) == struct.pack("<f", value) else value


def _head_dim(keys: _Keys) -> int:
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    size = keys.integer("attention.key_length", max(1, hidden // heads))
    if keys.get("attention.key_length") is None and hidden % heads:
        msg = f"{keys.label('attention.head_count')}: expected a divisor of embedding_length {hidden}, found {heads}"
        raise ConfigError(msg)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, size) != size:
            msg = f"{keys.label(key)}: expected {size} as attention.key_length, found {keys.get(key)}: not supported"
            raise ConfigError(msg)
    if size % 2:
        msg = f"{keys.label('attention.key_length')}: expected an even head size, as RoPE rotates pairs, found {size}"
        raise ConfigError(msg)
    return size


def _num_kv_heads(keys: _Keys) -> int:
    heads = keys.integer("attention.head_count")
    kv_heads = keys.integer("attention.head_count_kv", heads)
    if heads % kv_heads:
        msg = f"{keys.label('attention.head_count_kv')}: expected a divisor of {heads} heads, found {kv_heads}"
        raise ConfigError(msg)
    return kv_heads


def _rope(keys: _Keys, checkpoint: GgufCheckpoint, head_dim: int, context: int) -> RopeConfig:
    """Return the RoPE: unscaled, with linear or YaRN scaling, or with a divisor per frequency (Llama 3)."""
    unscaled = RopeConfig(head_dim, keys.number("rope.freq_base", 10000.0, bound=1))
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 0))
    kind = keys.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        msg = f"{keys.label('rope.scaling.type')}: expected none, linear or yarn, found {kind!r}"
        raise ConfigError(msg)
    is_scaled = kind != "none" and factor not in (0, 1)
    if _ROPE_FREQUENCIES in checkpoint:
        if is_scaled:
            msg = f"{keys.label('rope.scaling.type')}: expected none with {_ROPE_FREQUENCIES}, found {kind}"
            raise ConfigError(msg)
        return replace(unscaled, kind="factors", divisors=_divisors(checkpoint, head_dim))
    if not is_scaled:
        return unscaled
    factor = check_number(
        keys.label("rope.scaling.factor"), factor, 0, _MAX_NUMBER, exclusive_min=True, error=ConfigError
    )
    if kind == "linear":
        return replace(unscaled, kind="linear", factor=_decimal(factor), original=context)
    return replace(
        unscaled,
        kind="yarn",
        factor=_decimal(factor),
        original=keys.integer("rope.scaling.original_context_length", context),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_scale=1.0 if factor <= 1 else 0.1 * math.log(_decimal(factor)) + 1.0,
    )


def _divisors(checkpoint: GgufCheckpoint, head_dim: int) -> tuple[float, ...]:
    shape, type_ = checkpoint.shape(_ROPE_FREQUENCIES), checkpoint.type(_ROPE_FREQUENCIES)
    if shape != (head_dim // 2,) or type_ != "F32":
        found = f"{list(shape)} in {type_}"
        msg = f"{checkpoint.folder}: tensor {_ROPE_FREQUENCIES}: expected [{head_dim // 2}] in F32, found {found}"
        raise ConfigError(msg)
    values = struct.unpack(f"<{head_dim // 2}f", bytes(checkpoint.raw_bytes(_ROPE_FREQUENCIES).tolist()))
    if not all(0 < value < math.inf for value in values):
        msg = f"{checkpoint.folder}: tensor {_ROPE_FREQUENCIES}: expected finite numbers above 0, found others"
        raise ConfigError(msg)
    return values


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
