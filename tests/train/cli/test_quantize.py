"""``pronk quantize`` from outside: what it writes, says and refuses."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch

from command_line import Command as Run
from command_line import assert_mistake
from drafting.from_target.trained_eagle import Form, random_head, write_head
from pronk import LLM
from pronk.models import shards
from pronk.testing import tiny_checkpoint


@pytest.fixture
def run(command: Run) -> Run:
    return partial(command, "quantize")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "tiny")


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 64)])
def test_round_to_nearest(bits: int, group: int, run: Run, model: Path, tmp_path: Path) -> None:
    code, out, err = run(model, tmp_path / "out", "--bits", bits)
    assert (code, out) == (0, "")
    assert f"{bits} bits in groups of {group}, method nearest; " in err
    assert "perplexity" in err
    assert (
        f"\npronk quantize tiny out --bits {bits}\n" in (tmp_path / "out" / "README.md").read_text()
    )
    assert LLM(tmp_path / "out").generate("def add(a, b):").text


def test_calibrated(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(
        "".join(f"Line {number} of a book.\n" for number in range(400))
    )
    code, out, err = run(
        model,
        tmp_path / "out",
        "--group",
        16,
        "--calibrate",
        tmp_path / "book.txt",
        "--tokens",
        999,
    )
    assert (code, out) == (0, "")
    assert "in groups of 16, method " in err
    assert "tried: " in err
    card = (tmp_path / "out" / "README.md").read_text()
    assert (
        "\npronk quantize tiny out --bits 4 --group 16 --calibrate book.txt --tokens 999\n" in card
    )
    assert "a held-out part of book.txt" in card
    assert {path.name for path in tmp_path.iterdir()} == {"tiny", "out", "book.txt"}
    assert LLM(tmp_path / "out").generate("def add(a, b):").text


def test_mistakes_are_one_line(run: Run, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(model, out)[0] == 0
    (tmp_path / "short.txt").write_text("short")
    for args, message in (
        ((model, out), "expected a new or empty folder"),
        ((out, tmp_path / "x"), "quantized already"),
        ((model, tmp_path / "x", "--bits", 5), "bits: expected 4 or 8, found 5"),
        ((model, tmp_path / "x", "--bits", "many"), "--bits"),
        ((model, tmp_path / "x", "--group", 24), "group: expected a multiple of 8 that divides"),
        (
            (model, tmp_path / "x", "--calibrate", tmp_path / "short.txt"),
            "expected at least 128 tokens",
        ),
        ((model, tmp_path / "x", "--calibrate", tmp_path / "none"), "found no"),
        ((tmp_path / "none", tmp_path / "x"), "no such folder"),
    ):
        assert_mistake(run(*args), message)
    assert not (tmp_path / "x").exists()


def test_heads(run: Run, model: Path, tmp_path: Path) -> None:
    head = write_head(random_head(Form(hidden=64)), tmp_path / "head")
    out = tmp_path / "small"
    code, _, err = run(head, out, "--bits", 8)
    assert code == 0
    assert "small: 8 bits in groups of 16; " in err
    assert "\npronk quantize head small --bits 8\n" in (out / "README.md").read_text()
    plain = tmp_path / "plain"
    assert run(out, plain, "--bits", 16)[0] == 0
    before = load_torch(head / "model.safetensors")
    after = load_torch(plain / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.shape == after[name].shape
        error = (
            tensor.float() - after[name].float()
        ).square().mean() / tensor.float().square().mean().clamp_min(1e-9)
        assert error < 2e-4
    assert after["fc.weight"].dtype == torch.bfloat16
    for args, message in (
        ((head, tmp_path / "x", "--bits", 16), "expected a quantized head, found plain weights"),
        ((out, tmp_path / "x"), "expected plain weights, found a quantized head"),
        ((head, out), "expected a new or empty folder"),
        ((head, tmp_path / "x", "--group", 12), "group: expected a multiple of 8 that divides"),
        ((head, tmp_path / "x", "--calibrate", model), "calibrate: expected no text for a head"),
    ):
        assert_mistake(run(*args), message)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("method", ["nearest", "calibrated"])
def test_a_damaged_model_is_one_line(method: str, run: Run, model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weights["model.layers.0.input_layernorm.weight"][0] = np.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "book.txt").write_text(
        "".join(f"Line {number} of a book.\n" for number in range(400))
    )
    words = ("--calibrate", tmp_path / "book.txt") if method == "calibrated" else ()
    result = run(model, tmp_path / "out", *words)
    assert_mistake(result, "layer 0: expected finite numbers")
    assert "perplexity" not in result[2]
    assert not (tmp_path / "out").exists()


def test_interrupted(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(shards, "_header", interrupt)
    code, _, err = run(model, tmp_path / "out")
    assert code == 130
    assert "interrupted; no partial checkpoint was kept" in err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_help(run: Run) -> None:
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    assert "Usage: pronk quantize" in out
    assert "Examples" in out
    for option in ("--bits", "--group", "--calibrate", "--tokens", "--threads"):
        assert option in out
