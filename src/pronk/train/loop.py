"""The training loop, whatever is trained: a language model, a draft model.

A run lives in one folder and can be stopped and continued at any time::

    RUN/data/          token files, list of sources
    RUN/checkpoint.pt  what is trained, optimizer, position, clock
    RUN/latest/        the model at the last evaluation, as a Hugging Face checkpoint
    RUN/export/        the finished model

Where a run is in its text follows from the number of steps it has made in each of its two phases (short sequences, then
long ones), so that a resumed run computes exactly the losses of an uninterrupted one. Several processes may share the
work of a step (:mod:`pronk.train.distributed`); a run may be continued by more or fewer of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from pronk.errors import OptionError, PronkError
from pronk.train.batches import Batches
from pronk.train.checkpoint import load_checkpoint, save_checkpoint
from pronk.train.clock import EVALUATION, TRAINED_BY, Clock
from pronk.train.distributed import ProcessGroup, local_device
from pronk.train.optim import Optimizers, clip_gradients
from pronk.train.options import LoopOptions
from pronk.train.resume import check_run
from pronk.train.schedule import Schedule

__all__ = ["Objective", "Passed", "Report", "Trainer", "find_device"]


@dataclass(frozen=True)
class Passed:
    """What a pass over some sequences says.

    Attributes:
        loss: mean, in nats per token.
        same: for each guess ahead, how often it is the target's own likeliest token; empty where nothing guesses.
    """

    loss: float
    same: tuple[float, ...] = ()


class Objective(Protocol):
    """What is trained, on what, and how well it does."""

    @property
    def module(self) -> nn.Module:
        """The module whose parameters are trained; its large matrices are in ``module.layers``."""
        ...

    @property
    def phases(self) -> tuple[Batches, Batches]:
        """The sequences of the first part of the run, and the sequences of the last."""
        ...

    @property
    def identity(self) -> dict[str, Any]:
        """What a resumed run must have as before, beyond the loop's options."""
        ...

    def backward(self, inputs: Tensor, targets: Tensor, scale: float) -> Passed:
        """Add ``scale`` times the gradient of the mean loss over ``inputs`` and ``targets`` ``[count, length]``."""
        ...

    def evaluate(self, length: int, seconds: float = math.inf) -> dict[str, float]:
        """Figures by name, on held-out sequences of (at most) ``length`` tokens, as many as ``seconds`` allow."""
        ...

    def judge(self, figures: Mapping[str, float]) -> float:
        """The one number, lower is better, that early stopping goes by; NaN if there is no held-out text."""
        ...


Trained = TypeVar("Trained", bound=Objective)


@dataclass
class Report:
    """What the loop says: means since the last report, and the objective's figures when they are new.

    ``same`` is as in :class:`Passed`. ``seconds`` is the time so far, ``speed`` in tokens/s that of the median step,
    ``norm`` that of the last gradient.
    """

    step: int
    progress: float
    loss: float
    rate: float
    norm: float
    tokens: int
    seconds: float
    speed: float
    same: tuple[float, ...] = ()
    valid: dict[str, float] = field(default_factory=dict)


