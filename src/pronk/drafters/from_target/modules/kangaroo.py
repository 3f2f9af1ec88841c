"""Kangaroo's adapter: from an early layer's output to the target's head (Liu et al. 2024, 3.1).

With ``f`` the output of the target's layer number ``l``, the self-draft model of the paper is ``head(A(f))``, where ::

    attention      A(f) = norm(f + attention(norm(f)))          the paper's; the head is the target's own
    head           the same, with a head of its own
    transformer    A(f) = norm(layer(f))                        with post norm and feed-forward network
    mlp            A(f) = norm(f + W₂ silu(W₁ norm(f)))         no attention, with a head of its own

The last three are the ablations of table 2. Attention is multi-head: as many key/value heads as query heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pronk.architecture.config import ModelConfig
from pronk.errors import OptionError
from pronk.models.decoder import Attend, Layer, empty_linear, make_norm
from pronk.models.linear import Linear
from pronk.models.program import Program

__all__ = ["ADAPTERS", "KangarooAdapter", "KangarooShape"]

ADAPTERS = ("attention", "head", "transformer", "mlp")
_SHARE = 8  # by default the exit is after the first 1/8 of the target's layers


@dataclass(frozen=True)
class KangarooShape:
    """Sizes of an adapter, beside the target's.

    Attributes:
        exit_layer: the layer whose output is read, from 1 to the one before the target's last.
        adapter: one of :data:`ADAPTERS`.
        heads: attention heads, each of the target's head size.
        mlp: width of the feed-forward network of ``transformer``.
    """

    exit_layer: int
    adapter: str = "attention"
    heads: int = 1
    mlp: int = 1

    def __post_init__(self) -> None:
        if self.adapter not in ADAPTERS:
            msg = f"adapter: expected one of {', '.join(ADAPTERS)}, found {self.adapter!r}"
            raise OptionError(msg)
        for name in ("exit_layer", "heads", "mlp"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                msg = f"{name.replace('_', '-')}: expected an integer of at least 1, found {value!r}"
                raise OptionError(msg)

    @classmethod
    def of_target(
        cls, config: ModelConfig, exit_layer: int | None, adapter: str, heads: int | None = None, mlp: int | None = None
    ) -> KangarooShape:
        """Return a shape; by default the exit is after 1/8 of the layers, the sizes are the target's."""
        shape = cls(
            max(1, round(config.num_layers / _SHARE)) if exit_layer is None else exit_layer,
            adapter,
            config.num_heads if heads is None else heads,
            config.intermediate_size if mlp is None else mlp,
        )
        shape.check(config)
        return shape

    def check(self, config: ModelConfig) -> None:
        """Raise :class:`~pronk.errors.OptionError` if the target has no such exit layer."""
        max_layer = config.num_layers - 1
        if not max_layer:
            msg = "exit-layer: expected a target of at least 2 layers, found 1; train another drafter for it"
            raise OptionError(msg)
        if self.exit_layer > max_layer:
            msg = (
                f"exit-layer: expected 1 to {max_layer} for a target of {max_layer + 1} layers, found {self.exit_layer}"
            )
            raise OptionError(msg)

    @property
    def attends(self) -> bool:
        """Whether the adapter has attention, and so a cache."""
        return self.adapter != "mlp"

    @property
    def own_head(self) -> bool:
        """Whether the adapter has a head of its own."""
        return self.adapter in {"head", "mlp"}

    def config(self, target: ModelConfig) -> ModelConfig:
        """Return the configuration of the adapter's attention, a decoder of one layer.

        The window is that of the exit layer, whose rows may be gone beyond it.
        """
        window = target.windows[self.exit_layer - 1] if target.windows else None
        return replace(
            target,
            num_layers=1,
            num_heads=self.heads,
            num_kv_heads=self.heads,
            intermediate_size=self.mlp,
            windows=(window,),
        )


class KangarooAdapter(nn.Module):
    """The adapter, on packed rows; the weights are float32 and not initialized."""

    def __init__(self, shape: KangarooShape, target: ModelConfig) -> None:
        super().__init__()
        shape.check(target)
        self.shape = shape
        self.config = shape.config(target)
        self.layers = nn.ModuleList([_BLOCKS[shape.adapter](self.config)])
        vocab, size = target.vocab_size, target.hidden_size
        self.norm = make_norm(target, size)
        self.head: Linear | None = empty_linear(vocab, size, False) if shape.own_head else None

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, attend: Attend) -> Tensor:
        """Map the exit layer's output ``[rows, hidden]`` to the head's input; ``attend`` is for layer 0."""
        return self.norm(self.layers[0](x, rope, 0, attend))

    def part(self, index: int, x: Tensor, rope: tuple[Tensor, Tensor] | None, attend: Attend) -> Tensor:  # noqa: ARG002 - there is one
        """Call :meth:`forward`, as a :class:`~pronk.drafters.shared.side_cache.AttendingModule`."""
        return self(x, rope, attend)

    def compile_part(self, index: int, program: Program) -> None:
        """Compile the adapter for the kernels."""
        self.layers[index].compile(program, index)
        program.norm(self.norm)

    def initialize(self, generator: torch.Generator, norm: nn.Module, head: Tensor) -> None:
        """Set random weights for training; ``norm``, and ``head`` if used, are copied from the target."""
        with torch.no_grad():
            for name, parameter in self.layers.named_parameters():
                if parameter.dim() == 1:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                else:
                    parameter.normal_(0.0, 0.02, generator=generator)
            self.norm.load_state_dict({name: value.float() for name, value in norm.state_dict().items()})
            if self.head is not None:
                self.head.load_state_dict({"weight": head.float()})


class _Attention(Layer):
    """Input norm, attention and residual: the first half of a layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, empty_linear)
        del self.mlp_norm, self.up, self.down

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, index: int, attend: Attend) -> Tensor:
        return self.apply_attention(x, rope, index, attend)

    def compile(self, program: Program, index: int) -> None:
        program.attention(self, index)


class _TwoLinears(nn.Module):
    """Input norm, two linears and residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.input_norm = make_norm(config, size)
        self.up, self.down = empty_linear(size, size, False), empty_linear(size, size, False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, index: int, attend: Attend) -> Tensor:  # noqa: ARG002 - as all blocks
        return x + self.down(F.silu(self.up(self.input_norm(x))))

    def compile(self, program: Program, index: int) -> None:  # noqa: ARG002 - as all blocks
        program.linear(self.up, norm=self.input_norm, activation="silu", to="B")
        program.linear(self.down, source="B", residual=True)


_BLOCKS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "attention": _Attention,
    "head": _Attention,
    "transformer": lambda config: Layer(config, empty_linear),
    "mlp": _TwoLinears,
}
