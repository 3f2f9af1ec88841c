"""A draft model, distilled from the target that it will guess for.

It learns the target's whole distribution at every position, of the text it was given and of what the target itself
writes. The target's logits are computed with each batch and never stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pronk.models.decoder import Decoder
from pronk.train.attention import dense_hidden
from pronk.train.export import export_model
from pronk.train.features import Features
from pronk.train.lm import model_config
from pronk.train.student import Branch, Student

__all__ = ["DraftStudent"]


class DraftStudent(Student[Decoder]):
    """See :class:`~pronk.train.student.Student`; the vocabulary of its shape is the target's."""

    kind = "draft_model"
    what = "A draft model"
    library = "transformers"
    others = "Another target with the same tokenizer can be served, at a lower acceptance rate."

    def build(self, generator: torch.Generator) -> Decoder:
        """A small decoder."""
        target = self.teacher.llm.config
        decoder = Decoder(model_config(self.options.shape, target.bos_id, target.eos_ids))
        decoder.initialize(generator)
        self._hidden = torch.compile(dense_hidden) if self.options.compile else dense_hidden
        return decoder

    def branches(self, tokens: Tensor, features: Features) -> Iterator[Branch]:  # noqa: ARG002 - reads text alone
        """What follows each token."""
        yield Branch(self.module.norm(self._hidden(self.module, tokens)), self.module.embedding)

    @property
    def description(self) -> str:
        """Its shape, in words, for the card."""
        c = self.module.config
        return (
            f"Llama architecture, {c.num_layers} layers, hidden size {c.hidden_size}, {c.num_heads} heads of "
            f"{c.head_dim} over {c.num_kv_heads} key/value heads, MLP {c.intermediate_size}, tied embeddings. The "
            f"target's tokenizer, {c.vocab_size} tokens."
        )

    def export(self, folder: Path, card: str, facts: Mapping[str, Any]) -> None:
        """A checkpoint in the Hugging Face layout."""
        target = {"name": self.teacher.name, **self.teacher.fingerprints}
        documents = {"draft.json": {"target": target, **facts}} if facts else None
        export_model(self.module, self.teacher.folder, folder, card, documents)
