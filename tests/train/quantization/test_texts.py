"""Calibration and evaluation texts of ``quantize``."""

import json
import sys
from pathlib import Path

import pytest

from checkpoints import MakeCheckpoint
from pronk.base.errors import OptionError
from pronk.models.loader import read_config
from pronk.text.tokenizer import Tokenizer
from pronk.train.quantization.methods import read_texts


@pytest.fixture
def model(checkpoint: MakeCheckpoint) -> Path:
    return checkpoint("llama")


def rows(path: Path, count: int) -> Path:
    texts = [
        f"document {number} " + "has words in it, " * (number % 7 + 3) + f"and ends at {number}"
        for number in range(count)
    ]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def decode(model: Path, tokens: object) -> str:
    tokenizer = Tokenizer.load(model, read_config(model).vocab_size)
    return tokenizer.backend.decode(tokens.flatten().tolist())  # type: ignore[attr-defined]


def test_the_evaluation_text(model: Path) -> None:
    texts = read_texts(model)
    assert texts.calibration is None
    assert texts.methods == ("nearest",)
    assert texts.evaluation.shape[1] == 256  # the model's context length
    assert texts.evaluation.size <= 8192
    assert "def " in decode(model, texts.evaluation)


def test_evaluation_text_is_not_in_the_calibration_text(model: Path, tmp_path: Path) -> None:
    texts = read_texts(model, rows(tmp_path / "rows.jsonl", 900))
    assert texts.calibration is not None
    assert texts.methods == ("nearest", "scaled", "gptq")
    measured = decode(model, texts.evaluation)
    seen = decode(model, texts.calibration)
    ends = [f"ends at {number}<" for number in range(900)]
    held_out = {end for end in ends if end in measured.replace("document", "<")}
    assert 2 <= len(held_out) <= 20
    assert not {end for end in held_out if end in seen.replace("document", "<")}


def test_a_single_file_and_a_limit(model: Path, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(
        "".join(f"Line {number} of a book.\n" for number in range(4000))
    )
    texts = read_texts(model, tmp_path / "book.txt", 1000)
    assert texts.calibration is not None
    assert texts.calibration.shape == (3, 256)
    assert "Line 3996 of" in decode(model, texts.evaluation)
    assert "Line 0 of" not in decode(model, texts.calibration)  # samples are spread over the text
    (tmp_path / "page.txt").write_text("Word. " * 300)
    short = read_texts(model, tmp_path / "page.txt")
    assert short.evaluation.shape[0] == 1
    assert 128 <= short.evaluation.shape[1] < 1000


def test_short_and_missing_texts_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "empty.txt").write_text("")
    for name, message in (
        ("short.txt", "expected at least 128 tokens, found [0-9]+; give more text"),
        ("empty.txt", "expected text to train on, found none"),
        ("none.txt", "calibrate: expected text files, folders or JSON lines, found no"),
    ):
        with pytest.raises(OptionError, match=message) as caught:
            read_texts(model, tmp_path / name)
        assert "\n" not in str(caught.value)


def test_calibration_needs_torch(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    message = (
        r"calibrate: expected torch, found none; run pip install '\.\[train\]' in a clone of pronk"
    )
    with pytest.raises(OptionError, match=message):
        read_texts(model, rows(tmp_path / "rows.jsonl", 900))
    assert read_texts(model).calibration is None
