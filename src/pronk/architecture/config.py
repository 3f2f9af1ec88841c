"""Model configuration: parses ``config.json`` of any supported family into a :class:`ModelConfig`.

A key of ``config.json`` that turns on an unsupported computation raises a ConfigError that names the key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from pronk.architecture.rope import RopeConfig, parse_rope
from pronk.checks import check_choice, check_flag, check_integer, check_number
from pronk.errors import ConfigError

__all__ = ["FAMILIES", "ModelConfig", "llama_config", "parse_config"]

# More layers than any model has: a larger number in a damaged config.json is refused before memory is allocated.
_MAX_LAYERS = 10_000

Activation = Literal["silu", "gelu", "gelu_tanh"]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Values of keys that config.json lacks, by family, as in transformers. A key with the value null has another default:
# that of the call which reads the key.
_DEFAULTS: dict[str, dict[str, int]] = {
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
}
_DEFAULTS["mimo"] = _DEFAULTS["qwen2"]

# Keys of related families (Gemma, Granite, Cohere, Mixtral, encoders) that turn on computations not implemented here.
_UNSUPPORTED_KEYS = (
    "add_cross_attention alibi attention_chunk_size attention_multiplier attn_logit_softcapping clip_qkv "
    "embedding_multiplier final_logit_softcapping is_encoder_decoder logit_scale logits_scaling no_rope_layers "
    "num_experts num_local_experts query_pre_attn_scalar residual_multiplier scale_attn_by_inverse_layer_idx "
    "use_bidirectional_attention"
).split()


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and features of a decoder-only transformer of any supported family."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int  # maximum number of tokens, prompt and output together, after RoPE scaling
    norm_eps: float
    norm: Literal["rms", "layer"] = "rms"
    activation: Activation = "silu"
    gated: bool = True  # whether the MLP has a gate, as in SwiGLU
    rope: RopeConfig | None = None  # rotary embedding; ``None``: learned position embeddings
    windows: tuple[int | None, ...] = ()  # per layer: sliding window in tokens; ``None``: full attention
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # whether queries and keys are normalized before RoPE
    tied: bool = False  # whether the LM head shares the weights of the embedding
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # data type of the weights that are not quantized
    # ``quantization_config`` of config.json; ``None`` if it has none
    quantization: Mapping[str, Any] | None = field(default=None, hash=False)
    # Sampling options that the model's files recommend, by their names in SamplingParams
    sampling: Mapping[str, float] = field(default_factory=dict, hash=False, compare=False)

    @cached_property
    def digest(self) -> str:
        """Hash of the configuration, 16 hexadecimal digits."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True, default=str).encode()).hexdigest()[:16]

    @property
    def group(self) -> int:
        """Number of query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Output sizes of the query, key and value projections: number of heads times ``head_dim``."""
        kv = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, kv, kv

    def document_sizes(self) -> dict[str, int]:
        """Return the sizes as entries of a Hugging Face ``config.json``."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
        }

    @property
    def window(self) -> int | None:
        """Largest sliding window of all layers in tokens; ``None`` if any layer has full attention."""
        sizes = [size for size in self.windows if size is not None]
        return max(sizes) if len(sizes) == self.num_layers else None


def llama_config(
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    mlp: int,
    vocab: int,
    context: int,
    bos_id: int | None,
    eos_ids: tuple[int, ...],
) -> ModelConfig:
    """Return the configuration of a new Llama to train, with tied embeddings and bfloat16 weights."""
    head_dim = hidden // heads
    return ModelConfig(
        family="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context=context,
        norm_eps=1e-5,
        rope=RopeConfig(head_dim),
        windows=(None,) * layers,
        tied=True,
        bos_id=bos_id,
        eos_ids=eos_ids,
        dtype="bfloat16",
    )


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Parse a ``config.json`` document; raise a ConfigError if it is invalid or not supported."""
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        msg = f"unknown architecture: config.json has model_type {family!r}; supported are {known}"
        raise ConfigError(msg)
    # Early versions of compressed-tensors wrote compression_config.
    quantization = raw.get("quantization_config") or raw.get("compression_config")
    if quantization and not isinstance(quantization, Mapping):
        msg = f"config.json: expected an object as quantization_config, found {quantization!r:.80}"
        raise ConfigError(msg)
    unsupported = [key for key in _UNSUPPORTED_KEYS if raw.get(key)] + ["is_causal"] * (raw.get("is_causal") is False)
    if unsupported:
        msg = (
            f"config.json: {unsupported[0]} = {raw[unsupported[0]]!r} is not supported; expected a plain {family} model"
        )
        raise ConfigError(msg)
    config = FAMILIES[family](_ConfigReader({**_DEFAULTS.get(family, {}), **raw}, family))
    _check_heads(config)
    return replace(config, quantization=quantization or None)


