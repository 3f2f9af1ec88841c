"""Standard output that is full, closed, or read by a program that ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from waiting import HUNG

FULL = Path("/dev/full")
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
]


def run(arguments: list[str], shell: str, *, unbuffered: bool = False) -> subprocess.CompletedProcess[str]:
    """Run ``pronk ARGUMENTS`` with the redirection ``shell``."""
    python = [sys.executable, *(["-u"] if unbuffered else []), "-m", "pronk"]
    words = ["sh", "-c", f'"$@" {shell}', "sh", *python, *arguments]
    return subprocess.run(words, input="hi\n", capture_output=True, text=True, timeout=HUNG, check=False)


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
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
