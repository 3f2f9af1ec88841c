"""Standard streams that are full, closed, or read by a program that ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")
NEEDS_FULL = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
COMMANDS = [
    ["--help"],
    ["--version"],
    ["list"],
    ["list", "--known"],
    ["list", "--known", "--json"],
    ["generate", "--help"],
    ["generate", "hello", "--model", "pronk-tiny", "--max-tokens", "4", "--threads", "1"],
    ["generate", "hello", "--model", "pronk-tiny", "--max-tokens", "4", "--threads", "1", "--json"],
    ["chat", "--model", "pronk-tiny", "--max-tokens", "4", "--threads", "1"],
    ["explain", "hello", "--model", "pronk-tiny", "--max-tokens", "4", "--threads", "1"],
    ["explain", "hello", "--model", "pronk-tiny", "--max-tokens", "4", "--threads", "1", "--json"],
    [*"verify --model pronk-tiny --threads 1 --drafter suffix --limit 1 --max-tokens 4 --samples 0".split()],
    [*"verify --model pronk-tiny --threads 1 --drafter suffix --limit 1 --max-tokens 4 --samples 0 --json -".split()],
    [*"bench --quick --model pronk-tiny --threads 1 --drafter suffix --max-tokens 4".split()],
    [*"bench --quick --model pronk-tiny --threads 1 --drafter suffix --max-tokens 4 --json -".split()],
]
MISTAKES = [["generat"], ["generate", "x", "--rule", "luck"], ["generate", "x", "--model", "nowhere"]]
# Figures that two runs do not share: durations and speeds.
TIMED = ("explain", "verify", "bench")


def run(arguments: list[str], shell: str, *, unbuffered: bool = False) -> subprocess.CompletedProcess[str]:
    """Run ``pronk ARGUMENTS`` with the redirection ``shell``."""
    python = [sys.executable, *(["-u"] if unbuffered else []), "-m", "pronk"]
    words = ["sh", "-c", f'"$@" {shell}', "sh", *python, *arguments]
    return subprocess.run(words, input="hi\n", capture_output=True, text=True, timeout=120, check=False)


@NEEDS_FULL
@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_full_output_is_one_line(arguments: list[str], unbuffered: bool) -> None:
    done = run(arguments, f"> {FULL}", unbuffered=unbuffered)
    message = "stdout: expected room for the output, found No space left on device; make room or write elsewhere"
    *others, last = done.stderr.splitlines()
    assert (done.returncode, last) == (1, f"pronk: error: {message}")
    assert not any("Traceback" in line or "Errno" in line or "Exception ignored" in line for line in others)


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_reader_that_has_read_enough_gets_no_message(arguments: list[str]) -> None:
    reader, writer = sys.executable, "import sys; sys.stdin.close()"
    done = run(arguments, f"| {reader} -c '{writer}'")
    assert "pronk: error" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_closed_output_is_discarded(arguments: list[str]) -> None:
    done = run(arguments, ">&-")
    assert (done.returncode, done.stdout) == (0, "")
    assert "error" not in done.stderr


@pytest.mark.parametrize("broken", ["2>&-", pytest.param(f"2> {FULL}", marks=NEEDS_FULL)])
@pytest.mark.parametrize("arguments", [*COMMANDS, *MISTAKES], ids=" ".join)
def test_standard_error_changes_neither_the_exit_code_nor_the_output(arguments: list[str], broken: str) -> None:
    good, bad = run(arguments, ""), run(arguments, broken)
    assert bad.returncode == good.returncode
    assert bad.stderr == ""
    if arguments[0] in TIMED:
        assert bool(bad.stdout) == bool(good.stdout)
        assert len(bad.stdout.splitlines()) == len(good.stdout.splitlines())
    else:
        assert bad.stdout == good.stdout


@pytest.mark.parametrize("broken", ["2>&-", pytest.param(f"2> {FULL}", marks=NEEDS_FULL)])
@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ("batch IN OUT --model pronk-tiny --threads 1", "OUT"),
        ("quantize models/pronk-tiny OUT --bits 8 --threads 1", "OUT/config.json"),
        ("datastore build OUT IN --model pronk-tiny", "OUT/datastore.json"),
        ("explain x --model pronk-tiny --threads 1 --max-tokens 4 --plot OUT", "OUT"),
        ("bench --quick --model pronk-tiny --threads 1 --drafter suffix --max-tokens 4 --json OUT", "OUT"),
    ],
)
def test_standard_error_loses_no_file(arguments: str, result: str, broken: str, tmp_path: Path) -> None:
    request = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 2}}
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(request | {"text": "def f(x): return x\n" * 20}) + "\n")
    places = {"IN": str(source), "OUT": str(tmp_path / "out")}
    done = run([places.get(word, word) for word in arguments.split()], broken)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / result.replace("OUT", "out")).stat().st_size


@NEEDS_FULL
@pytest.mark.parametrize(
    "arguments",
    [
        "explain x --model pronk-tiny --threads 1 --max-tokens 4 --plot OUT",
        "explain x --model pronk-tiny --threads 1 --max-tokens 4 --json --plot OUT",
        "bench --quick --model pronk-tiny --threads 1 --drafter suffix --max-tokens 4 --json OUT",
        "bench --quick --model pronk-tiny --threads 1 --drafter suffix --max-tokens 4 --json - --markdown OUT",
        "verify --model pronk-tiny --threads 1 --drafter suffix --limit 1 --max-tokens 4 --samples 0 --json OUT",
    ],
)
def test_a_full_output_loses_no_file(arguments: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run([str(out) if word == "OUT" else word for word in arguments.split()], f"> {FULL}")
    assert done.returncode == 1
    assert out.stat().st_size


def test_a_closed_standard_input_is_empty() -> None:
    chat = run(["chat", "--model", "pronk-tiny", "--threads", "1"], "<&-")
    assert (chat.returncode, chat.stdout) == (0, "")
    prompt = run(["generate", "-", "--model", "pronk-tiny", "--threads", "1"], "<&-")
    assert (prompt.returncode, prompt.stderr.count("\n")) == (2, 1)
