"""Commands, run in this process."""

import io
import sys
from collections.abc import Callable

import pytest

from pronk.cli.main import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """``command("quantize", ..., given="standard input")``: exit code, standard output, standard error."""
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
    """A mistake of the user's: one line on standard error, in which these texts occur."""
    code, out, err = result
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("pronk: error: ")
    for text in expected:
        assert text in err
