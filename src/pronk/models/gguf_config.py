"""Configuration of a Llama from a GGUF file's metadata, which each architecture changes."""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from dataclasses import replace

from pronk.base.checks import check_integer
from pronk.base.errors import ConfigError, refuse
from pronk.checkpoint.config import MAX_LAYERS, ModelConfig
from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint
from pronk.checkpoint.rope import RopeConfig, check_positive, yarn_scale
from pronk.models.family import GgufArchitecture
from pronk.models.gguf_reader import GgufReader, shortest_decimal

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Tensors of divisors, one per RoPE frequency: of Llama 3.1, and of LongRoPE for long and for short
# contexts.
_DIVISORS = "rope_freqs.weight"
_LONG_DIVISORS = "rope_factors_long.weight"
_SHORT_DIVISORS = "rope_factors_short.weight"


def parse_architecture(
    checkpoint: GgufCheckpoint, architecture: GgufArchitecture, model_type: str
) -> ModelConfig:
    """Return the configuration of a model; ``model_type`` is the family that has the architecture.

    ``dtype`` is bfloat16 for quantized weights.

    Raises:
        ConfigError: a value is missing, contradictory or not supported.
        TokenizerError: the tokens of the file are inconsistent.
    """
    keys = GgufReader(checkpoint, architecture.name)
    config = architecture.parse(keys, _llama(keys, architecture, model_type))
    keys.check_unsupported()
    return config


def _llama(keys: GgufReader, architecture: GgufArchitecture, model_type: str) -> ModelConfig:
    checkpoint = keys.checkpoint
    vocabulary = checkpoint.vocabulary
    num_layers = keys.integer("block_count", maximum=MAX_LAYERS)
    context = keys.integer("context_length")
    head_dim = _head_dim(keys, has_own_values=architecture.has_own_values)
    rope = _rope(keys, head_dim, context, partial=architecture.partial_rope)
    return ModelConfig(
        family=model_type,
        vocab_size=_vocab_size(checkpoint),
        hidden_size=keys.integer("embedding_length"),
        intermediate_size=_intermediate_size(keys, architecture),
        num_layers=num_layers,
        num_heads=keys.integer("attention.head_count"),
        num_kv_heads=_num_kv_heads(keys, architecture),
        head_dim=head_dim,
        context=rope.extend(context),
        norm_eps=_norm_eps(keys),
        rope=rope,
        windows=(None,) * num_layers,
        qkv_bias=_has_bias(checkpoint, "attn_q") or _has_bias(checkpoint, "attn_qkv"),
        out_bias=_has_bias(checkpoint, "attn_output"),
        mlp_bias=_has_bias(checkpoint, "ffn_down"),
        tied="output.weight" not in checkpoint,
        bos_id=vocabulary.special_ids.get("bos"),
        eos_ids=vocabulary.eos_ids,
        dtype=_dtype(checkpoint),
    )


def _norm_eps(keys: GgufReader) -> float:
    """Return the epsilon of norms; files of Nemotron-H may have it under LayerNorm's name only."""
    of_layer_norm = keys.get("attention.layer_norm_epsilon")
    return keys.number("attention.layer_norm_rms_epsilon", of_layer_norm)


def _has_bias(checkpoint: GgufCheckpoint, module: str) -> bool:
    """Return whether a module has a bias in some layer; layers may lack the module."""
    return any(re.fullmatch(rf"blk\.\d+\.{module}\.bias", name) for name in checkpoint)


