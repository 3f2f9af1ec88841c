"""Faulty streams of the commands that guests add: no traceback, and no lost file."""

import json
from pathlib import Path

import pytest

from cli import test_streams as streams
from cli.test_streams import (
    CLOSED,
    FULL_STREAM,
    MODEL,
    NEEDS_FULL,
    READER_HAS_ENDED,
    UNBUFFERED,
    Run,
    cases,
    run_here,
)
from pronk import diagnosis
from pronk.lab.bench import measure

VERIFY = f"verify {MODEL} --drafter suffix --limit 1 --max-tokens 4 --samples 0"
BENCH = f"bench --quick --prompts tests/cli/one_prompt.txt {MODEL} --drafter suffix --max-tokens 4"
COMMANDS = [f"explain hello {MODEL} --max-tokens 4", f"{VERIFY} --json -"]
SLOW_COMMANDS = [
    f"explain hello {MODEL} --max-tokens 4 --json",
    VERIFY,
    BENCH,
    f"{BENCH} --json -",  # the tests of files run it with a full output
]


@pytest.fixture(autouse=True)
def quick_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read little memory and time few forward passes."""
    monkeypatch.setattr(diagnosis, "_BUFFER_BYTES", 2**20)
    monkeypatch.setattr(measure, "_ROUNDS", 1)
    monkeypatch.setattr(measure, "ROWS", (1, 4))


@pytest.mark.few(2)
@NEEDS_FULL
@pytest.mark.parametrize(
    ("run", "arguments", "fault"), cases(COMMANDS, [FULL_STREAM, UNBUFFERED], SLOW_COMMANDS)
)
def test_a_full_output_is_one_line(run: Run, arguments: str, fault: str) -> None:
    streams.test_a_full_output_is_one_line(run, arguments, fault)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("run", "arguments", "fault"), cases(COMMANDS, [CLOSED, READER_HAS_ENDED], SLOW_COMMANDS)
)
def test_an_output_that_ends_is_no_error(run: Run, arguments: str, fault: str) -> None:
    streams.test_an_output_that_ends_is_no_error(run, arguments, fault)


@pytest.mark.few(2)
@NEEDS_FULL
@pytest.mark.parametrize(
    ("run", "arguments", "fault"), cases(COMMANDS, [CLOSED, FULL_STREAM], SLOW_COMMANDS)
)
def test_standard_error_changes_neither_the_exit_code_nor_the_output(
    run: Run, arguments: str, fault: str
) -> None:
    streams.test_standard_error_changes_neither_the_exit_code_nor_the_output(run, arguments, fault)


@pytest.mark.long
@pytest.mark.few(2)
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
    request = {
        "custom_id": "1",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "x", "max_tokens": 2},
    }
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(request | {"text": "def f(x): return x\n" * 20}) + "\n")
    out = tmp_path / "out"
    done = run_here(
        arguments.replace("IN", str(source)).replace("OUT", str(out)), stderr=FULL_STREAM
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert Path(result.replace("OUT", str(out))).stat().st_size


@pytest.mark.few(2)
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
    done = run_here(arguments.replace("OUT", str(out)), stdout=FULL_STREAM)
    assert done.returncode == 1
    assert out.stat().st_size
