"""``pronk bench --server`` from outside: streams, files, exit codes, mistakes in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.load.fake_server import Fake, running

Run = Callable[..., tuple[int, str, str]]
FEW = ("--requests", 4, "--repeats", 1, "--warmup", 1, "--max-tokens", 20, "--limit", 1)


@pytest.fixture
def run(command: Run) -> Run:
    return partial(command, "bench")


def test_two_servers_and_a_document(run: Run, tmp_path: Path) -> None:
    fast, slow = Fake(steps=True, key="secret"), Fake(first=0.02)
    path = tmp_path / "load.json"
    with running(fast, slow):
        servers = ("--server", f"slow={slow.url}", "--server", f"fast={fast.url}/v1", "--api-key", "fast=secret")
        loads = ("--concurrency", "1,2", "--rate", "200", "--goodput", "ttft=60000, e2e=90000")
        extra = ("--extra-body", 'fast={"drafter": "jacobi"}', "--seed", 3)
        code, out, err = run(*servers, *loads, *extra, *FEW, "--json", path)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert all(word in out for word in ("slow", "fast", "2 clients", "200 requests/s", "4/4", "TTFT", "100%"))
    assert {body.get("drafter") for body in fast.asked} == {"jacobi"}
    assert {body.get("drafter") for body in slow.asked} == {None}
    text = path.read_text()
    assert "secret" not in text
    document = json.loads(text)
    assert (document["format"], document["interrupted"]) == ("pronk-load/1", False)
    asked = {"seed": 3, "max_tokens": 20, "temperature": [0.0], "concurrency": "1,2", "requests": 4}
    assert asked.items() <= document["arguments"].items()
    assert document["targets"] == {"ttft": 60.0, "tpot": None, "e2e": 90.0}
    assert [(f["server"], f["level"]["value"], f["answered"], f["S"]) for f in document["figures"]] == [
        *(("slow", 1, 4, None), ("fast", 1, 4, 2.0)),
        *(("slow", 2, 4, None), ("fast", 2, 4, 2.0)),
        *(("slow", 200, 4, None), ("fast", 200, 4, 2.0)),
    ]
    assert document["sustained"] == {"slow": 200.0, "fast": 200.0}
    assert len(document["figures"][0]["calls"]) == 4


def test_document_on_standard_output_and_a_page(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    fake = Fake(refuses=("stream_options",))
    with running(fake):
        code, out, err = run(
            "--server", fake.url, *FEW, "--concurrency", 1, "--json", "-", "--report", tmp_path / "page"
        )
    assert code == 0
    assert json.loads(out)["servers"][0]["without"] == ["stream_options"]
    assert f"{tmp_path}/page/index.html\n" in err
    assert "each chunk counts as one (4 answers)" in " ".join(err.split())
    assert (tmp_path / "page" / "index.html").is_file()


def test_a_drawn_load_of_prompts_of_ones_own(run: Run, tmp_path: Path) -> None:
    path, fake = tmp_path / "mine.txt", Fake()
    path.write_text("One\nTwo\n")
    with running(fake):
        code, _, _ = run(
            *("--server", fake.url, *FEW[:-2], "--prompts", path, "--endpoint", "completions", "--temperature", 0.8),
            *("--rate", "500", "--ignore-eos"),
        )
    assert code == 0
    assert {body["prompt"] for body in fake.asked} == {"One", "Two"}
    assert all((body["temperature"], body["ignore_eos"]) == (0.8, True) for body in fake.asked)
    assert {body["seed"] for body in fake.asked[-4:]} == {7, 8, 9, 10}


def test_a_key_from_the_environment(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others see a command line in the list of processes; the other benchmark does not mind that there is a key."""
    monkeypatch.setenv("PRONK_API_KEY", "secret")
    with running(fake := Fake(key="secret")):
        code, _, err = run("--server", fake.url, *FEW, "--concurrency", 1, "--json", tmp_path / "load.json")
    assert (code, err) == (0, "")
    assert "secret" not in (tmp_path / "load.json").read_text()
    assert "--drafter" not in run("--drafter", "magic")[2]


def test_a_bar_on_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    fake = Fake()
    with running(fake):
        code, out, err = run("--server", fake.url, *FEW, "--concurrency", 2, "--json", "-")
    assert code == 0
    assert json.loads(out)
    assert "2 clients, round 1 of 1" in err


def test_an_interrupt_gives_what_was_measured(run: Run, tmp_path: Path) -> None:
    """In the second level: one request asks what the server can do, one warms up, four are the first level's."""
    fake = Fake(on={8: lambda: os.kill(os.getpid(), signal.SIGINT)}, first=0.05)
    path = tmp_path / "load.json"
    with running(fake):
        code, out, err = run("--server", fake.url, *FEW, "--concurrency", "1,2,4", "--json", path)
    assert (code, err) == (130, "")
    assert "Interrupted" in out
    document = json.loads(path.read_text())
    assert document["interrupted"]
    found = [(f["level"]["value"], f["answered"], f["problems"]) for f in document["figures"]]
    assert found[0] == (1, 4, [])
    assert [(level, answered > 0, failed) for level, answered, failed in found[1:]] == [(2, True, [])]


