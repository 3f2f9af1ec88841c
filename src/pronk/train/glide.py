"""Training of GLIDE (cross-attention to the target's KV cache) and of a variant without it.

While the draft tokens of a step are generated, the target's cache ends before the first of them. Training imitates
this: the text is cut into blocks of ``L`` tokens, and cross-attention lets row ``j`` see token ``k`` of the cache if
``block(j) > block(k)`` (section 4.1 of the paper, L = 5). For L = 2, ``x`` where row j sees column k::

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

from pronk.train.attention import DenseAttention, dense_hidden, dense_rope
from pronk.train.features import Features
from pronk.train.modules.decoder import apply_rope
from pronk.train.modules.glide import GlideDecoderModule
from pronk.train.student import Branch, Student, describe_decoder

__all__ = ["DelayedAttention", "GlideStudent", "VanillaStudent", "block_mask"]


def block_mask(length: int, block: int, window: int | None = None) -> Tensor:
    """Return the mask ``[length, length]``: whether row ``j`` sees token ``k`` of the target's cache.

    Token ``k`` must be in an earlier block of ``block`` tokens than ``j``, and be one of the last ``window`` tokens.
    """
    positions = torch.arange(length)
    seen = positions[:, None] // block > positions // block
    return seen if window is None else seen & (positions > positions[:, None] - window)


@dataclass(frozen=True)
class DelayedAttention(DenseAttention):
    """Causal self-attention, and cross-attention to the target's cache, for training sequences."""

    rotation: tuple[Tensor, Tensor] | None = None  # RoPE rotations of the target, if it has RoPE
    keys: Sequence[Tensor] = ()  # per draft layer: keys of the target's cache, ``[rows, kv_heads, d]``
    values: Sequence[Tensor] = ()  # per draft layer: values of the same shape
    masks: Sequence[Tensor] = ()  # per draft layer: result of :func:`block_mask`, ``[length, length]``

    def cross(self, layer: int, q: Tensor) -> Tensor:
        """Return the cross-attention output ``[rows, heads * d]`` for ``q [rows, heads, d]``."""
        rotated = q if self.rotation is None else apply_rope(q, *self.rotation)
        k, v, seen = self.keys[layer], self.values[layer], self.masks[layer]
        q, k, v = (
            t.to(v.dtype).reshape(self.batch, self.length, *t.shape[1:]).transpose(1, 2) for t in (rotated, k, v)
        )
        # A softmax over no key is NaN. Rows that see no key attend to all keys, and their output is set to zero.
        sees_any = seen.any(1)
        out = F.scaled_dot_product_attention(q, k, v, seen | ~sees_any[:, None], enable_gqa=True)
        out = out * sees_any[:, None]
        return out.transpose(1, 2).reshape(self.batch * self.length, -1).to(rotated.dtype)


class GlideStudent(Student[GlideDecoderModule]):
    """Training of a decoder with cross-attention to the target's cache; ``options.shape`` has its sizes."""

    kind = "glide"
    title = "A GLIDE drafter"

    def build(self, generator: torch.Generator) -> GlideDecoderModule:
        """Return the decoder with initial weights."""
        module = GlideDecoderModule(self.options.shape, self.teacher.llm.config)
        module.initialize(generator)
        self.cache = module.cache_layers
        self._hidden = self.maybe_compile(dense_hidden)
        return module

    def branches(self, tokens: Tensor, features: Features) -> Iterator[Branch]:
        """Yield the only branch, which predicts the next token."""
        hidden = self._hidden(self.module, tokens, attend=self._attention(tokens, features))
        yield Branch(self.module.norm(hidden), self.module.embedding)

    def _attention(self, tokens: Tensor, features: Features) -> DelayedAttention:
        target, (batch, length), block = self.teacher.decoder, tokens.shape, self.options.shape.block
        masks = [block_mask(length, block, target.config.windows[layer - 1]) for layer in self.cache]
        return DelayedAttention(
            batch,
            length,
            rotation=dense_rope(target, batch, length, torch.float32, tokens.device),
            keys=[features.keys[layer] for layer in self.cache],
            values=[features.values[layer] for layer in self.cache],
            masks=[mask.to(tokens.device) for mask in masks],
        )

    @property
    def description(self) -> str:
        """Sizes of the module in words, for the model card."""
        target, layers = self.teacher.llm.config, ", ".join(map(str, self.cache))
        cross = (
            f"{target.num_heads} query heads of {target.head_dim} into the target's cache of "
            f"layer{'s' * (len(self.cache) > 1)} {layers}, trained with blocks of {self.options.shape.block} tokens"
        )
        return describe_decoder(self.module.config, cross if self.cache else "no cross-attention")


class VanillaStudent(GlideStudent):
    """Training of the variant without cross-attention: an ordinary draft model."""

    kind = "vanilla"
    title = "GLIDE's twin without cross-attention, a draft model"
