"""Kangaroo's adapter: from an early layer's output to the target's head (Liu et al. 2024, 3.1).

Let ``f`` be the output of the target's layer ``l``. The draft's logits are ``head(A(f))``, with one
of four adapters::

    attention      A(f) = norm(f + attention(norm(f)))      head of the target: the paper's choice
    head           A(f) = norm(f + attention(norm(f)))      head of its own
    transformer    A(f) = norm(layer(f))                    head of the target
    mlp            A(f) = norm(f + W₂ silu(W₁ norm(f)))     head of its own, no attention

The adapters after the first are the ablations of table 2. Attention is multi-head: as many
key/value heads as query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from pronk import OptionError
from pronk.backends import Attention, Layer, Program
from pronk.base.checks import check_choice, check_integer
from pronk.checkpoint import ModelConfig
from pronk.lab.drafters.modules.files import DrafterWeights

ADAPTERS = ("attention", "head", "transformer", "mlp")
# Default number of layers up to the exit layer, as a fraction of the target's layers.
_DEFAULT_EXIT = 1 / 8


@dataclass(frozen=True)
class KangarooShape:
    """Sizes of an adapter that do not follow from the target.

    Attributes:
        exit_layer: number (from 1) of the target's layer whose output the adapter reads; not the
            last layer.
        adapter: kind of adapter, one of ``ADAPTERS``.
        heads: number of attention heads, each of the target's head size.
        mlp: hidden neurons of the feed-forward network, only for the kind ``transformer``.
    """

    exit_layer: int
    adapter: str = "attention"
    heads: int = 1
    mlp: int = 1

    def __post_init__(self) -> None:
        check_choice("adapter", self.adapter, ADAPTERS)
        for name in ("exit_layer", "heads", "mlp"):
            check_integer(name.replace("_", "-"), getattr(self, name), 1)

    @classmethod
    def of_target(
        cls,
        config: ModelConfig,
        exit_layer: int | None,
        adapter: str,
        heads: int | None = None,
        mlp: int | None = None,
    ) -> KangarooShape:
        """Return a valid shape for a target of configuration ``config``.

        By default the exit is at 1/8 of the target's layers, and sizes are the target's. Raises
        OptionError if the target has no such exit layer.
        """
        if exit_layer is None:
            exit_layer = max(1, round(config.num_layers * _DEFAULT_EXIT))
        if heads is None:
            heads = config.num_heads
        if mlp is None:
            mlp = config.intermediate_size
        shape = cls(exit_layer, adapter, heads, mlp)
        shape.check(config)
        return shape

    def check(self, config: ModelConfig) -> None:
        """Raise :class:`~pronk.base.errors.OptionError` if the target has no such exit layer."""
        num_layers = config.num_layers
        if num_layers == 1:
            msg = (
                "exit-layer: expected a target of at least 2 layers, found 1; train another "
                "drafter for it"
            )
            raise OptionError(msg)
        if self.exit_layer >= num_layers:
            limits = f"1 to {num_layers - 1} for a target of {num_layers} layers"
            msg = f"exit-layer: expected {limits}, found {self.exit_layer}"
            raise OptionError(msg)

    @property
    def has_attention(self) -> bool:
        """Whether the adapter has attention, and so a KV cache."""
        return self.adapter != "mlp"

    @property
    def has_own_head(self) -> bool:
        """Whether the adapter has a head of its own."""
        return self.adapter in {"head", "mlp"}

    def config(self, target: ModelConfig) -> ModelConfig:
        """Return the configuration of the adapter's attention: a decoder of one layer.

        It has the exit layer's sliding window, since hidden states of tokens outside that window
        are not kept.
        """
        return target.plain_layers(
            self.exit_layer - 1,
            num_heads=self.heads,
            num_kv_heads=self.heads,
            intermediate_size=self.mlp,
            rope=target.rope_of(0),  # adapters are trained with the RoPE of the first layer
        )


class KangarooAdapter:
    """Kangaroo's adapter with its weights; ``target`` is the configuration of the target model."""

    def __init__(self, shape: KangarooShape, target: ModelConfig, weights: DrafterWeights) -> None:
        shape.check(target)
        self.shape = shape
        self.config = shape.config(target)
        vocab = target.vocab_size
        size = target.hidden_size
        self.block: Attention | _TwoLinears
        if shape.adapter == "mlp":
            self.block = _TwoLinears(self.config, weights)
        elif shape.adapter == "transformer":
            self.block = weights.layer(Layer(self.config), "layers.0")
        else:
            self.block = weights.attention(Attention(self.config), "layers.0")
        self.norm = weights.norm("norm", target, size)
        self.head = weights.linear("head", vocab, size) if shape.has_own_head else None

    def compile_part(self, index: int, program: Program) -> None:
        """Append the operations of the adapter, whose only part is 0, to a program.

        The operations map the exit layer's output ``[rows, hidden]`` to the head's input, of the
        same shape.
        """
        self.block.compile(program, index)
        program.norm(self.norm)


class _TwoLinears:
    """Adapter without attention: ``x + down(silu(up(norm(x))))``."""

    def __init__(self, config: ModelConfig, weights: DrafterWeights) -> None:
        size = config.hidden_size
        self.input_norm = weights.norm("layers.0.input_norm", config, size)
        self.up = weights.linear("layers.0.up", size, size)
        self.down = weights.linear("layers.0.down", size, size)

    def compile(self, program: Program, index: int) -> None:  # noqa: ARG002 - as all blocks
        program.linear(self.up, norm=self.input_norm, activation="silu", to="B")
        program.linear(self.down, source="B", residual=True)
