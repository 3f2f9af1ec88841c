"""``benchmarks/shapes.py`` writes the same file in every run, and measures it."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from checkpoints import MakeCheckpoint
from models.test_loader import load
from pronk.models.loader import read_config
from recurrent_models import write_gguf
from tiny_models import kernels, text_logits

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
SIZES: dict[str, Any] = {"hidden": 256, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 64}


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    found = importlib.import_module("shapes")
    heads = {"key_heads": 2, "value_heads": 4, "key_dim": 32, "value_dim": 64}
    small = found.GatedDelta(**SIZES, width=512, **heads)
    mamba = found.Granite(**(SIZES | {"layers": 10}), width=512, **heads)
    sublayers = found.Nemotron(**SIZES, width=512, tied=False, pattern="M-*M", **heads)
    monkeypatch.setattr(found, "SHAPES", {"small": small, "mamba": mamba, "sublayers": sublayers})
    return found


@pytest.fixture
def tokenizer(checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    return write_gguf(checkpoint("qwen3_5_text"), tmp_path / "tokenizer.gguf")


def run(shapes: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["shapes.py", *words])
    shapes.main()


@pytest.mark.parametrize(
    "name", ["granite-4-h-1b", "nemotron-3-nano-4b", "qwen3.5-0.8b", "qwen3.5-4b"]
)
def test_the_dense_model_has_as_many_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    shapes = importlib.import_module("shapes")
    shape = shapes.SHAPES[name]
    dense = shapes.dense_like(shape)
    assert abs(dense.products() / shape.products() - 1.0) < 0.03
    # A tenth of the layers of Mamba models have attention; the dense model has at least two heads.
    assert dense.attention_sizes() == shape.attention_sizes() or name.startswith(("gran", "nemo"))


def test_a_file_of_gemma4(
    shapes: Any, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = shapes.Gemma4(
        **SIZES | {"kv_heads": 1}, width=256, full_dim=128, interval=2, shared=2, window=16
    )
    monkeypatch.setattr(shapes, "SHAPES", {"small": small})
    run(shapes, monkeypatch, "write", "small", str(tmp_path), "--tokenizer", str(tokenizer))
    config = read_config(tmp_path / "small.gguf")
    assert [each.reads for each in config.attention_shapes] == [None, None, 0, 1]
    assert [each.head_dim for each in config.attention_shapes] == [64, 128] * 2
    assert config.intermediate_sizes == (256, 256, 512, 512)
    logits = text_logits(load(tmp_path / "small.gguf", kernels=kernels()), [3, 4, 5])
    assert np.isfinite(logits).all()


def test_files_do_not_depend_on_the_run(
    shapes: Any, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for folder in ("a", "b"):
        words = ("write", "small", str(tmp_path / folder), "--tokenizer", str(tokenizer))
        run(shapes, monkeypatch, *words)
        texts.append((tmp_path / folder / "small.gguf").read_bytes())
        assert (tmp_path / folder / "small-dense.gguf").is_file()
    assert texts[0] == texts[1]


def test_unused_tokens(
    shapes: Any, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("write", "small", str(tmp_path), "--tokenizer", str(tokenizer), "--vocab")
    run(shapes, monkeypatch, *words, "400")
    reader = gguf.GGUFReader(tmp_path / "small-400.gguf")
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == 400
    assert tokens[-1] == "[PAD399]"
    (embedding,) = (each for each in reader.tensors if each.name == "token_embd.weight")
    assert [*embedding.shape] == [256, 400]
    with pytest.raises(SystemExit, match="--vocab: expected at least the 300 of the tokenizer"):
        run(shapes, monkeypatch, *words[:2], str(tmp_path / "other"), *words[3:], "100")


def test_files_of_every_kind_are_loaded(
    shapes: Any, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser and the loader find all keys and tensors that they expect."""
    rules = {"small": "gated_delta", "mamba": "mamba2", "sublayers": "mamba2"}
    for name, rule in rules.items():
        run(shapes, monkeypatch, "write", name, str(tmp_path), "--tokenizer", str(tokenizer))
        config = load(tmp_path / f"{name}.gguf").config
        assert config.recurrent is not None
        assert config.recurrent.rule == rule
        assert sum(config.recurrent.layers) == shapes.SHAPES[name].recurrent_layers


def test_figures(
    shapes: Any,
    tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("measure", "small", str(tmp_path), "--tokenizer", str(tokenizer))
    run(shapes, monkeypatch, *words, "--rounds", "2", "--prompt", "40", "--threads", "1")
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert {len(values) for values in report["took"].values()} == {2}
    assert set(report["took"]) == {
        "bandwidth",
        *(f"{name} {kind}" for name in ("small", "small-dense") for kind in shapes.KINDS),
    }
    assert all(len(seconds) == 5 for seconds in report["took"]["small passes"])
    # three layers of 4 states of 32 · 64 numbers, and 3 inputs of 2 · 2 · 32 + 4 · 64 channels
    assert shapes.SHAPES["small"].state_bytes() == 3 * 4 * (4 * 32 * 64 + 3 * 384)
    assert any(line.startswith("plain ") and "x floor" in line for line in lines)
