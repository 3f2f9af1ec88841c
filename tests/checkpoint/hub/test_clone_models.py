"""pronk-tiny and its drafters by name in a clone of the repository; elsewhere an error of one
line.
"""

from pathlib import Path

import pytest

from pronk import LLM
from pronk.base.errors import CheckpointError, OptionError
from pronk.checkpoint.hub import clone_models
from pronk.checkpoint.hub.clone_models import clone_model, clone_names, tiny_model
from pronk.cli.main import main
from pronk.models.resolve import resolve_model

MODELS = Path(__file__).parents[3] / "models"
NONE = "model: expected a clone of the repository with models/pronk-tiny, found none; give "


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that is no clone, although it has a folder ``models``."""
    (tmp_path / "models" / "pronk-tiny").mkdir(parents=True)
    monkeypatch.setattr(clone_models, "_ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_names_in_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_model(None) == tiny_model() == MODELS / "pronk-tiny"
    for folder in MODELS.iterdir():
        assert resolve_model(folder.name) == clone_model(folder.name) == folder
    for name in ("", ".", "..", "../models", "pronk-tiny/datastore", "absent", str(tmp_path)):
        assert clone_model(name) is None
    (tmp_path / "pronk-tiny").mkdir()
    assert resolve_model("pronk-tiny") == Path("pronk-tiny")  # an existing folder has precedence


def test_the_package_has_no_weights_but_small_heads() -> None:
    package = Path(clone_models.__file__).parents[2]
    found = [
        file for ending in ("safetensors", "bin", "gguf") for file in package.rglob(f"*.{ending}")
    ]
    assert {file.parents[1] for file in found} == {package / "heads"}
    assert all(
        file.stat().st_size < 22_000_000 and (file.parent / "README.md").is_file() for file in found
    )


def test_no_names_outside_a_clone(outside: Path) -> None:
    assert clone_model("pronk-tiny") is None
    assert clone_names() == []
    with pytest.raises(OptionError, match=rf"^{NONE}--model, or LLM\(model\) in Python$"):
        tiny_model()
    with pytest.raises(
        CheckpointError,
        match=r"^model: expected a model folder, .* found no such folder: 'pronk-tiny'",
    ):
        LLM("pronk-tiny")


@pytest.mark.parametrize(
    "command",
    [
        "generate hi",
        "chat",
    ],
)
def test_commands_without_a_model(
    command: str, outside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pronk.models.resolve.DEFAULT_MODEL", "smollm2")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(outside / "cache"))
    with pytest.raises(SystemExit) as stop:
        main(command.split())
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, ""), err
    default = (
        "model: found no smollm2 on this machine; run `pronk pull smollm2` (98 MB), "
        "or name another\n"
    )
    assert err == f"pronk: error: {default}"


def test_drafters_outside_a_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tiny_model()
    monkeypatch.setattr(clone_models, "_ROOT", tmp_path)
    llm = LLM(folder, drafter="auto")
    for drafter in ("draft_model", "threshold", "threshold(draft_model)"):
        with pytest.raises(
            OptionError, match=r'^draft_model: expected model="…", .* for this target, found none$'
        ):
            llm.get_proposer(drafter)
