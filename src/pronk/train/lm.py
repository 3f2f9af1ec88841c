"""A language model, trained to predict its text."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pronk.architecture.config import ModelConfig, llama_config
from pronk.models.decoder import Decoder
from pronk.train.attention import dense_logits
from pronk.train.batches import Batches, Sequences, token_dtype
from pronk.train.chat import special_ids
from pronk.train.clock import within
from pronk.train.export import export_model
from pronk.train.loop import Passed, find_device
from pronk.train.options import LoopOptions, ModelShape, TrainOptions
from pronk.train.tokenizer import load_tokenizer

__all__ = ["LM_IDENTITY", "LanguageModel", "TextModel", "held_out_sets", "model_config", "two_phases"]

# What a run of a language model says of itself, beside its options.
LM_IDENTITY = {"kind": "lm"}

Module = TypeVar("Module", bound=nn.Module)


class TextModel(ABC, Generic[Module]):
    """See :class:`~pronk.train.loop.Objective`; a subclass says what is trained and by which loss.

    Args:
        folder: the run; ``folder / "data"`` must hold what :func:`pronk.train.data.prepare` wrote.
        options: of the run.

    Raises:
        OptionError: the text is shorter than one sequence, or there is no such device.
        TokenizerError: the tokenizer is damaged.
    """

    def __init__(self, folder: Path, options: TrainOptions) -> None:
        self.folder, self.data, self.options = folder, folder / "data", options
        end_of_text, *_, end = special_ids(load_tokenizer(self.data))
        self.config = model_config(options.shape, end_of_text, (end_of_text, end))
        self.device = find_device(options.device)
        self.module = self.build().to(self.device)
        self.phases: tuple[Batches, Batches] = two_phases(self.data / "train.bin", options, self.config.vocab_size)

    @property
    def identity(self) -> dict[str, Any]:
        """See :class:`~pronk.train.loop.Objective`."""
        return dict(LM_IDENTITY)

    @abstractmethod
    def build(self) -> Module:
        """What is trained, with its first weights."""

    @property
    @abstractmethod
    def decoder(self) -> Decoder:
        """The model that is exported."""

    @abstractmethod
    def backward(self, inputs: Tensor, targets: Tensor, scale: float) -> Passed:
        """See :class:`~pronk.train.loop.Objective`."""

    @abstractmethod
    def measure(self, inputs: Tensor, targets: Tensor) -> list[float]:
        """Mean loss in nats per token of ``inputs`` and ``targets`` ``[count, length]``, for each token ahead."""

    @torch.no_grad()
    def evaluate(self, length: int, seconds: float = math.inf) -> dict[str, float]:
        """Loss in nats per token of every held-out set, on sequences of (at most) ``length`` tokens.

        Of a set as many sequences are read as its share of ``seconds`` allows, at least one batch.

        Where more tokens than the next are predicted, the others' are called after their places: ``prose 2``.
        """
        figures: dict[str, float] = {}
        sets = list(held_out_sets(self.data, length, self.config.vocab_size))
        for name, sequences in sets:
            count, totals, seen = max(1, self.options.micro // sequences.length), list[float](), 0
            for start in within(seconds / len(sets), range(0, len(sequences), count)):
                size = min(count, len(sequences) - start)
                losses = self.measure(*sequences.batch(start, size))
                totals = [a + size * b for a, b in zip(totals or [0.0] * len(losses), losses, strict=True)]
                seen += size
            for place, total in enumerate(totals, 1):
                figures[name if place == 1 else f"{name} {place}"] = total / seen
        return figures

    def judge(self, figures: Mapping[str, float]) -> float:
        """The mean loss, over all held-out sets and all tokens ahead."""
        return fmean(figures.values()) if figures else math.nan

    def export(self, folder: Path, card: str, facts: Mapping[str, Any]) -> None:  # noqa: ARG002 - for what comes beside it
        """Replace ``folder`` by the model as it is now; ``facts`` are for the JSON files of what comes with it."""
        export_model(self.decoder, self.data, folder, card)


class LanguageModel(TextModel[Decoder]):
    """The loss is the cross-entropy of the next token."""

    def build(self) -> Decoder:
        """The model."""
        decoder = Decoder(self.config)
        decoder.initialize(torch.Generator().manual_seed(self.options.seed))
        self._loss = torch.compile(self.loss) if self.options.compile else self.loss
        return decoder

    @property
    def decoder(self) -> Decoder:
        """The model."""
        return self.module

    def backward(self, inputs: Tensor, targets: Tensor, scale: float) -> Passed:
        """See :class:`~pronk.train.loop.Objective`."""
        loss = self._loss(inputs, targets)
        (loss * scale).backward()
        return Passed(float(loss.detach()))

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss in nats per token of ``inputs`` and ``targets`` ``[count, length]``."""
        # The residual stream stays float32; autocast runs the matrix products and the attention in bfloat16.
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = dense_logits(self.module, inputs.to(self.device))
        return F.cross_entropy(logits.float(), targets.to(self.device).reshape(-1))

    def measure(self, inputs: Tensor, targets: Tensor) -> list[float]:
        """See :class:`TextModel`; the next token alone."""
        return [float(self.loss(inputs, targets))]


def two_phases(file: Path, options: LoopOptions, vocab_size: int) -> tuple[Sequences, Sequences]:
    """The parts of a token file for the two phases of a run."""
    o, dtype = options, token_dtype(vocab_size)
    border = 1 - o.final_share
    first = Sequences(file, o.length, o.seed, 0.0, border, dtype)
    last = Sequences(file, o.final_length, o.seed, border, 1.0, dtype)
    for phase, share in ((first, border), (last, o.final_share)):
        if share:
            phase.check()
    return first, last


def held_out_sets(data: Path, length: int, vocab_size: int) -> Iterator[tuple[str, Sequences]]:
    """The held-out sets of a run by name, in sequences of (at most) ``length`` tokens."""
    dtype = token_dtype(vocab_size)
    for file in sorted(data.glob("valid-*.bin")):
        size = file.stat().st_size // np.dtype(dtype).itemsize
        yield file.stem.removeprefix("valid-"), Sequences(file, min(length, size - 1), seed=0, dtype=dtype)


def model_config(shape: ModelShape, bos_id: int | None, eos_ids: tuple[int, ...]) -> ModelConfig:
    """The configuration of a decoder of this shape."""
    return llama_config(**asdict(shape), bos_id=bos_id, eos_ids=eos_ids)
