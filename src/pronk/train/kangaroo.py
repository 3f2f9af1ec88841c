"""Training of Kangaroo's adapter on a frozen target (*Kangaroo*, Liu et al. 2024, section 3.1).

Equation 3 is the cross-entropy against the target's distribution at every position::

    A* = argmin_A  sum_t sum_n  -M^b_n(x_t) log M^s_n(x_t),    M^s = head ∘ A ∘ M^b[:l]

It differs from the divergence in :mod:`pronk.train.losses` by a constant, the target's entropy: the gradient is equal.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pronk.train.attention import DenseAttention, dense_rope
from pronk.train.features import Features
from pronk.train.modules.decoder import DecoderModule
from pronk.train.modules.kangaroo import KangarooModule
from pronk.train.student import Branch, Student

__all__ = ["KangarooStudent", "dense_adapter"]

_WORDS = {
    "attention": "one multi-head attention and two norms",
    "head": "one multi-head attention, two norms and a head of its own",
    "transformer": "one transformer layer and a norm",
    "mlp": "two linears, two norms and a head of its own",
}


class KangarooStudent(Student[KangarooModule]):
    """Training of an adapter on the output of the target's exit layer; ``options.shape`` has its sizes."""

    kind = "kangaroo"
    title = "A Kangaroo adapter"

    def build(self, generator: torch.Generator) -> KangarooModule:
        """Build the adapter; its last norm, and its head if it has one, start as copies of the target's."""
        shape, teacher = self.options.shape, self.teacher
        self.hidden = (shape.exit_layer,)
        adapter = KangarooModule(shape, teacher.llm.config)
        adapter.initialize(generator, teacher.decoder.norm, teacher.unembedding)
        self._adapt = self.maybe_compile(dense_adapter)
        return adapter

    def branches(self, tokens: Tensor, features: Features) -> Iterator[Branch]:
        """Yield the only branch, which predicts the next token."""
        head = self.teacher.unembedding if self.module.head is None else self.module.get_parameter("head.weight")
        early = features.hidden[self.options.shape.exit_layer].float()
        yield Branch(self._adapt(self.module, self.teacher.decoder, early, *tokens.shape), head)

    @property
    def description(self) -> str:
        """Sizes of the module in words, for the model card."""
        shape, layers = self.options.shape, self.teacher.llm.config.num_layers
        heads = f" {shape.heads} attention heads." if shape.has_attention else ""
        return f"Exit after layer {shape.exit_layer} of {layers}; adapter of {_WORDS[shape.adapter]}.{heads}"

    @property
    def spec(self) -> str:
        """Specification of the drafter for measurements; ``eta=0``: it proposes at any confidence."""
        return f"{self.kind}(model={{model!r}}, num_tokens={self.options.num_tokens}, eta=0)"


def dense_adapter(adapter: KangarooModule, decoder: DecoderModule, early: Tensor, batch: int, length: int) -> Tensor:
    """Return the adapter's output ``[batch * length, hidden]`` for the exit layer's output ``early``.

    Rows are ``batch`` sequences of ``length`` tokens, one after the other; ``decoder`` is the target.
    """
    rope = dense_rope(decoder, batch, length, early.dtype, early.device)
    return adapter(early, rope, DenseAttention(batch, length, adapter.config.windows))
