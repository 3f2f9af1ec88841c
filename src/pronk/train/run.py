"""A complete training run: prepare the text, train, show the progress, export the model."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from pronk.train.card import head_card, model_card, student_card
from pronk.train.checkpoint import CHECKPOINT, check_run, load_checkpoint
from pronk.train.clock import EVALUATION, TEXT_BY, TOKENS_BY, TRAINED_BY, Clock
from pronk.train.corpus.answers import read_answers
from pronk.train.corpus.collection import Collection
from pronk.train.data import prepare
from pronk.train.dialogues import ANSWERS, has_answers, write_answers_text
from pronk.train.display import PLAIN, TrainingDisplay, WritingDisplay, figure_lines
from pronk.train.distributed import ProcessGroup, join_processes
from pronk.train.eagle import EagleTraining
from pronk.train.export import InitialModel
from pronk.train.future import FutureTokens
from pronk.train.head_plan import check_answers
from pronk.train.lm import LanguageModel, TextModel
from pronk.train.loop import Report, Trainer
from pronk.train.on_policy import continue_prompts, write_prompts
from pronk.train.options import (
    DataOptions,
    EagleOptions,
    LoopOptions,
    OnPolicyOptions,
    StudentOptions,
    TrainOptions,
)
from pronk.train.students import Student
from pronk.train.teacher import Teacher


@dataclass(frozen=True)
class Run:
    """A training run in a folder.

    An unfinished run is continued. A finished one is only exported again.
    """

    folder: Path
    name: str  # name of the model in the model card
    command: str  # command of the run, shown in the model card
    console: Console
    clock: Clock  # measures the time of the run, and has its limit

    @contextmanager
    def begin(
        self,
        options: LoopOptions,
        identity: dict[str, Any],
        own: OnPolicyOptions | None,
        *,
        writes_text: bool = True,
    ) -> Iterator[ProcessGroup]:
        """Join the processes of the run, and begin or resume it.

        A resumed run must have the options of its checkpoint, and goes on with its clock. With a
        time limit, a line shows how the time is divided.

        Args:
            options: options of the training loop.
            identity: other values that must be equal when a run is resumed.
            own: options of the text that the target writes; ``None`` if it writes none.
            writes_text: whether the run prepares its training text, which takes a part of the time.
        """
        with join_processes(options.device) as processes:
            self.console.quiet = self.console.quiet or not processes.is_main
            defining = options.defining() | identity
            defaults = options.defaults()
            processes.from_main(
                lambda: self._resume(defaults, defining, own, writes_text=writes_text)
            )
            yield processes

    def _resume(
        self,
        defaults: dict[str, Any],
        defining: dict[str, Any],
        own: OnPolicyOptions | None,
        *,
        writes_text: bool,
    ) -> None:
        """Check that a resumed run has its old options, set its clock, and show the time plan.

        ``defining`` are the options that must be unchanged, and ``defaults`` the values of those
        that a checkpoint of an older version lacks.
        """
        checkpoint = self.folder / CHECKPOINT
        if checkpoint.exists():
            state = load_checkpoint(checkpoint, mapped=True)
            check_run(self.folder, defaults | state["options"], defining)
            self.clock.earlier = state["seconds"] + state.get("before", 0.0)
        else:
            self.clock.restore(self.folder / "data")
        if self.clock.has_limit:
            writing = not checkpoint.exists() if writes_text else None
            self.say(_time_plan(self.clock, own, writing=writing))

    def say(self, *lines: str) -> None:
        """Print lines as they are: a path in them may look like rich's markup."""
        for line in lines:
            self.console.print(line, **PLAIN)

    def is_late(self, share: float) -> bool:
        """Return whether the fraction ``share`` of the time limit has passed."""
        return self.clock.seconds_left(share) <= 0


def train_model(
    run: Run, data: DataOptions, options: TrainOptions, initial: InitialModel | None = None
) -> bool:
    """Train a language model until the schedule ends or Ctrl-C; return whether the schedule ended.

    With ``initial``, the training starts from this checkpoint. Raises PronkError if options,
    sources or checkpoints are invalid.
    """

    def enough(done: int) -> bool:
        return done >= options.min_text_tokens and run.is_late(TEXT_BY)

    def write_text() -> None:
        folder = run.folder / "data"
        prepare(
            data,
            folder,
            tokens=options.steps * options.batch + 1,
            context=options.shape.context,
            say=run.say,
            encoder=None if initial is None else initial.encoder,
            min_source_tokens=options.longest + 1,
            enough=enough,
        )
        run.clock.save(folder)

    with run.begin(options, TextModel.identify(initial), None) as processes:
        processes.from_main(write_text)
        objective: type[TextModel[Any]] = LanguageModel if options.heads is None else FutureTokens
        trainer = Trainer(objective(run.folder, options, initial), processes, run.clock)
        return _train_and_export(run, trainer, model_card, name=run.name)


