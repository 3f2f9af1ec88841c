"""Results of long computations are never lost: another file, or standard output."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

import pronk.base.files.results
from pronk.base.errors import OptionError
from pronk.base.files.results import save_result


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def fill_disk(monkeypatch: pytest.MonkeyPatch, full: Path) -> None:
    """Let every write below ``full`` fail."""
    real = pronk.base.files.results.replace_file

    @contextmanager
    def replace_file(path: Path) -> Iterator[BinaryIO]:
        if path.is_relative_to(full):
            raise OSError(errno.ENOSPC, "No space left on device")
        with real(path) as file:
            yield file

    monkeypatch.setattr(pronk.base.files.results, "replace_file", replace_file)


def test_a_result_replaces_the_old_file(tmp_path: Path, temporary: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    save_result("json", path, "new")
    assert path.read_text() == "new"
    assert [*temporary.iterdir()] == []


@pytest.mark.parametrize("place", ["missing/out.json", "file/out.json", "folder"])
def test_a_result_that_cannot_be_written_is_kept_elsewhere(
    place: str, tmp_path: Path, temporary: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(
        OptionError, match=r"^json: expected to write .*, found: .*; the result is in "
    ) as error:
        save_result("json", tmp_path / place, "new \ud800 text")
    kept = Path(str(error.value).partition("; the result is in ")[2])
    assert kept.is_relative_to(temporary)
    assert kept.name == Path(place).name
    assert kept.read_text(encoding="utf-8") == "new \\ud800 text"


def test_a_full_disk_keeps_the_old_file(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "disk" / "out.json"
    path.parent.mkdir()
    path.write_text("old")
    fill_disk(monkeypatch, path.parent)
    with pytest.raises(OptionError, match="found: No space left on device; the result is in "):
        save_result("json", path, "new")
    assert path.read_text() == "old"
    assert [file.read_text() for file in temporary.rglob("out.json")] == ["new"]


def test_without_any_room_the_result_is_on_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill_disk(monkeypatch, tmp_path)
    with pytest.raises(OptionError, match=r"the result is in standard output$"):
        save_result("json", tmp_path / "out.json", "the result")
    assert capsys.readouterr().out == "the result"
