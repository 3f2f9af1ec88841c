"""What ``pronk serve`` and ``pronk batch`` say of mistakes, before a model is loaded."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from typing import Any

import pytest

from pronk.cli.main import main


def said(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "expected --api-key or --api-key-file beside '0.0.0.0'"),
        (["--port", "70000"], "70000"),
        (["--api-key", "short"], "at least 8 printable ASCII characters"),
        (["--api-key-file", "nowhere.txt"], "api-key-file: expected a text file, found nowhere.txt"),
        (["--guardrails", "nowhere.txt"], "guardrails: expected a text file"),
        (["--moderation-prompt", "nowhere.txt"], "moderation-prompt: expected a text file"),
        (["--also", "nonsense"], "unknown drafter 'nonsense'"),
        (["--max-n", "0"], "max-n"),
    ],
)
def test_serve(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert message in said(capsys, "serve", *options)


def test_a_port_that_somebody_has(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        message = f"port: expected an address to listen at, found 127.0.0.1:{port}: Address already in use; "
        assert message in said(capsys, "serve", "--port", port)


def test_files_with_nothing_in_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("# keys\n\n")
    assert "expected keys, one a line, found none" in said(capsys, "serve", "--api-key-file", str(path))
    path.write_text(" \n")
    assert "expected a prompt, found an empty file" in said(capsys, "serve", "--guardrails", str(path))


def test_batch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("{}\n")
    assert "line 1: custom_id: expected" in said(capsys, "batch", str(source), str(tmp_path / "out.jsonl"))
    assert "expected another file than IN" in said(capsys, "batch", str(source), str(source))
    assert "found [Errno 2]" in said(capsys, "batch", str(tmp_path / "no.jsonl"), str(tmp_path / "out.jsonl"))


@pytest.mark.parametrize("command", ["serve", "batch"])
def test_without_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    def find(name: str, *more: Any) -> Any:
        return None if name == "uvicorn" else found(name, *more)

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", find)
    files = [] if command == "serve" else [str(tmp_path / "in"), str(tmp_path / "out")]
    message = f"{command}: expected uvicorn, found no such package; run: pip install 'pronk[serve]'"
    assert message in said(capsys, command, *files)
