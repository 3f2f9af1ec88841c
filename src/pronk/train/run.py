"""A complete run: prepare the text unless its files exist, train, show the progress, export the model."""

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

from pronk.corpus.collection import Collection
from pronk.train.answers_text import has_answers, write_answers_text
from pronk.train.card import model_card, student_card
from pronk.train.checkpoint import CHECKPOINT, load_checkpoint
from pronk.train.clock import EVALUATION, TEXT_BY, TOKENS_BY, TRAINED_BY, Clock
from pronk.train.data import prepare
from pronk.train.display import PLAIN, TrainingDisplay, WritingDisplay, figure_lines
from pronk.train.distributed import join_processes
from pronk.train.future import FutureTokens
from pronk.train.initial import InitialModel
from pronk.train.lm import LanguageModel, TextModel
from pronk.train.loop import Trainer
from pronk.train.on_policy import continue_prompts, write_prompts
from pronk.train.options import DataOptions, LoopOptions, OnPolicyOptions, StudentOptions, TrainOptions
from pronk.train.resume import check_run
from pronk.train.student import Student
from pronk.train.teacher import Teacher

__all__ = ["begin_run", "run", "run_student", "train_and_export"]


def run(  # noqa: PLR0917 - options of the model, then of the run
    data: DataOptions,
    options: TrainOptions,
    folder: Path,
    name: str,
    command: str,
    console: Console,
    clock: Clock | None = None,
    initial: InitialModel | None = None,
) -> bool:
    """Train a language model until the schedule ends or Ctrl-C; return whether the schedule ended.

    An unfinished run in ``folder`` is continued, a finished one is exported again. The model card contains ``name`` and
    ``command``. The time limit counts from the creation of ``clock``, by default from this call. With ``initial``, the
    training starts from this checkpoint.

    Raises:
        PronkError: bad options, sources or checkpoints.
    """
    clock = clock or Clock(options.minutes)
    with join_processes(options.device) as processes:
        console.quiet = console.quiet or not processes.is_main
        processes.from_main(partial(begin_run, folder, options, TextModel.identify(initial), clock, console))

        def enough(done: int) -> bool:
            return done >= options.min_text_tokens and clock.seconds_left(TEXT_BY) <= 0

        def write_text() -> None:
            say, min_tokens = partial(console.print, **PLAIN), options.longest + 1
            tokens, context = options.steps * options.batch + 1, options.shape.context
            encoder = None if initial is None else initial.encoder
            prepare(data, folder / "data", tokens, context, say, encoder, min_source_tokens=min_tokens, enough=enough)
            clock.save(folder / "data")

        processes.from_main(write_text)
        objective: type[TextModel[Any]] = LanguageModel if options.heads is None else FutureTokens
        trainer = Trainer(folder, options, objective(folder, options, initial), processes, clock)
        return train_and_export(trainer, partial(model_card, trainer, name), {"name": name}, command, console)


