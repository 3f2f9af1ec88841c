"""Medusa heads as a module of torch; see :mod:`pronk.drafters.from_target.modules.medusa`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pronk.architecture.config import ModelConfig
from pronk.drafters.from_target.modules.medusa import MedusaShape
from pronk.train.modules.decoder import PlainLinear, empty_linear

__all__ = ["MedusaHeadModule", "MedusaModule"]


class MedusaHeadModule(nn.Module):
    """One head: its residual blocks, without the unembedding."""

    def __init__(self, size: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_zero_linear(size) for _ in range(blocks))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map rows ``[rows, hidden]`` after the target's final norm to the input of the unembedding."""
        for block in self.blocks:
            hidden = hidden + F.silu(block(hidden))
        return hidden


class MedusaModule(nn.Module):
    """Heads of one target, on packed rows ``[rows, hidden]``; ``config`` is the target's.

    A head at first returns its input, since its blocks are initialized to zeros.
    """

    def __init__(self, shape: MedusaShape, config: ModelConfig) -> None:
        super().__init__()
        self.shape = shape
        vocab, size = config.vocab_size, config.hidden_size
        self.layers = nn.ModuleList(MedusaHeadModule(size, shape.blocks) for _ in range(shape.num_heads))
        num_copies = shape.num_heads if shape.unembeddings == "replicated" else 0
        self.unembeddings = nn.ModuleList(empty_linear(vocab, size, bias=False) for _ in range(num_copies))

    def initialize(self, unembedding: Tensor) -> None:
        """Copy the target's unembedding ``[vocab, hidden]`` to the heads' own unembeddings, if there are any."""
        with torch.no_grad():
            for own_unembedding in self.unembeddings:
                own_unembedding.get_parameter("weight").copy_(unembedding)


def _zero_linear(size: int) -> PlainLinear:
    return PlainLinear(torch.zeros(size, size, requires_grad=True), torch.zeros(size, requires_grad=True))
