"""A disk that is full at any file: the error is one line, and the same command later has the same
result.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import save_file

from pronk.base.errors import CheckpointError
from pronk.cli.main import main
from pronk.train.checkpoint import load_checkpoint
from pronk.train.clock import Clock
from pronk.train.options import DataOptions
from pronk.train.run import Run, train_model, train_student
from pronk.train.students import DraftStudent
from pronk.train.teacher import Teacher
from train.tiny import OWN, TINY, TINY_DRAFT, draft_command, same_weights

FULL = Path("/dev/full")
OPTIONS = replace(TINY_DRAFT, steps=4, evaluate_every=2, save_every=1, final_share=0.0)
MESSAGE = (
    "expected to write .*, found .*No space left on device.*; "
    "make room and give the same command again"
)

pytestmark = pytest.mark.skipif(
    not FULL.is_char_device(), reason="needs a device that is always full"
)


def fill_disk(patch: pytest.MonkeyPatch, name: str, times: int = 0) -> list[str]:
    """Redirect file ``name`` to a full device after ``times`` openings; return its openings."""
    real = Path.open
    opened = list[str]()

    def redirected(path: Path) -> Path:
        if path.name.removesuffix(".partial") == name:
            opened.append(path.name)
            if len(opened) > times:
                return FULL
        return path

    def opening(self: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        return real(self if mode.startswith("r") else redirected(self), mode, *rest, **more)

    def write_text(self: Path, text: str, **more: Any) -> int:
        with opening(self, "w", **more) as file:
            return int(file.write(text))

    def save(tensors: dict[str, torch.Tensor], path: Path, **more: Any) -> None:
        if redirected(path) == FULL:  # safetensors would replace the device by a file
            raise SafetensorError(
                "Error while serializing: I/O error: No space left on device (os error 28)"
            )
        save_file(tensors, path, **more)

    patch.setattr(Path, "open", opening)
    patch.setattr(Path, "write_text", write_text)
    patch.setattr("pronk.train.export.save_file", save)
    return opened


def train(data: DataOptions, teacher: Teacher, folder: Path, console: Console) -> None:
    assert train_student(
        Run(folder, "small", "command", console, Clock(None)),
        DraftStudent,
        data,
        OWN,
        OPTIONS,
        teacher,
    )


@pytest.fixture(scope="module")
def undisturbed(
    data_options: DataOptions, teacher: Teacher, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    train(data_options, teacher, folder, Console(quiet=True))
    return folder


TEXT = (
    "train.bin valid-extra.bin sources.json prompts.json valid-on-policy.bin on-policy.bin "
    "on-policy.json"
).split()
MODEL = [
    ("checkpoint.pt", 0),
    ("checkpoint.pt", 2),
    ("model.safetensors", 1),
    ("config.json", 0),
    ("README.md", 2),
]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "times"), [*((name, int(name == "on-policy.bin")) for name in TEXT), *MODEL]
)
def test_any_file(
    name: str,
    times: int,
    undisturbed: Path,
    data_options: DataOptions,
    teacher: Teacher,
    tmp_path: Path,
    quiet: Console,
) -> None:
    if name not in TEXT:
        shutil.copytree(undisturbed / "data", tmp_path / "data")
    with pytest.MonkeyPatch.context() as patch:
        opened = fill_disk(patch, name, times)
        message = f"{name}: {MESSAGE}" if name in TEXT else MESSAGE
        with pytest.raises(CheckpointError, match=message) as caught:
            train(data_options, teacher, tmp_path, quiet)
    assert len(opened) == times + 1
    assert ("(the one before is intact)" in str(caught.value)) == (
        (name, times) == ("checkpoint.pt", 2)
    )
    assert not list(tmp_path.rglob("*.partial"))
    checkpoint = tmp_path / "checkpoint.pt"
    assert checkpoint.exists() == (name not in TEXT and (name, times) != ("checkpoint.pt", 0))
    if checkpoint.exists():
        assert load_checkpoint(checkpoint)["step"] >= 1
    train(data_options, teacher, tmp_path, quiet)
    assert same_weights(tmp_path, undisturbed)
    for file in (undisturbed / "data").glob("*.bin"):
        assert (tmp_path / "data" / file.name).read_bytes() == file.read_bytes()


def test_tokenizer(
    data_options: DataOptions, tmp_path: Path, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch, "tokenizer_config.json")
    with pytest.raises(CheckpointError, match=MESSAGE):
        train_model(Run(tmp_path, "m", "command", quiet, Clock(None)), data_options, TINY)

    def save(*_: object) -> None:
        raise Exception("No space left on device (os error 28)")  # noqa: TRY002 - what tokenizers raises

    monkeypatch.setattr("pronk.train.data.save_tokenizer", save)
    with pytest.raises(CheckpointError, match=MESSAGE):
        train_model(Run(tmp_path, "m", "command", quiet, Clock(None)), data_options, TINY)


def test_command_ends_with_one_line(
    corpus: Path,
    teacher: Teacher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fill_disk(monkeypatch, "checkpoint.pt")
    more = "--on-policy 0 --steps 1 --batch 64 --final-share 0 --num-tokens 0"
    with pytest.raises(SystemExit) as end:
        main(["train", *draft_command(teacher, corpus, tmp_path, more)])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"pronk: error: {tmp_path}/checkpoint.pt: expected to write a training checkpoint, found "
    )
    assert error.count("\n") == 1
