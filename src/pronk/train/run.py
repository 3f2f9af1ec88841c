"""A whole run: prepare the text once, train with progress on the terminal, export."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from pronk.train.card import model_card
from pronk.train.data import prepare
from pronk.train.export import export_model
from pronk.train.lm import Report, Trainer
from pronk.train.options import DataOptions, TrainOptions

__all__ = ["run"]

# Lines are printed as they are: a path may hold what rich would read as markup.
_PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}


def run(data: DataOptions, options: TrainOptions, folder: Path, name: str, command: str, console: Console) -> bool:
    """Train in ``folder`` until the schedule ends or Ctrl-C; returns whether it ended.

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
    context = options.shape.context
    tokens = options.steps * options.batch + 1
    prepare(data, folder / "data", tokens, context, lambda text: console.print(text, **_PLAIN))
    trainer = Trainer(folder, options)

    def export(target: str, valid: dict[str, float], length: int) -> None:
        card = model_card(trainer, name, command, valid, length)
        export_model(trainer.decoder, folder / "data", folder / target, card)

    with _interrupt_flag() as interrupted, _Display(console) as display:
        trainer.train(
            report=display.show,
            evaluated=lambda news: export("latest", news.valid, options.length),
            stop=lambda: bool(interrupted),
        )
    if trainer.finished:
        length = options.final_length if options.final_share else options.length
        export("export", trainer.evaluate(length), length)
        console.print(f"finished: {folder / 'export'}", **_PLAIN)
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


class _Display:
    """Lines of figures, and a bar below them when the console is a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (TextColumn("training"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("training", total=1.0)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, news: Report) -> None:
        """Print one line of figures."""
        left = news.seconds * (1 - news.progress) / max(news.progress, 1e-9)
        line = (
            f"step {news.step}  {news.progress:6.1%}  loss {news.loss:.4f}  lr {news.rate:.2e}  norm {news.norm:.2f}  "
            f"{news.tokens / 1e6:.2f} M tokens  {news.speed:.0f} tokens/s  {left / 60:.0f} min left"
        )
        line += "".join(f"  valid {name} {loss:.4f}" for name, loss in news.valid.items())
        self._progress.update(self._task, completed=news.progress)
        self._console.print(line, **_PLAIN)
