"""Training of a draft model, distilled from the target's whole distribution at every position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pronk.train.attention import dense_hidden
from pronk.train.export import export_model
from pronk.train.features import Features
from pronk.train.lm import model_config
from pronk.train.modules.decoder import DecoderModule
from pronk.train.student import Branch, Student, describe_decoder

__all__ = ["DraftStudent"]


class DraftStudent(Student[DecoderModule]):
    """Training objective of a draft model: a small decoder with the target's vocabulary."""

    kind = "draft_model"
    title = "A draft model"
    library = "transformers"
    other_targets = "Another target with the same tokenizer can be served, at a lower acceptance rate."

    def build(self, generator: torch.Generator) -> DecoderModule:
        """Return the draft model with initial weights."""
        target = self.teacher.llm.config
        decoder = DecoderModule(model_config(self.options.shape, target.bos_id, target.eos_ids))
        decoder.initialize(generator)
        self._hidden = self.maybe_compile(dense_hidden)
        return decoder

    def branches(self, tokens: Tensor, features: Features) -> Iterator[Branch]:  # noqa: ARG002 - reads tokens only
        """Yield the only branch, which predicts the next token."""
        yield Branch(self.module.norm(self._hidden(self.module, tokens)), self.module.embedding)

    @property
    def description(self) -> str:
        """Sizes of the module in words, for the model card."""
        return f"Llama architecture, {describe_decoder(self.module.config)}"

    def export(self, folder: Path, card: str, facts: Mapping[str, Any]) -> None:
        """Write ``folder``, replacing its contents, as a checkpoint in the Hugging Face layout."""
        target = {"name": self.teacher.name, **self.teacher.fingerprints}
        documents = {"draft.json": {"target": target, **facts}} if facts else None
        export_model(self.module, self.teacher.folder, folder, card, documents)
