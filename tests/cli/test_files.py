"""Files of options: other kinds than regular files are refused before the work, whatever the
option.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from command_line import Command, assert_mistake

MODEL = "--model pronk-tiny --threads 1"
READ = [
    f"generate {MODEL} --prompt-file FILE",
    f"generate x {MODEL} --json-schema FILE",
    f"generate x {MODEL} --grammar FILE",
    f"generate x {MODEL} --prediction FILE",
    f"generate x {MODEL} --calibration FILE",
    f"generate x {MODEL} --drafter recycling(table='FILE')",
    f"generate x {MODEL} --drafter suffix(store='FILE')",
]


@pytest.mark.parametrize("kind", ["a named pipe", "a device"])
@pytest.mark.parametrize("arguments", READ)
def test_a_file_of_another_kind_is_refused(
    command: Command, arguments: str, kind: str, tmp_path: Path
) -> None:
    file = tmp_path / "endless.jsonl"
    if kind == "a device":
        file.symlink_to("/dev/zero")
    else:
        os.mkfifo(file)
    places = {"FILE": file, "OUT": tmp_path / "out", "REQUESTS": tmp_path / "requests.jsonl"}
    for name, path in places.items():
        arguments = arguments.replace(name, str(path))
    assert_mistake(command(*arguments.split()), f"{kind} instead of a regular file")


@pytest.mark.parametrize("place", ["/dev/full", "/dev/null"])
def test_a_chat_is_not_saved_to_a_device(command: Command, place: str) -> None:
    code, _, err = command(
        *f"chat {MODEL} --max-tokens 2".split(), given=f"/save {place}\n/load {place}\n"
    )
    assert code == 0
    assert err.count("a device instead of a regular file") == 2


def test_an_endless_line_is_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pronk.cli.repl._MAX_LINE", 2**10)
    assert_mistake(
        command(*f"chat {MODEL}".split(), given="x" * 2**10),
        "expected lines of text, found one of 1024",
    )
