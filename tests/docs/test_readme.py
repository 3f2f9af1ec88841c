"""Every command of the README runs: on pronk-tiny, with fewer tokens, and without the network."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import httpx
import pytest
from huggingface_hub import constants

from command_line import Command
from fake_hub import fake_hub
from pronk import diagnosis
from pronk.checkpoint.hub import names
from pronk.lab.bench import measure
from pronk.models import resolve
from waiting import HUNG

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINES = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]
# Options after those of the README, which make a command cheaper.
FEWER = {
    "generate": (),
    "explain": (),
    "list": (),
    "batch": (),
    "chat": ("--max-tokens", "8"),
    "bench": (
        "--limit",
        "1",
        "--repeats",
        "1",
        "--temperature",
        "0",
        "--max-tokens",
        "8",
        "--drafter",
        "suffix",
    ),
    "verify": (
        "--limit",
        "1",
        "--samples",
        "0",
        "--max-tokens",
        "16",
        "--drafter",
        "prompt_lookup(min_ngram=1)",
    ),
}
REQUEST = {
    "custom_id": "1",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"prompt": "def f(", "max_tokens": 4},
}
Run = Callable[[list[str]], None]


@pytest.fixture
def runs(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Run]:
    """Return functions that run the words of a command, by its beginning."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(diagnosis, "_BUFFER_BYTES", 2**20)  # pronk bench reads less memory
    monkeypatch.setattr(measure, "_ROUNDS", 1)
    monkeypatch.setattr(measure, "ROWS", (1, 4))

    def pronk(words: list[str]) -> None:
        Path("in.jsonl").write_text(json.dumps(REQUEST) + "\n")
        code, out, err = command(*words[1:], *FEWER[words[1]], given="What is a cat?\n")
        assert code == 0, err
        assert out or json.loads(Path("out.jsonl").read_text())["response"]["status_code"] == 200

    def pull(words: list[str]) -> None:
        """Download a small file from a Hub on this machine."""
        data = b"GGUF"
        known = names.known_models()[words[2]]
        known = known._replace(
            model=replace(known.model, revision=None), sha256=sha256(data).hexdigest()
        )
        for module in (names, resolve):
            monkeypatch.setattr(module, "known_models", lambda: {known.name: known})
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        with fake_hub() as hub:
            hub.repos[known.model.repo] = {known.model.file: data}
            template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
            monkeypatch.setattr(constants, "ENDPOINT", hub.url)
            monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            code, out, err = command(*words[1:])
        assert code == 0, err
        assert Path(out.strip()).read_bytes() == data

    def doctor(words: list[str]) -> None:
        """Read the command's words; ``tests/cli/test_doctor.py`` runs it, which takes seconds."""
        code, _, err = command(*words[1:], "--help")
        assert code == 0, err

    others = {"pip install": install, "pronk pull": pull, "pronk serve": serve, "curl": curl}
    others["pronk doctor"] = doctor
    return others | {f"pronk {name}": pronk for name in FEWER}


@pytest.mark.parametrize("line", LINES)
def test_command(runs: dict[str, Run], line: str) -> None:
    found = [run for beginning, run in runs.items() if line.startswith(beginning)]
    assert found, "expected a function that runs this command; add one to the fixture runs"
    found[0](shlex.split(line))


def test_lines_are_whole_commands() -> None:
    assert len(LINES) >= 10
    assert not [line for line in LINES if not line or "#" in line or line.endswith("\\")]


def install(words: list[str]) -> None:
    """Check the names of the extras; ``tests/test_packaging.py`` installs the project."""
    extras = re.fullmatch(r"\.\[([\w,]+)\]", words[2])
    assert extras is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {*extras[1].split(",")} <= {*project["optional-dependencies"]}


@contextmanager
def serving(words: list[str]) -> Iterator[str]:
    """Run ``pronk serve`` with pronk-tiny in place of each model; yield its address, and stop it by
    Ctrl-C.
    """
    known = "|".join(
        re.escape(name) for name in sorted(names.known_models(), key=len, reverse=True)
    )
    arguments = [re.sub(rf"(?:{known})$", "pronk-tiny", word) for word in words[1:]]
    arguments += [] if "--model" in words else ["--model", "pronk-tiny"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pronk", *arguments, "--port", "0", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(2)]
            address = re.search(r"http://127\.0\.0\.1:\d+", lines[0])
            assert address is not None, "".join(lines) + process.stdout.read()
            assert lines[1] == f"chat page: {address[0]}/ · Ctrl-C stops the server\n"
            yield address[0]
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(HUNG) == 0


def serve(words: list[str]) -> None:
    """Ask every model at all addresses that the comments of the README name."""
    with serving(words) as url, httpx.Client(base_url=url, timeout=HUNG) as client:
        models = [model["id"] for model in client.get("/v1/models").json()["data"]]
        assert len(models) == max(1, words.count("--model"))
        assert "text/html" in client.get("/").headers["content-type"]
        for model in models:
            body = {
                "model": model,
                "max_tokens": 4,
                "messages": [{"role": "user", "content": "Hello"}],
            }
            for route in ("/v1/chat/completions", "/v1/messages"):
                assert client.post(route, json=body).json()["usage"]


def curl(words: list[str]) -> None:
    """Run curl against a server at another port."""
    if shutil.which("curl") is None:
        pytest.skip("expected curl, found none; install it")
    with serving(["pronk", "serve"]) as url:
        there = [word.replace("http://127.0.0.1:8000", url) for word in words]
        done = subprocess.run(
            [*there, "--silent"], capture_output=True, text=True, check=True, timeout=HUNG
        )
    assert json.loads(done.stdout)["choices"][0]["text"]


def test_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"`make ([\w-]+)`", README)
    assert targets
    assert all(f"\n{target}:" in makefile for target in targets)


def test_length() -> None:
    assert len(README.splitlines()) <= 110
