"""``pronk inflate`` beside quantized checkpoints: what it leaves for ``pronk quantize``, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

import gguf_files
from cli.conftest import Command as Run
from cli.conftest import assert_mistake
from pronk import LLM
from pronk.models.loader import read_config
from pronk.testing import tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


def test_a_large_model_is_quantized_like_any_other(command: Run, model: Path, tmp_path: Path) -> None:
    big, small, source = tmp_path / "big", tmp_path / "small", ("--source", model)
    config = read_config(model)
    sizes = ("--hidden", 2 * config.hidden_size, "--layers", config.num_layers, "--intermediate", 128)
    assert command("inflate", big, *source, *sizes)[0] == 0
    code, _, err = command("quantize", big, small, "--bits", 8)
    assert code == 0, err
    assert LLM(small).generate("def add(a, b):").text
    assert LLM(big, weights="int4").generate("def add(a, b):").text

    assert_mistake(command("inflate", tmp_path / "x", "--source", small), "quantized; inflate what it was made from")
    asked = command("inflate", small, *source, "--drafter", "pronk-tiny-medusa")
    assert_mistake(asked, "quantized; add drafters to what it was made from")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["big", "small"]


def test_a_file_of_gguf_is_no_source(command: Run, model: Path, tmp_path: Path) -> None:
    path = gguf_files.convert(model, tmp_path / "model.gguf")
    assert_mistake(command("inflate", tmp_path / "x", "--source", path), "model.gguf; inflate what it was made from")
    assert [each.name for each in tmp_path.iterdir()] == ["model.gguf"]
