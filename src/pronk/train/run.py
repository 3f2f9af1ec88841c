"""A complete run: prepare the text unless its files exist, train, show the progress, export the model."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from pronk.corpus.answers import merge_answers, read_answers
from pronk.corpus.collection import Collection
from pronk.files.atomic import convert_write_errors
from pronk.train.card import head_card, model_card, student_card
from pronk.train.checkpoint import CHECKPOINT, check_run, load_checkpoint
from pronk.train.clock import EVALUATION, TEXT_BY, TOKENS_BY, TRAINED_BY, Clock
from pronk.train.data import prepare
from pronk.train.dialogues import Dialogues, has_answers, hold_out, write_answers_text
from pronk.train.display import PLAIN, TrainingDisplay, WritingDisplay, figure_lines
from pronk.train.distributed import join_processes
from pronk.train.eagle import ANSWERS, EagleTraining
from pronk.train.export import InitialModel
from pronk.train.future import FutureTokens
from pronk.train.head_plan import check_answers
from pronk.train.lm import LanguageModel, TextModel
from pronk.train.loop import Trainer
from pronk.train.on_policy import continue_prompts, write_prompts
from pronk.train.options import DataOptions, EagleOptions, LoopOptions, OnPolicyOptions, StudentOptions, TrainOptions
from pronk.train.student import Student
from pronk.train.teacher import Teacher


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
    training starts from this checkpoint. Bad options, sources or checkpoints raise a PronkError.
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


def steps_of(folder: Path, answers: Sequence[Path], epochs: float, batch: int, length: int, seed: int) -> int:
    """Return the number of steps for ``epochs``; first copy the files of answers into the run's folder.

    A run that is resumed keeps its copy, so that more answers in the files do not change it.
    """
    copy = folder / ANSWERS
    if not copy.exists():
        with convert_write_errors(copy, "the dialogues"):
            copy.parent.mkdir(parents=True, exist_ok=True)
            merge_answers(answers, copy)
    sequences = Dialogues(hold_out(read_answers(copy)[1])[0], length, seed).per_epoch
    return max(1, math.ceil(epochs * sequences * length / batch))


def run_head(  # noqa: PLR0917 - as for run_student
    options: EagleOptions,
    teacher: Teacher,
    folder: Path,
    name: str,
    command: str,
    console: Console,
    clock: Clock | None = None,
) -> bool:
    """Train a head on the answers of :func:`steps_of`; otherwise like :func:`~pronk.train.run.run`."""
    clock = clock or Clock(options.minutes)
    check_answers(folder / ANSWERS, read_answers(folder / ANSWERS)[0].weights, teacher.fingerprint)
    with join_processes(options.device) as processes:
        console.quiet = console.quiet or not processes.is_main
        identity = {"target": teacher.fingerprints}
        processes.from_main(partial(begin_run, folder, options, identity, clock, console, writes_text=False))
        objective = EagleTraining(folder, options, teacher)
        trainer = Trainer(folder, options, objective, processes, clock)
        if not trainer.is_finished:
            for line in _plan(trainer):
                console.print(line, **PLAIN)
        card = partial(head_card, trainer, name)
        return train_and_export(trainer, card, {"name": name}, command, console, keep_unfinished=True)


def _plan(trainer: Trainer[EagleTraining]) -> list[str]:
    """Return lines of text: the sizes of the head, the text, and the expected duration."""
    head, o = trainer.objective, trainer.options
    states = head.states.check_space(head.text.num_tokens) / 1e9
    steps = o.steps - trainer.step
    start, acceptance = time.monotonic(), head.module.acceptance.clone()
    head.backward(*head.text.batch(0, max(1, o.micro // o.length)), 1.0)
    seconds = (time.monotonic() - start) * (o.batch // o.micro) / trainer.processes.count
    trainer.optimizers.clear()
    head.module.acceptance.copy_(acceptance)
    size = head.num_parameters / 1e6
    layers = ", ".join(map(str, head.sources))
    limit = f", ended after {o.minutes:g} minutes" if o.minutes is not None else ""
    what = f"head: {size:.2f} M parameters ({size:.1f} MB in 8 bits), reads layers {layers} of the target"
    vocabulary = f"draft vocabulary of {len(head.module.draft_ids)}, {head.coverage:.1%} of the answers"
    text = f"text: {head.text.num_tokens} tokens, {head.num_answered} of them answers"
    duration = f"about {seconds:.1f} s each: {steps * seconds / 3600:.1f} hours{limit}"
    folder = head.options.states
    kept = [f"states: up to {states:.1f} GB in {folder}; later epochs take less time"] if folder else list[str]()
    return [
        f"{what}, {vocabulary}",
        f"{text}; {len(head.held_out)} dialogues are held out",
        *kept,
        f"plan: {steps} steps of {o.batch} tokens, {duration}",
    ]