def run_student(  # noqa: PLR0917 - as for run, with a target and its own text
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
    """Train a drafter like :func:`run`, partly on text by the target ``teacher``; ``own`` has its amount."""
    clock = clock or Clock(options.minutes)
    with join_processes(options.device) as processes:
        console.quiet = console.quiet or not processes.is_main
        processes.from_main(partial(begin_run, folder, options, kind.identify(teacher), clock, console, own))
        if not processes.from_main(partial(_write_text, data, own, options, teacher, folder / "data", console, clock)):
            console.print("saved what the target has written; the same command continues", **PLAIN)
            return False
        trainer = Trainer(folder, options, kind(folder, options, teacher), processes, clock)
        return train_and_export(trainer, partial(student_card, trainer, name), {}, command, console)


def begin_run(
    folder: Path,
    options: LoopOptions,
    identity: dict[str, Any],
    clock: Clock,
    console: Console,
    own: OnPolicyOptions | None = None,
    *,
    writes_text: bool = True,
) -> None:
    """Check that a resumed run has its checkpoint's options; add its earlier duration to the clock.

    With a time limit, print how it is divided; ``writes_text``: whether the run prepares its own text.
    """
    checkpoint = folder / CHECKPOINT
    if checkpoint.exists():
        state = load_checkpoint(checkpoint, mapped=True)
        check_run(folder, state["options"], options.defining() | identity)
        clock.resume(state["seconds"] + state.get("before", 0.0))
    else:
        clock.restore(folder / "data")
    if clock.seconds_left(TRAINED_BY) < inf:
        console.print(_time_plan(clock, own, writing=not checkpoint.exists() if writes_text else None), **PLAIN)


def _time_plan(clock: Clock, own: OnPolicyOptions | None, *, writing: bool | None) -> str:
    """Return a line of text: the minutes left for preparing the text, for training and for evaluation.

    ``writing``: whether the text is still to be prepared; ``None`` for runs that prepare none.
    """
    text = max(0.0, clock.seconds_left(TEXT_BY)) if writing else 0.0
    training = max(0.0, clock.seconds_left(TRAINED_BY) - text)
    evaluating = max(0.0, min(clock.seconds_left(), (1 - TRAINED_BY) * clock.limit))
    phases = [f"{text / 60:.1f} for text", f"{training / 60:.1f} for training", f"{evaluating / 60:.1f} for evaluating"]
    phases = phases[1:] if writing is None else phases
    if writing and own is not None and own.tokens and not own.at_most:
        phases[0] = f"as long as the {own.tokens} tokens of --on-policy take"
        phases[1] = f"what that leaves of {(text + training) / 60:.1f} for training"
    return f"minutes left of {clock.limit / 60:g}: {', '.join(phases)}"


def _write_text(  # noqa: PLR0917 - called in the first process only
    data: DataOptions,
    own: OnPolicyOptions,
    options: StudentOptions,
    teacher: Teacher,
    folder: Path,
    console: Console,
    clock: Clock,
) -> bool:
    """Prepare the sources, then let the target write its text; return false if it was interrupted.

    Files of answers are the target's text already.
    """
    if has_answers(data.sources):
        write_answers_text(data.sources, teacher, folder, own.held_out)
        return True
    tokens = math.ceil((1 - options.share) * options.steps * options.batch) + 1
    say, min_tokens = partial(console.print, **PLAIN), options.longest + 1

    def is_late() -> bool:
        return clock.seconds_left(TOKENS_BY) <= 0

    def enough(done: int) -> bool:
        return done >= options.min_text_tokens and is_late()

    def make_prompts(read: Collection) -> None:
        write_prompts(read, teacher, own, folder, is_late if own.at_most else lambda: False)

    prepare(data, folder, tokens, options.context, say, teacher.encoder, make_prompts, min_tokens, enough)
    clock.save(folder)
    bar = WritingDisplay(console, own.tokens, clock if own.at_most else None)
    with _interrupts() as interrupted, bar:
        return continue_prompts(teacher, folder, own, bar.show, interrupted, clock=clock, min_tokens=min_tokens)


def train_and_export(
    trainer: Trainer[Any],
    card: Callable[[dict[str, Any]], str],
    extra_facts: dict[str, Any],
    command: str,
    console: Console,
    *,
    keep_unfinished: bool = False,
) -> bool:
    """Train, then export; the exported JSON file contains ``extra_facts`` and the evaluation's figures.

    With ``keep_unfinished``, an interrupted run writes its model to ``latest`` without evaluating it.
    """
    options = trainer.options

    def export(target: str, figures: dict[str, float], length: int) -> None:
        facts = {**extra_facts, "figures": figures, "length": length, "command": command}
        trainer.objective.export(trainer.folder / target, card(facts), facts)

    with _interrupts() as interrupted, TrainingDisplay(console) as display:
        trainer.train(
            display.show,
            lambda news: export("latest", news.valid, options.first_length),
            interrupted,
            display.show_pass,
        )
    if not trainer.is_finished:
        if keep_unfinished and trainer.step and trainer.processes.is_main:
            export("latest", {}, options.first_length)
            console.print(f"{trainer.folder / 'latest'} has what is trained so far", **PLAIN)
        console.print(f"saved at step {trainer.step}; the same command continues", **PLAIN)
    elif trainer.processes.is_main:
        if trainer.stopped_early:
            step, best = min(trainer.judgements, key=lambda judgement: judgement[1])
            line = f"stopped early: no validation after that of step {step} ({best:.4f}) is better"
            console.print(f"{line}, with a patience of {options.patience}", **PLAIN)
        length = options.last_length
        # A finished run that is exported again has no time left, but may take as long as one evaluation in training.
        seconds = max(trainer.clock.seconds_left(), EVALUATION * trainer.clock.limit)
        figures = trainer.objective.evaluate(length, seconds)
        for target in ("latest", "export"):
            export(target, figures, length)
        console.print(f"finished: {trainer.folder / 'export'}, on sequences of {length} tokens", **PLAIN)
        for line in figure_lines(figures):
            console.print(line, **PLAIN)
    return trainer.is_finished


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Defer the first Ctrl-C or SIGTERM, not the second; yield a function that returns whether one came."""
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def remember(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
        received.append(number)
        restore()

    for number in handlers:
        signal.signal(number, remember)
    try:
        yield lambda: bool(received)
    finally:
        restore()
