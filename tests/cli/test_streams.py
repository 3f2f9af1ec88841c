"""Standard streams that are full, closed, or read by a program that ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from covering import covering
from waiting import HUNG

FULL = Path("/dev/full")
NEEDS_FULL = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
MODEL = "--model pronk-tiny --threads 1"
VERIFY = f"verify {MODEL} --drafter suffix --limit 1 --max-tokens 4 --samples 0"
BENCH = f"bench --quick --prompts tests/cli/one_prompt.txt {MODEL} --drafter suffix --max-tokens 4"
COMMANDS = [
    "--help",
    "--version",
    "list",
    "list --known",
    "list --known --json",
    "generate --help",
    f"generate hello {MODEL} --max-tokens 4",
    f"generate hello {MODEL} --max-tokens 4 --json",
    f"chat {MODEL} --max-tokens 4",
    f"explain hello {MODEL} --max-tokens 4",
    f"{VERIFY} --json -",
]
SLOW_COMMANDS = [
    f"explain hello {MODEL} --max-tokens 4 --json",
    VERIFY,
    BENCH,
    f"{BENCH} --json -",  # the tests of files run it with a full output
]
MISTAKES = ["generat", "generate x --rule luck", "generate x --model nowhere"]
# Words of commands whose output has figures that two runs do not share: durations, random seeds.
VARYING = {"explain", "verify", "bench", "--json"}


# Shell redirections of an output whose end is no error.
ENDED = {"closed": ">&-", "reader has ended": f"| {sys.executable} -c 'import sys; sys.stdin.close()'"}


def cases(commands: Sequence[str], faults: Sequence[Any]) -> list[Any]:
    """Return each command with one of the faults, which take turns; all other cases are slow tests."""
    slow = product(SLOW_COMMANDS, faults)
    return [
        *covering(commands, faults, strength=1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in slow),
    ]


def run(arguments: str, shell: str, *, unbuffered: bool = False) -> subprocess.CompletedProcess[str]:
    """Run ``pronk ARGUMENTS`` with the redirection ``shell``."""
    python = [sys.executable, *(["-u"] if unbuffered else []), "-m", "pronk"]
    words = ["sh", "-c", f'"$@" {shell}', "sh", *python, *arguments.split()]
    return subprocess.run(words, input="hi\n", capture_output=True, text=True, timeout=HUNG, check=False)


@cache
def run_with_good_streams(arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command once for all tests."""
    return run(arguments, "")


@NEEDS_FULL
@pytest.mark.parametrize(("arguments", "unbuffered"), cases(COMMANDS, [False, True]))
def test_a_full_output_is_one_line(arguments: str, unbuffered: bool) -> None:
    done = run(arguments, f"> {FULL}", unbuffered=unbuffered)
    message = "stdout: expected room for the output, found No space left on device; make room or write elsewhere"
    *others, last = done.stderr.splitlines()
    assert (done.returncode, last) == (1, f"pronk: error: {message}")
    assert not any("Traceback" in line or "Errno" in line or "Exception ignored" in line for line in others)


@pytest.mark.parametrize(("arguments", "end"), cases(COMMANDS, [*ENDED]))
def test_an_output_that_ends_is_no_error(arguments: str, end: str) -> None:
    done = run(arguments, ENDED[end])
    assert (done.returncode, done.stdout) == (0, "")
    assert "error" not in done.stderr
    assert "Exception" not in done.stderr


@NEEDS_FULL
@pytest.mark.parametrize(("arguments", "broken"), cases([*COMMANDS, *MISTAKES], ["2>&-", f"2> {FULL}"]))
def test_standard_error_changes_neither_the_exit_code_nor_the_output(arguments: str, broken: str) -> None:
    good = run_with_good_streams(arguments)
    bad = run(arguments, broken)
    assert bad.returncode == good.returncode
    assert bad.stderr == ""
    if "--json" in arguments:
        assert type(json.loads(bad.stdout)) is type(json.loads(good.stdout))
    elif VARYING.intersection(arguments.split()):
        assert bad.stdout.split()[:2] == good.stdout.split()[:2]  # durations decide what is drafted, and what is shown
    else:
        assert bad.stdout == good.stdout


@NEEDS_FULL
@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        (f"batch IN OUT {MODEL}", "OUT"),
        ("quantize models/pronk-tiny OUT --bits 8 --threads 1", "OUT/config.json"),
        ("datastore build OUT IN --model pronk-tiny", "OUT/datastore.json"),
        (f"explain x {MODEL} --max-tokens 4 --plot OUT", "OUT"),
        (
            f"{BENCH} --json OUT",
            "OUT",
        ),
    ],
)
def test_standard_error_loses_no_file(arguments: str, result: str, tmp_path: Path) -> None:
    request = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 2}}
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(request | {"text": "def f(x): return x\n" * 20}) + "\n")
    out = tmp_path / "out"
    done = run(arguments.replace("IN", str(source)).replace("OUT", str(out)), f"2> {FULL}")
    assert (done.returncode, done.stderr) == (0, "")
    assert Path(result.replace("OUT", str(out))).stat().st_size


@NEEDS_FULL
@pytest.mark.parametrize(
    "arguments",
    [
        f"explain x {MODEL} --max-tokens 4 --plot OUT",
        f"explain x {MODEL} --max-tokens 4 --json --plot OUT",
        f"{BENCH} --json OUT",
        f"{BENCH} --json - --markdown OUT",
        f"{VERIFY} --json OUT",
    ],
)
def test_a_full_output_loses_no_file(arguments: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(arguments.replace("OUT", str(out)), f"> {FULL}")
    assert done.returncode == 1
    assert out.stat().st_size


def test_a_closed_standard_input_is_empty() -> None:
    chat = run(f"chat {MODEL}", "<&-")
    assert (chat.returncode, chat.stdout) == (0, "")
    prompt = run(f"generate - {MODEL}", "<&-")
    assert (prompt.returncode, prompt.stderr.count("\n")) == (2, 1)
