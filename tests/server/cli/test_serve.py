"""Errors of ``pronk serve`` and ``pronk batch`` for wrong options, before a model is loaded."""

import importlib.util
import socket
from pathlib import Path
from typing import Any

import pytest

from command_line import Command, assert_mistake

TWO = ["--model", "pronk-tiny", "--model", "other=pronk-tiny"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "expected --api-key or --api-key-file beside '0.0.0.0'"),
        (["--port", "70000"], "70000"),
        (
            ["--api-key", "short"],
            "at least 8 printable ASCII characters without spaces, found 5 characters",
        ),
        (
            ["--api-key", "with a space"],
            "at least 8 printable ASCII characters without spaces, found another character",
        ),
        (
            ["--api-key-file", "nowhere.txt"],
            "api-key-file: expected a file that can be read at nowhere.txt, found No such file",
        ),
        (
            ["--guardrails", "nowhere.txt"],
            "guardrails: expected a file that can be read at nowhere.txt",
        ),
        (
            ["--moderation-prompt", "nowhere.txt"],
            "moderation-prompt: expected a file that can be read at nowhere.txt",
        ),
        (["--also", "nonsense"], "found 'nonsense'"),
        (["--max-n", "0"], "max-n"),
        (
            ["--model", "pronk-tiny", "--model", "pronk-tiny"],
            "model: expected distinct names, found pronk-tiny for",
        ),
        ([*TWO, "--pin", "third"], "pin: expected one of pronk-tiny, other, found 'third'"),
        ([*TWO, "--name", "x"], "name: expected one model, found 2; name each: --model NAME=MODEL"),
        ([*TWO, "--workers", "2"], "workers: expected 1 with several models, found 2"),
        (
            [*TWO, "--calibration", "rates.json"],
            "calibration: expected on or off with several models",
        ),
        (
            [*TWO, "--replicas", "2"],
            "model: expected one, found pronk-tiny and other=pronk-tiny; leave --replicas out",
        ),
        (
            ["--model", "pronk-tiny", "--allow-pull", "--workers", "2"],
            "workers: expected 1 with several models, found 2",
        ),
        (
            ["--api-key", "a-key-of-clients", "--allow-pull"],
            "allow-pull: expected --pull-key on a server with API keys",
        ),
        (["--pull-key", "a-key-of-pulls"], "pull-key: expected --allow-pull beside it"),
        (
            ["--replicas", "2", "--idle-minutes", "5"],
            "idle-minutes: expected no such option with --replicas",
        ),
        (
            ["--model", "pronk-tiny", "--memory", "64KiB"],
            "memory: expected at most 64 KiB, found 20.5 MiB of pronk-tiny",
        ),
        ([*TWO, "--memory", "lots"], "memory: expected a positive number of bytes"),
    ],
)
def test_serve(command: Command, options: list[str], message: str) -> None:
    assert_mistake(command("serve", *options), message)


def test_a_port_in_use(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        message = (
            f"port: expected an address to listen at, found 127.0.0.1:{port}: "
            "Address already in use; "
        )
        assert_mistake(command("serve", "--port", port), message)


def test_files_with_nothing_in_them(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("# keys\n\n")
    assert_mistake(
        command("serve", "--api-key-file", str(path)), "expected keys, one a line, found none"
    )
    path.write_text(" \n")
    assert_mistake(
        command("serve", "--guardrails", str(path)), "expected a prompt, found an empty file"
    )


def test_batch(command: Command, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("{}\n")
    assert_mistake(
        command("batch", str(source), str(tmp_path / "out.jsonl")), "line 1: custom_id: expected"
    )
    assert_mistake(command("batch", str(source), str(source)), "expected another file than IN")
    assert_mistake(
        command("batch", str(tmp_path / "no.jsonl"), str(tmp_path / "out.jsonl")),
        "found: No such file",
    )


@pytest.mark.parametrize("words", [["batch", "in", "out"], ["generate", "x"], ["verify"]])
def test_a_second_model_does_not_replace_the_first_one(
    command: Command, tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "in").write_text(
        '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {}}\n'
    )
    words = [str(tmp_path / word) if word in ("in", "out") else word for word in words]
    found = command(*words, "--model", "pronk-tiny", "--model", "pronk-tiny-draft")
    assert_mistake(found, "model: expected one, found pronk-tiny and pronk-tiny-draft; give one")


@pytest.mark.parametrize("name", ["serve", "batch"])
def test_without_the_extra(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    def find(name: str, *more: Any) -> Any:
        return None if name == "uvicorn" else found(name, *more)

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", find)
    files = [] if name == "serve" else [str(tmp_path / "in"), str(tmp_path / "out")]
    message = (
        f"{name}: expected uvicorn, found none; run pip install '.[serve]' in a clone of pronk"
    )
    assert_mistake(command(name, *files), message)
