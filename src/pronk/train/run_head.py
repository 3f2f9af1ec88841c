"""A run that trains an EAGLE-3 or MTP head on a file of the target's own dialogues."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from pronk.corpus.answers import merge_answers, read_answers
from pronk.files.atomic import convert_write_errors
from pronk.files.cards import render_card
from pronk.train.clock import Clock
from pronk.train.dialogues import Dialogues, hold_out
from pronk.train.display import PLAIN
from pronk.train.distributed import join_processes
from pronk.train.eagle import ANSWERS, EagleTraining
from pronk.train.head_plan import check_answers
from pronk.train.loop import Trainer
from pronk.train.options import EagleOptions
from pronk.train.run import begin_run, train_and_export
from pronk.train.teacher import Teacher

__all__ = ["run_head", "steps_of"]


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
    """Train a head until the schedule ends or Ctrl-C; return whether the schedule ended.

    The folder has a copy of the answers (:func:`steps_of`). An unfinished run in it is continued.

    Raises:
        PronkError: bad options, answers or checkpoints.
    """
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


def head_card(trainer: Trainer[EagleTraining], name: str, facts: Mapping[str, Any]) -> str:
    """Return the ``README.md`` of a head; the arguments are those of :func:`~pronk.train.card.model_card`."""
    head = trainer.objective
    return render_card(
        "pronk.train",
        "eagle",
        name=name,
        trainer=trainer,
        options=trainer.options,
        head=head,
        figures=facts["figures"],
        command=facts["command"],
    )
