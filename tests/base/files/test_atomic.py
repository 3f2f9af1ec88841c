import os
from pathlib import Path

import numpy as np
import pytest

from pronk.base.errors import CheckpointError, OptionError
from pronk.base.files.atomic import (
    convert_write_errors,
    new_folder,
    replace_file,
    replace_folder,
    write_json,
    write_tokens,
)


def test_file_is_the_old_one_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"n": 1})

    def fail() -> None:
        with replace_file(path) as file:
            file.write(b"half")
            file.flush()
            assert path.read_text() == '{"n": 1}\n'
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]
    assert path.read_text() == '{"n": 1}\n'
    write_json(path, {"n": 2})
    assert path.read_text() == '{"n": 2}\n'


def test_folder_is_the_old_one_until_the_new_one_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (tmp_path / "model.partial").mkdir()
    (tmp_path / "model.partial" / "left by a process that died").touch()

    def write(name: str, result: float) -> None:
        with replace_folder(folder) as partial:
            (partial / name).touch()
            assert result

    write("one", 1)
    with pytest.raises(AssertionError):
        write("two", 0)
    assert [str(each.relative_to(tmp_path)) for each in sorted(tmp_path.rglob("*"))] == [
        "model",
        "model/one",
    ]
    write("two", 1)
    assert [each.name for each in folder.iterdir()] == ["two"]


def test_a_failed_rename_does_not_lose_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    rename = Path.rename

    def write(name: str) -> None:
        with replace_folder(folder) as partial:
            (partial / name).touch()

    def refuse(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            # the old folder is kept until the new one has its name
            assert (tmp_path / "model.old" / "one").exists()
            raise OSError("no")
        return rename(self, target)

    write("one")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(OSError, match="no"):
            write("two")
    assert [str(each.relative_to(tmp_path)) for each in sorted(tmp_path.rglob("*"))] == [
        "model",
        "model/one",
    ]
    folder.rename(tmp_path / "model.old")  # as if a process died between the two renames

    def fail() -> None:
        with replace_folder(folder):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [str(each.relative_to(tmp_path)) for each in sorted(tmp_path.rglob("*"))] == [
        "model",
        "model/one",
    ]
    write("two")
    assert [str(each.relative_to(tmp_path)) for each in sorted(tmp_path.rglob("*"))] == [
        "model",
        "model/two",
    ]


def test_new_folder_takes_the_place_of_an_empty_one_only(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "model.old").mkdir()  # not ours, so it must stay

    def write(name: str) -> None:
        with new_folder(folder) as partial:
            (partial / "deep").mkdir()
            (partial / "deep" / name).touch()

    write("one")
    with pytest.raises(OSError, match="not empty"):
        write("two")
    found = [str(each.relative_to(tmp_path)) for each in sorted(tmp_path.rglob("*"))]
    assert found == ["model", "model/deep", "model/deep/one", "model.old"]


def test_two_processes_may_replace_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with replace_file(path, shared=True) as mine:
        mine.write(b"mine")
        # another process's file; ours has another name
        (tmp_path / "a.partial").write_bytes(b"theirs")
        assert not path.exists()
    assert path.read_bytes() == b"mine"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "a.partial"]


def test_tokens_are_all_there(tmp_path: Path) -> None:
    tokens = np.arange(70_000, dtype=np.uint32)[::-1].copy()
    write_tokens(tmp_path / "t.bin", tokens)
    assert np.array_equal(np.fromfile(tmp_path / "t.bin", dtype=np.uint32), tokens)


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        CheckpointError,
        match=r"a: expected to write JSON, found Not a directory; choose a writable folder",
    ):
        write_json(tmp_path / "file" / "a", {})


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with (
        pytest.raises(OptionError, match=r"^mine$"),
        convert_write_errors(tmp_path, "it", Exception),
    ):
        raise OptionError("mine")
    with (
        pytest.raises(CheckpointError, match="expected to write it, found theirs; make room"),
        convert_write_errors(tmp_path, "it", RuntimeError),
    ):
        raise RuntimeError("theirs\nand a long story")


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "target.json"
    link = tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    write_json(link, {"n": 1})
    assert link.is_symlink()
    assert target.read_text() == '{"n": 1}\n'


@pytest.mark.parametrize("kind", ["a named pipe", "a device"])
def test_other_kinds_of_files_are_refused_and_stay(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "other"
    if kind == "a named pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/full")
    before = path.stat()
    with pytest.raises(
        CheckpointError, match=f"expected to write JSON, found {kind} instead of a regular file"
    ):
        write_json(path, {"n": 1})
    assert path.stat().st_ino == before.st_ino
