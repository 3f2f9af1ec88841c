"""Sizes of runs that take a second, their folders and commands, and a writer of JSONL files."""

import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from pronk.base.errors import OptionError
from pronk.train.cli.main import app
from pronk.train.options import (
    DraftOptions,
    EagleOptions,
    ModelShape,
    OnPolicyOptions,
    TrainOptions,
)
from pronk.train.teacher import Teacher

SHAPE = ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, mlp=48, vocab=320, context=64)
PACE: dict[str, Any] = {
    "steps": 12,
    "batch": 256,
    "micro": 128,
    "length": 32,
    "final_length": 64,
    "final_share": 0.25,
    "rate": 1e-2,
    "warmup": 2,
    "threads": 1,
    "evaluate_every": 6,
    "save_every": 6,
    "log_every": 3,
}
TINY = TrainOptions(shape=SHAPE, **PACE)
TINY_DRAFT = DraftOptions(
    shape=ModelShape(hidden=16, layers=1, heads=2, kv_heads=1, mlp=24, vocab=320, context=64),
    num_tokens=0,
    **PACE,
)
TOKENS = TINY.steps * TINY.batch + 1
OWN = OnPolicyOptions(tokens=400, prompt=24, length=12, batch=16, held_out=6)

# options of a head for a tiny target, which is trained in seconds
EAGLE_OPTIONS = EagleOptions(
    steps=16,
    batch=128,
    micro=64,
    length=64,
    final_length=64,
    rate=2e-2,
    warmup=2,
    threads=1,
    evaluate_every=16,
    save_every=16,
    log_every=16,
    depth=2,
    draft_vocab=200,
    context=128,
    mlp=32,
    num_tokens=2,
)


def draft_command(teacher: Teacher, corpus: Path, out: Path, more: str) -> list[str]:
    """Return a short run of ``draft``, with ``more`` options."""
    return (
        f"draft --target {teacher.folder} --source {corpus / 'stories.jsonl'}=1 --out {out} "
        "--on-policy 200 "
        "--hidden 16 --layers 1 --heads 2 --kv-heads 1 --mlp 16 --batch 128 --micro 64 --length 32 "
        f"--final-length 64 --threads 1 {more}"
    ).split()


def run_command(words: str | list[str]) -> str:
    """Run ``pronk train`` and return its output."""
    result = CliRunner().invoke(app, words.split() if isinstance(words, str) else words)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def refusal(words: str) -> str:
    """Run ``pronk train`` and return its error."""
    result = CliRunner().invoke(app, words.split())
    assert isinstance(result.exception, OptionError), result.output
    return str(result.exception)


def shown(console: Console) -> str:
    """Return the output on the console ``quiet``."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class InterruptingConsole(Console):
    """A console that sends Ctrl-C when a line begins with ``start``."""

    def __init__(self, console: Console, start: str) -> None:
        super().__init__(file=console.file, width=200)
        self.start = start

    def print(self, *objects: object, **options: object) -> None:
        super().print(*objects, **options)  # type: ignore[arg-type]
        if str(objects[0]).startswith(self.start):
            os.kill(os.getpid(), signal.SIGINT)


def write_jsonl(path: Path, texts: list[str], origin: str = "owner/name@abc:file") -> Path:
    rows = (
        {"text": text, "source": f"{origin}#{i}", "license": "MIT"} for i, text in enumerate(texts)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def same_weights(one: Path, other: Path) -> bool:
    """Compare the exported weights of two runs."""
    mine, theirs = (load_file(each / "export" / "model.safetensors") for each in (one, other))
    return mine.keys() == theirs.keys() and all(
        torch.equal(mine[name], theirs[name]) for name in mine
    )


def link(data: Path, folder: Path) -> Path:
    """Make the folder of a run with the text of another one."""
    folder.mkdir(exist_ok=True)
    (folder / "data").symlink_to(data)
    return folder
