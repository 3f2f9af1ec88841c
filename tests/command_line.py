"""Commands, run in this process."""

import io
import sys
from collections.abc import Callable

import pytest

from pronk.cli.main import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs ``pronk ARGS`` with standard input ``given``: (exit code, stdout,
    stderr).
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
    """Check for exit code 2, no output, and one line on standard error that contains all
    ``expected`` texts.
    """
    code, out, err = result
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("pronk: error: ")
    for text in expected:
        assert text in err
