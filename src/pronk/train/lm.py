"""The training loop of a language model.

A run lives in one folder and can be stopped and continued at any time::

    RUN/data/          token files, tokenizer, list of sources
    RUN/checkpoint.pt  model, optimizer, position, clock
    RUN/latest/        the model at the last evaluation, as a Hugging Face checkpoint
    RUN/export/        the finished model

Where a run is in its text follows from the number of steps it has made in each of its two phases (short sequences, then
long ones), so that a resumed run computes exactly the losses of an uninterrupted one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.errors import OptionError, PronkError
from pronk.model.config import ModelConfig
from pronk.model.decoder import Decoder
from pronk.model.rope import RopeConfig
from pronk.train.attention import dense_logits
from pronk.train.batches import Sequences
from pronk.train.chat import special_ids
from pronk.train.checkpoint import load_checkpoint, save_checkpoint
from pronk.train.optim import Optimizers, clip_gradients
from pronk.train.options import Shape, TrainOptions, option_name
from pronk.train.schedule import Schedule
from pronk.train.tokenizer import load_tokenizer

__all__ = ["Report", "Trainer", "model_config"]

_TOKEN_BYTES = 2

# Options that may change when a run is resumed; all others define what it computes.
_FREE = frozenset({"minutes", "threads", "compile", "device", "evaluate_every", "save_every", "log_every"})


@dataclass
class Report:
    """What the loop says: the mean loss since the last report, and validation losses when they are new.

    ``seconds`` is the time so far, ``speed`` in tokens/s that of the median step, ``norm`` that of the last gradient.
    """

    step: int
    progress: float
    loss: float
    rate: float
    norm: float
    tokens: int
    seconds: float
    speed: float
    valid: dict[str, float] = field(default_factory=dict)


class Trainer:
    """One run: ``train`` goes on from wherever the folder's checkpoint is.

    Args:
        folder: the run; ``folder / "data"`` must hold what :func:`pronk.train.data.prepare` wrote.
        options: the loop's settings; those of a resumed run must agree with its checkpoint.

    Raises:
        OptionError: options differ from the checkpoint's, or the text is shorter than one batch.
        CheckpointError: the checkpoint or the tokenizer is damaged.
    """

    def __init__(self, folder: Path, options: TrainOptions) -> None:
        self.folder, self.options = folder, options
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        tokenizer = load_tokenizer(folder / "data")
        end_of_text, *_, end = special_ids(tokenizer)
        self.config = model_config(options.shape, end_of_text, (end_of_text, end))
        self.device = _device(options.device)
        self.decoder = Decoder(self.config)
        self.decoder.initialize(torch.Generator().manual_seed(options.seed))
        self.decoder.to(self.device)
        self.optimizers = Optimizers(self.decoder, options.optimizer, options.weight_decay)
        o = options
        self.schedule = Schedule(o.steps, o.minutes, o.warmup, o.rate, o.floor)
        self.seconds = 0.0  # on the clock, over all parts of the run
        self.phases = self._phases()
        self.step = 0
        self.done = [0, 0]  # steps made in each phase
        self.losses: list[float] = []  # since the last report
        self.history: list[dict[str, Any]] = []
        self._loss: Callable[[Tensor, Tensor], Tensor] = torch.compile(self._pass) if o.compile else self._pass
        if self.checkpoint.exists():
            self._restore(load_checkpoint(self.checkpoint))

    @property
    def checkpoint(self) -> Path:
        """The file that the run is saved in."""
        return self.folder / "checkpoint.pt"

    @property
    def finished(self) -> bool:
        """Whether the schedule has ended."""
        return self.schedule.progress(self.step, self.seconds) >= 1.0

    @property
    def tokens(self) -> int:
        """Tokens trained on so far."""
        return self.step * self.options.batch

    def _phases(self) -> tuple[Sequences, Sequences]:
        o, file = self.options, self.folder / "data" / "train.bin"
        border = 1 - o.final_share
        phases = Sequences(file, o.length, o.seed, 0.0, border), Sequences(file, o.final_length, o.seed, border, 1.0)
        for phase, share in zip(phases, (border, o.final_share), strict=True):
            if share and not len(phase):
                found = int(share * file.stat().st_size / _TOKEN_BYTES)
                msg = f"expected at least {phase.length + 1} tokens for sequences of {phase.length}, found {found}"
                raise OptionError(msg)
        return phases

    def _restore(self, state: dict[str, Any]) -> None:
        mine, saved = _defining(self.options), state["options"]
        for name, value in mine.items():
            if saved.get(name) != value:
                msg = (
                    f"cannot resume {self.folder}: expected {option_name(name)} = {saved.get(name)!r} as before, "
                    f"found {value!r}; use another --out folder for a new run"
                )
                raise OptionError(msg)
        self.decoder.load_state_dict(state["model"])
        self.optimizers.load_state_dict(state["optimizers"])
        torch.set_rng_state(state["rng"])
        self.step, self.done = state["step"], list(state["done"])
        self.seconds = state["seconds"]
        self.losses, self.history = list(state.get("losses", [])), list(state["history"])

    def save(self) -> None:
        """Write the checkpoint."""
        save_checkpoint(
            self.checkpoint,
            {
                "options": _defining(self.options),
                "model": self.decoder.state_dict(),
                "optimizers": self.optimizers.state_dict(),
                "rng": torch.get_rng_state(),
                "step": self.step,
                "done": self.done,
                "seconds": self.seconds,
                "losses": self.losses,
                "history": self.history,
            },
        )

    def train(
        self,
        report: Callable[[Report], None],
        evaluated: Callable[[Report], None],
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Train to the end of the schedule, or until ``stop`` says so between two steps, and save.

        Args:
            report: called every ``log_every`` steps and after each evaluation.
            evaluated: called after each evaluation, to export an intermediate model.
            stop: asked after each step.

        Raises:
            PronkError: the loss is not finite any more; the last checkpoint stays.
        """
        o = self.options
        last, durations = time.monotonic(), []
        while not self.finished and not stop():
            begin = time.monotonic()
            progress = self.schedule.progress(self.step, self.seconds)
            rate = self.schedule.rate(self.step, progress)
            loss, norm = self._step(progress, rate)
            self.losses.append(loss)
            end = time.monotonic()
            durations.append(end - begin)
            # Evaluations and the time a process was suspended count too: the time limit is a promise.
            self.seconds, last = self.seconds + end - last, end
            evaluate = self.finished or self.step % o.evaluate_every == 0
            if evaluate or self.step % o.log_every == 0:
                mean = math.fsum(self.losses) / len(self.losses)
                speed = o.batch / median(durations)
                news = Report(self.step, progress, mean, rate, norm, self.tokens, self.seconds, speed)
                news.valid = self.evaluate(o.length) if evaluate else {}
                self.history.append(asdict(news))
                report(news)
                self.losses.clear()
                durations.clear()
            if evaluate:
                evaluated(news)
            if self.step % o.save_every == 0:
                self.save()
        self.save()

    def _step(self, progress: float, rate: float) -> tuple[float, float]:
        """One optimizer step; returns its mean loss and the norm of its gradient."""
        o = self.options
        number = 0 if progress < 1 - o.final_share else 1
        phase = self.phases[number]
        count = o.micro // phase.length
        passes = o.batch // o.micro
        total = 0.0
        for i in range(passes):
            inputs, targets = phase.batch((self.done[number] * passes + i) * count, count)
            loss = self._loss(inputs, targets)
            (loss / passes).backward()
            total += float(loss.detach())
        if not math.isfinite(total):
            msg = f"step {self.step + 1}: expected a finite loss, found {total}; use a lower --lr than {o.rate:g}"
            raise PronkError(msg)
        norm = clip_gradients(self.decoder, o.clip)
        self.optimizers.step(rate)
        self.done[number] += 1
        self.step += 1
        return total / passes, norm

    def _pass(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss in nats per token of ``inputs`` and ``targets`` ``[count, length]``."""
        # The residual stream stays float32; autocast runs the matrix products and the attention in bfloat16.
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = dense_logits(self.decoder, inputs.to(self.device))
        return F.cross_entropy(logits.float(), targets.to(self.device).reshape(-1))

    @torch.no_grad()
    def evaluate(self, length: int) -> dict[str, float]:
        """Loss in nats per token of every held-out set, on sequences of (at most) ``length`` tokens."""
        losses: dict[str, float] = {}
        for file in sorted((self.folder / "data").glob("valid-*.bin")):
            sequences = Sequences(file, min(length, file.stat().st_size // _TOKEN_BYTES - 1), seed=0)
            count = max(1, self.options.micro // sequences.length)
            total = 0.0
            for start in range(0, len(sequences), count):
                size = min(count, len(sequences) - start)
                total += size * float(self._pass(*sequences.batch(start, size)))
            losses[file.stem.removeprefix("valid-")] = total / len(sequences)
        return losses


def model_config(shape: Shape, bos_id: int, eos_ids: tuple[int, ...]) -> ModelConfig:
    """The decoder's configuration: Llama with tied embeddings, weights to be kept in bfloat16."""
    head_dim = shape.hidden // shape.heads
    return ModelConfig(
        family="llama",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=head_dim,
        context=shape.context,
        norm_eps=1e-5,
        rope=RopeConfig(head_dim),
        windows=(None,) * shape.layers,
        tied=True,
        bos_id=bos_id,
        eos_ids=eos_ids,
        dtype="bfloat16",
    )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # an unknown name; a device that this torch or machine lacks
        msg = f"device: expected one that this machine has, for example cpu, found {name!r}"
        raise OptionError(msg) from error
    return device


def _defining(options: TrainOptions) -> dict[str, Any]:
    return {name: value for name, value in asdict(options).items() if name not in _FREE}