def test_an_interrupt_before_anything_was_measured(run: Run, tmp_path: Path) -> None:
    fake = Fake(on={1: lambda: os.kill(os.getpid(), signal.SIGINT)}, first=0.05)
    with running(fake):
        code, out, _ = run("--server", fake.url, *FEW, "--json", tmp_path / "load.json")
    assert (code, out, list(tmp_path.iterdir())) == (130, "", [])


def test_a_server_that_refuses_everything(run: Run) -> None:
    fake = Fake(fails=dict.fromkeys(range(2, 99), 503))
    with running(fake):
        code, out, err = run("--server", f"it={fake.url}", *FEW, "--concurrency", 1)
    assert code == 2
    assert err == "pronk: error: nothing was measured: expected answers, found HTTP 503 (busy)\n"
    assert "it, 1 client: 4 of 4 requests failed, HTTP 503: busy" in out


def test_a_server_that_fails_at_the_warm_up(run: Run) -> None:
    fake = Fake(fails={1: 400})
    with running(fake):
        code, out, err = run("--server", f"it={fake.url}", *FEW)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "server it: expected an answer of the model tiny" in err


SERVER = ("--server", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([*SERVER], ["server 127.0.0.1:9: expected an OpenAI-compatible server", "no connection", "start it"]),
        (["--server", "here"], ["server: expected [NAME=]URL", "'here'"]),
        ([*SERVER, "--drafter", "jacobi"], ["server: expected options of a load on servers, found --drafter"]),
        ([*SERVER, "--threads", "1"], ["--threads"]),
        ([*SERVER, "--peer", "transformers"], ["--peer"]),
        ([*SERVER, "--batch", "1"], ["--batch"]),
        ([*SERVER, "--markdown", "x.md"], ["--markdown"]),
        ([*SERVER, "--trace", "x.jsonl"], ["--trace"]),
        ([*SERVER, "--replay", "x.jsonl"], ["replay", "--server"]),
        ([*SERVER, "--json", "none/x.json"], ["json", "none"]),
        ([*SERVER, "--temperature", "0", "--temperature", "0.8"], ["temperature: expected one", "0, 0.8"]),
        ([*SERVER, "--concurrency", "1,32"], ["requests: expected at least one for each of 32 clients, found 16"]),
        ([*SERVER, "--concurrency", "x"], ["concurrency", "'x'"]),
        ([*SERVER, "--rate", "0"], ["rate"]),
        ([*SERVER, "--goodput", "ttft"], ["goodput: expected milliseconds", "'ttft'"]),
        ([*SERVER, "--goodput", "itl=3"], ["goodput", "'itl=3'"]),
        ([*SERVER, "--goodput", "ttft=3,ttft=4"], ["goodput", "'ttft=4'"]),
        ([*SERVER, "--goodput", "ttft=nan"], ["goodput", "'ttft=nan'"]),
        ([*SERVER, "--endpoint", "both"], ["endpoint"]),
        ([*SERVER, "--timeout", "0"], ["timeout"]),
        ([*SERVER, "--prompts", "none.txt"], ["none.txt"]),
        (["--concurrency", "4"], ["expected --server with the server to load, found --concurrency"]),
        (["--goodput", "ttft=1"], ["--server", "--goodput"]),
        (["--unique"], ["--server", "--unique"]),
    ],
)
def test_mistakes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], expected: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*args)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    for text in ("pronk: error: ", *expected):
        assert text in err


def in_a_process(code: str, *args: object) -> Any:
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, check=False)


def test_it_needs_no_torch() -> None:
    """It shares the machine with the server: what models need stays where it is."""
    fake = Fake()
    code = """
import sys
from pronk.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as stop:
    assert not stop.code
sys.exit("torch" in sys.modules)
"""
    with running(fake):
        result = in_a_process(code, "bench", "--server", fake.url, *FEW, "--concurrency", 1)
    assert result.returncode == 0, result.stderr


def test_a_missing_client_is_one_line() -> None:
    code = "import sys; sys.modules['httpx'] = None; from pronk.cli.main import main; main(sys.argv[1:])"
    result = in_a_process(code, "bench", *SERVER)
    assert result.returncode == 2
    assert result.stderr.startswith("pronk: error: server: expected httpx, found none")
    assert result.stderr.endswith("pip install 'pronk[serve]'\n")
    assert result.stderr.count("\n") == 1
