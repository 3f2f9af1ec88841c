"""Training where no model is."""

from pathlib import Path

import pytest

from checkpoint.hub.test_clone_models import NONE, outside
from pronk.cli.main import main

__all__ = ["outside"]


def test_training_without_a_model(outside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (outside / "text.txt").write_text("some text\n")
    with pytest.raises(SystemExit) as stop:
        main("train kangaroo --out run --source text.txt=1".split())
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err) == (2, "", f"pronk: error: {NONE}--target\n")
