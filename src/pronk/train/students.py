"""Training of draft models, of GLIDE and of Kangaroo's adapter on a frozen target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pronk.train.attention import DelayedAttention, DenseAttention, Features, dense_hidden, dense_rope
from pronk.train.export import export_model
from pronk.train.lm import model_config
from pronk.train.modules.decoder import DecoderModule
from pronk.train.modules.drafters import GlideDecoderModule, KangarooModule
from pronk.train.student import Branch, Student, describe_decoder


class DraftStudent(Student[DecoderModule]):
    """Training objective of a draft model: a small decoder with the target's vocabulary."""

    kind = "draft_model"
    title = "A draft model"
    library = "transformers"
    other_targets = "Another target with the same tokenizer can be served, at a lower acceptance rate."

    def build(self, generator: torch.Generator) -> DecoderModule:
        target = self.teacher.llm.config
        decoder = DecoderModule(model_config(self.options.shape, target.bos_id, target.eos_ids))
        decoder.initialize(generator)
        self._hidden = self.maybe_compile(dense_hidden)
        return decoder

    def branches(self, tokens: Tensor, features: Features) -> Iterator[Branch]:  # noqa: ARG002 - reads tokens only
        yield Branch(self.module.norm(self._hidden(self.module, tokens)), self.module.embedding)

    @property
    def description(self) -> str:
        return f"Llama architecture, {describe_decoder(self.module.config)}"

    def export(self, folder: Path, card: str, facts: Mapping[str, Any]) -> None:
        target = {"name": self.teacher.name, **self.teacher.fingerprints}
        documents = {"draft.json": {"target": target, **facts}} if facts else None
        export_model(self.module, self.teacher.folder, folder, card, documents)


def block_mask(length: int, block: int, window: int | None = None) -> Tensor:
    """Return the mask ``[length, length]`` of :class:`GlideStudent`; ``window`` is the target's."""
    positions = torch.arange(length)
    seen = positions[:, None] // block > positions // block
    return seen if window is None else seen & (positions > positions[:, None] - window)


class GlideStudent(Student[GlideDecoderModule]):
    """Training of a decoder with cross-attention to the target's cache; ``options.shape`` has its sizes.

    While the draft tokens of a step are generated, the target's cache ends before the first of them. Training imitates
    this: the text is cut into blocks of ``L`` tokens, and cross-attention lets row ``j`` see token ``k`` of the cache
    if ``block(j) > block(k)`` (section 4.1 of the paper, L = 5). For L = 2, ``x`` where row j sees column k::

          0 1 2 3 4
        0 . . . . .
        1 . . . . .
        2 x x . . .
        3 x x . . .
        4 x x x x .
    """

    kind = "glide"
    title = "A GLIDE drafter"

    def build(self, generator: torch.Generator) -> GlideDecoderModule:
        module = GlideDecoderModule(self.options.shape, self.teacher.llm.config)
        module.initialize(generator)
        self.cache = module.cache_layers
        self._hidden = self.maybe_compile(dense_hidden)
        return module

    def branches(self, tokens: Tensor, features: Features) -> Iterator[Branch]:
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


_WORDS = {
    "attention": "one multi-head attention and two norms",
    "head": "one multi-head attention, two norms and a head of its own",
    "transformer": "one transformer layer and a norm",
    "mlp": "two linears, two norms and a head of its own",
}


class KangarooStudent(Student[KangarooModule]):
    """Training of an adapter on the output of the target's exit layer; ``options.shape`` has its sizes.

    Equation 3 of *Kangaroo* (Liu et al. 2024, section 3.1) is the cross-entropy against the target's distribution::

        A* = argmin_A  sum_t sum_n  -M^b_n(x_t) log M^s_n(x_t),    M^s = head ∘ A ∘ M^b[:l]

    It differs from the divergence in :mod:`pronk.train.losses` by a constant, the target's entropy: the gradient is
    equal.
    """

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
        head = self.teacher.unembedding if self.module.head is None else self.module.get_parameter("head.weight")
        early = features.hidden[self.options.shape.exit_layer].float()
        yield Branch(self._adapt(self.module, self.teacher.decoder, early, *tokens.shape), head)

    @property
    def description(self) -> str:
        shape, layers = self.options.shape, self.teacher.llm.config.num_layers
        heads = f" {shape.heads} attention heads." if shape.has_attention else ""
        return f"Exit after layer {shape.exit_layer} of {layers}; adapter of {_WORDS[shape.adapter]}.{heads}"

    @property
    def spec(self) -> str:
        # With ``eta=0`` it proposes at any confidence.
        return f"{self.kind}(model={{model!r}}, num_tokens={self.options.num_tokens}, eta=0)"


def dense_adapter(adapter: KangarooModule, decoder: DecoderModule, early: Tensor, batch: int, length: int) -> Tensor:
    """Return the adapter's output ``[batch * length, hidden]`` for the exit layer's output ``early``.

    Rows are ``batch`` sequences of ``length`` tokens, one after the other; ``decoder`` is the target.
    """
    rope = dense_rope(decoder, batch, length, early.dtype, early.device)
    return adapter(early, rope, DenseAttention(batch, length, adapter.config.windows))
