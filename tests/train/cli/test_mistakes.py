"""Mistakes in commands of this package: one line, expected and found, the nearest name."""

from pathlib import Path

import pytest

from cli import test_mistakes as mistakes
from command_line import Command


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["train", "eagel3"], "eagle3"),
        (["train", "lm", "--steps_", 3], "--steps"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_misspelled_names_get_the_nearest(
    command: Command, arguments: list[object], near: str
) -> None:
    mistakes.test_misspelled_names_get_the_nearest(command, arguments, near)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quantize", "x"], "out: expected a value, found none"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_wrong_values_are_named(
    command: Command,
    arguments: list[object],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mistakes.test_wrong_values_are_named(command, arguments, message, tmp_path, monkeypatch)
