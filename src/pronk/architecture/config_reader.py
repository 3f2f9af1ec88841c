"""Typed access to the keys of ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pronk.architecture.config import Activation, ModelConfig
from pronk.architecture.rope import parse_rope
from pronk.checks import check_choice, check_flag, check_integer, check_number
from pronk.errors import ConfigError

__all__ = ["ConfigReader", "llama_like"]

# More layers than any model has: a larger number in a damaged config.json is refused before memory is allocated.
_MAX_LAYERS = 10_000

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class ConfigReader:
    """Typed access to the keys of ``config.json``, with a ConfigError for invalid values."""

    def __init__(self, raw: Mapping[str, Any], family: str) -> None:
        self.raw = raw
        self.family = family
        self.used: set[str] = set()  # keys that were read

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
        return self.integer(key, high=_MAX_LAYERS)

    def number(self, key: str, default: float) -> float:
        """Return a number above 0."""
        return check_number(f"config.json: {key}", self.get(key, default), 0, exclusive_min=True, error=ConfigError)

    def optional_number(self, key: str) -> float | None:
        """Return a number above 0, or ``None`` if the key is absent or null."""
        return None if self.get(key) is None else self.number(key, 0.0)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a boolean."""
        return check_flag(f"config.json: {key}", self.get(key, default), error=ConfigError)

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
        bos, eos = self.raw.get("bos_token_id"), self.raw.get("eos_token_id")
        ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
        bos = (bos or [None])[0] if isinstance(bos, list) else bos
        high = self.integer("vocab_size") - 1
        for key, token in (("bos_token_id", 0 if bos is None else bos), *(("eos_token_id", token) for token in ids)):
            check_integer(f"config.json: {key}", token, 0, high, error=ConfigError)
        return bos, ids

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
            msg = f"config.json: expected {layers} layer_types, each {' or '.join(supported)}, found {kinds!r:.80}"
            raise ConfigError(msg)
        return tuple(size if kind == "sliding_attention" else None for kind in kinds)


def llama_like(
    keys: ConfigReader, *, windows: tuple[int | None, ...], partial_rope: bool = False, **features: Any
) -> ModelConfig:
    """Parse the keys that most families share; ``features`` are further fields of ModelConfig."""
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    head_dim = keys.integer("head_dim", hidden // heads)
    if keys.get("head_dim") is None and hidden % heads:
        msg = f"config.json: expected num_attention_heads to divide hidden_size = {hidden}, found {heads}"
        raise ConfigError(msg)
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
