"""Standard streams that are full, closed, or read by a program that ends."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from covering import covering
from pronk.cli.main import main
from waiting import HUNG

FULL = Path("/dev/full")
NEEDS_FULL = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
MODEL = "--model pronk-tiny --threads 1"
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
]
MISTAKES = ["generat", "generate x --rule luck", "generate x --model nowhere"]
# Words of commands whose output has figures that two runs do not share: durations, random seeds.
VARYING = {"explain", "verify", "bench", "--json"}

# Commands that also run in processes: text of the parser, a table, text of a model, a message.
IN_PROCESSES = ["--help", "list", f"generate hello {MODEL} --max-tokens 4", "generat"]


class Ended(NamedTuple):
    """Exit code and texts of a command; the text of a faulty stream is empty."""

    returncode: int
    stdout: str
    stderr: str


# Faults of a stream; those that a shell can make have a redirection, with {0} for the descriptor.
FULL_STREAM = "full"
UNBUFFERED = "full, unbuffered"
CLOSED = "closed"
READER_HAS_ENDED = "reader has ended"
REDIRECTIONS = {FULL_STREAM: f"{{0}}> {FULL}", UNBUFFERED: f"{{0}}> {FULL}", CLOSED: "{0}>&-"}
DESCRIPTORS = {"stdin": 0, "stdout": 1, "stderr": 2}
Run = Callable[..., Ended]


def run_in_a_process(arguments: str, **faults: str) -> Ended:
    """Run ``pronk ARGUMENTS`` with faults of its streams, e.g. ``stdout="full"``."""
    python = [sys.executable, *(["-u"] if UNBUFFERED in faults.values() else []), "-m", "pronk"]
    shell = "".join(
        f" {REDIRECTIONS[fault].format(DESCRIPTORS[name])}"
        for name, fault in faults.items()
        if fault in REDIRECTIONS
    )
    words = ["sh", "-c", f'"$@"{shell}', "sh", *python, *arguments.split()]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with faulty_stream(READER_HAS_ENDED) as ended:
        pipes |= {name: ended for name, fault in faults.items() if fault == READER_HAS_ENDED}
        done = subprocess.run(words, input="hi\n", text=True, timeout=HUNG, check=False, **pipes)
    return Ended(done.returncode, done.stdout or "", done.stderr or "")


def run_here(arguments: str, **faults: str) -> Ended:
    """Run ``pronk ARGUMENTS`` in this process, where ``sys`` has the streams that a process would
    begin with.

    At the end, each faulty stream is flushed, as when an interpreter ends; an error of it fails the
    test.
    """
    texts = {
        name: io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for name in ("stdout", "stderr")
    }
    stdin = io.TextIOWrapper(io.BytesIO(b"hi\n"), encoding="utf-8")
    with ExitStack() as closing, pytest.MonkeyPatch.context() as patch:
        for name, stream in {"stdin": stdin, **texts}.items():
            buffering = 1 if name == "stderr" else -1  # of a process: by lines, or by blocks
            used = (
                closing.enter_context(faulty_stream(faults[name], buffering))
                if name in faults
                else stream
            )
            patch.setattr(sys, name, used)
        with pytest.raises(SystemExit) as stop:
            main(arguments.split())
        for name in faults:
            stream = getattr(sys, name)  # main() replaces a closed one
            # the tests in processes see what the interpreter makes of it
            with suppress(BrokenPipeError):
                stream.flush()
            with suppress(OSError):
                stream.close()
    for stream in texts.values():
        stream.seek(0)
    assert isinstance(stop.value.code, int)
    return Ended(stop.value.code, texts["stdout"].read(), texts["stderr"].read())


@contextmanager
def faulty_stream(fault: str, buffering: int = -1) -> Iterator[Any]:
    """Yield a stream with a descriptor of its own; ``None``, as in ``sys``, if it is closed."""
    if fault == CLOSED:
        yield None
    elif fault == READER_HAS_ENDED:
        reader, writer = os.pipe()
        os.close(reader)
        with suppress(BrokenPipeError), open(writer, "w", buffering, encoding="utf-8") as stream:  # noqa: PTH123
            yield stream
    elif fault == UNBUFFERED:
        with io.TextIOWrapper(FULL.open("wb", buffering=0), write_through=True) as stream:
            yield stream
    else:
        with FULL.open("w", buffering, encoding="utf-8") as stream:
            yield stream


@cache
def run_with_good_streams(arguments: str) -> Ended:
    """Run a command once for all tests."""
    return run_here(arguments)


def cases(commands: Sequence[str], faults: Sequence[str], slowly: Sequence[str] = ()) -> list[Any]:
    """Return each command with each fault in this process, and a few in processes; the others are
    slow tests.

    The commands ``slowly`` are slow tests in this process, too.
    """
    here = [pytest.param(run_here, *case) for case in product(commands, faults)]
    slow = [
        pytest.param(run_here, *case, marks=pytest.mark.slow) for case in product(slowly, faults)
    ]
    some = [each for each in commands if each in IN_PROCESSES]
    few = covering([run_in_a_process], some, faults, strength=1) if some else []
    others = [command for command in (*commands, *slowly) if command not in IN_PROCESSES]
    rest = [
        pytest.param(run_in_a_process, *case, marks=pytest.mark.slow)
        for case in product(others, faults)
    ]
    return [*here, *slow, *few, *rest]


@NEEDS_FULL
@pytest.mark.parametrize(("run", "arguments", "fault"), cases(COMMANDS, [FULL_STREAM, UNBUFFERED]))
def test_a_full_output_is_one_line(run: Run, arguments: str, fault: str) -> None:
    done = run(arguments, stdout=fault)
    message = (
        "stdout: expected room for the output, found No space left on device; "
        "make room or write elsewhere"
    )
    *others, last = done.stderr.splitlines()
    assert (done.returncode, last) == (1, f"pronk: error: {message}")
    assert not any(
        "Traceback" in line or "Errno" in line or "Exception ignored" in line for line in others
    )


@pytest.mark.parametrize(("run", "arguments", "fault"), cases(COMMANDS, [CLOSED, READER_HAS_ENDED]))
def test_an_output_that_ends_is_no_error(run: Run, arguments: str, fault: str) -> None:
    """As usual in a pipe, the exit code tells the shell of an ended reader, and no message does."""
    done = run(arguments, stdout=fault)
    assert (done.returncode, done.stdout) == (1 if fault == READER_HAS_ENDED else 0, "")
    assert "error" not in done.stderr
    assert "Exception" not in done.stderr


@NEEDS_FULL
@pytest.mark.parametrize(
    ("run", "arguments", "fault"), cases([*COMMANDS, *MISTAKES], [CLOSED, FULL_STREAM])
)
def test_standard_error_changes_neither_the_exit_code_nor_the_output(
    run: Run, arguments: str, fault: str
) -> None:
    good = run_with_good_streams(arguments)
    bad = run(arguments, stderr=fault)
    assert bad.returncode == good.returncode
    assert bad.stderr == ""
    if "--json" in arguments:
        assert type(json.loads(bad.stdout)) is type(json.loads(good.stdout))
    elif VARYING.intersection(arguments.split()):
        # durations decide what is drafted, and what is shown
        assert bad.stdout.split()[:2] == good.stdout.split()[:2]
    else:
        assert bad.stdout == good.stdout


@pytest.mark.parametrize("run", [run_here, pytest.param(run_in_a_process, marks=pytest.mark.slow)])
def test_a_closed_standard_input_is_empty(run: Run) -> None:
    chat = run(f"chat {MODEL}", stdin=CLOSED)
    assert (chat.returncode, chat.stdout) == (0, "")
    prompt = run(f"generate - {MODEL}", stdin=CLOSED)
    assert (prompt.returncode, prompt.stderr.count("\n")) == (2, 1)
