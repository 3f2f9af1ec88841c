"""Medusa heads (Cai et al. 2024), which predict later tokens from the target's last hidden state.

Let ``h`` be the output of the target's last layer and final norm at position ``t``. From ``h`` the target's unembedding
``U`` predicts the token at ``t + 1``. Head ``i`` (1 is the first) predicts the token at ``t + 1 + i``, with ``n``
residual blocks::

    h_0 = h      h_j = h_(j-1) + SiLU(W_j h_(j-1) + b_j)  for j = 1 … n      logits = U h_n

``W_j`` and ``b_j`` are initialized to zeros, so every head at first predicts what the target predicts. The heads share
the target's unembedding, or each head trains a copy of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pronk.architecture.config import ModelConfig
from pronk.checks import check_choice
from pronk.errors import OptionError
from pronk.models.linear import PlainLinear
from pronk.models.program import Program

__all__ = ["UNEMBEDDINGS", "Head", "MedusaHeads", "MedusaShape"]

UNEMBEDDINGS = ("shared", "replicated")


@dataclass(frozen=True)
class MedusaShape:
    """Sizes of the heads, and the tree of their tokens."""

    num_heads: int = 4  # number of heads, 1..16
    blocks: int = 2  # number of residual blocks of a head, 1..8
    unembeddings: str = "shared"  # ``"shared"``: all heads use the target's; ``"replicated"``: each head has a copy
    tree: tuple[tuple[int, ...], ...] = ()  # paths of ranks (``rank_tree``), parents first; empty during training
    # ``accuracies[head][rank]``: fraction of positions, 0..1, at which the head's token of this rank is the target's
    # likeliest token; empty during training.
    accuracies: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        # Convert the lists of a JSON file to tuples, so that the shape is hashable.
        object.__setattr__(self, "tree", tuple(tuple(path) for path in self.tree))
        object.__setattr__(self, "accuracies", tuple(tuple(ranks) for ranks in self.accuracies))
        for name, value, maximum in (("heads", self.num_heads, 16), ("blocks", self.blocks, 8)):
            if type(value) is not int or not 1 <= value <= maximum:
                msg = f"{name}: expected 1 to {maximum}, found {value!r}"
                raise OptionError(msg)
        check_choice("unembeddings", self.unembeddings, UNEMBEDDINGS)
        if self.accuracies and len(self.accuracies) != self.num_heads:
            msg = f"accuracies: expected those of {self.num_heads} heads, found {len(self.accuracies)}"
            raise OptionError(msg)


class Head(nn.Module):
    """One head: its residual blocks, without the unembedding."""

    def __init__(self, size: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_zero_linear(size) for _ in range(blocks))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map rows ``[rows, hidden]`` after the target's final norm to the input of the unembedding."""
        for block in self.blocks:
            hidden = hidden + F.silu(block(hidden))
        return hidden

    def compile(self, program: Program) -> None:
        """Append the operations of :meth:`forward` to a program of the kernels."""
        for block in self.blocks:
            program.linear(block, activation="silu", residual=True)


class MedusaHeads(nn.Module):
    """Heads of one target, on packed rows ``[rows, hidden]``; ``config`` is the target's."""

    def __init__(self, shape: MedusaShape, config: ModelConfig) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(Head(config.hidden_size, shape.blocks) for _ in range(shape.num_heads))
        self.unembeddings = nn.ModuleList(
            PlainLinear(torch.empty(config.vocab_size, config.hidden_size, requires_grad=True))
            for _ in range(shape.num_heads if shape.unembeddings == "replicated" else 0)
        )

    def initialize(self, unembedding: Tensor) -> None:
        """Copy the target's unembedding ``[vocab, hidden]`` to the heads' own unembeddings, if there are any."""
        with torch.no_grad():
            for own_unembedding in self.unembeddings:
                own_unembedding.get_parameter("weight").copy_(unembedding)

    def logits(self, hidden: Tensor, unembed: nn.Module) -> Tensor:
        """Return logits ``[heads, rows, vocab]``; ``hidden`` ``[rows, hidden]`` is after the final norm.

        ``unembed``, the target's unembedding, is called once for all heads unless the heads have their own.
        """
        states = [head(hidden) for head in self.layers]
        if self.unembeddings:
            return torch.stack([layer(state) for layer, state in zip(self.unembeddings, states, strict=True)])
        logits: Tensor = unembed(torch.cat(states))
        return logits.view(len(states), len(hidden), -1)


def _zero_linear(size: int) -> PlainLinear:
    return PlainLinear(torch.zeros(size, size, requires_grad=True), torch.zeros(size, requires_grad=True))