class _ConfigReader:
    """Typed access to the keys of ``config.json``, with a ConfigError for invalid values."""

    def __init__(self, raw: Mapping[str, Any], family: str) -> None:
        self.raw = raw
        self.family = family

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or the default if the key is absent or null."""
        value = self.raw.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = 2**31 - 1) -> int:
        return check_integer(f"config.json: {key}", self.get(key, default), low, high, error=ConfigError)

    def layers(self, key: str) -> int:
        return self.integer(key, high=_MAX_LAYERS)

    def number(self, key: str, default: float) -> float:
        return check_number(f"config.json: {key}", self.get(key, default), 0, exclusive_min=True, error=ConfigError)

    def flag(self, key: str, *, default: bool = False) -> bool:
        return check_flag(f"config.json: {key}", self.get(key, default), error=ConfigError)

    def activation(self, key: str, default: str) -> Activation:
        name = check_choice(f"config.json: {key}", self.get(key, default), tuple(_ACTIVATIONS), error=ConfigError)
        return _ACTIVATIONS[name]

    def dtype(self) -> str:
        name = str(self.get("dtype", self.get("torch_dtype", "float32"))).removeprefix("torch.")
        return check_choice("config.json: dtype", name, ("float32", "float16", "bfloat16"), error=ConfigError)

    def special_ids(self) -> tuple[int | None, tuple[int, ...]]:
        """Return the id of the BOS token (the first one of a list, ``None`` without BOS) and all EOS ids."""
        bos, eos = self.raw.get("bos_token_id"), self.raw.get("eos_token_id")
        ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
        bos = (bos or [None])[0] if isinstance(bos, list) else bos
        high = self.integer("vocab_size") - 1
        for key, token in (("bos_token_id", 0 if bos is None else bos), *(("eos_token_id", token) for token in ids)):
            check_integer(f"config.json: {key}", token, 0, high, error=ConfigError)
        return bos, ids

    def windows(self, size: int | None, first: int = 0) -> tuple[int | None, ...]:
        """Return the sliding window of each layer: ``size`` tokens, or ``None`` for full attention.

        The key ``layer_types`` says which layers have a window. Without the key, the layers with index
        ``first`` or more have one. If ``size`` is ``None``, no layer has one.
        """
        layers = self.layers("num_hidden_layers")
        implied = ["full_attention" if size is None or i < first else "sliding_attention" for i in range(layers)]
        kinds = self.get("layer_types", implied)
        supported = ["full_attention"] if size is None else ["full_attention", "sliding_attention"]
        if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in supported for kind in kinds):
            msg = f"config.json: expected {layers} layer_types, each {' or '.join(supported)}, found {kinds!r:.80}"
            raise ConfigError(msg)
        return tuple(size if kind == "sliding_attention" else None for kind in kinds)


def _llama_like(keys: _ConfigReader, *, windows: tuple[int | None, ...], **features: Any) -> ModelConfig:
    """Parse the keys that Llama, Mistral and Qwen share; ``features`` are further fields of ModelConfig."""
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    head_dim = keys.integer("head_dim", hidden // heads)
    if keys.get("head_dim") is None and hidden % heads:
        msg = f"config.json: expected num_attention_heads to divide hidden_size = {hidden}, found {heads}"
        raise ConfigError(msg)
    context = keys.integer("max_position_embeddings", 2048)
    rope = parse_rope(keys.raw, head_dim, context)
    bos, eos = keys.special_ids()
    values: dict[str, Any] = {
        "family": keys.family,
        "vocab_size": keys.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": keys.integer("intermediate_size"),
        "num_layers": len(windows),
        "num_heads": heads,
        "num_kv_heads": keys.integer("num_key_value_heads", heads),
        "head_dim": head_dim,
        "context": rope.extend(context),
        "norm_eps": keys.number("rms_norm_eps", 1e-6),
        "activation": keys.activation("hidden_act", "silu"),
        "rope": rope,
        "windows": windows,
        "tied": keys.flag("tie_word_embeddings"),
        "bos_id": bos,
        "eos_ids": eos,
        "dtype": keys.dtype(),
    }
    return ModelConfig(**(values | features))


def _llama(keys: _ConfigReader) -> ModelConfig:
    bias, mlp_bias = keys.flag("attention_bias"), keys.flag("mlp_bias")
    return _llama_like(keys, windows=keys.windows(None), qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)


def _mistral(keys: _ConfigReader) -> ModelConfig:
    size = None if keys.get("sliding_window") is None else keys.integer("sliding_window")
    windows = keys.windows(size)
    if None in windows and size is not None:
        msg = "config.json: layer_types asks for full attention in some layers; expected sliding_attention in all"
        raise ConfigError(msg)
    return _llama_like(keys, windows=windows)


def _qwen_windows(keys: _ConfigReader) -> tuple[int | None, ...]:
    if not keys.get("use_sliding_window", False) or keys.get("sliding_window") is None:
        return keys.windows(None)
    return keys.windows(keys.integer("sliding_window"), keys.integer("max_window_layers", 28, low=0))


def _qwen2(keys: _ConfigReader) -> ModelConfig:
    return _llama_like(keys, windows=_qwen_windows(keys), qkv_bias=True)


def _qwen3(keys: _ConfigReader) -> ModelConfig:
    bias = keys.flag("attention_bias")
    return _llama_like(keys, windows=_qwen_windows(keys), qkv_bias=bias, out_bias=bias, qk_norm=True)


def _gpt2(keys: _ConfigReader) -> ModelConfig:
    if not keys.get("scale_attn_weights", True):
        msg = "config.json: scale_attn_weights = false is not supported"
        raise ConfigError(msg)
    hidden, heads, layers = keys.integer("n_embd"), keys.integer("n_head"), keys.layers("n_layer")
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


FAMILIES: dict[str, Callable[[_ConfigReader], ModelConfig]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mimo": _qwen2,  # Qwen 2 with an MTP head
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}


def _check_heads(config: ModelConfig) -> None:
    """Raise ConfigError unless num_kv_heads divides num_heads and (GPT-2) num_heads divides hidden_size."""
    if config.num_heads % config.num_kv_heads:
        msg = (
            f"config.json: {config.num_heads} attention heads cannot share {config.num_kv_heads} key/value heads; "
            "expected a divisor"
        )
        raise ConfigError(msg)
    if config.norm == "layer" and config.hidden_size % config.num_heads:
        msg = f"config.json: {config.num_heads} heads do not divide the hidden size {config.hidden_size}"
        raise ConfigError(msg)