def train_student(
    run: Run,
    kind: type[Student[Any]],
    data: DataOptions,
    own: OnPolicyOptions,
    options: StudentOptions,
    teacher: Teacher,
) -> bool:
    """Train a drafter, partly on text that the target writes; otherwise like :func:`train_model`.

    ``own`` has the options of that text, and ``teacher`` is the target.
    """
    with run.begin(options, kind.identify(teacher), own) as processes:
        if not processes.from_main(lambda: _write_text(run, data, own, options, teacher)):
            run.say("saved what the target has written; the same command continues")
            return False
        trainer = Trainer(kind(run.folder, options, teacher), processes, run.clock)
        return _train_and_export(run, trainer, student_card)


def _time_plan(clock: Clock, own: OnPolicyOptions | None, *, writing: bool | None) -> str:
    """Return a line about how the time that is left is divided: text, training and evaluation.

    ``writing`` says whether the text is still to be written; it is ``None`` if the run prepares no
    text. ``own`` is ``None`` if the target writes no text.
    """
    text = max(0.0, clock.seconds_left(TEXT_BY)) if writing else 0.0
    training = max(0.0, clock.seconds_left(TRAINED_BY) - text)
    evaluating = max(0.0, min(clock.seconds_left(), (1 - TRAINED_BY) * clock.limit))
    phases = [f"{training / 60:.1f} for training", f"{evaluating / 60:.1f} for evaluating"]
    if writing is not None:
        phases.insert(0, f"{text / 60:.1f} for text")
    if writing and own is not None and own.tokens and not own.at_most:
        phases[0] = f"as long as the {own.tokens} tokens of --on-policy take"
        phases[1] = f"what that leaves of {(text + training) / 60:.1f} for training"
    return f"minutes left of {clock.limit / 60:g}: {', '.join(phases)}"


def _write_text(
    run: Run, data: DataOptions, own: OnPolicyOptions, options: StudentOptions, teacher: Teacher
) -> bool:
    """Read the sources, then let the target write its text.

    Return False if Ctrl-C interrupted the writing.
    """
    folder = run.folder / "data"
    if has_answers(data.sources):  # the sources are the target's own text already
        write_answers_text(data.sources, teacher, folder, own.held_out)
        return True
    min_tokens = options.longest + 1

    def enough(done: int) -> bool:
        return done >= options.min_text_tokens and run.is_late(TOKENS_BY)

    def make_prompts(read: Collection) -> None:
        write_prompts(read, teacher, own, folder, lambda: own.at_most and run.is_late(TOKENS_BY))

    prepare(
        data,
        folder,
        tokens=math.ceil((1 - options.share) * options.steps * options.batch) + 1,
        context=options.context,
        say=run.say,
        encoder=teacher.encoder,
        also=make_prompts,
        min_source_tokens=min_tokens,
        enough=enough,
    )
    run.clock.save(folder)
    bar = WritingDisplay(run.console, own.tokens, run.clock if own.at_most else None)
    with _interrupts() as interrupted, bar:
        return continue_prompts(
            teacher, folder, own, bar.show, interrupted, clock=run.clock, min_tokens=min_tokens
        )


