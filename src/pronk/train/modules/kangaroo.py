"""Kangaroo's adapter as a module of torch; see :mod:`pronk.drafters.from_target.modules.kangaroo`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pronk.architecture.config import ModelConfig
from pronk.drafters.from_target.modules.kangaroo import KangarooShape
from pronk.train.modules.decoder import Attend, ModuleLayer, empty_linear, make_norm

__all__ = ["KangarooModule"]


class KangarooModule(nn.Module):
    """Adapter on packed rows ``[rows, hidden]``; the weights are float32 and not initialized."""

    def __init__(self, shape: KangarooShape, target: ModelConfig) -> None:
        super().__init__()
        shape.check(target)
        self.shape = shape
        self.config = shape.config(target)
        self.layers = nn.ModuleList([_BLOCKS[shape.adapter](self.config)])
        vocab, size = target.vocab_size, target.hidden_size
        self.norm = make_norm(target, size)
        self.head = empty_linear(vocab, size, bias=False) if shape.has_own_head else None

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, attend: Attend) -> Tensor:
        """Map the exit layer's output ``[rows, hidden]`` to the head's input, of the same shape."""
        return self.norm(self.layers[0](x, rope, 0, attend))

    def initialize(self, generator: torch.Generator, norm: nn.Module, head: Tensor) -> None:
        """Set initial weights for training: random ones, and copies of the target's ``norm`` and ``head``.

        An adapter without a head of its own ignores ``head``.
        """
        with torch.no_grad():
            for name, parameter in self.layers.named_parameters():
                if parameter.dim() == 1:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                else:
                    parameter.normal_(0.0, 0.02, generator=generator)
            self.norm.load_state_dict({name: value.float() for name, value in norm.state_dict().items()})
            if self.head is not None:
                self.head.load_state_dict({"weight": head.float()})


class _Attention(ModuleLayer):
    """The first half of a decoder layer: ``x + attention(norm(x))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        del self.mlp_norm, self.up, self.down

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, index: int, attend: Attend) -> Tensor:
        return self.apply_attention(x, rope, index, attend)


class _TwoLinears(nn.Module):
    """Adapter without attention: ``x + down(silu(up(norm(x))))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.input_norm = make_norm(config, size)
        self.up, self.down = empty_linear(size, size, bias=False), empty_linear(size, size, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, index: int, attend: Attend) -> Tensor:  # noqa: ARG002 - as all blocks
        return x + self.down(F.silu(self.up(self.input_norm(x))))


_BLOCKS: dict[str, type[nn.Module]] = {
    "attention": _Attention,
    "head": _Attention,
    "transformer": ModuleLayer,
    "mlp": _TwoLinears,
}
