"""Fixture that runs commands of the command line in this process."""

import io
import sys
from collections.abc import Callable

import pytest

from pronk.cli.main import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs ``pronk ARGS`` with the standard input ``given``.

    The function returns exit code, standard output and standard error.
    """
    monkeypatch.setenv("COLUMNS", "80")

    def call(*args: object, given: str | bytes = "") -> tuple[int, str, str]:
        data = given.encode() if isinstance(given, str) else given
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        capsys.readouterr()  # what fixtures have printed
        with pytest.raises(SystemExit) as stop:
            main(list(map(str, args)))
        out, err = capsys.readouterr()
        assert isinstance(stop.value.code, int)
        return stop.value.code, out, err

    return call


def assert_mistake(result: tuple[int, str, str], *expected: str) -> None:
    """Check that a command refused a mistake of the user.

    The exit code is 2, there is no output, and standard error is one line that contains all
    ``expected`` texts.
    """
    code, out, err = result
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("pronk: error: ")
    for text in expected:
        assert text in err
