"""Training loop of language models and drafters.

A run is one folder and can be stopped and continued at any time::

    RUN/data/          token files, list of sources
    RUN/checkpoint.pt  module, optimizer, position, clock
    RUN/latest/        the model at the last evaluation
    RUN/export/        the finished model

The numbers of steps in the two phases (short sequences, then long ones) determine the position in
the text, so a resumed run computes exactly the losses of an uninterrupted one. The number of
processes that share the steps (:mod:`pronk.train.distributed`) may change when a run is resumed.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from pronk import LLM, OptionError, PronkError
from pronk.backends import set_threads
from pronk.base import number_texts
from pronk.drafting import Counts, derive_seed
from pronk.train.batches import Batches
from pronk.train.checkpoint import CHECKPOINT, check_run, load_checkpoint, save_checkpoint
from pronk.train.clock import EVALUATION, TRAINED_BY, Clock
from pronk.train.distributed import ProcessGroup, local_device
from pronk.train.optim import Optimizers, Schedule
from pronk.train.options import LoopOptions
from pronk.train.served import SERVED_TOKENS, measure, take_acceptance

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class PassResult:
    """Result of one forward and backward pass over a part of a step's batch."""

    loss: float  # mean loss of the rows in nats per token
    # For each branch (prediction head) of a drafter, the fraction of rows in which its most likely
    # token is the target's. Empty for a language model.
    same: tuple[float, ...] = ()


class Objective(ABC, Generic[Module]):
    """A module to train, with its loss, training text and evaluation; see :class:`Trainer`."""

    folder: Path  # folder of the run
    options: LoopOptions
    # the module to train; the optimizer ``muon`` updates the matrices in ``module.layers``
    module: Module
    # Training sequences of the two phases of a run: short sequences, then long ones.
    phases: tuple[Batches, Batches]
    # Values that must be unchanged when a run is resumed, in addition to the options of the loop.
    identity: dict[str, Any]
    # Acceptance counts of the last :meth:`serve`, which travel with the exported drafter.
    acceptance: Counts = MappingProxyType({})

    @abstractmethod
    def backward(self, inputs: Tensor, targets: Tensor, scale: float) -> PassResult:
        """Add ``scale`` times the gradient of the mean loss of a batch to the module's gradients.

        If there are several losses, the gradient is that of their sum.

        Args:
            inputs: token ids ``[sequences, length]``.
            targets: for each token of ``inputs``, the next token of its text; same shape.
            scale: factor of the gradient.

        Returns:
            The mean loss, without ``scale``.
        """

    @abstractmethod
    def evaluate(self, length: int, seconds: float = math.inf) -> dict[str, float]:
        """Return figures by name, measured on held-out sequences for about ``seconds``.

        The sequences have up to ``length`` tokens, and a figure such as "prose KL" has the name of
        the held-out text.
        """

    def judge(self, figures: Mapping[str, float]) -> float:
        """Return the figure that early stopping compares; lower is better.

        By default it is the mean divergence of a drafter from the target; NaN without held-out
        text.
        """
        divergences = [value for name, value in figures.items() if " KL" in name]
        return fmean(divergences) if divergences else math.nan

    @abstractmethod
    def export(self, folder: Path, card: str, facts: Mapping[str, Any]) -> None:
        """Write the current module to ``folder``, in place of its contents.

        ``card`` becomes ``README.md``, and ``facts`` are stored as JSON.
        """

    def serve(
        self, llm: LLM, spec: str, prompts: Sequence[list[int]], seconds: float
    ) -> dict[str, float]:
        """Export the current drafter to ``RUN/latest``, and measure it in the engine.

        Args:
            llm: the target.
            spec: the drafter's specification, with ``{model!r}`` for the folder of the drafter.
            prompts: token ids of prompts; without prompts, nothing is exported or measured.
            seconds: time limit.

        Returns:
            The figures of :func:`pronk.train.served.measure`; empty without prompts.
        """
        if not prompts:
            return {}
        latest = self.folder / "latest"
        self.acceptance = {}
        self.export(latest, "", {})
        drafter = spec.format(model=str(latest))
        figures = measure(llm, drafter, prompts, SERVED_TOKENS, seconds)
        self.acceptance = take_acceptance(llm, drafter)
        return figures


