"""Multi-token heads that learn from a frozen target, trained one head at a time.

The logits of all heads, and their gradients, would be the largest tensors in memory. Therefore each head goes forward
and backward before the next one, and only the gradient at the trunk accumulates, one row of the hidden size per token
(section 2 and figure 2 of the paper). If heads read other heads, all go forward first, then come the losses one by
one, and last the gradients from the head furthest from the trunk back to the trunk (figure S11).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pronk.drafters.from_target.modules.heads import HeadsShape, MultiTokenHeads
from pronk.drafters.from_target.modules.medusa import MedusaHeads
from pronk.train.attention import DenseAttention, dense_rope
from pronk.train.features import Features
from pronk.train.student import Branch, Student

__all__ = ["HeadsStudent", "Stage", "ahead", "describe", "head_by_head", "head_stages", "head_weight"]

# The number of a prediction, and the function from its input ``[rows, hidden]`` to the input of its norm.
Stage = tuple[int, Callable[[Tensor], Tensor]]


class HeadsStudent(Student[MultiTokenHeads]):
    """Heads of a ``HeadsShape``; head ``i`` learns the target's distribution ``i`` positions further on."""

    kind = "multi_token"
    what = "Multi-token heads"

    def build(self, generator: torch.Generator) -> MultiTokenHeads:
        """Build heads near the identity, with the target's norm and unembedding."""
        self.hidden = (self.options.shape.layer,)
        heads = MultiTokenHeads(self.options.shape, self.teacher.llm.config)
        heads.initialize(generator, self.teacher.decoder.norm, self.teacher.unembedding)
        return heads

    def branches(self, tokens: Tensor, features: Features) -> Iterator[Branch]:
        """Yield one branch per head, nearest token first, for the rows with a token that far ahead."""
        heads, (batch, length) = self.module, tokens.shape
        z = features.hidden[heads.shape.layer].float()
        rope = dense_rope(self.teacher.decoder, batch, length, z.dtype, z.device)
        attend = DenseAttention(batch, length, heads.config.windows)
        for index, out in head_by_head(head_stages(heads, rope, attend), z, chained=heads.shape.chained):
            rows, said = ahead(batch, length, index + 1, tokens.device)
            if len(rows):  # held-out sequences may be shorter
                yield Branch(heads.norm(index, out[rows]), head_weight(heads, index, self.teacher.unembedding), said)

    @property
    def description(self) -> str:
        """Its shape in words, for the card."""
        return describe(self.options.shape)


def describe(shape: HeadsShape) -> str:
    """Return a shape in words, for a card."""
    layer = f"a transformer layer with an MLP of {shape.mlp}" if shape.kind == "transformer" else "a linear layer"
    return (
        f"{shape.num_heads} heads for the tokens 2 to {shape.num_heads + 1} places ahead, {shape.order}, over the "
        f"output of the target's layer {shape.layer}; each is {layer} and a norm, with {shape.unembeddings} "
        "unembeddings."
    )


def head_weight(heads: MultiTokenHeads | MedusaHeads, index: int, shared: Tensor) -> Tensor:
    """Return the unembedding ``[vocab, hidden]`` of a head: its own, or else ``shared``, the target's."""
    return heads.unembeddings[index].get_parameter("weight") if heads.unembeddings else shared


def head_stages(heads: MultiTokenHeads, rope: tuple[Tensor, Tensor] | None, attend: DenseAttention) -> list[Stage]:
    """Return the heads in order of execution, for rows with these rotations and this attention."""

    def stage(index: int) -> Stage:
        return index, lambda x: heads.run_part(index, x, rope, attend)

    return [stage(index) for index in heads.shape.sequence]


def head_by_head(stages: Sequence[Stage], z: Tensor, *, chained: bool) -> Iterator[tuple[int, Tensor]]:
    """Yield number and output ``[rows, hidden]`` of each stage, by rising numbers.

    The caller runs backward on an output before it takes the next one. After the last one, if ``chained``, the
    gradients go from stage to stage, and to ``z`` if it requires a gradient.

    Args:
        stages: stages in order of execution.
        z: ``[rows, hidden]``, the trunk's output; a leaf.
        chained: whether each stage reads the output of the one before; otherwise all read ``z``.
    """
    if not chained:
        for number, apply in sorted(stages, key=lambda stage: stage[0]):
            yield number, apply(z)
        return
    made: list[tuple[int, Tensor, Tensor]] = []
    x = z
    for number, apply in stages:
        out = apply(x)
        x = out.detach().requires_grad_()
        made.append((number, out, x))
    for number, _, x in sorted(made, key=lambda each: each[0]):
        yield number, x
    for _, out, x in reversed(made):
        if out.requires_grad:
            out.backward(x.grad)


def ahead(batch: int, length: int, places: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rows with a token ``places`` later in their sequence, and the rows of these later tokens.

    For two sequences of 3 rows and 1 place: ``0 1 3 4`` and ``1 2 4 5``.
    """
    every = torch.arange(batch * length, device=device).view(batch, length)
    return every[:, : length - places].reshape(-1), every[:, places:].reshape(-1)