def _head_dim(keys: GgufReader, *, has_own_values: bool) -> int:
    hidden = keys.integer("embedding_length")
    heads = keys.integer("attention.head_count")
    size = keys.integer("attention.key_length", max(1, hidden // heads))
    if keys.get("attention.key_length") is None and hidden % heads:
        keys.refuse(
            "attention.head_count",
            f"expected a divisor of embedding_length {hidden}, found {heads}",
        )
    found = keys.integer("attention.value_length", size)
    if found != size and not has_own_values:
        keys.refuse(
            "attention.value_length", f"expected {size} as attention.key_length, found {found}"
        )
    return size


def _intermediate_size(keys: GgufReader, architecture: GgufArchitecture) -> int:
    key = "feed_forward_length"
    if architecture.varies:
        return _first(keys, key)
    if architecture.skips_mlps:
        return _largest(keys, key)
    return keys.integer(key, keys.get("expert_feed_forward_length"))


def _first(keys: GgufReader, key: str) -> int:
    """Return the value of a key in the first layer; other layers may have other values."""
    num_layers = keys.integer("block_count", maximum=MAX_LAYERS)
    value = keys.per_layer(key, num_layers, varies=True)[0]
    return check_integer(keys.label(key), value, 1, error=ConfigError)


def _largest(keys: GgufReader, key: str) -> int:
    """Return the value of a key in the layers where it is not 0."""
    values = keys.per_layer(key, keys.integer("block_count", maximum=MAX_LAYERS))
    return check_integer(keys.label(key), max(values), 1, error=ConfigError)


def _num_kv_heads(keys: GgufReader, architecture: GgufArchitecture) -> int:
    heads = keys.integer("attention.head_count")
    key = "attention.head_count_kv"
    if architecture.varies:
        kv_heads = _first(keys, key)
    elif architecture.skips_attention:
        kv_heads = _largest(keys, key)
    else:
        kv_heads = keys.integer(key, heads)
    if heads % kv_heads:
        keys.refuse(
            "attention.head_count_kv", f"expected a divisor of {heads} heads, found {kv_heads}"
        )
    return kv_heads


def _vocab_size(checkpoint: GgufCheckpoint) -> int:
    """Return the number of rows of the embedding.

    The tokens in the metadata may be fewer, or missing.
    """
    if "token_embd.weight" not in checkpoint or len(checkpoint.shape("token_embd.weight")) != 2:
        msg = (
            f"{checkpoint.folder}: expected a matrix token_embd.weight, found none; is it a "
            "language model?"
        )
        raise ConfigError(msg)
    return checkpoint.shape("token_embd.weight")[0]


def _dtype(checkpoint: GgufCheckpoint) -> str:
    """Return ``bfloat16`` if a matrix is quantized, else the dtype of most bytes in matrices."""
    sizes: Counter[str] = Counter()
    for name in checkpoint:
        if len(checkpoint.shape(name)) > 1:
            sizes[checkpoint.type(name)] += checkpoint.nbytes(name)
    return (
        _DTYPES.get(sizes.most_common(1)[0][0], "bfloat16")
        if set(sizes) <= set(_DTYPES)
        else "bfloat16"
    )


def _rope(keys: GgufReader, head_dim: int, context: int, *, partial: bool) -> RopeConfig:
    """Return the RoPE: unscaled, with linear or YaRN scaling, or with divisors of the frequencies.

    ``partial``: whether the architecture can rotate a part of each head, ``rope.dimension_count``
    of its dimensions.
    """
    dim = _num_dimensions(keys, head_dim, partial=partial)
    unscaled = RopeConfig(dim, keys.number("rope.freq_base", 10000.0, bound=1))
    if _LONG_DIVISORS in keys.checkpoint or _SHORT_DIVISORS in keys.checkpoint:
        return _read_longrope(keys, unscaled, context)
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 0))
    kind = keys.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        keys.refuse("rope.scaling.type", f"expected none, linear or yarn, found {kind!r:.80}")
    is_scaled = kind != "none" and factor not in (0, 1)
    if _DIVISORS in keys.checkpoint:
        if is_scaled:
            keys.refuse("rope.scaling.type", f"expected none with {_DIVISORS}, found {kind}")
        return replace(unscaled, kind="factors", divisors=_read_divisors(keys, _DIVISORS, dim))
    if not is_scaled:
        return unscaled
    factor = shortest_decimal(check_positive(keys.label("rope.scaling.factor"), factor))
    if kind == "linear":
        return replace(unscaled, kind="linear", factor=factor, original=context)
    return replace(
        unscaled,
        kind="yarn",
        factor=factor,
        original=keys.integer("rope.scaling.original_context_length", context),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_scale=_yarn_attention_scale(keys, factor),
    )


def _num_dimensions(keys: GgufReader, head_dim: int, *, partial: bool) -> int:
    dim = keys.integer("rope.dimension_count", head_dim)
    if dim != head_dim and not (partial and dim < head_dim):
        expected = f"at most {head_dim}" if partial else str(head_dim)
        keys.refuse(
            "rope.dimension_count", f"expected {expected} as attention.key_length, found {dim}"
        )
    if dim % 2:
        key = "attention.key_length" if dim == head_dim else "rope.dimension_count"
        keys.refuse(key, f"expected an even size, as RoPE rotates pairs, found {dim}")
    return dim


def _yarn_attention_scale(keys: GgufReader, factor: float) -> float:
    """Return YaRN's factor of cosines and sines; ``yarn_attn_factor`` may state the same number."""
    key = "rope.scaling.yarn_attn_factor"
    scale = yarn_scale(factor)
    stated = keys.number(key, 1.0)
    if stated != 1.0 and not math.isclose(stated, scale, rel_tol=1e-5):
        msg = (
            f"{keys.label(key)} = {stated} is not supported; expected 1 or {scale:.6g}, which YaRN "
            "computes itself"
        )
        raise ConfigError(msg)
    return scale


def _read_longrope(keys: GgufReader, unscaled: RopeConfig, context: int) -> RopeConfig:
    long, short = (
        _read_divisors(keys, name, unscaled.dim) for name in (_LONG_DIVISORS, _SHORT_DIVISORS)
    )
    kind = keys.get("rope.scaling.type", "longrope")
    if kind not in ("none", "longrope"):
        keys.refuse(
            "rope.scaling.type",
            f"expected none or longrope with {_LONG_DIVISORS}, found {kind!r:.80}",
        )
    return replace(
        unscaled,
        kind="longrope",
        original=keys.integer("rope.scaling.original_context_length", context),
        attention_scale=keys.number("rope.scaling.attn_factor", 1.0),
        divisors=long,
        short_divisors=short,
    )


def _read_divisors(keys: GgufReader, name: str, dim: int) -> tuple[float, ...]:
    checkpoint = keys.checkpoint
    where = f"{checkpoint.folder}: tensor {name}"
    if name not in checkpoint:
        refuse(
            where, f"expected {dim // 2} divisors of RoPE frequencies, found no tensor", ConfigError
        )
    shape = checkpoint.shape(name)
    type_ = checkpoint.type(name)
    if shape != (dim // 2,) or type_ != "F32":
        refuse(where, f"expected [{dim // 2}] in F32, found {list(shape)} in {type_}", ConfigError)
    values = struct.unpack(f"<{dim // 2}f", bytes(checkpoint.raw_bytes(name).tolist()))
    if not all(0 < value < math.inf for value in values):
        refuse(where, "expected finite numbers above 0, found others", ConfigError)
    return values