Trained = TypeVar("Trained", bound=Objective[Any])


@dataclass
class Report:
    """Progress of a run, as it is shown and logged."""

    step: int  # number of steps so far
    progress: float  # fraction of the training that is done, 0..1
    loss: float  # mean loss since the last report, in nats per token
    rate: float  # learning rate
    norm: float  # norm of the last gradient before clipping
    tokens: int  # number of tokens trained on so far
    seconds: float  # training time so far, in seconds
    speed: float  # tokens per second in the median step since the last report
    same: tuple[float, ...] = ()  # means of :class:`PassResult`'s ``same`` since the last report
    # Figures of an evaluation by name; empty if there was none at this step.
    valid: dict[str, float] = field(default_factory=dict)


class Trainer(Generic[Trained]):
    """One training run, which resumes from the checkpoint in the run's folder, if there is one.

    Raises OptionError if options differ from those of the checkpoint, if the forward passes of a
    step cannot be divided evenly among the processes, or if no time is left; CheckpointError if the
    checkpoint is damaged.
    """

    def __init__(
        self, objective: Trained, processes: ProcessGroup | None = None, clock: Clock | None = None
    ) -> None:
        self.folder = objective.folder
        self.options = objective.options
        self.objective = objective
        options = self.options
        self.checkpoint = self.folder / CHECKPOINT
        self._defining = options.defining() | objective.identity
        self.processes = processes or ProcessGroup()
        self.clock = clock or Clock(options.minutes)
        if options.batch // options.micro % self.processes.count:
            msg = (
                f"batch: expected a multiple of micro times the processes, {options.micro} × "
                f"{self.processes.count} tokens, found {options.batch}; change --batch or "
                "--micro, or start another number of processes"
            )
            raise OptionError(msg)
        set_all_threads(options.threads)
        self.optimizers = Optimizers(
            objective.module, options.optimizer, options.weight_decay, options.adamw_share
        )
        # Seconds of training by the first process's clock, including those before a resumption.
        self.seconds = 0.0
        self.step = 0  # number of steps made
        self.step_seconds = 0.0  # duration of the last step in seconds
        self.phase_steps = [0, 0]  # number of steps made in each phase
        # Loss and ``same`` (see PassResult) of each step since the last report.
        self.step_results: list[tuple[float, ...]] = []
        self.history: list[dict[str, Any]] = []
        if self.checkpoint.exists():
            self._restore(load_checkpoint(self.checkpoint))
        # Seconds of the run that were not training: writing the text, and loading after each
        # restart.
        self.seconds_before = self.processes.agree(self.clock.seconds) - self.seconds
        self.schedule = Schedule(options, self._minutes())

    def _minutes(self) -> float | None:
        """Return the time limit of the training alone in minutes; ``None`` without a limit."""
        if not self.clock.has_limit:
            return None
        left = TRAINED_BY * self.clock.limit - self.seconds_before
        if left <= 0 and not self.step:
            needed, found = number_texts(self.seconds_before / 60, self.clock.limit / 60)
            msg = (
                f"minutes: expected more than the {needed} that the text took, found {found}; "
                "the text is kept, and the same command with more --minutes goes on"
            )
            raise OptionError(msg)
        return max(left, 1e-3) / 60

    @property
    def is_finished(self) -> bool:
        """Whether the run has ended: all steps are done, time is over, or it was stopped early."""
        progress = self.schedule.progress(self.step, self.seconds + self.step_seconds)
        return progress >= 1.0 or self.stopped_early

    @property
    def stopped_early(self) -> bool:
        """Whether the best evaluation is older than the last ``patience`` evaluations."""
        patience = self.options.patience
        values = [judgement for _, judgement in self.judgements]
        if patience is None or len(values) <= patience:
            return False
        return min(values[:-patience]) <= min(values[-patience:])

    @property
    def judgements(self) -> list[tuple[int, float]]:
        """Number of the step and figure of :meth:`Objective.judge`, for each evaluation so far."""
        evaluated = [entry for entry in self.history if entry["valid"]]
        return [(entry["step"], self.objective.judge(entry["valid"])) for entry in evaluated]

    @property
    def tokens(self) -> int:
        """Number of tokens trained on so far."""
        return self.step * self.options.batch

    def _restore(self, state: dict[str, Any]) -> None:
        check_run(self.folder, self.options.defaults() | state["options"], self._defining)
        self.objective.module.load_state_dict(state["model"])
        self.optimizers.load_state_dict(state["optimizers"])
        torch.set_rng_state(state["rng"])
        self.step = state["step"]
        self.phase_steps = list(state["done"])
        self.step_seconds = state.get("pace", 0.0)
        self.seconds = state["seconds"]
        self.clock.earlier = self.seconds + state.get("before", 0.0)
        self.step_results = list(state.get("passed", []))
        self.history = list(state["history"])

    def save(self) -> None:
        """Write the checkpoint of the run; only the first process does."""
        state = {
            "options": self._defining,
            "model": self.objective.module.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "rng": torch.get_rng_state(),
            "step": self.step,
            "pace": self.step_seconds,
            "done": self.phase_steps,
            "seconds": self.seconds,
            "before": self.seconds_before,
            "passed": self.step_results,
            "history": self.history,
        }
        if self.processes.is_main:
            save_checkpoint(self.checkpoint, state)

    def train(
        self,
        report: Callable[[Report], None],
        evaluated: Callable[[Report], None],
        stop: Callable[[], bool] = lambda: False,
        on_pass: Callable[[int, int, int], None] = lambda *_: None,
    ) -> None:
        """Train to the end of the schedule, or until ``stop`` returns True, and save.

        Args:
            report: called every ``log_every`` steps, and after each evaluation.
            evaluated: called after each evaluation, to export an intermediate model.
            stop: called after each step, and before each forward pass of a step but the first; an
                unfinished step is dropped.
            on_pass: called after each forward pass with the number of the step (from 1), the number
                of this process's finished passes of the step, and that of all its passes.

        Raises PronkError if the loss is not finite; the last checkpoint stays.
        """
        last_end = time.monotonic()
        durations = []
        while not self.processes.is_any_true(self.is_finished or stop()):
            begin = time.monotonic()
            progress = self.schedule.progress(self.step, self.seconds)
            rate = self.schedule.rate(self.step, progress)
            norm = self._step(progress, rate, stop, on_pass)
            if norm is None:
                break
            end = time.monotonic()
            durations.append(end - begin)
            # The time since the end of the last step also includes saving, and periods in which the
            # process was suspended.
            clocks = (self.seconds + end - last_end, end - begin)
            self.seconds, self.step_seconds = self.processes.agree(clocks)
            last_end = end
            evaluate = self.step % self.options.evaluate_every == 0
            if self.is_finished and not self.clock.has_limit:
                # With a time limit, the caller evaluates the finished model after this method
                # instead.
                evaluate = True
            if evaluate or self.is_finished or self.step % self.options.log_every == 0:
                progress_report = self._make_report(rate, norm, median(durations))
                progress_report.valid = self._evaluate() if evaluate else {}
                self.history.append(asdict(progress_report))
                self.processes.from_main(partial(report, progress_report))
                durations.clear()
            if evaluate:
                self.processes.from_main(partial(evaluated, progress_report))
                now = time.monotonic()
                self.seconds = self.processes.agree(self.seconds + now - last_end)
                last_end = now
            if self.step % self.options.save_every == 0:
                self.save()
        self.save()

    def _make_report(self, rate: float, norm: float, seconds: float) -> Report:
        """Return a report of all steps since the last report.

        ``rate`` is the current learning rate, ``norm`` that of the last gradient, and ``seconds``
        the median duration of a step.
        """
        loss, *same = (fmean(column) for column in zip(*self.step_results, strict=True))
        self.step_results.clear()
        return Report(
            step=self.step,
            progress=self.schedule.progress(self.step, self.seconds),
            loss=loss,
            rate=rate,
            norm=norm,
            tokens=self.tokens,
            seconds=self.seconds,
            speed=self.options.batch / seconds,
            same=tuple(same),
        )

    def _evaluate(self) -> dict[str, float]:
        length = self.options.first_length
        seconds = EVALUATION * self.clock.limit
        figures = self.processes.from_main(lambda: self.objective.evaluate(length, seconds))
        if self.options.patience is not None and math.isnan(self.objective.judge(figures)):
            msg = "patience: expected held-out text to go by, found none; give more text"
            raise OptionError(msg)
        return figures

    def _step(
        self,
        progress: float,
        rate: float,
        stop: Callable[[], bool],
        on_pass: Callable[[int, int, int], None],
    ) -> float | None:
        """Make one optimizer step; return the norm of the gradient before clipping.

        The result is ``None`` if ``stop`` returned True: then the step is dropped.
        """
        o = self.options
        phase_number = 0 if progress < 1 - o.final_share else 1
        phase = self.objective.phases[phase_number]
        count = o.micro // phase.length
        passes = o.batch // o.micro
        # Loss and ``same`` (see PassResult) of each forward pass that this process computes.
        own_rows: list[tuple[float, ...]] = []
        own = list(self.processes.own_passes(passes))
        first_pass = self.phase_steps[phase_number] * passes
        # A step that is dropped must leave buffers, such as running means, as they were.
        buffers = [(buffer, buffer.clone()) for buffer in self.objective.module.buffers()]
        for i in own:
            if own_rows and self.processes.is_any_true(stop()):
                self.optimizers.clear()
                for buffer, before in buffers:
                    buffer.copy_(before)
                return None
            number = first_pass + i
            inputs, targets = phase.batch(number * count, count)
            # Random numbers of a pass depend on its number, not on the process or on interruptions.
            torch.manual_seed(derive_seed(o.seed, 2 * number + phase_number))
            passed = self.objective.backward(inputs, targets, 1 / passes)
            own_rows.append((passed.loss, *passed.same))
            on_pass(self.step + 1, len(own_rows), len(own))
        rows = self.processes.gather(own_rows)
        means = tuple(sum(column) / passes for column in zip(*rows, strict=True))
        if not math.isfinite(means[0]):
            msg = (
                f"step {self.step + 1}: expected a finite loss, found {means[0]}; use a lower --lr "
                f"than {o.rate:g}"
            )
            raise PronkError(msg)
        self.processes.sum_gradients(self.objective.module)
        norm = float(nn.utils.clip_grad_norm_(self.objective.module.parameters(), o.clip))
        self.optimizers.step(rate)
        self.step_results.append(means)
        self.phase_steps[phase_number] += 1
        self.step += 1
        return norm


def find_device(name: str) -> torch.device:
    """Return the torch device ``name``; ``cuda`` is the GPU of this process.

    Raises OptionError if the device does not exist.
    """
    try:
        device = torch.device(local_device(name))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # the name is unknown, or the device is missing
        msg = f"device: expected one that this machine has, for example cpu, found {name!r}"
        raise OptionError(msg) from error
    return device


def set_all_threads(threads: int | None) -> None:
    """Set the number of threads, 1..4096, of torch and of pronk's kernels.

    With ``None``, torch keeps its number of threads, and the kernels get the same.
    """
    set_threads(torch.get_num_threads() if threads is None else threads, workers=1)
    if threads is not None:
        torch.set_num_threads(threads)
