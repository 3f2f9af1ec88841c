"""Reader of ``config.json``: typed values, parts that families share, and unsupported keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pronk.base.checks import check_choice, check_flag, check_integer, check_number
from pronk.base.errors import ConfigError
from pronk.checkpoint.config import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_TAPS,
    Activation,
    MixtureConfig,
    ModelConfig,
    RecurrentConfig,
)
from pronk.checkpoint.end_tokens import stated_token
from pronk.checkpoint.rope import parse_rope, refuse_config

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}

# Values of ``time_step_limit`` without limits: as JSON, and as transformers 5 writes an infinity.
_NO_LIMITS = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])

# Keys that turn on computations. If one has another value than null, 0 or false, and the family's
# parser does not read it, the config is refused: the computation would be left out silently.
UNSUPPORTED_KEYS = (
    "add_cross_attention alibi attention_chunk_size attention_multiplier attn_logit_softcapping "
    "clip_qkv "
    "embedding_multiplier final_logit_softcapping is_encoder_decoder logit_scale logits_scaling "
    "no_rope_layers "
    "num_experts num_local_experts query_pre_attn_scalar residual_multiplier "
    "scale_attn_by_inverse_layer_idx "
    "use_bidirectional_attention"
).split()


class ConfigReader:
    """Typed access to the keys of ``config.json``, with a ConfigError for invalid values.

    ``used`` collects the keys that are read, so that unsupported keys can be found afterwards.
    """

    def __init__(self, raw: Mapping[str, Any], family: str, used: set[str] | None = None) -> None:
        self.raw = raw
        self.family = family
        self.used = set[str]() if used is None else used

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or the default if the key is absent or null."""
        self.used.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def integer(
        self, key: str, default: int | None = None, low: int = 1, high: int = 2**31 - 1
    ) -> int:
        """Return the value of a key, an integer from ``low`` to ``high``; ``default`` if absent."""
        return check_integer(
            f"config.json: {key}", self.get(key, default), low, high, error=ConfigError
        )

    def layers(self, key: str) -> int:
        """Return the value of a key, a number of layers from 1 to ``MAX_LAYERS``."""
        return self.integer(key, high=MAX_LAYERS)

    def number(self, key: str, default: float) -> float:
        """Return the value of a key, a number above 0; ``default`` if the key is absent or null."""
        return check_number(
            f"config.json: {key}", self.get(key, default), 0, exclusive_min=True, error=ConfigError
        )

    def optional_number(self, key: str) -> float | None:
        """Return the value of a key, a number above 0; ``None`` if the key is absent or null."""
        return None if self.get(key) is None else self.number(key, 0.0)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return the value of a key, a boolean; ``default`` if the key is absent or null."""
        return check_flag(f"config.json: {key}", self.get(key, default), error=ConfigError)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return the value of a key, a JSON object; it is empty if the key is absent or null."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            refuse_config(f"{key}: expected an object, found {value!r:.80}")
        return value

    def list_of(self, key: str, kind: type, default: Iterable[Any]) -> list[Any]:
        """Return the value of a key, a list whose elements have the type ``kind``.

        The list is ``default`` if the key is absent or null.
        """
        values = self.get(key, [*default])
        if not isinstance(values, list) or not all(isinstance(each, kind) for each in values):
            refuse_config(
                f"{key}: expected a list of values of type {kind.__name__}, found {values!r:.80}"
            )
        return values

    def attention_bias(self) -> dict[str, bool]:
        """Return the fields of ModelConfig that ``attention_bias`` sets: qkv_bias and out_bias."""
        return dict.fromkeys(("qkv_bias", "out_bias"), self.flag("attention_bias"))

    def activation(self, key: str, default: str) -> Activation:
        """Return pronk's name of the activation function that a key names.

        Args:
            key: the key of ``config.json``, such as ``hidden_act``.
            default: name in ``config.json`` that applies if the key is absent.

        Raises:
            ConfigError: the function is not supported.
        """
        name = check_choice(
            f"config.json: {key}", self.get(key, default), tuple(_ACTIVATIONS), error=ConfigError
        )
        return _ACTIVATIONS[name]

    def require_silu(self, key: str) -> None:
        """Refuse another activation than SiLU, that of the convolutions of recurrent layers."""
        if self.activation(key, "silu") != "silu":
            found = self.get(key)
            refuse_config(f"{key}: expected silu with recurrent layers, found {found}")

    def dtype(self) -> str:
        """Return the data type of the weights: ``float32``, ``float16`` or ``bfloat16``."""
        name = str(self.get("dtype", self.get("torch_dtype", "float32"))).removeprefix("torch.")
        return check_choice(
            "config.json: dtype", name, ("float32", "float16", "bfloat16"), error=ConfigError
        )

    def special_ids(self) -> tuple[int | None, tuple[int, ...]]:
        """Return the id of the BOS token, ``None`` if there is none, and the ids of all EOS tokens.

        If ``bos_token_id`` is a list, its first id is returned.
        """
        bos = self._token_ids("bos_token_id")
        return next(iter(bos), None), self._token_ids("eos_token_id")

    def _token_ids(self, key: str) -> tuple[int, ...]:
        """Return the token ids under a key, whose value is an id, a list of ids or null.

        Ids outside the vocabulary are left out with a warning, because the model is usable without.
        """
        value = self.raw.get(key)
        vocab_size = self.integer("vocab_size")
        values = value if isinstance(value, list) else [value]
        ids = [stated_token(f"config.json: {key}", each, vocab_size) for each in values]
        return tuple(token for token in ids if token is not None)

    def windows(
        self, size: int | None, slides: Callable[[int], bool] = lambda _: True
    ) -> tuple[int | None, ...]:
        """Return the sliding window of each layer: ``size`` tokens, or ``None`` for full attention.

        The key ``layer_types`` says which layers have a window. Without the key, the layers (from
        0) for which ``slides`` is true have one. If ``size`` is ``None``, no layer has one.
        """
        layers = self.layers("num_hidden_layers")
        implied = [
            "sliding_attention" if size is not None and slides(i) else "full_attention"
            for i in range(layers)
        ]
        kinds = self.get("layer_types", implied)
        supported = ["full_attention"] if size is None else ["full_attention", "sliding_attention"]
        if (
            not isinstance(kinds, list)
            or len(kinds) != layers
            or not all(kind in supported for kind in kinds)
        ):
            refuse_config(
                f"expected {layers} layer_types, each {' or '.join(supported)}, found {kinds!r:.80}"
            )
        return tuple(size if kind == "sliding_attention" else None for kind in kinds)

    def periodic_windows(self, period: int) -> tuple[int | None, ...]:
        """Return the sliding window of each layer in tokens, ``None`` for full attention.

        By default every ``period``-th layer has full attention, and all others have a window of
        ``sliding_window`` tokens. The key ``layer_types`` overrides which layers have one.
        """
        size = self.integer("sliding_window")
        return self.windows(size, lambda layer: (layer + 1) % period > 0)

    def mixture(
        self,
        experts: str = "num_local_experts",
        width: str = "intermediate_size",
        *,
        normalized: bool = True,
        bias: bool = False,
        is_mixture: Callable[[int], bool] = lambda _: True,
    ) -> MixtureConfig | None:
        """Return the mixture of experts and the layers that have it; ``None`` if no layer has one.

        Args:
            experts: key of the number of experts.
            width: key of an expert's intermediate size.
            normalized: whether the weights of a row's experts sum to 1.
            bias: whether experts have biases.
            is_mixture: whether a layer (from 0) has experts in place of one MLP.
        """
        count = self.integer(experts, 128, high=MAX_EXPERTS)
        layers = tuple(is_mixture(layer) for layer in range(self.layers("num_hidden_layers")))
        per_row = self.integer("num_experts_per_tok", high=count)
        if not any(layers):
            return None
        return MixtureConfig(count, per_row, self.integer(width), normalized, layers, bias)

    def grouped_router(self) -> dict[str, Any]:
        """Return the fields of MixtureConfig that describe the router of DeepSeek-V3.

        Several families share it: scores are sigmoids, which are corrected for the choice.
        """
        return {
            "normalized": self.flag("norm_topk_prob", default=True),
            "scores": "sigmoid",
            "correction": True,
            "groups": self.integer("n_group", 1),
            "row_groups": self.integer("topk_group", 1),
            "scale": self.number("routed_scaling_factor", 1.0),
            "epsilon": 1e-20,
        }

    def mamba2(self, layers: tuple[bool, ...], inner: int) -> RecurrentConfig:
        """Return Mamba 2 in the layers for which ``layers`` is true; ``inner`` is its inner size.

        A config with limits of ``dt`` is refused (:class:`~pronk.checkpoint.config.
        RecurrentConfig`), and so are biases of the projections and other activations than SiLU.
        """
        self.require_silu("hidden_act")
        heads = self.integer("mamba_n_heads")
        groups = self.integer("mamba_n_groups", 1)
        stated = self.get("mamba_d_head", "auto")
        head_dim = inner // heads if stated == "auto" else self.integer("mamba_d_head")
        if heads * head_dim != inner or head_dim > MAX_HEAD_DIM:
            expected = f"expected a size of at most {MAX_HEAD_DIM} of {inner} / {heads}"
            refuse_config(f"mamba_d_head: {expected}, found {stated!r:.80}")
        if heads % groups:
            refuse_config(f"mamba_n_groups: expected a divisor of {heads} heads, found {groups}")
        if self.flag("mamba_proj_bias"):
            refuse_config("mamba_proj_bias = true is not supported; expected false")
        limits = self.get("time_step_limit", [0.0, math.inf])
        if not isinstance(limits, list) or limits not in _NO_LIMITS:
            expected = "expected no limits, [0.0, Infinity]"
            refuse_config(f"time_step_limit: {expected}, found {limits!r:.80}")
        return RecurrentConfig(
            layers=layers,
            key_heads=groups,
            value_heads=heads,
            key_dim=self.integer("mamba_d_state", high=MAX_HEAD_DIM),
            value_dim=head_dim,
            taps=self.integer("mamba_d_conv", 4, high=MAX_TAPS),
            rule="mamba2",
            norm="after_gate",
            filter_bias=self.flag("mamba_conv_bias", default=True),
        )

    def ropes(
        self, windows: tuple[int | None, ...], theta: float, sliding_theta: float
    ) -> dict[str, Any]:
        """Return the fields ``rope`` and ``layer_ropes`` if some layers have a sliding window.

        ``rope`` is the rotary embedding of the layers with full attention. If ``rope_parameters``
        has no entries for both kinds of layers, as in older checkpoints, its scaling applies to the
        layers with full attention only. The default bases are then ``theta`` for full attention and
        ``sliding_theta`` for layers with a window.
        """
        both = self.mapping("rope_parameters")
        if "full_attention" not in both:
            scaling = self.mapping("rope_scaling") or both
            scaling = {"rope_theta": theta, "rope_type": "default", **scaling}
            both = {"full_attention": scaling, "sliding_attention": {"rope_theta": sliding_theta}}
        hidden = self.integer("hidden_size")
        head_dim = self.integer("head_dim", hidden // self.integer("num_attention_heads"))
        context = self.integer("max_position_embeddings", 2048)
        full, sliding = (
            parse_rope({"rope_parameters": both.get(kind)}, head_dim, context)
            for kind in ("full_attention", "sliding_attention")
        )
        layer_ropes = tuple(full if window is None else sliding for window in windows)
        return {"rope": full, "layer_ropes": layer_ropes}


def llama_like(
    keys: ConfigReader,
    *,
    windows: tuple[int | None, ...],
    partial_rope: bool = False,
    **features: Any,
) -> ModelConfig:
    """Return the config of a model whose keys are those of Llama, which most families share.

    Args:
        keys: reader of ``config.json``.
        windows: sliding window of each layer, ``None`` for full attention.
        partial_rope: whether the config may limit the rotation to a part of each head.
        features: fields of ModelConfig that replace the values of these keys or add to them.
    """
    hidden = keys.integer("hidden_size")
    heads = keys.integer("num_attention_heads")
    head_dim = keys.integer("head_dim", hidden // heads)
    if keys.get("head_dim") is None and hidden % heads:
        refuse_config(
            f"expected num_attention_heads to divide hidden_size = {hidden}, found {heads}"
        )
    context = keys.integer("max_position_embeddings", 2048)
    rope = features.get("rope") or parse_rope(keys.raw, head_dim, context, partial=partial_rope)
    bos, eos = keys.special_ids()
    mixture = features.get("mixture")
    # Without a layer that has a plain MLP, a config may lack the width of MLPs.
    width = mixture.width if mixture is not None and all(mixture.layers) else None
    values: dict[str, Any] = {
        "family": keys.family,
        "vocab_size": keys.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": keys.integer("intermediate_size", width),
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