def _train_and_export(
    run: Run,
    trainer: Trainer[Any],
    card: Callable[[Trainer[Any], str, dict[str, Any]], str],
    *,
    keep_unfinished: bool = False,
    fewer: str = "--steps 100",
    **more_facts: Any,
) -> bool:
    """Train, then export the model; return whether the schedule ended.

    ``card`` returns the model card. The exported JSON file has ``more_facts`` and the figures of
    the evaluation. With ``keep_unfinished``, an interrupted run writes its model to ``latest``
    without an evaluation. ``fewer`` is an option by which the run has fewer steps.
    """
    options = trainer.options
    shorter = None if options.minutes is not None else f"--minutes 10, {fewer}"

    def export(target: str, figures: dict[str, float], length: int) -> None:
        facts = {**more_facts, "figures": figures, "length": length, "command": run.command}
        trainer.objective.export(run.folder / target, card(trainer, run.name, facts), facts)

    def evaluated(news: Report) -> None:
        export("latest", news.valid, options.first_length)

    steps = options.steps - trainer.step
    with (
        _interrupts() as interrupted,
        TrainingDisplay(run.console, steps, shorter) as display,
    ):
        trainer.train(display.show, evaluated, interrupted, display.show_pass)
    if not trainer.is_finished:
        if keep_unfinished and trainer.step and trainer.processes.is_main:
            export("latest", {}, options.first_length)
            run.say(f"{run.folder / 'latest'} has what is trained so far")
        run.say(f"saved at step {trainer.step}; the same command continues")
    elif trainer.processes.is_main:
        if trainer.stopped_early:
            step, best = min(trainer.judgements, key=lambda judgement: judgement[1])
            line = f"stopped early: no validation after that of step {step} ({best:.4f}) is better"
            run.say(f"{line}, with a patience of {options.patience}")
        length = options.last_length
        # A finished run that is exported again may have no time left; it gets the time of one
        # evaluation.
        seconds = max(run.clock.seconds_left(), EVALUATION * run.clock.limit)
        figures = trainer.objective.evaluate(length, seconds)
        for target in ("latest", "export"):
            export(target, figures, length)
        line = f"finished: {run.folder / 'export'}, on sequences of {length} tokens"
        run.say(line, *figure_lines(figures))
    return trainer.is_finished


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Catch Ctrl-C and SIGTERM in the block; yield a function that returns whether one arrived.

    The first signal has no other effect, so that the run can save; a second one acts as usual.
    """
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


def train_head(run: Run, options: EagleOptions, teacher: Teacher) -> bool:
    """Train an EAGLE-3 or MTP head on the answers in the run's folder, as :func:`train_model` does.

    Returns whether the schedule ended.
    """
    answers = run.folder / ANSWERS
    header, _ = read_answers(answers)
    check_answers(answers, header.weights, teacher.fingerprint)
    with run.begin(options, {"target": teacher.fingerprints}, None, writes_text=False) as processes:
        if not (run.folder / CHECKPOINT).exists():  # it takes a minute for a large target
            first = "the target reads some of the answers"
            if options.init is not None:
                first = f"those of {options.init}"
            run.say(f"first weights: {first}")
        trainer = Trainer(EagleTraining(run.folder, options, teacher), processes, run.clock)
        if not trainer.is_finished:
            run.say(*_plan(trainer))
        return _train_and_export(run, trainer, head_card, keep_unfinished=True, fewer="--epochs 1")


def _plan(trainer: Trainer[EagleTraining]) -> Iterator[str]:
    """Yield lines about a run that begins: sizes of the head, its text, and the expected duration.

    The duration is estimated from one forward and backward pass, whose gradients are dropped.
    """
    head = trainer.objective
    o = trainer.options
    states = head.states.check_space(head.text.num_tokens) / 1e9
    start = time.monotonic()
    acceptance = head.module.acceptance.clone()
    inputs, marks = head.text.batch(0, max(1, o.micro // o.length))
    head.backward(inputs, marks, 1.0)
    seconds = (time.monotonic() - start) * (o.batch // o.micro) / trainer.processes.count
    trainer.optimizers.clear()
    head.module.acceptance.copy_(acceptance)
    size = head.num_parameters / 1e6
    bits = head.options.bits or 16
    layers = ", ".join(map(str, head.sources))
    yield (
        f"head: {size:.2f} M parameters ({size * bits / 8:.1f} MB in {bits} bits), reads layers "
        f"{layers} of the target, draft vocabulary of {len(head.module.draft_ids)}, "
        f"{head.coverage:.1%} of the answers"
    )
    dialogues = head.dialogues
    answers = [f"{dialogues.num_own_tokens} of them the target's answers"]
    answers += [f"{tokens} those of {name}" for name, tokens in dialogues.other_tokens.items()]
    held_out = f"{len(dialogues.held_out)} dialogues are held out"
    yield f"text: {head.text.num_tokens} tokens, {', '.join(answers)}; {held_out}"
    if head.options.states:
        yield f"states: up to {states:.1f} GB in {head.options.states}; later epochs take less time"
    steps = o.steps - trainer.step
    limit = f", ended after {o.minutes:g} minutes" if o.minutes is not None else ""
    duration = f"about {seconds:.1f} s each: {steps * seconds / 3600:.1f} hours{limit}"
    yield f"plan: {steps} steps of {o.batch} tokens, {duration}"
