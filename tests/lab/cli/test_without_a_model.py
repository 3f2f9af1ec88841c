"""Commands of this package where no model is."""

from pathlib import Path

import pytest

from checkpoint.hub.test_clone_models import outside
from checkpoint.hub.test_clone_models import test_commands_without_a_model as check

__all__ = ["outside"]


@pytest.mark.parametrize(
    "command", ["bench --limit 1", "explain hi", "verify", "datastore build out text.txt"]
)
def test_commands_without_a_model(
    command: str, outside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (outside / "text.txt").write_text("some text\n")
    check(command, outside, monkeypatch, capsys)
