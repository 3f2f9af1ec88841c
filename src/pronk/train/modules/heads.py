"""Multi-token heads as a module of torch; see :mod:`pronk.drafters.from_target.modules.heads`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pronk.architecture.config import ModelConfig
from pronk.drafters.from_target.modules.heads import HeadsShape, heads_config
from pronk.train.modules.decoder import Attend, ModuleLayer, empty_linear, make_norm

__all__ = ["HeadsModule"]


class HeadsModule(nn.Module):
    """Heads on packed rows ``[rows, hidden]``; the weights are float32 and not initialized.

    ``layers``, one per head, are shared with a target that is trained together with its heads. By default the heads
    have layers of their own.
    """

    def __init__(self, shape: HeadsShape, target: ModelConfig, layers: Sequence[nn.Module] | None = None) -> None:
        super().__init__()
        shape.check(target)
        self.shape = shape
        self.config = heads_config(shape, target)
        size, heads = target.hidden_size, range(shape.num_heads)
        self.layers = nn.ModuleList([self._layer() for _ in heads] if layers is None else layers)
        self.norms = nn.ModuleList(make_norm(target, size) for _ in heads)
        with_copy = heads if shape.unembeddings == "replicated" else ()
        self.unembeddings = nn.ModuleList(empty_linear(target.vocab_size, size, bias=False) for _ in with_copy)

    def _layer(self) -> nn.Module:
        if self.shape.kind == "transformer":
            return ModuleLayer(self.config)
        return empty_linear(self.config.hidden_size, self.config.hidden_size, bias=False)

    def run_part(self, index: int, x: Tensor, rope: tuple[Tensor, Tensor] | None, attend: Attend) -> Tensor:
        """Run the layer of head ``index`` on ``x`` ``[rows, hidden]``; return the same shape.

        ``x`` is the output of the target's layer, or in the causal and anticausal orders that of the head before.
        """
        layer = self.layers[index]
        out: Tensor = layer(x, rope, index, attend) if self.shape.kind == "transformer" else layer(x)
        return out.to(x.dtype)  # autocast makes a linear layer return a narrower dtype

    def norm(self, index: int, x: Tensor) -> Tensor:
        """Apply the norm of head ``index`` to its output; both are ``[rows, hidden]``."""
        out: Tensor = self.norms[index](x)
        return out

    def initialize(self, generator: torch.Generator, norm: nn.Module | None = None, head: Tensor | None = None) -> None:
        """Set initial weights for training: small random ones, so that a head nearly returns its input.

        ``norm``, the target's final norm, is copied to each head's norm; if it is ``None``, the norms' weights are 1.
        ``head`` ``[vocab, hidden]``, the target's unembedding, is copied to the heads' own; ``None``: these are random.
        """
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 1:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                else:
                    # As in GPT-2, the last matrix of a residual branch starts smaller if there are more layers.
                    shrink = (2 * len(self.layers)) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                    parameter.normal_(0.0, 0.02 * shrink, generator=generator)
            if self.shape.kind == "linear":
                for layer in self.layers:
                    weight = layer.get_parameter("weight")
                    weight.add_(torch.eye(len(weight)))
            if norm is not None:
                for head_norm in self.norms:
                    head_norm.load_state_dict({name: value.float() for name, value in norm.state_dict().items()})
            if head is not None:
                for unembedding in self.unembeddings:
                    unembedding.get_parameter("weight").copy_(head)
