"""What the files of a model say about its embeddings."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pronk.base.errors import ConfigError, OptionError
from pronk.checkpoint.config import EmbeddingDefaults
from pronk.checkpoint.embedding import gguf_embedding_defaults, read_embedding_defaults
from pronk.engine.pooling import EmbeddingOptions
from pronk.models.families import get_architecture, get_family


def write(folder: Path, pooling: dict[str, Any] | None, *kinds: str) -> None:
    """Write the files of sentence-transformers: a list of modules, and the config of a pooling."""
    modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


LAST = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
TWO = {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}


@pytest.mark.parametrize(
    ("pooling", "kinds", "expected"),
    [
        # the files of Qwen3-Embedding
        (LAST, ("Transformer", "Pooling", "Normalize"), EmbeddingDefaults("last", True)),
        (LAST, ("Transformer", "Pooling"), EmbeddingDefaults("last", False)),
        ({"pooling_mode": "lasttoken"}, ("Pooling", "Normalize"), EmbeddingDefaults("last")),
        ({"pooling_mode": "cls"}, ("Pooling", "Normalize"), EmbeddingDefaults("cls")),
        (TWO, ("Pooling", "Normalize"), EmbeddingDefaults("mean+max")),
        ({}, ("Pooling", "Normalize"), EmbeddingDefaults("mean")),
        (
            LAST,
            ("Pooling", "Dense", "Normalize"),
            EmbeddingDefaults("last", modules=("Dense",)),
        ),
    ],
)
def test_modules_of_sentence_transformers(
    pooling: dict[str, Any], kinds: tuple[str, ...], expected: EmbeddingDefaults, tmp_path: Path
) -> None:
    write(tmp_path, pooling, *kinds)
    assert read_embedding_defaults(tmp_path) == expected


def test_a_folder_without_modules(tmp_path: Path) -> None:
    assert read_embedding_defaults(tmp_path) == EmbeddingDefaults("mean", normalize=True)


@pytest.mark.parametrize("text", ["{}", "[1]", '[{"name": "0"}]', "[", '[{"type": "Pooling"}]'])
def test_damaged_files_are_refused(text: str, tmp_path: Path) -> None:
    """The last list names a module whose config is missing."""
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ConfigError, match="expected"):
        read_embedding_defaults(tmp_path)


@pytest.mark.parametrize(
    ("kind", "pooling"), [(None, "mean"), (0, "mean"), (1, "mean"), (2, "cls"), (3, "last")]
)
def test_poolings_of_gguf_files(kind: int | None, pooling: str) -> None:
    header = {"general.architecture": "qwen3", "qwen3.pooling_type": kind}
    assert gguf_embedding_defaults(header.get) == EmbeddingDefaults(pooling)


def test_options_of_a_call() -> None:
    defaults = EmbeddingDefaults("last", normalize=False)
    options = EmbeddingOptions.for_model(defaults, None, 3, None)
    assert options == EmbeddingOptions("last", 3, normalize=False)
    options = EmbeddingOptions.for_model(defaults, "mean", None, True)
    assert options == EmbeddingOptions("mean", None, normalize=True)
    for other, found in (
        (EmbeddingDefaults("cls"), "found 'cls' in its files"),
        (EmbeddingDefaults(modules=("Dense",)), "found Dense in its modules.json"),
    ):
        with pytest.raises(OptionError, match=found):
            EmbeddingOptions.for_model(other, None, None, None)
        assert EmbeddingOptions.for_model(other, "mean", None, None) == EmbeddingOptions()


def test_encoders_are_refused_by_name() -> None:
    for name in ("bert", "xlm_roberta", "modernbert"):
        with pytest.raises(ConfigError, match=f"'{name}'.*encoders are not supported; use a"):
            get_family(name)
    for name in ("bert", "nomic-bert"):
        file = SimpleNamespace(folder="m.gguf", header={"general.architecture": name})
        with pytest.raises(ConfigError, match=f"architecture {name}: encoders are not supported"):
            get_architecture(file)  # type: ignore[arg-type]
