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
    "name",
    [
        "glm-4.7-flash",
        "granite-4-h-1b",
        "lfm3-1.7b",
        "nemotron-3-nano-4b",
        "qwen3.5-0.8b",
        "qwen3.5-4b",
    ],
)
def test_the_dense_model_has_as_many_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    shapes = importlib.import_module("shapes")
    shape = shapes.SHAPES[name]
    dense = shapes.dense_like(shape)
    assert abs(dense.products() / shape.products() - 1.0) < 0.03
    # The dense model has whole heads of 128 outputs, and at least two.
    differ = ("glm", "granite", "lfm3", "nemotron")
    assert dense.attention_sizes() == shape.attention_sizes() or name.startswith(differ)


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


@pytest.fixture
def latent(shapes: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    sizes = {"rank": 64, "query_rank": 96, "rope_dim": 16, "plain_dim": 32, "value_dim": 32}
    heads = {"kv_heads": 1, "head_dim": 80, "layers": 2}
    small = shapes.Latent(
        **SIZES | heads, width=256, **sizes, experts=8, per_row=2, expert_width=64, tied=False
    )
    monkeypatch.setattr(shapes, "SHAPES", {"small": small})
    return small


def test_a_file_of_latent_attention_and_experts(
    shapes: Any, latent: Any, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(shapes, monkeypatch, "write", "small", str(tmp_path), "--tokenizer", str(tokenizer))
    decoder = load(tmp_path / "small.gguf", kernels=kernels())
    config = decoder.config
    assert config.latent is not None
    assert config.latent.query_dim == 48
    assert config.mixture is not None
    assert config.mixture.layers == (False, True)
    assert config.mixture.scale == pytest.approx(1.8)
    # Rows that are no whole blocks of Q4_K have Q5_0.
    layer = decoder.layers[1]
    assert {layer.q_b.packed.format, layer.k_b.packed.format} == {"int5 in groups of 32"}
    assert layer.kv_a.packed.format == "int4 in groups of 32 in super-blocks of 256"
    assert np.isfinite(text_logits(decoder, [3, 4, 5])).all()
    # Of a layer with experts, a token uses the shared expert and two others.
    experts = 3 * 256 * 64 * 3
    attention = 96 * 256 + 4 * 48 * 96 + 80 * 256 + 4 * 64 * 32 + 4 * 32 * 64 + 256 * 128
    assert latent.products() == 2 * attention + 3 * 256 * 256 + experts + 8 * 256


def test_passes_are_compared_with_the_experts_that_they_read(
    shapes: Any, latent: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four rows read three times the experts of one row, which are half of its bytes."""
    assert latent.state_bytes() == 0
    options = shapes.argparse.Namespace(shape="small", threads=1, rounds=2, prompt=10)
    about = {"floor_bytes": 10, "experts": 0.5, "kernels": "", "processor": ""}
    rows = [(1.0, 1.0), (1.5, 2.0), (2.1, 3.0), (2.0, 3.0), (2.0, 3.0)]
    took: dict[str, Any] = {"bandwidth": [10.0], "small plain": [1.0], "small prompt": [1.0]}
    took |= {"small passes": [rows], "small-dense passes": [rows], "small-dense prompt": [1.0]}
    shapes.show(options, about, took, {"small": None, "small-dense": None})
    lines = capsys.readouterr().out.splitlines()
    (four,) = (line for line in lines if line.startswith(" 4 rows"))
    assert "2.10 [2.10, 2.10] x one row, 1.05 [1.05, 1.05] x the bytes of 3.0 [3.0, 3.0]" in four


def test_a_folder_of_lfm3(
    shapes: Any, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = shapes.Lfm3(**SIZES, width=256)
    monkeypatch.setattr(shapes, "SHAPES", {"small": small})
    words = ("small", str(tmp_path), "--tokenizer", str(tokenizer), "--vocab", "320")
    run(shapes, monkeypatch, "write", *words)
    decoder = load(tmp_path / "small-320", kernels=kernels())
    config = decoder.config
    assert config.convolution is not None
    assert (config.convolution.taps, config.vocab_size) == (7, 320)
    assert config.windows == (None, None, None, None)
    assert config.convolution.layers == (True, True, False, True)
    assert np.isfinite(text_logits(decoder, [3, 4, 5])).all()
    with pytest.raises(SystemExit, match="--llama-bench: expected a GGUF file"):
        run(shapes, monkeypatch, "measure", *words, "--llama-bench", "llama-bench")


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


@pytest.mark.slow  # runs a whole benchmark
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
