"""A whole run: prepare the text once, train with progress on the terminal, export."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from pronk.train.card import draft_card, model_card
from pronk.train.data import prepare
from pronk.train.draft import Draft
from pronk.train.export import export_model
from pronk.train.lm import LanguageModel
from pronk.train.loop import Report, Trainer
from pronk.train.on_policy import continue_prompts, write_prompts
from pronk.train.options import DataOptions, DraftOptions, OnPolicyOptions, TrainOptions
from pronk.train.teacher import Teacher

__all__ = ["run", "run_draft"]

# Lines are printed as they are: a path may hold what rich would read as markup.
_PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}


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
    prepare(data, folder / "data", tokens, options.shape.context, lambda text: console.print(text, **_PLAIN))
    trainer = Trainer(folder, options, LanguageModel(folder, options))

    def export(target: str, valid: dict[str, float], length: int) -> None:
        card = model_card(trainer, name, command, valid, length)
        export_model(trainer.objective.module, folder / "data", folder / target, card)

    return _train(trainer, export, console)


def run_draft(  # noqa: PLR0917 - as run, with a target and what it is to write
    data: DataOptions,
    own: OnPolicyOptions,
    options: DraftOptions,
    teacher: Teacher,
    folder: Path,
    name: str,
    command: str,
    console: Console,
) -> bool:
    """Distil a draft model in ``folder``, from ``teacher`` and what it is to write (``own``); see :func:`run`."""
    tokens = math.ceil((1 - options.share) * options.steps * options.batch) + 1
    prepare(
        data,
        folder / "data",
        tokens,
        options.shape.context,
        lambda text: console.print(text, **_PLAIN),
        teacher.encoder,
        lambda read: write_prompts(read, teacher, own, folder / "data"),
    )
    with _interrupt_flag() as interrupted, _Written(console, own.tokens) as bar:
        whole = continue_prompts(teacher, folder / "data", own, bar.show, lambda: bool(interrupted))
    if not whole:
        console.print("saved what the target has written; the same command continues", **_PLAIN)
        return False
    trainer = Trainer(folder, options, Draft(folder, options, teacher))

    def export(target: str, valid: dict[str, float], length: int) -> None:
        card = draft_card(trainer, name, command, valid, length)
        facts = {"target": {"name": teacher.name, **teacher.fingerprints}, "figures": valid, "length": length}
        export_model(trainer.objective.module, teacher.folder, folder / target, card, {"draft.json": facts})

    return _train(trainer, export, console)


def _train(trainer: Trainer[Any], export: Callable[[str, dict[str, float], int], None], console: Console) -> bool:
    """Train with progress on the terminal, and export what comes of it."""
    options = trainer.options
    with _interrupt_flag() as interrupted, _Display(console) as display:
        trainer.train(
            report=display.show,
            evaluated=lambda news: export("latest", news.valid, options.length),
            stop=lambda: bool(interrupted),
        )
    if trainer.finished:
        length = options.final_length if options.final_share else options.length
        export("export", trainer.objective.evaluate(length), length)
        console.print(f"finished: {trainer.folder / 'export'}", **_PLAIN)
    else:
        console.print(f"saved at step {trainer.step}; the same command continues", **_PLAIN)
    return trainer.finished


@contextmanager
def _interrupt_flag() -> Iterator[list[int]]:
    """A list that the first Ctrl-C makes non-empty; a second one interrupts at once."""
    received: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
        received.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)


class _Bar:
    """A bar, when the console is a terminal."""

    def __init__(self, console: Console, what: str, total: float) -> None:
        self._console = console
        columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task(what, total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _show(self, completed: float, line: str) -> None:
        self._progress.update(self._task, completed=completed)
        if line:
            self._console.print(line, **_PLAIN)


class _Written(_Bar):
    """How much the target has written: a line for every twentieth, and a bar below them."""

    def __init__(self, console: Console, total: int) -> None:
        super().__init__(console, "writing", total)
        self._total, self._began = total, time.monotonic()
        self.done = 0

    def show(self, done: int) -> None:
        """``done`` tokens are there."""
        minutes = (time.monotonic() - self._began) / 60
        line = f"written {done} of {self._total} tokens  {minutes:.1f} min"
        self._show(done, line if done * 20 // self._total > self.done * 20 // self._total else "")
        self.done = done


class _Display(_Bar):
    """Lines of figures, and a bar below them."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, "training", 1.0)

    def show(self, news: Report) -> None:
        """Print one line of figures."""
        left = news.seconds * (1 - news.progress) / max(news.progress, 1e-9)
        line = (
            f"step {news.step}  {news.progress:6.1%}  loss {news.loss:.4f}  lr {news.rate:.2e}  norm {news.norm:.2f}  "
            f"{news.tokens / 1e6:.2f} M tokens  {news.speed:.0f} tokens/s  {left / 60:.0f} min left"
        )
        self._show(news.progress, line + "".join(f"  valid {name} {loss:.4f}" for name, loss in news.valid.items()))
