"""A whole run: prepare the text once, train with progress on the terminal, export."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from pronk.train.card import model_card, student_card
from pronk.train.checkpoint import load_checkpoint
from pronk.train.clock import EVALUATION, TEXT_BY, TOKENS_BY, TRAINED_BY, Clock
from pronk.train.data import Collection, prepare
from pronk.train.display import PLAIN, TrainingDisplay, WritingDisplay, figure_lines
from pronk.train.distributed import ProcessGroup, join_processes
from pronk.train.future import FutureTokens
from pronk.train.lm import LM_IDENTITY, LanguageModel, TextModel
from pronk.train.loop import Trainer
from pronk.train.on_policy import continue_prompts, write_prompts
from pronk.train.options import DataOptions, LoopOptions, OnPolicyOptions, StudentOptions, TrainOptions
from pronk.train.resume import check_run
from pronk.train.student import Student
from pronk.train.teacher import Teacher

__all__ = ["run", "run_student"]


def run(  # noqa: PLR0917 - what is trained, and how it is called
    data: DataOptions,
    options: TrainOptions,
    folder: Path,
    name: str,
    command: str,
    console: Console,
    clock: Clock | None = None,
) -> bool:
    """Train a language model in ``folder`` until the schedule ends or Ctrl-C; returns whether it ended.

    Args:
        data: sources and their mixture.
        options: the loop's settings.
        folder: of the run; an unfinished run is continued, a finished one exported again.
        name: of the model, for its card.
        command: for the card.
        console: for figures and, on a terminal, a progress bar.
        clock: started with the command, if that is before this.

    Raises:
        PronkError: bad options, sources or checkpoints.
    """
    clock = clock or Clock(options.minutes)
    tokens = options.steps * options.batch + 1
    with _together(options, console) as processes:
        processes.from_main(partial(_begin, folder, options, LM_IDENTITY, clock, console))

        def write_text() -> None:
            def enough(done: int) -> bool:
                return done >= options.least_text and clock.left(TEXT_BY) <= 0

            say, least = partial(console.print, **PLAIN), options.longest + 1
            prepare(data, folder / "data", tokens, options.shape.context, say, least=least, enough=enough)
            clock.save(folder / "data")

        processes.from_main(write_text)
        made = LanguageModel if options.heads is None else FutureTokens
        objective: TextModel[Any] = made(folder, options)
        trainer = Trainer(folder, options, objective, processes, clock)

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
    clock: Clock | None = None,
) -> bool:
    """Train a drafter in ``folder``, from ``teacher`` and what it is to write (``own``); see :func:`run`."""
    clock = clock or Clock(options.minutes)
    with _together(options, console) as processes:
        processes.from_main(partial(_begin, folder, options, kind.identify(teacher), clock, console, own))
        if not processes.from_main(partial(_write_text, data, own, options, teacher, folder / "data", console, clock)):
            console.print("saved what the target has written; the same command continues", **PLAIN)
            return False
        trainer = Trainer(folder, options, kind(folder, options, teacher), processes, clock)

        def export(target: str, valid: dict[str, float], length: int) -> None:
            card = student_card(trainer, name, command, valid, length)
            facts = {"figures": valid, "length": length, "command": command}
            trainer.objective.export(folder / target, card, facts)

        return _train(trainer, export, console)


def _begin(
    folder: Path,
    options: LoopOptions,
    identity: dict[str, Any],
    clock: Clock,
    console: Console,
    own: OnPolicyOptions | None = None,
) -> None:
    """Refuse other options than those of the checkpoint to be resumed, before any text is written by them.

    The clock goes on from where it was. If it has a limit, it is said how the time is shared out.
    """
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        state = load_checkpoint(checkpoint, mapped=True)
        check_run(folder, state["options"], options.defining() | identity)
        clock.resume(state["seconds"] + state.get("before", 0.0))
    else:
        clock.restore(folder / "data")
    if clock.left(TRAINED_BY) < inf:
        console.print(_plan(clock, own, writing=not checkpoint.exists()), **PLAIN)


def _plan(clock: Clock, own: OnPolicyOptions | None, *, writing: bool) -> str:
    """How the time that is left is shared out, in one line."""
    text = max(0.0, clock.left(TEXT_BY)) if writing else 0.0
    training = max(0.0, clock.left(TRAINED_BY) - text)
    ending = max(0.0, min(clock.left(), (1 - TRAINED_BY) * clock.limit))
    parts = [f"{text / 60:.1f} for text", f"{training / 60:.1f} for training", f"{ending / 60:.1f} for evaluating"]
    if writing and own is not None and own.tokens and not own.at_most:
        parts[0] = f"as long as the {own.tokens} tokens of --on-policy take"
        parts[1] = f"what that leaves of {(text + training) / 60:.1f} for training"
    return f"minutes left of {clock.limit / 60:g}: {', '.join(parts)}"


def _write_text(  # noqa: PLR0917 - as it is called in another process's stead
    data: DataOptions,
    own: OnPolicyOptions,
    options: StudentOptions,
    teacher: Teacher,
    folder: Path,
    console: Console,
    clock: Clock,
) -> bool:
    """Prepare the text, and let the target write its own; returns whether all of it is there."""
    tokens = math.ceil((1 - options.share) * options.steps * options.batch) + 1

    def late() -> bool:
        return clock.left(TOKENS_BY) <= 0

    def prompts(read: Collection) -> None:
        write_prompts(read, teacher, own, folder, late if own.at_most else lambda: False)

    prepare(
        data,
        folder,
        tokens,
        options.context,
        partial(console.print, **PLAIN),
        teacher.encoder,
        prompts,
        options.longest + 1,
        lambda done: done >= options.least_text and late(),
    )
    clock.save(folder)
    bar = WritingDisplay(console, own.tokens, clock if own.at_most else None)
    with _interrupt_flag() as interrupted, bar:
        return continue_prompts(
            teacher, folder, own, bar.show, lambda: bool(interrupted), clock=clock, least=options.longest + 1
        )


@contextmanager
def _together(options: LoopOptions, console: Console) -> Iterator[ProcessGroup]:
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
        # A finished run that is exported again has no time left, and is measured as in the middle of its training.
        seconds = max(trainer.clock.left(), EVALUATION * trainer.clock.limit)
        figures = trainer.objective.evaluate(length, seconds)
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
