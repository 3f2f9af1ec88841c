"""Commands, run in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pronk.cli.main import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """``command("quantize", ...)``: exit code, standard output, standard error."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()  # whatever fixtures have printed
        with pytest.raises(SystemExit) as stop:
            main(list(map(str, args)))
        out, err = capsys.readouterr()
        assert isinstance(stop.value.code, int)
        return stop.value.code, out, err

    return call
