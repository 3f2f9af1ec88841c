"""Commands of this package where no model is."""

from pathlib import Path

import pytest

from checkpoint.hub.test_clone_models import outside
from checkpoint.hub.test_clone_models import test_commands_without_a_model as check

__all__ = ["outside"]


@pytest.mark.parametrize("command", ["serve", "batch in.jsonl out.jsonl"])
def test_commands_without_a_model(
    command: str, outside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (outside / "in.jsonl").write_text(
        '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "m", '
        '"prompt": "a"}}\n'
    )
    check(command, outside, monkeypatch, capsys)
