"""A draft model, distilled from the target that it will guess for.

It learns the target's whole distribution at every position, of the text it was given and of what the target itself
writes. The target's logits are computed with each batch and never stored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pronk.model.decoder import Decoder
from pronk.train.attention import dense_hidden
from pronk.train.batches import Batches, Mixture, Sequences, token_dtype
from pronk.train.distill import Comparison, TeacherLogits, compare, distillation_loss
from pronk.train.export import export_model
from pronk.train.lm import held_out_sets, model_config, two_phases
from pronk.train.loop import find_device
from pronk.train.on_policy import held_out_prompts
from pronk.train.options import DraftOptions
from pronk.train.served import measure_draft
from pronk.train.teacher import Teacher

__all__ = ["Draft"]

_SERVED_TOKENS = 96  # after each held-out prompt


class Draft:
    """See :class:`~pronk.train.loop.Objective`; the loss is that of :mod:`pronk.train.distill`.

    Args:
        folder: the run; ``folder / "data"`` must hold the text and the target's own.
        options: of the run; the vocabulary of its shape is the target's.
        teacher: the target.

    Raises:
        OptionError: the text is shorter than one sequence, or there is no such device.
    """

    def __init__(self, folder: Path, options: DraftOptions, teacher: Teacher) -> None:
        self.folder, self.data, self.options, self.teacher = folder, folder / "data", options, teacher
        target = teacher.llm.config
        self.config = model_config(options.shape, target.bos_id, target.eos_ids)
        self.device = find_device(options.device)
        self.module = Decoder(self.config)
        self.module.initialize(torch.Generator().manual_seed(options.seed))
        self.module.to(self.device)
        self.phases: tuple[Batches, Batches] = self._phases()
        self.identity: dict[str, Any] = {"target": teacher.fingerprints}

    def _phases(self) -> tuple[Batches, Batches]:
        o = self.options
        own = [self._own_text(o.length, used=o.final_share < 1), self._own_text(o.final_length, used=o.final_share > 0)]
        if o.share == 1:
            return own[0], own[1]
        first, last = two_phases(self.data / "train.bin", o, self.config.vocab_size)
        return Mixture(first, own[0], o.share), Mixture(last, own[1], o.share)

    def _own_text(self, length: int, *, used: bool) -> Sequences:
        dtype = token_dtype(self.config.vocab_size)
        sequences = Sequences(self.data / "on-policy.bin", length, self.options.seed, dtype=dtype)
        if used and self.options.share:
            sequences.check()
        return sequences

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss in nats per token of ``inputs`` and ``targets`` ``[count, length]``."""
        hidden, teacher = self._pass(inputs)
        labels = targets.to(self.device).reshape(-1)
        return distillation_loss(hidden, self.module.embedding, teacher, labels, self.options.hard)

    def _pass(self, inputs: Tensor) -> tuple[Tensor, TeacherLogits]:
        """The student's hidden states after the final norm, and the teacher's logits, to be computed by slices."""
        tokens = inputs.to(self.device)
        teacher = self._teach(tokens)
        with torch.autocast(self.device.type, torch.bfloat16):
            hidden = self.module.norm(dense_hidden(self.module, tokens))
        return hidden, teacher

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # packed weights are opaque to the compiler
    def _teach(self, tokens: Tensor) -> TeacherLogits:
        target = self.teacher.decoder
        with torch.no_grad():
            states = dense_hidden(target, tokens, self.teacher.dtype)

        def teacher(part: slice) -> Tensor:
            with torch.no_grad():
                return target.logits(states[part])

        return teacher

    @torch.no_grad()
    def evaluate(self, length: int) -> dict[str, float]:
        """Divergence from the target, and how often both have the same likeliest token, on every held-out set.

        With them alpha and S, as the decoding engine measures them on held-out prompts.
        """
        figures: dict[str, float] = {}
        for name, sequences in held_out_sets(self.data, length, self.config.vocab_size):
            count, sums = max(1, self.options.micro // sequences.length), Comparison()
            for start in range(0, len(sequences), count):
                inputs, _ = sequences.batch(start, min(count, len(sequences) - start))
                hidden, teacher = self._pass(inputs)
                compare(hidden, self.module.embedding, teacher, sums)
            figures |= {f"{name} KL": sums.divergence / sums.rows, f"{name} same": sums.same / sums.rows}
        return figures | self._serve()

    def _serve(self) -> dict[str, float]:
        """What the decoding engine makes of the draft as it is now in ``RUN/latest``."""
        prompts = held_out_prompts(self.data)
        if not self.options.num_tokens or not prompts:
            return {}
        latest = self.folder / "latest"
        export_model(self.module, self.teacher.folder, latest, "")
        return measure_draft(self.teacher.llm, latest, prompts, self.options.num_tokens, _SERVED_TOKENS)
