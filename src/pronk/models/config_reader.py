"""Keys of ``config.json``: typed access, values of absent keys, and keys of unsupported computations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pronk.base.checks import check_choice, check_flag, check_integer, check_number
from pronk.base.errors import ConfigError
from pronk.checkpoint.config import MAX_LAYERS, Activation, ModelConfig
from pronk.checkpoint.end_tokens import stated_token
from pronk.checkpoint.rope import parse_rope, refuse_config

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class ConfigReader:
    """Typed access to the keys of ``config.json``, with a ConfigError for invalid values.

    Each key that is read is added to ``used``.
    """

    def __init__(self, raw: Mapping[str, Any], family: str, used: set[str] | None = None) -> None:
        self.raw, self.family = raw, family
        self.used = set[str]() if used is None else used

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or the default if the key is absent or null."""
        self.used.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = 2**31 - 1) -> int:
        """Return an integer from ``low`` to ``high``."""
        return check_integer(f"config.json: {key}", self.get(key, default), low, high, error=ConfigError)

    def layers(self, key: str) -> int:
        """Return a number of layers."""
        return self.integer(key, high=MAX_LAYERS)

    def number(self, key: str, default: float) -> float:
        """Return a number above 0."""
        return check_number(f"config.json: {key}", self.get(key, default), 0, exclusive_min=True, error=ConfigError)

    def optional_number(self, key: str) -> float | None:
        """Return a number above 0, or ``None`` if the key is absent or null."""
        return None if self.get(key) is None else self.number(key, 0.0)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a boolean."""
        return check_flag(f"config.json: {key}", self.get(key, default), error=ConfigError)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return an object, which is empty if the key is absent or null."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            refuse_config(f"{key}: expected an object, found {value!r:.80}")
        return value

    def list_of(self, key: str, kind: type, default: Iterable[Any]) -> list[Any]:
        """Return a list whose elements have the type ``kind``; ``default`` if the key is absent or null."""
        values = self.get(key, [*default])
        if not isinstance(values, list) or not all(isinstance(each, kind) for each in values):
            refuse_config(f"{key}: expected a list of values of type {kind.__name__}, found {values!r:.80}")
        return values

    def attention_bias(self) -> dict[str, bool]:
        """Return the fields of ModelConfig that the key ``attention_bias`` sets."""
        return dict.fromkeys(("qkv_bias", "out_bias"), self.flag("attention_bias"))

    def activation(self, key: str, default: str) -> Activation:
        """Return the name of an activation function."""
        name = check_choice(f"config.json: {key}", self.get(key, default), tuple(_ACTIVATIONS), error=ConfigError)
        return _ACTIVATIONS[name]

    def dtype(self) -> str:
        """Return the data type of the weights."""
        name = str(self.get("dtype", self.get("torch_dtype", "float32"))).removeprefix("torch.")
        return check_choice("config.json: dtype", name, ("float32", "float16", "bfloat16"), error=ConfigError)

    def special_ids(self) -> tuple[int | None, tuple[int, ...]]:
        """Return the id of the BOS token (the first one of a list, ``None`` without BOS) and all EOS ids."""
        bos = self._token_ids("bos_token_id")
        return next(iter(bos), None), self._token_ids("eos_token_id")

    def _token_ids(self, key: str) -> tuple[int, ...]:
        """Return the ids of a key, which has an id, a list or null; ids that are no tokens are left out."""
        value, vocab_size = self.raw.get(key), self.integer("vocab_size")
        values = value if isinstance(value, list) else [value]
        ids = [stated_token(f"config.json: {key}", each, vocab_size) for each in values]
        return tuple(token for token in ids if token is not None)

    def windows(self, size: int | None, slides: Callable[[int], bool] = lambda _: True) -> tuple[int | None, ...]:
        """Return the sliding window of each layer: ``size`` tokens, or ``None`` for full attention.

        The key ``layer_types`` says which layers have a window. Without the key, the layers (from 0) for which
        ``slides`` is true have one. If ``size`` is ``None``, no layer has one.
        """
        layers = self.layers("num_hidden_layers")
        implied = ["sliding_attention" if size is not None and slides(i) else "full_attention" for i in range(layers)]
        kinds = self.get("layer_types", implied)
        supported = ["full_attention"] if size is None else ["full_attention", "sliding_attention"]
        if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in supported for kind in kinds):
            refuse_config(f"expected {layers} layer_types, each {' or '.join(supported)}, found {kinds!r:.80}")
        return tuple(size if kind == "sliding_attention" else None for kind in kinds)


def llama_like(
    keys: ConfigReader, *, windows: tuple[int | None, ...], partial_rope: bool = False, **features: Any
) -> ModelConfig:
    """Parse the keys that most families share; ``features`` are further fields of ModelConfig."""
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    head_dim = keys.integer("head_dim", hidden // heads)
    if keys.get("head_dim") is None and hidden % heads:
        refuse_config(f"expected num_attention_heads to divide hidden_size = {hidden}, found {heads}")
    context = keys.integer("max_position_embeddings", 2048)
    rope = features.get("rope") or parse_rope(keys.raw, head_dim, context, partial=partial_rope)
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


# Families whose config has that of a language model as ``text_config``, with the default of its ``model_type``.
MULTIMODAL = {"gemma3": "gemma3_text", "mistral3": "mistral"}


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of a multimodal model's language model, with missing keys of the whole model."""
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in MULTIMODAL:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        refuse_config(f"expected an object as text_config, found {text!r:.80}")
    shared = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config", "compression_config")
    inherited = {key: raw[key] for key in shared if raw.get(key) is not None}
    tied = {} if raw.get("tie_word_embeddings") is None else {"tie_word_embeddings": raw["tie_word_embeddings"]}
    return {"model_type": MULTIMODAL[family], **inherited, **text, **tied}


