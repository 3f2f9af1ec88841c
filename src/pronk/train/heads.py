"""Multi-token heads that learn from a frozen target, and how heads are trained one at a time.

With ``k`` heads, their logits and the gradients of these would be the largest things in memory. So each head goes
forward and backward before the next one begins, and what is kept of all of them is the gradient at the trunk, one row
of the hidden size for each token (section 2 and figure 2 of the paper). Where heads read other heads, all go forward
first, then come the losses one by one, and last the gradients from the head furthest from the trunk back to it
(figure S11).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pronk.drafters.from_target.modules.heads import HeadsShape, MultiTokenHeads
from pronk.errors import OptionError
from pronk.train.attention import DenseAttention
from pronk.train.features import Features
from pronk.train.options import LoopOptions, option_name
from pronk.train.student import Branch, Student

__all__ = [
    "HeadsStudent",
    "Stage",
    "ahead",
    "check_guesses",
    "check_lengths",
    "describe",
    "head_by_head",
    "head_stages",
]

# The number of a guess, and how what it reads ``[rows, hidden]`` becomes what its norm and unembedding read.
Stage = tuple[int, Callable[[Tensor], Tensor]]


class HeadsStudent(Student[MultiTokenHeads]):
    """See :class:`~pronk.train.student.Student`; head ``i`` learns what the target says ``i`` places further on."""

    kind = "multi_token"
    what = "Multi-token heads"

    def build(self, generator: torch.Generator) -> MultiTokenHeads:
        """Heads that hardly change what they read, below norms and unembeddings that are the target's."""
        shape = self.options.shape
        check_lengths(self.options, shape.num_heads)
        check_guesses(self.options.num_tokens, shape.num_heads)
        self.hidden = (shape.layer,)
        heads = MultiTokenHeads(shape, self.teacher.llm.config)
        heads.initialize(generator, self.teacher.decoder.norm, self.teacher.unembedding)
        return heads

    def branches(self, tokens: Tensor, features: Features) -> Iterator[Branch]:
        """One for each head, from the nearest token on, without the last rows, after which nothing is known."""
        heads, decoder, (batch, length) = self.module, self.teacher.decoder, tokens.shape
        z = features.hidden[heads.shape.layer].float()
        positions = torch.arange(length, device=tokens.device).repeat(batch)
        rope = decoder.rope(positions, positions + 1, z.dtype)
        attend = DenseAttention(batch, length, heads.config.windows)
        for index, out in head_by_head(head_stages(heads, rope, attend), z, chained=heads.shape.chained):
            rows, said = ahead(batch, length, index + 1, tokens.device)
            if len(rows):  # a held-out text may be that short
                own = heads.unembeddings[index].get_parameter("weight") if heads.unembeddings else None
                yield Branch(heads.norm(index, out[rows]), self.teacher.unembedding if own is None else own, said)

    @property
    def description(self) -> str:
        """Its shape, in words, for the card."""
        return describe(self.options.shape)


def check_lengths(options: LoopOptions, num_heads: int) -> None:
    """Raise :class:`~pronk.errors.OptionError` if sequences end before what the last head is to guess."""
    for name, length in options.lengths.items():
        if length <= num_heads:
            msg = f"{option_name(name)}: expected at least {num_heads + 1} for {num_heads} heads, found {length}"
            raise OptionError(msg)


def check_guesses(num_tokens: int, num_heads: int) -> None:
    """Raise :class:`~pronk.errors.OptionError` if more is to be guessed than there are heads."""
    if num_tokens > num_heads:
        msg = f"num-tokens: expected 0 to {num_heads}, the heads, found {num_tokens}"
        raise OptionError(msg)


def describe(shape: HeadsShape) -> str:
    """A shape in words, for a card."""
    layer = f"a transformer layer with an MLP of {shape.mlp}" if shape.kind == "transformer" else "a linear layer"
    return (
        f"{shape.num_heads} heads for the tokens 2 to {shape.num_heads + 1} places ahead, {shape.order}, over the "
        f"output of the target's layer {shape.layer}; each is {layer} and a norm, with {shape.unembeddings} "
        "unembeddings."
    )


def head_stages(heads: MultiTokenHeads, rope: tuple[Tensor, Tensor] | None, attend: DenseAttention) -> list[Stage]:
    """The heads in the order in which they are applied, for rows with these rotations and this attention."""

    def stage(index: int) -> Stage:
        return index, lambda x: heads.part(index, x, rope, attend)

    return [stage(index) for index in heads.shape.sequence]


def head_by_head(stages: Sequence[Stage], z: Tensor, *, chained: bool) -> Iterator[tuple[int, Tensor]]:
    """Outputs of the stages, by number, each to be taken backward before the next is asked for.

    After the last one the gradients go from stage to stage, if they are chained, and to ``z`` if it wants one.

    Args:
        stages: in the order in which they are applied.
        z: ``[rows, hidden]``, what they read; a leaf.
        chained: whether each reads the output of the one before, or else all read ``z``.

    Yields:
        The number of a stage, and its output ``[rows, hidden]``, by rising numbers.
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
    """Row numbers of all tokens that have a successor ``places`` tokens later in their sequence, and of the successors.

    For two sequences of 3 rows and 1 place: ``0 1 3 4`` and ``1 2 4 5``.
    """
    every = torch.arange(batch * length, device=device).view(batch, length)
    return every[:, : length - places].reshape(-1), every[:, places:].reshape(-1)
