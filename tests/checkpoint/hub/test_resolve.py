"""Names that need no download: folders, files, names in a clone; errors of one line."""

from pathlib import Path

import pytest

from pronk.base.errors import CheckpointError, OptionError
from pronk.models.resolve import resolve_model


def test_an_existing_folder_has_precedence_over_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("owner/name", "smollm2", "pronk-tiny"):
        (tmp_path / name).mkdir(parents=True)
        assert resolve_model(name) == Path(name)
        assert resolve_model(tmp_path / name) == tmp_path / name


@pytest.mark.parametrize(
    "name", ["./absent", "/absent/model", "~/absent-model", "a/b/c", "absent", "a b/c", "../x"]
)
def test_no_such_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = (
        r"^model: expected a model folder, a GGUF file, or owner/name of a model on .*, found no "
        r"such folder: "
    )
    with pytest.raises(CheckpointError, match=expected):
        resolve_model(name)


def test_an_empty_name_is_no_folder() -> None:
    with pytest.raises(
        OptionError, match=r"^model: expected a folder, a GGUF file or a name, found ''$"
    ):
        resolve_model("")


@pytest.mark.parametrize(
    "name", ["https://huggingface.co", "https://huggingface.co/", "hf.co", "hf://", "hf.co?x=1"]
)
def test_an_address_without_a_repository(name: str) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"^model: expected the address of a model .*, found no repository in ",
    ):
        resolve_model(name)


def test_near_names() -> None:
    with pytest.raises(
        CheckpointError, match=r"found no such folder: 'smollm' \(did you mean smollm2"
    ):
        resolve_model("smollm")
    with pytest.raises(CheckpointError, match=r"\(did you mean .*pronk-tiny"):
        resolve_model("pronktiny")


def test_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointError,
        match=r"^model: expected a folder with config.json, .* found the file .*file$",
    ):
        resolve_model(str(tmp_path / "file"))
    with pytest.raises(
        CheckpointError,
        match=r"^model: expected a GGUF file, or a model folder, found no such file: 'x.gguf'",
    ):
        resolve_model("x.gguf")


def test_a_folder_with_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_text("")
    assert resolve_model(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_text("")
    with pytest.raises(
        CheckpointError,
        match=r": expected config.json or one GGUF file, found a.gguf, b.gguf; name",
    ):
        resolve_model(str(tmp_path))


def test_the_default_model(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pronk.models.resolve.DEFAULT_MODEL", "smollm2")
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)  # a folder of this name has to be given
    message = (
        r"^model: found no smollm2 on this machine; run `pronk pull smollm2` \(98 MB\), "
        r"or name another$"
    )
    with pytest.raises(OptionError, match=message):
        resolve_model(None)
