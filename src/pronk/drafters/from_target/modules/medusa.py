"""Medusa heads (Cai et al. 2024): predict later tokens from the target's last hidden state.

Let ``h`` be the last layer's output at a position after the final norm, from which the target's unembedding ``U``
predicts the next token. Head ``i`` (1 is the first) predicts the token ``i`` places further on::

    h_0 = h      h_j = h_(j-1) + SiLU(W_j h_(j-1) + b_j)      logits = U h_blocks

``W`` and ``b`` are initialized to zeros, so that every head begins as the target's own. The heads share the target's
unembedding, or each trains a copy of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pronk.architecture.config import ModelConfig
from pronk.errors import OptionError
from pronk.models.linear import PlainLinear
from pronk.models.program import Program

__all__ = ["UNEMBEDDINGS", "Head", "MedusaHeads", "MedusaShape"]

UNEMBEDDINGS = ("shared", "replicated")


@dataclass(frozen=True)
class MedusaShape:
    """Sizes of the heads, and their tree.

    Attributes:
        num_heads: number of heads, 1..16.
        blocks: residual blocks of a head, 1..8.
        unembeddings: ``"shared"`` is the target's, ``"replicated"`` one for each head.
        tree: paths of ranks (:mod:`~pronk.drafters.shared.rank_tree`), parents first; empty before it is chosen.
        accuracies: ``[head][rank]``, how often the rank was the target's token; empty before it is measured.
    """

    num_heads: int = 4
    blocks: int = 2
    unembeddings: str = "shared"
    tree: tuple[tuple[int, ...], ...] = ()
    accuracies: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        # JSON has lists, and a hashable shape needs tuples.
        object.__setattr__(self, "tree", tuple(tuple(path) for path in self.tree))
        object.__setattr__(self, "accuracies", tuple(tuple(ranks) for ranks in self.accuracies))
        for name, value, maximum in (("heads", self.num_heads, 16), ("blocks", self.blocks, 8)):
            if type(value) is not int or not 1 <= value <= maximum:
                msg = f"{name}: expected 1 to {maximum}, found {value!r}"
                raise OptionError(msg)
        if self.unembeddings not in UNEMBEDDINGS:
            msg = f"unembeddings: expected one of {', '.join(UNEMBEDDINGS)}, found {self.unembeddings!r}"
            raise OptionError(msg)
        if self.accuracies and len(self.accuracies) != self.num_heads:
            msg = f"accuracies: expected those of {self.num_heads} heads, found {len(self.accuracies)}"
            raise OptionError(msg)


class Head(nn.Module):
    """The residual blocks of one head."""

    def __init__(self, size: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_zero_linear(size) for _ in range(blocks))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[rows, hidden]`` after the target's final norm to the input of the unembedding."""
        for block in self.blocks:
            hidden = hidden + F.silu(block(hidden))
        return hidden

    def compile(self, program: Program) -> None:
        """Compile :meth:`forward` for the kernels."""
        for block in self.blocks:
            program.linear(block, activation="silu", residual=True)


class MedusaHeads(nn.Module):
    """The heads of one target, on packed rows; ``config`` is the target's."""

    def __init__(self, shape: MedusaShape, config: ModelConfig) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(Head(config.hidden_size, shape.blocks) for _ in range(shape.num_heads))
        self.unembeddings = nn.ModuleList(
            PlainLinear(torch.empty(config.vocab_size, config.hidden_size, requires_grad=True))
            for _ in range(shape.num_heads if shape.unembeddings == "replicated" else 0)
        )

    def initialize(self, unembedding: Tensor) -> None:
        """Copy the target's unembedding ``[vocab, hidden]`` into those of replicated heads."""
        with torch.no_grad():
            for each in self.unembeddings:
                each.get_parameter("weight").copy_(unembedding)

    def logits(self, hidden: Tensor, unembed: nn.Module) -> Tensor:
        """Return ``[heads, rows, vocab]`` for ``hidden`` ``[rows, hidden]`` after the target's final norm.

        ``unembed`` is the target's unembedding; shared heads call it once for all rows.
        """
        states = [head(hidden) for head in self.layers]
        if self.unembeddings:
            return torch.stack([own(state) for own, state in zip(self.unembeddings, states, strict=True)])
        logits: Tensor = unembed(torch.cat(states))
        return logits.view(len(states), len(hidden), -1)


def _zero_linear(size: int) -> PlainLinear:
    return PlainLinear(torch.zeros(size, size, requires_grad=True), torch.zeros(size, requires_grad=True))
