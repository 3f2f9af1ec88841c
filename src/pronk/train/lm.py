"""Training of a language model on text."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from math import inf, nan
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.checkpoint import ModelConfig, llama_config
from pronk.train.attention import dense_logits
from pronk.train.batches import Sequences
from pronk.train.corpus.encoder import special_ids, token_dtype
from pronk.train.data import load_tokenizer
from pronk.train.export import InitialModel, export_model
from pronk.train.loop import Module, Objective, PassResult, find_device
from pronk.train.losses import autocast
from pronk.train.modules.decoder import DecoderModule, maybe_compile
from pronk.train.options import LoopOptions, ModelShape, TrainOptions


class TextModel(Objective[Module]):
    """Training objective of language models; a subclass defines the module and the loss.

    ``folder`` is that of the run; its token files, written by :func:`pronk.train.data.prepare`, are
    in ``folder / "data"``. With ``initial``,
    weights, sizes and tokenizer are those of a checkpoint. Raises OptionError if the text is
    shorter than one sequence, or the device does not exist; TokenizerError if the tokenizer is
    damaged.
    """

    options: TrainOptions

    def __init__(
        self, folder: Path, options: TrainOptions, initial: InitialModel | None = None
    ) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.options = options
        self.initial = initial
        self.identity = self.identify(initial)
        if initial is None:
            self.end_id, *_, end = special_ids(load_tokenizer(self.data))
            self.config = model_config(options.shape, self.end_id, (self.end_id, end))
        else:
            self.config = initial.config
            self.end_id = initial.encoder.end_id
        self.device = find_device(options.device)
        self.module = self.build().to(self.device)
        self.phases = two_phases(self.data / "train.bin", options, self.config.vocab_size)

    @classmethod
    def identify(cls, initial: InitialModel | None) -> dict[str, Any]:
        """Return ``identity`` without building an objective, to check a resumed run before."""
        return {"kind": "lm", "init": None if initial is None else initial.fingerprint.weights}

    @abstractmethod
    def build(self) -> Module:
        """Return the module to train, with its initial weights."""

    @property
    @abstractmethod
    def decoder(self) -> DecoderModule:
        """The part of the module that :meth:`export` writes as a checkpoint."""

    @abstractmethod
    def measure(self, inputs: Tensor, targets: Tensor) -> list[float]:
        """Return the mean losses in nats per token: of the next token, then of later ones, if any.

        ``inputs`` and ``targets`` are ``[count, length]``.
        """

    @torch.no_grad()
    def evaluate(self, length: int, seconds: float = inf) -> dict[str, float]:
        """Return the losses on all held-out sets in nats per token, measured for ``seconds``.

        The key ``prose`` is the loss of the next token on the held-out set ``prose``; ``prose 2``
        is the loss of the token after the next one, and so on.
        """
        figures: dict[str, float] = {}
        sets = list(held_out_sets(self.data, length, self.config.vocab_size))
        for name, sequences in sets:
            totals = list[float]()  # for each loss, its sum over the sequences
            seen = 0  # number of sequences measured so far
            for inputs, targets in sequences.batches(self.options.micro, seconds / len(sets)):
                losses = self.measure(inputs, targets)
                size = len(inputs)
                if not totals:
                    totals = [0.0] * len(losses)
                pairs = zip(totals, losses, strict=True)
                totals = [total + size * loss for total, loss in pairs]
                seen += size
            for place, total in enumerate(totals, 1):
                key = name if place == 1 else f"{name} {place}"
                figures[key] = total / seen
        return figures

    def judge(self, figures: Mapping[str, float]) -> float:
        return fmean(figures.values()) if figures else nan

    def export(self, folder: Path, card: str, facts: Mapping[str, Any]) -> None:  # noqa: ARG002 - for subclasses
        tokenizer_of = self.data if self.initial is None else self.initial.folder
        export_model(self.decoder, tokenizer_of, folder, card)


class LanguageModel(TextModel[DecoderModule]):
    """Training of a language model with the cross-entropy of the next token."""

    def build(self) -> DecoderModule:
        decoder = DecoderModule(self.config)
        if self.initial is None:
            decoder.initialize(torch.Generator().manual_seed(self.options.seed))
        else:
            decoder.load_state_dict(self.initial.weights())
        self._loss = maybe_compile(self.loss, compiles=self.options.compile)
        return decoder

    @property
    def decoder(self) -> DecoderModule:
        return self.module

    def backward(self, inputs: Tensor, targets: Tensor, scale: float) -> PassResult:
        loss = self._loss(inputs, targets)
        (loss * scale).backward()
        return PassResult(float(loss.detach()))

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss in nats per token.

        ``inputs`` and ``targets`` are token ids ``[count, length]``.
        """
        # The residual stream is float32. Matrix products and attention are bfloat16, unless
        # bfloat16 is emulated.
        with autocast(self.device):
            logits = dense_logits(self.module, inputs.to(self.device))
        return F.cross_entropy(logits.float(), targets.to(self.device).reshape(-1))

    def measure(self, inputs: Tensor, targets: Tensor) -> list[float]:
        return [float(self.loss(inputs, targets))]


def two_phases(file: Path, options: LoopOptions, vocab_size: int) -> tuple[Sequences, Sequences]:
    """Return the training sequences of a run's first phase and of its last phase.

    The first phase reads the token file from the beginning, and the last phase reads its end.
    Raises OptionError if the text of a phase is shorter than one sequence.
    """
    o = options
    border = 1 - options.final_share
    first = Sequences(file, vocab_size, o.length, o.seed, 0.0, border)
    last = Sequences(file, vocab_size, o.final_length, o.seed, border, 1.0)
    for phase, share in ((first, border), (last, o.final_share)):
        if share:
            phase.check()
    return first, last


def held_out_sets(data: Path, length: int, vocab_size: int) -> Iterator[tuple[str, Sequences]]:
    """Yield name and sequences of each held-out set in the folder ``data``.

    The sequences have ``length`` tokens; a set with fewer tokens is one shorter sequence.
    """
    for file in sorted(data.glob("valid-*.bin")):
        name = file.stem.removeprefix("valid-")
        size = file.stat().st_size // token_dtype(vocab_size)().itemsize
        yield name, Sequences(file, vocab_size, min(length, size - 1), seed=0)


def model_config(shape: ModelShape, bos_id: int | None, eos_ids: tuple[int, ...]) -> ModelConfig:
    """Return the configuration of a Llama with the sizes ``shape``.

    ``bos_id`` and ``eos_ids`` are the token ids at the beginning and the end of a text.
    """
    return replace(llama_config(**asdict(shape), eos_ids=eos_ids), bos_id=bos_id)
