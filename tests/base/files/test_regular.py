"""Files that end: what can be read and replaced, and what is refused before it is opened."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import pronk.base.files.regular
from pronk.base.checks import check_writable
from pronk.base.errors import PronkError
from pronk.base.files.atomic import replace_file, write_json
from pronk.base.files.json_lines import read_json_lines
from pronk.base.files.regular import (
    check_regular,
    is_file,
    is_folder,
    open_input,
    read_input,
    read_stream,
)
from pronk.base.files.results import save_result
from pronk.base.files.text import read_text
from waiting import HUNG

KINDS = ["a named pipe", "a socket", "a device"]


@pytest.fixture(params=KINDS)
def endless(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, str]:
    """A file that does not end, or whose opening does not, and what messages call it."""
    path = tmp_path / "endless"
    if request.param == "a named pipe":
        os.mkfifo(path)
    elif request.param == "a socket":
        monkeypatch.chdir(tmp_path)  # the path of a socket is short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    else:
        path.symlink_to("/dev/zero")
    return path, request.param


@pytest.mark.parametrize(
    "read",
    [
        read_input,
        read_text,
        open_input,
        lambda path: list(read_json_lines(path)),
    ],
)
def test_a_file_without_an_end_is_not_read(
    read: Callable[[Path], object], endless: tuple[Path, str]
) -> None:
    path, kind = endless
    with pytest.raises((OSError, PronkError), match=f"{kind} instead of a regular file"):
        read(path)


@pytest.mark.parametrize(
    "write",
    [
        check_regular,
        lambda path: check_writable("json", path),
        lambda path: write_json(path, {}),
        lambda path: replace_file(path).__enter__(),
    ],
)
def test_a_file_of_another_kind_is_not_written(
    write: Callable[[Path], object], endless: tuple[Path, str]
) -> None:
    path, kind = endless
    with pytest.raises((OSError, PronkError), match=f"{kind} instead of a regular file"):
        write(path)
    assert not path.is_file()


def test_a_result_is_kept_beside_a_device() -> None:
    with pytest.raises(
        PronkError, match=r"^json: .* found: a device instead of a regular file; the result is in "
    ) as e:
        save_result("json", Path("/dev/null"), "text")
    kept = Path(str(e.value).partition("the result is in ")[2])
    assert kept.read_text() == "text"


def test_an_open_pipe_is_read_to_its_end() -> None:
    """As ``<(command)`` of a shell, or ``/dev/stdin``."""
    reader, writer = os.pipe()
    thread = threading.Thread(target=lambda: (os.write(writer, b"some text"), os.close(writer)))
    thread.start()
    assert read_text(Path(f"/dev/fd/{reader}")) == "some text"
    thread.join()
    os.close(reader)


def test_streams_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pronk.base.files.regular, "MAX_STREAM_BYTES", 2**20)
    assert read_stream(io.BytesIO(b"x" * 2**20)) == b"x" * 2**20
    with pytest.raises(OSError, match="more than 1 MiB"):
        read_stream(io.BytesIO(b"x" * (2**20 + 1)))


def test_an_endless_standard_input_is_refused() -> None:
    command = [
        sys.executable,
        "-m",
        "pronk",
        "generate",
        "-",
        "--model",
        "pronk-tiny",
        "--threads",
        "1",
    ]
    with Path("/dev/zero").open("rb") as endless:
        done = subprocess.run(
            command, stdin=endless, capture_output=True, text=True, timeout=HUNG, check=False
        )
    message = (
        "pronk: error: prompt: standard input: expected a text, found more than 256 MiB; "
        "give a file\n"
    )
    assert (done.returncode, done.stderr) == (2, message)


@pytest.mark.parametrize(
    "name",
    ["missing", "x" * 300, "x" * 5000, "x/" * 5000, "a\0b", "\ud800"],
    ids=lambda name: repr(name[:8]),
)
def test_names_that_no_file_has_name_no_file(name: str, tmp_path: Path) -> None:
    assert not is_file(tmp_path / name)
    assert not is_folder(tmp_path / name)


def test_files_and_folders_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert (is_file(tmp_path / "file"), is_folder(tmp_path / "file")) == (True, False)
    assert (is_file(tmp_path), is_folder(tmp_path)) == (False, True)
