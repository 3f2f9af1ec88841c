"""The training loop, whatever is trained: a language model, a draft model.

A run lives in one folder and can be stopped and continued at any time::

    RUN/data/          token files, list of sources
    RUN/checkpoint.pt  what is trained, optimizer, position, clock
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
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from pronk.errors import OptionError, PronkError
from pronk.train.batches import Batches
from pronk.train.checkpoint import load_checkpoint, save_checkpoint
from pronk.train.optim import Optimizers, clip_gradients
from pronk.train.options import LoopOptions
from pronk.train.resume import check_unchanged
from pronk.train.schedule import Schedule

__all__ = ["Objective", "Report", "Trainer", "find_device"]


class Objective(Protocol):
    """What is trained, on what, and how well it does."""

    @property
    def module(self) -> nn.Module:
        """Its parameters are trained; the large matrices among them are those of ``module.layers``."""
        ...

    @property
    def phases(self) -> tuple[Batches, Batches]:
        """The sequences of the first part of the run, and those of the last."""
        ...

    @property
    def identity(self) -> dict[str, Any]:
        """What a resumed run must have as before, beyond the loop's options."""
        ...

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss in nats per token of ``inputs`` and ``targets`` ``[count, length]``."""
        ...

    def evaluate(self, length: int) -> dict[str, float]:
        """Figures by name, on held-out sequences of (at most) ``length`` tokens."""
        ...


Trained = TypeVar("Trained", bound=Objective)


@dataclass
class Report:
    """What the loop says: the mean loss since the last report, and the objective's figures when they are new.

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


class Trainer(Generic[Trained]):
    """One run: ``train`` goes on from wherever the folder's checkpoint is.

    Args:
        folder: the run.
        options: the loop's settings; those of a resumed run must agree with its checkpoint.
        objective: what is trained; a resumed one takes the checkpoint's weights.

    Raises:
        OptionError: options differ from the checkpoint's.
        CheckpointError: the checkpoint is damaged.
    """

    def __init__(self, folder: Path, options: LoopOptions, objective: Trained) -> None:
        self.folder, self.options, self.objective = folder, options, objective
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        self.optimizers = Optimizers(objective.module, options.optimizer, options.weight_decay)
        o = options
        self.schedule = Schedule(o.steps, o.minutes, o.warmup, o.rate, o.floor)
        self.seconds = 0.0  # on the clock, over all parts of the run
        self.step = 0
        self.done = [0, 0]  # steps made in each phase
        self.losses: list[float] = []  # since the last report
        self.history: list[dict[str, Any]] = []
        self._loss: Callable[[Tensor, Tensor], Tensor] = torch.compile(objective.loss) if o.compile else objective.loss
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

    def _defining(self) -> dict[str, Any]:
        return self.options.defining() | self.objective.identity

    def _restore(self, state: dict[str, Any]) -> None:
        check_unchanged(self.folder, state["options"], self._defining())
        self.objective.module.load_state_dict(state["model"])
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
                "options": self._defining(),
                "model": self.objective.module.state_dict(),
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
                news.valid = self.objective.evaluate(o.length) if evaluate else {}
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
        phase = self.objective.phases[number]
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
        norm = clip_gradients(self.objective.module, o.clip)
        self.optimizers.step(rate)
        self.done[number] += 1
        self.step += 1
        return total / passes, norm


def find_device(name: str) -> torch.device:
    """The device of that name; :class:`~pronk.errors.OptionError` if this machine has none."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # an unknown name; a device that this torch or machine lacks
        msg = f"device: expected one that this machine has, for example cpu, found {name!r}"
        raise OptionError(msg) from error
    return device
