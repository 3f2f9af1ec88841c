"""Training of multi-token heads (Gloeckle et al. 2024) on a frozen target.

:mod:`pronk.train.future` uses this module to train heads together with the trunk.

The logits of all heads, and their gradients, would be the largest tensors in memory. Therefore each step runs every
head forward and backward before the next one. If the trunk is trained, the gradient of its output accumulates over the
heads (section 2 and figure 2). If heads read the outputs of other heads, all heads run forward first. Then the losses
are computed one by one, and at last the gradients run back through the chain of heads (figure S11).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pronk.drafters.from_target.modules.heads import HeadsShape
from pronk.train.attention import DenseAttention, dense_rope
from pronk.train.features import Features
from pronk.train.modules.heads import HeadsModule
from pronk.train.modules.medusa import MedusaModule
from pronk.train.student import Branch, Student

__all__ = ["HeadsStudent", "Stage", "describe", "head_by_head", "head_stages", "head_weight", "shifted_rows"]

# Number of a head, and the function that maps ``[rows, hidden]`` to its output before its norm, of the same shape.
Stage = tuple[int, Callable[[Tensor], Tensor]]


class HeadsStudent(Student[HeadsModule]):
    """Training of heads; head ``i`` learns the target's distribution ``i`` positions further on."""

    kind = "multi_token"
    title = "Multi-token heads"

    def build(self, generator: torch.Generator) -> HeadsModule:
        """Build heads that nearly copy their input at first, with the target's norm and unembedding."""
        self.hidden = (self.options.shape.layer,)
        heads = HeadsModule(self.options.shape, self.teacher.llm.config)
        heads.initialize(generator, self.teacher.decoder.norm, self.teacher.unembedding)
        return heads

    def branches(self, tokens: Tensor, features: Features) -> Iterator[Branch]:
        """Yield one branch per head, nearest token first; the last rows of a sequence have fewer branches."""
        heads, (batch, length) = self.module, tokens.shape
        z = features.hidden[heads.shape.layer].float()
        rope = dense_rope(self.teacher.decoder, batch, length, z.dtype, z.device)
        attend = DenseAttention(batch, length, heads.config.windows)
        for index, out in head_by_head(head_stages(heads, rope, attend), z, chained=heads.shape.is_chained):
            rows, target_rows = shifted_rows(batch, length, index + 1, tokens.device)
            if len(rows):  # empty if a held-out sequence is too short for this head
                weight = head_weight(heads, index, self.teacher.unembedding)
                yield Branch(heads.norm(index, out[rows]), weight, target_rows)

    @property
    def description(self) -> str:
        """Sizes of the module in words, for the model card."""
        return describe(self.options.shape)


def describe(shape: HeadsShape) -> str:
    """Return the heads' sizes in words, for a model card."""
    layer = f"a transformer layer with an MLP of {shape.mlp}" if shape.kind == "transformer" else "a linear layer"
    return (
        f"{shape.num_heads} heads for the tokens 2 to {shape.num_heads + 1} places ahead, {shape.order}, over the "
        f"output of the target's layer {shape.layer}; each is {layer} and a norm, with {shape.unembeddings} "
        "unembeddings."
    )


def head_weight(heads: HeadsModule | MedusaModule, index: int, shared: Tensor) -> Tensor:
    """Return a head's unembedding ``[vocab, hidden]``: its own, or ``shared`` if it has none."""
    return heads.unembeddings[index].get_parameter("weight") if heads.unembeddings else shared


def head_stages(heads: HeadsModule, rope: tuple[Tensor, Tensor] | None, attend: DenseAttention) -> list[Stage]:
    """Return index and function of each head, in order of execution; ``rope``: rotations of the rows."""

    def stage(index: int) -> Stage:
        return index, lambda x: heads.run_part(index, x, rope, attend)

    return [stage(index) for index in heads.shape.execution_order]


def head_by_head(stages: Sequence[Stage], z: Tensor, *, chained: bool) -> Iterator[tuple[int, Tensor]]:
    """Yield number and output ``[rows, hidden]`` of each head, by ascending number.

    The caller runs backward from each output before it takes the next one. If ``chained``, the iterator finally passes
    the gradients back through the stages, and to ``z`` if it requires a gradient.

    Args:
        stages: heads in order of execution.
        z: input of the first stage, ``[rows, hidden]``; a leaf of the autograd graph.
        chained: whether each stage reads the output of the stage before it; otherwise all stages read ``z``.
    """
    if not chained:
        for number, apply in sorted(stages, key=lambda stage: stage[0]):
            yield number, apply(z)
        return
    outputs: list[tuple[int, Tensor, Tensor]] = []  # head number, output, detached output
    leaf = z
    for number, apply in stages:
        out = apply(leaf)
        leaf = out.detach().requires_grad_()
        outputs.append((number, out, leaf))
    for number, _, leaf in sorted(outputs, key=lambda output: output[0]):
        yield number, leaf
    for _, out, leaf in reversed(outputs):
        if out.requires_grad:
            out.backward(leaf.grad)


def shifted_rows(batch: int, length: int, places: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the indices of rows that have a row ``places`` later in their sequence, and of these rows.

    For two sequences of 3 rows and 1 place: ``0 1 3 4`` and ``1 2 4 5``.
    """
    all_rows = torch.arange(batch * length, device=device).view(batch, length)
    return all_rows[:, : length - places].reshape(-1), all_rows[:, places:].reshape(-1)
