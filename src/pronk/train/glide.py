"""GLIDE, distilled from the target whose cache it reads, and its twin without cross-attention.

When a step's ``i``-th token is drafted, the target's cache still ends before the first. Training imitates that: the
text is cut into blocks of ``L`` tokens, and in the cross-attention row ``j`` sees token ``k`` of the target's cache if
``block(j) > block(k)`` (section 4.1 of the paper, L = 5). For L = 2 (rows see columns)::

          0 1 2 3 4
        0 . . . . .
        1 . . . . .
        2 x x . . .
        3 x x . . .
        4 x x x x .
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.architecture.rope import apply_rope
from pronk.drafters.from_target.modules import glide
from pronk.drafters.from_target.modules.glide import GlideShape
from pronk.train.attention import DenseAttention, dense_hidden
from pronk.train.features import Features
from pronk.train.student import Branch, Student

__all__ = ["DelayedAttention", "GlideStudent", "VanillaStudent", "block_mask"]


def block_mask(length: int, block: int, window: int | None = None) -> Tensor:
    """``[length, length]``: whether row ``j`` sees token ``k`` of the target's cache.

    It does if ``j`` is in a later block of ``block`` tokens, and ``k`` in the ``window`` positions up to ``j``.
    """
    places = torch.arange(length)
    seen = places[:, None] // block > places // block
    return seen if window is None else seen & (places > places[:, None] - window)


@dataclass(frozen=True)
class DelayedAttention(DenseAttention):
    """A :class:`~pronk.drafters.from_target.modules.glide.CrossAttend` over a batch of sequences.

    Attributes:
        rotation: what the target rotates its rows by, or ``None``.
        keys: per draft layer, ``[rows, kv_heads, d]`` of the target's cache.
        values: likewise.
        seen: per draft layer, ``[length, length]``.
    """

    rotation: tuple[Tensor, Tensor] | None = None
    keys: Sequence[Tensor] = ()
    values: Sequence[Tensor] = ()
    seen: Sequence[Tensor] = ()

    def cross(self, layer: int, q: Tensor) -> Tensor:
        """See :class:`~pronk.drafters.from_target.modules.glide.CrossAttend`."""
        rotated = q if self.rotation is None else apply_rope(q, *self.rotation)
        k, v, seen = self.keys[layer], self.values[layer], self.seen[layer]
        q, k, v = (
            t.to(v.dtype).reshape(self.batch, self.length, *t.shape[1:]).transpose(1, 2) for t in (rotated, k, v)
        )
        # A row that sees nothing looks at everything and forgets it: a softmax over nothing is not a number.
        some = seen.any(1)
        out = F.scaled_dot_product_attention(q, k, v, seen | ~some[:, None], enable_gqa=True)
        out = out * some[:, None]
        return out.transpose(1, 2).reshape(self.batch * self.length, -1).to(rotated.dtype)


class GlideStudent(Student[glide.GlideModule]):
    """See ``Student``; its shape is a ``GlideShape``."""

    kind = "glide"
    what = "A GLIDE drafter"

    def build(self, generator: torch.Generator) -> glide.GlideModule:
        """A decoder that looks into the target's cache."""
        module = glide.GlideModule(self.shape, self.teacher.llm.config)
        module.initialize(generator)
        self.cache = module.cache_layers
        self._hidden = torch.compile(dense_hidden) if self.options.compile else dense_hidden
        return module

    @property
    def shape(self) -> GlideShape:
        """What the module is made by."""
        shape = self.options.shape
        assert isinstance(shape, GlideShape)
        return shape

    def branches(self, tokens: Tensor, features: Features) -> Iterator[Branch]:
        """What follows each token."""
        hidden = self._hidden(self.module, tokens, attend=self._attention(tokens, features))
        yield Branch(self.module.norm(hidden), self.module.embedding)

    def _attention(self, tokens: Tensor, features: Features) -> DelayedAttention:
        target, (batch, length) = self.teacher.decoder, tokens.shape
        positions = torch.arange(length, device=tokens.device).repeat(batch)
        layers = self.module.cache_layers
        masks = [block_mask(length, self.shape.block, target.config.windows[layer - 1]) for layer in layers]
        return DelayedAttention(
            batch,
            length,
            rotation=target.rope(positions, positions + 1, torch.float32),
            keys=[features.keys[layer] for layer in layers],
            values=[features.values[layer] for layer in layers],
            seen=[mask.to(tokens.device) for mask in masks],
        )

    @property
    def description(self) -> str:
        """Its shape, in words, for the card."""
        c, target = self.module.config, self.teacher.llm.config
        cross = (
            f"{target.num_heads} query heads of {target.head_dim} into the target's cache of {_layers(self.cache)}, "
            f"trained with blocks of {self.shape.block} tokens"
            if self.cache
            else "no cross-attention"
        )
        return (
            f"{c.num_layers} layers, hidden size {c.hidden_size}, {c.num_heads} heads of {c.head_dim} over "
            f"{c.num_kv_heads} key/value heads, {cross}, MLP {c.intermediate_size}, tied embeddings. The target's "
            f"tokenizer, {c.vocab_size} tokens."
        )


def _layers(numbers: Sequence[int]) -> str:
    return f"layer {numbers[0]}" if len(numbers) == 1 else f"layers {', '.join(map(str, numbers))}"


class VanillaStudent(GlideStudent):
    """The twin without cross-attention."""

    kind = "vanilla"
    what = "GLIDE's twin without cross-attention, a draft model"
