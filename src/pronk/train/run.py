"""A whole run: prepare the text once, train with progress on the terminal, export."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from pronk.train.card import model_card
from pronk.train.data import DataOptions, prepare
from pronk.train.export import export_model
from pronk.train.lm import Report, Trainer
from pronk.train.options import TrainOptions

__all__ = ["generic_command", "run"]


def run(data: DataOptions, options: TrainOptions, folder: Path, name: str, command: str, console: Console) -> bool:
    """Train in ``folder`` until the schedule ends or Ctrl-C; returns whether it ended.

    ``name`` and ``command`` go into the model card.

    Raises:
        PronkError: bad options, sources or checkpoints.
    """
    if not (folder / "data" / "sources.json").exists():  # written last
        tokens = options.steps * options.batch + 1
        prepare(data, folder / "data", tokens, options.shape.context, lambda text: console.print(text, highlight=False))
    trainer = Trainer(folder, options)

    def export(to: str) -> None:
        export_model(trainer.decoder, folder / "data", folder / to, model_card(trainer, name, command))

    with _interrupt_flag() as interrupted, _Display(trainer, console) as display:
        trainer.train(display.show, lambda _: export("latest"), lambda: bool(interrupted))
    if trainer.finished:
        export("export")
        console.print(f"finished: {folder / 'export'}", highlight=False)
    else:
        console.print(f"stopped at step {trainer.step} and saved; the same command continues", highlight=False)
    return trainer.finished


def generic_command(arguments: Sequence[str]) -> str:
    """The command line with file names only: folders of the machine say nothing to a reader of the card."""
    return shlex.join(["pronk", "train", *(_generic(argument) for argument in arguments)])


def _generic(argument: str) -> str:
    what, equals, weight = argument.rpartition("=")
    head, colon, path = (what or weight).rpartition(":")
    return f"{head}{colon}{Path(path).name}" + (f"={weight}" if equals else "")


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


class _Display:
    """Log lines, and above them a bar when the console is a terminal."""

    def __init__(self, trainer: Trainer, console: Console) -> None:
        self._console, self._options = console, trainer.options
        columns = (TextColumn("training"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("training", total=1.0, completed=0.0)
        self._before = (trainer.tokens, trainer.clock.seconds)

    def __enter__(self) -> _Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, news: Report) -> None:
        """Print one line of figures."""
        tokens, seconds = self._before
        speed = (news.tokens - tokens) / max(news.seconds - seconds, 1e-9)
        self._before = (news.tokens, news.seconds)
        left = news.seconds * (1 - news.progress) / max(news.progress, 1e-9)
        line = (
            f"step {news.step}  {news.progress:6.1%}  loss {news.loss:.4f}  lr {news.rate:.2e}  norm {news.norm:.2f}  "
            f"{news.tokens / 1e6:.2f} M tokens  {speed:.0f} tokens/s  {left / 60:.0f} min left"
        )
        line += "".join(f"  valid {name} {loss:.4f}" for name, loss in news.valid.items())
        self._progress.update(self._task, completed=news.progress)
        self._console.print(line, highlight=False, soft_wrap=True)