class Trainer(Generic[Trained]):
    """One run: ``train`` goes on from wherever the folder's checkpoint is.

    Args:
        folder: the run.
        options: the loop's settings; those of a resumed run must agree with its checkpoint.
        objective: what is trained; a resumed one takes the checkpoint's weights.
        processes: that share the work.
        clock: of the run, by which ``options.minutes`` end it; a resumed one goes on from the checkpoint's.

    Raises:
        OptionError: options differ from the checkpoint's, the passes of a step cannot be shared evenly, or there is no
            time left.
        CheckpointError: the checkpoint is damaged.
    """

    def __init__(
        self,
        folder: Path,
        options: LoopOptions,
        objective: Trained,
        processes: ProcessGroup | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.folder, self.options, self.objective = folder, options, objective
        self.processes, self.clock = processes or ProcessGroup(), clock or Clock(options.minutes)
        _check_shares(options, self.processes.count)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        self.optimizers = Optimizers(objective.module, options.optimizer, options.weight_decay)
        self.seconds = 0.0  # of training, on the first process's clock, over all parts of the run
        self.step, self.length_tracker = 0, 0.0  # seconds of the last step
        self.done = [0, 0]  # steps made in each phase
        self.passed: list[tuple[float, ...]] = []  # of each step since the last report: its loss, then ``same``
        self.history: list[dict[str, Any]] = []
        if self.checkpoint.exists():
            self._restore(load_checkpoint(self.checkpoint))
        # What the text took, and starting again; a run ends in time whatever came before the training.
        self.before = self.processes.agree(self.clock.seconds) - self.seconds
        o = options
        self.schedule = Schedule(o.steps, self._minutes(), o.warmup, o.rate, o.floor)

    def _minutes(self) -> float | None:
        """How long the training may take."""
        if not self.clock.limited:
            return None
        left = TRAINED_BY * self.clock.limit - self.before
        if left <= 0 and not self.step:
            msg = (
                f"minutes: expected more than the {self.before / 60:.1f} that the text took, found "
                f"{self.clock.limit / 60:g}; the text is kept, and the same command with more --minutes goes on"
            )
            raise OptionError(msg)
        return max(left, 1e-3) / 60

    @property
    def checkpoint(self) -> Path:
        """The file that the run is saved in."""
        return self.folder / "checkpoint.pt"

    @property
    def finished(self) -> bool:
        """Whether the schedule has ended, or has no time for another step, or early stopping has ended it."""
        return self.schedule.progress(self.step, self.seconds + self.length_tracker) >= 1.0 or self.stopped_early

    @property
    def stopped_early(self) -> bool:
        """Whether the last ``patience`` evaluations were no better than the best one before them."""
        patience, judged = self.options.patience, [each for _, each in self.judged]
        return patience is not None and len(judged) > patience and min(judged[:-patience]) <= min(judged[-patience:])

    @property
    def judged(self) -> list[tuple[int, float]]:
        """The step of each evaluation so far, and what early stopping goes by."""
        return [(each["step"], self.objective.judge(each["valid"])) for each in self.history if each["valid"]]

    @property
    def tokens(self) -> int:
        """Tokens trained on so far."""
        return self.step * self.options.batch

    def _defining(self) -> dict[str, Any]:
        return self.options.defining() | self.objective.identity

    def _restore(self, state: dict[str, Any]) -> None:
        check_run(self.folder, state["options"], self._defining())
        self.objective.module.load_state_dict(state["model"])
        self.optimizers.load_state_dict(state["optimizers"])
        torch.set_rng_state(state["rng"])
        self.step, self.done = state["step"], list(state["done"])
        self.length_tracker = state.get("pace", 0.0)
        self.seconds = state["seconds"]
        self.clock.resume(self.seconds + state.get("before", 0.0))
        self.passed, self.history = list(state.get("passed", [])), list(state["history"])

    def save(self) -> None:
        """Write the checkpoint.

        Raises:
            CheckpointError: it cannot be written, for want of room for example; the one before is intact.
        """
        if not self.processes.main:
            return
        save_checkpoint(
            self.checkpoint,
            {
                "options": self._defining(),
                "model": self.objective.module.state_dict(),
                "optimizers": self.optimizers.state_dict(),
                "rng": torch.get_rng_state(),
                "step": self.step,
                "pace": self.length_tracker,
                "done": self.done,
                "seconds": self.seconds,
                "before": self.before,
                "passed": self.passed,
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
        last, durations = time.monotonic(), []
        while not self.processes.any(self.finished or stop()):
            begin = time.monotonic()
            progress = self.schedule.progress(self.step, self.seconds)
            rate = self.schedule.rate(self.step, progress)
            norm = self._step(progress, rate)
            end = time.monotonic()
            durations.append(end - begin)
            # Evaluations and the time a process was suspended count too: the time limit is a promise.
            self.seconds, self.length_tracker = self.processes.agree((self.seconds + end - last, end - begin))
            last = end
            # Where time is short, the finished model is measured, and not twice.
            evaluate = self.step % self.options.evaluate_every == 0 or (self.finished and not self.clock.limited)
            if evaluate or self.finished or self.step % self.options.log_every == 0:
                news = self._news(rate, norm, median(durations))
                news.valid = self._evaluate() if evaluate else {}
                self.history.append(asdict(news))
                self.processes.from_main(partial(report, news))
                durations.clear()
            if evaluate:
                self.processes.from_main(partial(evaluated, news))
                now = time.monotonic()
                self.seconds, last = self.processes.agree(self.seconds + now - last), now
            if self.step % self.options.save_every == 0:
                self.save()
        self.save()

    def _news(self, rate: float, norm: float, seconds: float) -> Report:
        """What has passed since the last report, where a step took ``seconds``."""
        loss, *same = (fmean(column) for column in zip(*self.passed, strict=True))
        self.passed.clear()
        progress, speed = self.schedule.progress(self.step, self.seconds), self.options.batch / seconds
        return Report(self.step, progress, loss, rate, norm, self.tokens, self.seconds, speed, tuple(same))

    def _evaluate(self) -> dict[str, float]:
        length, seconds = self.options.first_length, EVALUATION * self.clock.limit
        figures = self.processes.from_main(lambda: self.objective.evaluate(length, seconds))
        if self.options.patience is not None and math.isnan(self.objective.judge(figures)):
            msg = "patience: expected held-out text to go by, found none; give more text or, with --valid, a file"
            raise OptionError(msg)
        return figures

    def _step(self, progress: float, rate: float) -> float:
        """One optimizer step; returns the norm of its gradient."""
        o = self.options
        number = 0 if progress < 1 - o.final_share else 1
        phase = self.objective.phases[number]
        count, passes = o.micro // phase.length, o.batch // o.micro
        own = []
        for i in self.processes.share(passes):
            inputs, targets = phase.batch((self.done[number] * passes + i) * count, count)
            passed = self.objective.backward(inputs, targets, 1 / passes)
            own.append((passed.loss, *passed.same))
        means = tuple(sum(column) / passes for column in zip(*self.processes.gather(own), strict=True))
        if not math.isfinite(means[0]):
            msg = f"step {self.step + 1}: expected a finite loss, found {means[0]}; use a lower --lr than {o.rate:g}"
            raise PronkError(msg)
        self.processes.sum_gradients(self.objective.module)
        norm = clip_gradients(self.objective.module, o.clip)
        self.optimizers.step(rate)
        self.passed.append(means)
        self.done[number] += 1
        self.step += 1
        return norm


def _check_shares(options: LoopOptions, processes: int) -> None:
    """Every process makes as many passes as the others."""
    if options.batch // options.micro % processes:
        msg = (
            f"batch: expected a multiple of micro times the processes, {options.micro} × {processes} tokens, "
            f"found {options.batch}; change --batch or --micro, or start another number of processes"
        )
        raise OptionError(msg)


def find_device(name: str) -> torch.device:
    """The device of that name, for ``cuda`` this process's own; :class:`~pronk.errors.OptionError` if there is none."""
    try:
        device = torch.device(local_device(name))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # an unknown name; a device that this torch or machine lacks
        msg = f"device: expected one that this machine has, for example cpu, found {name!r}"
        raise OptionError(msg) from error
    return device
