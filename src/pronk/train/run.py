"""A whole run: prepare the text once, train with progress on the terminal, export."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from pronk.train.card import model_card, student_card
from pronk.train.checkpoint import load_options
from pronk.train.data import prepare
from pronk.train.display import PLAIN, TrainingDisplay, WritingDisplay, figure_lines
from pronk.train.distributed import Processes, join_processes
from pronk.train.future import FutureTokens
from pronk.train.lm import LM_IDENTITY, LanguageModel, TextModel
from pronk.train.loop import Trainer
from pronk.train.on_policy import continue_prompts, write_prompts
from pronk.train.options import DataOptions, LoopOptions, OnPolicyOptions, StudentOptions, TrainOptions
from pronk.train.resume import check_run
from pronk.train.student import Student
from pronk.train.teacher import Teacher

__all__ = ["run", "run_student"]


def run(data: DataOptions, options: TrainOptions, folder: Path, name: str, command: str, console: Console) -> bool:
    """Train a language model in ``folder`` until the schedule ends or Ctrl-C; returns whether it ended.

    Args:
        data: sources and their mixture.
        options: the loop's settings.
        folder: of the run; an unfinished run is continued, a finished one exported again.
        name: of the model, for its card.
        command: for the card.
        console: for figures and, on a terminal, a progress bar.

    Raises:
        PronkError: bad options, sources or checkpoints.
    """
    tokens = options.steps * options.batch + 1
    with _together(options, console) as processes:
        say = partial(console.print, **PLAIN)
        processes.from_main(partial(_check_resumed, folder, options, LM_IDENTITY))
        text = partial(prepare, data, folder / "data", tokens, options.shape.context, say, least=options.longest + 1)
        processes.from_main(text)
        made = LanguageModel if options.heads is None else FutureTokens
        objective: TextModel[Any] = made(folder, options)
        trainer = Trainer(folder, options, objective, processes)

        def export(target: str, valid: dict[str, float], length: int) -> None:
            card = model_card(trainer, name, command, valid, length)
            facts = {"name": name, "figures": valid, "length": length, "command": command}
            objective.export(folder / target, card, facts)

        return _train(trainer, export, console)


def run_student(  # noqa: PLR0917 - as run, with a target and what it is to write
    kind: type[Student[Any]],
    data: DataOptions,
    own: OnPolicyOptions,
    options: StudentOptions,
    teacher: Teacher,
    folder: Path,
    name: str,
    command: str,
    console: Console,
) -> bool:
    """Train a drafter in ``folder``, from ``teacher`` and what it is to write (``own``); see :func:`run`."""
    with _together(options, console) as processes:
        processes.from_main(partial(_check_resumed, folder, options, kind.identify(teacher)))
        if not processes.from_main(partial(_write_text, data, own, options, teacher, folder / "data", console)):
            console.print("saved what the target has written; the same command continues", **PLAIN)
            return False
        trainer = Trainer(folder, options, kind(folder, options, teacher), processes)

        def export(target: str, valid: dict[str, float], length: int) -> None:
            card = student_card(trainer, name, command, valid, length)
            facts = {"figures": valid, "length": length, "command": command}
            trainer.objective.export(folder / target, card, facts)

        return _train(trainer, export, console)


def _check_resumed(folder: Path, options: LoopOptions, identity: dict[str, Any]) -> None:
    """Refuse other options than those of the checkpoint to be resumed, before any text is written by them."""
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        check_run(folder, load_options(checkpoint), options.defining() | identity)


def _write_text(
    data: DataOptions, own: OnPolicyOptions, options: StudentOptions, teacher: Teacher, folder: Path, console: Console
) -> bool:
    """Prepare the text, and let the target write its own; returns whether all of it is there."""
    tokens = math.ceil((1 - options.share) * options.steps * options.batch) + 1
    say = partial(console.print, **PLAIN)
    prompts = partial(write_prompts, teacher=teacher, options=own, folder=folder)
    prepare(data, folder, tokens, options.context, say, teacher.encoder, prompts, options.longest + 1)
    with _interrupt_flag() as interrupted, WritingDisplay(console, own.tokens) as bar:
        return continue_prompts(teacher, folder, own, bar.show, lambda: bool(interrupted))


@contextmanager
def _together(options: LoopOptions, console: Console) -> Iterator[Processes]:
    """The processes that share the run; only the first one's ``console`` shows anything."""
    with join_processes(options.device) as processes:
        console.quiet = console.quiet or not processes.main
        yield processes


def _train(trainer: Trainer[Any], export: Callable[[str, dict[str, float], int], None], console: Console) -> bool:
    """Train with progress on the terminal, and export the model of the last step."""
    options = trainer.options
    with _interrupt_flag() as interrupted, TrainingDisplay(console) as display:
        trainer.train(
            report=display.show,
            evaluated=lambda news: export("latest", news.valid, options.first_length),
            stop=lambda: bool(interrupted),
        )
    if not trainer.finished:
        console.print(f"saved at step {trainer.step}; the same command continues", **PLAIN)
    elif trainer.processes.main:
        if trainer.stopped_early:
            step, best = min(trainer.judged, key=lambda each: each[1])
            line = f"stopped early: no validation after that of step {step} ({best:.4f}) is better"
            console.print(f"{line}, with a patience of {options.patience}", **PLAIN)
        length = options.last_length
        figures = trainer.objective.evaluate(length)
        for target in ("latest", "export"):
            export(target, figures, length)
        console.print(f"finished: {trainer.folder / 'export'}, on sequences of {length} tokens", **PLAIN)
        for line in figure_lines(figures):
            console.print(line, **PLAIN)
    return trainer.finished


@contextmanager
def _interrupt_flag() -> Iterator[list[int]]:
    """A list that the first Ctrl-C, or a polite ``kill``, makes non-empty; the second one interrupts at once."""
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def remember(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
        received.append(number)
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, remember)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
