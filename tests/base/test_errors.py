"""Reasons of exceptions: one line, never empty."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable

import pytest

from pronk.base.errors import (
    CheckpointError,
    DeadlineError,
    OptionError,
    PronkError,
    describe_error,
    describe_json_error,
    describe_reason,
    locate_error,
)

ERRORS: list[BaseException] = [
    Exception(),
    Exception("  \n "),
    Exception("two\n  lines"),
    KeyError("name"),
    TimeoutError(),
    EOFError(),
    KeyboardInterrupt(),
    MemoryError(),
    RecursionError("maximum recursion depth exceeded"),
    OSError(errno.ENOSPC, "No space left on device", "out.json"),
    BrokenPipeError(errno.EPIPE, "Broken pipe"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    Exception("x" * 10_000),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_reasons_are_one_line_and_never_empty(error: BaseException) -> None:
    reason = describe_error(error)
    assert reason.strip()
    assert len(reason.splitlines()) == 1
    assert len(reason) <= 300


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Exception("two\n  lines"), "two lines"),
        (Exception(), "Exception without a message"),
        (MemoryError(), "not enough memory"),
        (
            OSError(errno.ENOSPC, "No space left on device", "out.json"),
            "No space left on device: out.json",
        ),
    ],
)
def test_reasons(error: Exception, reason: str) -> None:
    assert describe_error(error) == reason


def test_an_exception_without_a_message_is_described_by_its_cause() -> None:
    error = Exception()
    error.__cause__ = ValueError("the real reason")
    assert describe_error(error) == "the real reason"


@pytest.mark.parametrize(
    "message",
    [
        "plain, größer …",
        "two\nlines",
        "a\0b",
        "\ud800",
        "\x1b[31mred",
        "x" * 100_000,
        "\n" * 100_000,
    ],
    ids=lambda message: f"{message[:8]!r} of {len(message)}",
)
@pytest.mark.parametrize("kind", [PronkError, CheckpointError, OptionError, DeadlineError])
def test_messages_are_one_printable_line(kind: type[PronkError], message: str) -> None:
    """Whatever a message quotes of a file, the line has a bounded length, and its beginning and end
    remain.
    """
    shown = str(kind(f"file: {message}; do this"))
    assert shown.isprintable()
    assert len(shown) <= 10_000
    assert shown.startswith("file: ")
    assert shown.endswith("; do this")
    shown.encode()


def _fail_with(remedy: str) -> None:
    with locate_error("layer 3", Exception, remedy=remedy):
        raise Exception  # noqa: TRY002 - as some libraries do


def test_a_located_error_has_a_reason() -> None:
    with pytest.raises(PronkError, match=r"^layer 3: Exception without a message$"):
        _fail_with("")
    with pytest.raises(CheckpointError, match=r"^layer 3: Exception without a message; again$"):
        _fail_with("; again")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "Connection refused"),
        (OSError("[Errno 111] Connection refused"), "Connection refused"),
        (OSError(111, "Multiple: [Errno 111] Connect failed"), "Multiple: Connect failed"),
        (RuntimeError("No space left on device (os error 28)"), "No space left on device"),
        (RuntimeError("[WinError 5] Access is denied: x"), "Access is denied: x"),
        (RuntimeError("[Errno -2] Name or service not known"), "Name or service not known"),
    ],
)
def test_reasons_have_no_numbers_of_errors(error: Exception, reason: str) -> None:
    assert describe_error(error) == reason
    assert describe_reason(error) == reason


@pytest.mark.parametrize(
    ("parse", "found"),
    [
        (
            lambda: json.loads('{"a": 1,\n "b" 2}'),
            "a mistake at line 2, column 6 (Expecting ':' delimiter, found '2}')",
        ),
        (lambda: json.loads(""), "a mistake at line 1, column 1 (Expecting value, found the end)"),
        (lambda: json.loads("{} {}"), "a mistake at line 1, column 4 (Extra data, found '{}')"),
        (b"ab\xff".decode, "a byte at position 2 that is not UTF-8"),
        (lambda: json.loads("[" * 100_000), "too many nested brackets"),
    ],
)
def test_mistakes_in_json_have_a_position(parse: Callable[[], object], found: str) -> None:
    with pytest.raises((ValueError, RecursionError)) as error:
        parse()
    assert describe_json_error(error.value) == found


def test_the_line_of_a_file_of_json_lines() -> None:
    with pytest.raises(json.JSONDecodeError) as error:
        json.loads("{")
    assert describe_json_error(error.value, line=7).startswith("a mistake at line 7, column 2 ")
