"""Medusa heads (Cai et al. 2024): what follows the next token, guessed from the target's last hidden state.

With ``h``, the last layer's output at a position after the final norm, from which the target's unembedding ``U`` gives
the next token, head number ``i`` (1 is the first) guesses the token ``i`` further on::

    h_0 = h      h_j = h_(j-1) + SiLU(W_j h_(j-1) + b_j)      logits = U h_blocks

``W`` and ``b`` begin as zeros, so that every head begins as the target's own. The heads share the target's unembedding,
or each has a copy of its own that it changes.
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
    """Heads, and the tree that they guess.

    Attributes:
        num_heads: 1..16.
        blocks: residual blocks of a head, 1..8.
        unembeddings: ``"shared"`` is the target's, ``"replicated"`` one for each head.
        tree: paths of ranks (``rank_tree``), parents first; empty before they have been chosen.
        accuracies: ``[head][rank]``, how often that was the target's token; empty before it was measured.

    Raises:
        OptionError: a value out of its range.
    """

    num_heads: int = 4
    blocks: int = 2
    unembeddings: str = "shared"
    tree: tuple[tuple[int, ...], ...] = ()
    accuracies: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        # JSON has lists.
        object.__setattr__(self, "tree", tuple(tuple(path) for path in self.tree))
        object.__setattr__(self, "accuracies", tuple(tuple(ranks) for ranks in self.accuracies))
        for name, value, most in (("heads", self.num_heads, 16), ("blocks", self.blocks, 8)):
            if type(value) is not int or not 1 <= value <= most:
                msg = f"{name}: expected 1 to {most}, found {value!r}"
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
        """``[rows, hidden]`` after the target's final norm, to what its unembedding takes."""
        for block in self.blocks:
            hidden = hidden + F.silu(block(hidden))
        return hidden

    def compile(self, program: Program) -> None:
        """Describe :meth:`forward` to the kernels."""
        for block in self.blocks:
            program.linear(block, activation="silu", residual=True)


class MedusaHeads(nn.Module):
    """The heads of one target, on packed rows.

    Args:
        shape: of the heads.
        config: of the target.
    """

    def __init__(self, shape: MedusaShape, config: ModelConfig) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(Head(config.hidden_size, shape.blocks) for _ in range(shape.num_heads))
        self.unembeddings = nn.ModuleList(
            PlainLinear(torch.empty(config.vocab_size, config.hidden_size, requires_grad=True))
            for _ in range(shape.num_heads if shape.unembeddings == "replicated" else 0)
        )

    def initialize(self, unembedding: Tensor) -> None:
        """Give heads with unembeddings of their own the target's, ``[vocab, hidden]``; all begin as the target."""
        with torch.no_grad():
            for each in self.unembeddings:
                each.get_parameter("weight").copy_(unembedding)

    def logits(self, hidden: Tensor, unembed: nn.Module) -> Tensor:
        """What every head says, ``[heads, rows, vocab]``.

        Args:
            hidden: ``[rows, hidden]`` after the target's final norm.
            unembed: the target's unembedding, for heads without one; all heads' rows go through it together.
        """
        states = [head(hidden) for head in self.layers]
        if self.unembeddings:
            return torch.stack([own(state) for own, state in zip(self.unembeddings, states, strict=True)])
        logits: Tensor = unembed(torch.cat(states))
        return logits.view(len(states), len(hidden), -1)


def _zero_linear(size: int) -> PlainLinear:
    return PlainLinear(torch.zeros(size, size, requires_grad=True), torch.zeros(size, requires_grad=True))
