"""Hostile files of the tokenizers package: expansion, damaged tables, panics; ordinary files pass."""

from __future__ import annotations

import base64
import json
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from pronk.errors import TokenizerError
from pronk.tokenization.limits import MAX_EXPANSION, check_tokenizer
from pronk.tokenization.tokenizer import Tokenizer

PLAIN = json.loads(Backend(models.BPE({"l": 0, "ll": 1}, [("l", "l")])).to_str())


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(*parts: dict[str, Any], name: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", name: [*parts]}


LONG = replace("l", "l" * 100)


def load(folder: Path, **changed: Any) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps({**PLAIN, **changed}), encoding="utf-8")
    return Tokenizer.load(folder)


@pytest.mark.parametrize("stage", ["normalizer", "decoder"])
@pytest.mark.parametrize(
    "parts",
    [
        [LONG],
        [LONG] * 5,
        [replace("l", "l" * 9)] * 3,
        [replace("", "ab")] * 9,
        [replace("l*", "l" * 30, "Regex")] * 2,
        [replace("(", "l" * 99, "Regex")],
        [replace("l", "")] * 300,
        [{"type": "Prepend", "prepend": "l" * 10**6}],
    ],
    ids=range(8),
)
def test_files_that_make_texts_too_long_are_refused(tmp_path: Path, stage: str, parts: list[dict[str, Any]]) -> None:
    name = f"{stage}s"
    for component in (sequence(*parts, name=name), sequence(sequence(*parts, name=name), name=name)):
        with pytest.raises(
            TokenizerError, match=rf"tokenizer\.json: {stage}: expected .*; restore it from its source$"
        ):
            load(tmp_path, **{stage: component})


def test_added_tokens_are_normalized_while_a_file_is_loaded(tmp_path: Path) -> None:
    """Without the check, the process ends."""
    token = {"id": 2, "content": "l" * 50, "special": False, "normalized": True}
    token |= {"single_word": False, "lstrip": False, "rstrip": False}
    with pytest.raises(TokenizerError, match=f"at most {MAX_EXPANSION} times longer"):
        load(tmp_path, normalizer=sequence(*[LONG] * 6), added_tokens=[token])


@pytest.mark.parametrize(
    "normalizer",
    [
        None,
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace("``", '"')]),
        normalizers.BertNormalizer(),
    ],
    ids=range(4),
)
def test_ordinary_files_pass(normalizer: Any) -> None:
    backend = Backend(models.BPE({"l": 0, "ll": 1}, [("l", "l")]))
    if normalizer is not None:
        backend.normalizer = normalizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    check_tokenizer(backend.to_str())


def charsmap(texts: dict[str, str]) -> bytes:
    """Return the table of a ``Precompiled`` normalizer that replaces characters of one byte."""
    units = [0] * 512
    blob = b""
    units[0] = (256 << 10) >> 0  # the units of first characters are in the second half
    for character, text in texts.items():
        code = ord(character)
        node = 256 ^ code
        # The unit of a character: its label, a leaf, and no further characters; the leaf is the unit at its base.
        base = 200 + len(blob)
        units[node] = code | (1 << 8) | ((node ^ base) << 10)
        units[base] = (1 << 31) | len(blob)
        blob += text.encode() + b"\0"
    return struct.pack("<I", 4 * len(units)) + struct.pack(f"<{len(units)}I", *units) + blob


def precompiled(data: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


GOOD = charsmap({"a": "xy", "b": ""})


def test_a_table_is_followed(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, normalizer=precompiled(GOOD))
    assert tokenizer.backend.normalizer.normalize_str("abc") == "xyc"


@pytest.mark.parametrize("data", [b"", b"\0\0\0\0", b"\x08\0\0\0" + b"\xff" * 8 + b"abc\0", GOOD[:-1], GOOD[:900]])
def test_damaged_tables_are_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(TokenizerError, match="normalizer: expected the table of a Precompiled normalizer, found a dam"):
        load(tmp_path, normalizer=precompiled(data))


def test_tables_that_pass_cause_no_panic(tmp_path: Path) -> None:
    """Random changes of a table: what is accepted can be used on texts of all bytes; panics print to stderr."""
    dice, accepted = random.Random(0), list[bytes]()
    for _ in range(400):
        data = bytearray(GOOD)
        for _ in range(dice.randint(1, 3)):
            data[dice.randrange(4, len(data))] = dice.randrange(256)
        try:
            check_tokenizer(json.dumps({**PLAIN, "normalizer": precompiled(bytes(data))}))
        except TokenizerError:
            continue
        accepted.append(bytes(data))
    assert 20 < len(accepted) < 400
    files = [json.dumps({**PLAIN, "normalizer": precompiled(data)}) for data in accepted]
    (tmp_path / "files.json").write_text(json.dumps(files), encoding="utf-8")
    script = (
        "import json, sys\nfrom tokenizers import Tokenizer\n"
        "text = ''.join(map(chr, range(1, 256))) * 2\n"
        "for file in json.load(open(sys.argv[1])): Tokenizer.from_str(file).encode(text + 'é' + text)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "files.json")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_dropout_of_training_is_switched_off(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, model={**PLAIN["model"], "dropout": 0.5})
    assert {tuple(tokenizer.encode("llllllll")) for _ in range(20)} == {(1, 1, 1, 1)}


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, '{"model": {}}'])
def test_files_that_are_no_tokenizers(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(TokenizerError, match="restore it from its source"):
        Tokenizer.load(tmp_path)
