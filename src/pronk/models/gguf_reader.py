"""Reader of the metadata of a GGUF file: typed values, and errors for unsupported computations.

Source of keys and rules: ``conversion/*.py``, ``src/models/*.cpp`` and ``src/llama-context.cpp`` of
llama.cpp.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NoReturn

from pronk.base.checks import check_integer
from pronk.base.errors import ConfigError, refuse
from pronk.checkpoint.config import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_TAPS,
    MixtureConfig,
    RecurrentConfig,
    RouterScores,
)
from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint
from pronk.checkpoint.rope import check_positive

# Keys of computations that most architectures do without, each with the values that leave the
# computation out. Any other value raises an error, unless the parser of the architecture reads the
# key.
_UNSUPPORTED_KEYS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(
        "attention.clamp_kqv attention.kv_lora_rank attention.max_alibi_bias attention.q_lora_rank "
        "attention.relative_buckets_count attention.scale attention.shared_kv_layers "
        "attention.temperature_scale "
        "attn_logit_softcapping embedding_length_per_layer_input expert_count expert_shared_count "
        "expert_shared_feed_forward_length final_logit_softcapping leading_dense_block_count "
        "n_deepstack_layers "
        "nextn_predict_layers rope.dimension_sections rope.scaling.yarn_log_multiplier "
        "shortconv.l_cache "
        "ssm.conv_kernel swiglu_clamp_exp swiglu_clamp_shexp swin_norm "
        "use_parallel_residual".split(),
        (0,),
    ),
    **dict.fromkeys(
        "attention.output_scale embedding_scale expert_group_count expert_weights_scale "
        "full_attention_interval "
        "logit_scale residual_scale rope.scaling.alpha".split(),
        (0, 1),
    ),
    **dict.fromkeys(
        "attention.causal expert_weights_norm rope.scaling.attn_factor "
        "rope.scaling.yarn_attn_factor".split(),
        (1,),
    ),
    # softmax: 1 over the scores of all experts, 3 over those of the chosen experts
    "expert_gating_func": (0, 1, 3),
    "rope.scaling.yarn_ext_factor": (1, -1),
}


# Values of ``expert_gating_func``: the function that gives the scores of experts; 0: the
# architecture decides, 3: softmax over the scores of the chosen experts.
_GATING_FUNCTIONS: dict[int, RouterScores | None] = {
    0: None,
    1: "softmax",
    2: "sigmoid",
    3: "softmax",
}


class GgufReader:
    """Typed access to the metadata of a GGUF file, such as ``llama.block_count``.

    Methods take the part of the key after the architecture, such as ``block_count``. A value of a
    wrong type or out of range raises a ConfigError.
    """

    def __init__(self, checkpoint: GgufCheckpoint, architecture: str) -> None:
        self.checkpoint = checkpoint
        self.architecture = architecture
        self.used: set[str] = set()  # keys that were read; see check_unsupported()

    def label(self, key: str) -> str:
        """Return ``FILE: ARCHITECTURE.KEY``, for error messages."""
        return f"{self.checkpoint.folder}: {self.architecture}.{key}"

    def refuse(self, key: str, problem: str) -> NoReturn:
        """Raise a ConfigError with the message ``FILE: ARCHITECTURE.KEY: problem``."""
        refuse(self.label(key), problem, ConfigError)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or ``default`` if the file lacks the key.

        If the value is an array with an element per layer, all elements must be equal, and one of
        them is returned.
        """
        self.used.add(key)
        value = self.checkpoint.header.get(f"{self.architecture}.{key}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                self.refuse(key, "expected the same value in all layers, found several")
            value = value[0]
        value = value[:80] if isinstance(value, str) else value
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, maximum: int = 2**31 - 1) -> int:
        """Return the value of a key, an integer from 1 to ``maximum``; ``default`` if absent."""
        return check_integer(self.label(key), self.get(key, default), 1, maximum, error=ConfigError)

    def num_layers(self) -> int:
        """Return the number of layers without MTP heads, which ``block_count`` counts, too."""
        heads = self.get("nextn_predict_layers", 0)
        count = self.integer("block_count") - heads if isinstance(heads, int) else None
        return check_integer(self.label("block_count"), count, 1, error=ConfigError)

    def per_layer(self, key: str, num_layers: int, *, varies: bool = False) -> list[int]:
        """Return the value of a key for each layer: integers of at least 0.

        Args:
            key: the key; its value is an array, or one number for all layers.
            num_layers: number of layers.
            varies: whether the numbers may differ; otherwise all numbers above 0 must be equal.

        Raises:
            ConfigError: the value is no such array or number.
        """
        self.used.add(key)
        value = self.checkpoint.header.get(f"{self.architecture}.{key}")
        values = value if isinstance(value, list) else [value] * num_layers
        if len(values) != num_layers or not all(
            isinstance(each, int) and each >= 0 for each in values
        ):
            self.refuse(
                key, f"expected a number for each of {num_layers} layers, found {values!r:.80}"
            )
        if not varies and len({*values} - {0}) > 1:
            self.refuse(
                key, f"expected 0 or the same value in all layers, found {sorted({*values})!r:.80}"
            )
        return values

    def number(self, key: str, default: float | None = None, bound: float = 0) -> float:
        """Return the value of a key, a number above ``bound``; ``default`` if the key is absent."""
        return shortest_decimal(check_positive(self.label(key), self.get(key, default), bound))

    def optional_number(self, key: str) -> float | None:
        """Return the value of a key, a number above 0; ``None`` if the key is absent or 0."""
        return self.number(key) if self.get(key) else None

    def mixture(
        self,
        num_layers: int,
        *,
        bias: bool = False,
        normalized: bool = True,
        scores: RouterScores = "softmax",
        epsilon: float = 0.0,
    ) -> MixtureConfig | None:
        """Return the mixture of experts of all layers but the first ``leading_dense_block_count``.

        Return ``None`` if the file has no experts.

        Args:
            num_layers: number of layers of the model.
            bias: whether experts have biases.
            normalized: whether the weights of a row's experts sum to a constant, if the file does
                not say it.
            scores: function that gives the scores, if the file does not say it.
            epsilon: that of MixtureConfig.
        """
        if not self.get("expert_count"):
            return None
        count = self.integer("expert_count", maximum=MAX_EXPERTS)
        width = self._count("expert_feed_forward_length", 0) or self.integer("feed_forward_length")
        function = self._choice("expert_gating_func", 0, tuple(_GATING_FUNCTIONS))
        num_dense = self._choice("leading_dense_block_count", 0, range(num_layers))
        mixture = MixtureConfig(
            count,
            self.integer("expert_used_count", maximum=count),
            width,
            normalized=bool(self.get("expert_weights_norm", normalized)) or function == 3,
            layers=tuple(layer >= num_dense for layer in range(num_layers)),
            bias=bias,
            scores=_GATING_FUNCTIONS[function] or scores,
            correction=f"blk.{num_dense}.exp_probs_b.bias" in self.checkpoint,
            groups=self._count("expert_group_count", 1),
            row_groups=self._count("expert_group_used_count", 1),
            scale=self.optional_number("expert_weights_scale") or 1.0,
            epsilon=epsilon,
            shared_width=self._shared_width(width),
        )
        if not mixture.has_valid_groups:
            found = f"{mixture.groups} groups, of which a row chooses {mixture.row_groups}"
            self.refuse("expert_group_count", f"expected groups of {count} experts, found {found}")
        return mixture

    def _count(self, key: str, default: int) -> int:
        """Return the value of a key, a number above 0; ``default`` if it is absent or 0."""
        return self.integer(key) if self.get(key) else default

    def _choice(self, key: str, default: int, choices: Sequence[int]) -> int:
        """Return the value of a key, one of some numbers; ``default`` if the key is absent."""
        value = self.get(key, default)
        if value not in choices:
            expected = f"one of {', '.join(map(str, choices))}"
            self.refuse(key, f"expected {expected:.60}, found {value!r:.80}")
        return int(value)

    def _shared_width(self, width: int) -> int:
        """Return the width of all shared experts together; 0: the file has none.

        If the file does not state the width, they are as wide as ``width`` each.
        """
        num_shared = self._count("expert_shared_count", 0)
        return self._count("expert_shared_feed_forward_length", num_shared * width)

    def recurrence(self, layers: tuple[bool, ...]) -> RecurrentConfig:
        """Return the sizes of recurrent layers, with the rule of Gated DeltaNet.

        ``layers`` says which layers are recurrent. Their convolution has a bias if the file has
        one.
        """
        key_heads = self.integer("ssm.group_count")
        value_heads = self.integer("ssm.time_step_rank")
        size = self.integer("ssm.inner_size")
        if value_heads % key_heads:
            self.refuse(
                "ssm.time_step_rank",
                f"expected a multiple of ssm.group_count = {key_heads}, found {value_heads}",
            )
        if size % value_heads or size // value_heads > MAX_HEAD_DIM:
            expected = f"expected {value_heads} times at most {MAX_HEAD_DIM}"
            self.refuse("ssm.inner_size", f"{expected}, found {size}")
        bias = f"blk.{layers.index(True)}.ssm_conv1d.bias"
        return RecurrentConfig(
            layers=layers,
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=self.integer("ssm.state_size", maximum=MAX_HEAD_DIM),
            value_dim=size // value_heads,
            taps=self.integer("ssm.conv_kernel", maximum=MAX_TAPS),
            filter_bias=bias in self.checkpoint,
        )

    def windows(
        self, num_layers: int, period: int, size: int | None = None
    ) -> tuple[int | None, ...]:
        """Return the sliding window of each layer in tokens, ``None`` for full attention.

        The size of the window is ``attention.sliding_window``, by default ``size``; without either,
        or with 0, all layers have full attention. ``attention.sliding_window_pattern`` says which
        layers have a window: it is an array of a boolean per layer, or a number n such that every
        n-th layer has full attention. By default n is ``period``.
        """
        key = "attention.sliding_window_pattern"
        size = (
            self.integer("attention.sliding_window", size)
            if self.get("attention.sliding_window", size)
            else None
        )
        pattern = self.checkpoint.header.get(f"{self.architecture}.{key}")
        if not isinstance(pattern, list):
            period = self.integer(key, period)
            pattern = [(layer + 1) % period > 0 for layer in range(num_layers)]
        if len(pattern) != num_layers:
            self.refuse(
                key, f"expected a boolean for each of {num_layers} layers, found {len(pattern)}"
            )
        return tuple(size if slides else None for slides in pattern)

    def check_unsupported(self) -> None:
        """Raise a ConfigError if the file asks for a computation that the parser ignores.

        This is the case if a key of :data:`_UNSUPPORTED_KEYS` was not read and has another value
        than those that leave the computation out.
        """
        for key, off_values in _UNSUPPORTED_KEYS.items():
            if key in self.used:
                continue
            value = self.checkpoint.header.get(f"{self.architecture}.{key}")
            values = value if isinstance(value, list) else [value]
            if value is not None and any(item not in off_values for item in values):
                msg = (
                    f"{self.label(key)} = {value!r:.80} is not supported; expected a plain "
                    f"{self.architecture} model"
                )
                raise ConfigError(msg)
        if "attention.sliding_window" in self.used:
            return
        window = self.get("attention.sliding_window", 0)
        if isinstance(window, int) and 0 < window < self.integer("context_length"):
            msg = (
                f"{self.label('attention.sliding_window')} = {window} is not supported; expected "
                "full attention"
            )
            raise ConfigError(msg)


def shortest_decimal(value: float) -> float:
    """Return ``value`` rounded to 7 digits if both are the same float32, else ``value``.

    GGUF files store float32: 9.999999747378752e-06 is 1e-05.
    """
    decimal = float(f"{value:.7g}")
    return decimal if struct.pack("<f", decimal) == struct.pack("<f", value) else value
