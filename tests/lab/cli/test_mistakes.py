"""Mistakes in commands of this package: one line, expected and found, the nearest name."""

from pathlib import Path

import pytest

from cli import test_mistakes as mistakes
from command_line import Command


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["datastore", "bild"], "build"),
        (["bench", "--repeat", 2], "--repeats"),
        (["bench", "--drafter", "sufix"], "suffix"),
        (["verify", "--drafter", "recyling"], "recycling"),
        (["bench", "--peer", "llama-cpp"], "llama_cpp"),
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
        (["bench", "--batch", 2000], "--batch: expected an integer in 1..1024, found '2000'"),
        (["bench", "--temperature", -1], "--temperature: expected a number in 0..100, found '-1'"),
        (["bench", "--replay", "nope.jsonl"], "nope.jsonl: expected a file"),
        (
            ["bench", "--json", "nope/x.json"],
            "json: expected a file in a folder that exists, found nope/x.json",
        ),
        (
            ["verify", "--json", "nope/x.json"],
            "json: expected a file in a folder that exists, found nope/x.json",
        ),
        (
            ["explain", "x", "--plot", "nope/x.svg"],
            "plot: expected a file in a folder that exists, found nope/x.svg",
        ),
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
