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

from pronk.architecture.config import ModelConfig
from pronk.checks import check_choice, check_integer
from pronk.drafters.from_target.modules.files import DrafterWeights
from pronk.errors import OptionError
from pronk.models.linear import Norm
from pronk.models.program import Program

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
            check_integer(name, value, 1, maximum)
        check_choice("unembeddings", self.unembeddings, UNEMBEDDINGS)
        if self.accuracies and len(self.accuracies) != self.num_heads:
            msg = f"accuracies: expected those of {self.num_heads} heads, found {len(self.accuracies)}"
            raise OptionError(msg)


class MedusaHeads:
    """Heads of one target, whose configuration is ``config``."""

    def __init__(self, shape: MedusaShape, config: ModelConfig, weights: DrafterWeights) -> None:
        self.shape = shape
        vocab, size, heads = config.vocab_size, config.hidden_size, range(shape.num_heads)
        self._blocks = [
            [weights.linear(f"layers.{head}.blocks.{block}", size, size, bias=True) for block in range(shape.blocks)]
            for head in heads
        ]
        with_copy = heads if shape.unembeddings == "replicated" else ()
        self.unembeddings = [weights.linear(f"unembeddings.{head}", vocab, size) for head in with_copy]

    def compile(self, head: int, norm: Norm, program: Program) -> None:
        """Append the target's final ``norm``, then the residual blocks of head number ``head`` (from 0)."""
        program.norm(norm)
        for block in self._blocks[head]:
            program.linear(block, activation="silu", residual=True)