_RECURRENT = "layers with a recurrent state are not supported (docs/families.md); use a model with attention, or LFM2"
_LATENT = "multi-head latent attention is not supported; use a model with grouped heads, such as Qwen3 or Qwen3-MoE"
_OTHER_MIXTURE = "are not supported; use Mixtral, Qwen3-MoE, gpt-oss or Granite MoE"
# Families that are close to a supported one, or asked for often: the reason, and what to use.
REFUSED = {
    "lfm2_moe": "short convolutions with mixtures of experts are not supported; use a dense LFM2",
    "lfm2_vl": "images are not supported; use the text model LFM2",
    **dict.fromkeys("deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite kimi_k2 minicpm3 mistral4".split(), _LATENT),
    **dict.fromkeys("llama4 llama4_text".split(), f"mixtures with a shared expert {_OTHER_MIXTURE}"),
    **dict.fromkeys("dots1 glm4_moe minimax_m2 qwen2_moe".split(), f"these mixtures of experts {_OTHER_MIXTURE}"),
    **dict.fromkeys(
        "gemma3n gemma3n_text gemma4 gemma4_text".split(),
        "embeddings per layer and shared keys are not supported; use Gemma 3",
    ),
    **dict.fromkeys(
        "bamba falcon_h1 falcon_mamba jamba kimi_linear mamba mamba2 minimax nemotron_h qwen3_5 qwen3_5_moe "
        "qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma rwkv zamba zamba2".split(),
        _RECURRENT,
    ),
}

# Values of keys that config.json lacks, by family, as in transformers. A key with the value null has another default:
# that of the call which reads the key.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "max_position_embeddings": 8192,
        "head_dim": 256,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "head_dim": 256,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    "lfm2": {
        "block_ffn_dim_multiplier": 1.0,
        "intermediate_size": 12288,
        "max_position_embeddings": 128000,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "ministral3": {
        "max_position_embeddings": 262144,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmo3": {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096},
    "phi3": {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "smollm3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "max_position_embeddings": 131072,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
    },
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "mixtral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
    },
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
}
DEFAULTS["mimo"] = DEFAULTS["qwen2"]

# Keys that turn on computations. A family whose reader does not read such a key refuses a value other than null, 0 or
# false: no family implements most of them, and others belong to some families only.
UNSUPPORTED_KEYS = (
    "add_cross_attention alibi attention_chunk_size attention_multiplier attn_logit_softcapping clip_qkv "
    "embedding_multiplier final_logit_softcapping is_encoder_decoder logit_scale logits_scaling no_rope_layers "
    "num_experts num_local_experts query_pre_attn_scalar residual_multiplier scale_attn_by_inverse_layer_idx "
    "use_bidirectional_attention"
).split()
