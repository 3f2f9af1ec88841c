"""Files of a benchmark: a failed write is reported after the other files and the tables were
written.
"""

import json
from pathlib import Path

import pytest

from lab.bench.test_run import measured, plan, quick  # noqa: F401 - a fixture
from pronk.base.errors import OptionError
from pronk.lab.bench.outputs import STDOUT, Outputs


def test_a_failed_write_still_prints_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = measured(plan()).records
    gone = tmp_path / "gone" / "figures"
    outputs = Outputs(gone, tmp_path / "tables.md", report=None, trace=None)
    with pytest.raises(
        OptionError, match=r"^json: expected to write .*gone/figures, found: No such file"
    ) as error:
        outputs.deliver(records)
    saved = Path(str(error.value).partition("; the result is in ")[2])
    assert json.loads(saved.read_text())["models"]
    assert "autoregressive" in capsys.readouterr().out
    assert "autoregressive" in (tmp_path / "tables.md").read_text()
    with pytest.raises(
        OptionError,
        match=r"^json: .*; markdown: expected to write .*gone/figures, found: No such file",
    ):
        Outputs(gone, gone, report=None, trace=None).deliver(records)


def test_paths_are_checked_first(tmp_path: Path) -> None:
    Outputs(STDOUT, tmp_path / "a.md", report=None, trace=tmp_path / "b.jsonl").check()
    with pytest.raises(
        OptionError, match=r"^markdown: expected a file in a folder that exists, found .*a\.md"
    ):
        Outputs(None, tmp_path / "none" / "a.md", report=None, trace=None).check()
    with pytest.raises(OptionError, match=r"^json, trace: expected different files, found"):
        Outputs(tmp_path / "a", None, report=None, trace=tmp_path / "a").check()
