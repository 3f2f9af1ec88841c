"""Text files of users: a byte order mark is not a part of the text, and other encodings are
refused.
"""

import codecs
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pronk.base.errors import OptionError, TokenizerError
from pronk.base.files.json_lines import read_json_lines
from pronk.base.files.text import decode_text, read_text
from pronk.checkpoint.tensors import read_json
from pronk.cli.repl import _read_messages
from pronk.cli.values import read_guide, read_prompt
from pronk.testing import byte_tokenizer
from pronk.text.tokenizer import Tokenizer

OTHER_ENCODINGS = ("utf-16", "utf-16-be", "utf-16-le", "utf-32")


def template(path: Path) -> str | None:
    byte_tokenizer().save(str(path.with_name("tokenizer.json")))
    return Tokenizer.load(path.parent).chat_template


GRAMMAR = 'start: "é"'
LINES = '{"text": "é"}\n\n{"text": "b"}\n'
TALK = {"messages": [{"role": "system", "content": "é"}]}
# File name, its text, and the reader.
Reader = tuple[str, str, Callable[[Path], Any]]
READERS: dict[str, Reader] = {
    "text": ("a.txt", "é\r\n", read_text),
    "prompt": ("a.txt", "é\n", lambda path: read_prompt(prompt_file=str(path))),
    "schema": ("a.json", '{"const": "é"}', lambda path: read_guide(json_schema=str(path))),
    "grammar": ("a.lark", GRAMMAR, lambda path: read_guide(grammar=str(path))),
    "JSON lines": ("a.jsonl", LINES, lambda path: [*read_json_lines(path)]),
    "conversation": ("a.json", json.dumps(TALK, ensure_ascii=False), _read_messages),
    "template": ("chat_template.jinja", "é{{ messages }}", template),
    "JSON of a model": ("config.json", '{"a": "é"}', read_json),
}


@pytest.fixture(params=READERS.values(), ids=READERS)
def reader(request: pytest.FixtureRequest) -> Reader:
    """A file and what reads it; the tests of guests have their own."""
    found: Reader = request.param
    return found


def test_a_byte_order_mark_is_not_a_part_of_the_text(reader: Reader, tmp_path: Path) -> None:
    file, text, read = reader
    results = []
    for folder, mark in (("plain", b""), ("marked", codecs.BOM_UTF8)):
        path = tmp_path / folder / file
        path.parent.mkdir()
        path.write_bytes(mark + text.encode())
        results.append(read(path))
    plain, marked = results
    assert plain == marked
    assert "é" in str(plain) or "é" not in text


REFUSING = {
    name: reader
    for name, reader in READERS.items()
    if name not in ("conversation", "JSON of a model")
}


@pytest.fixture(params=REFUSING.values(), ids=REFUSING)
def refusing(request: pytest.FixtureRequest) -> Reader:
    """A file and what reads it, and refuses other encodings."""
    found: Reader = request.param
    return found


@pytest.mark.parametrize("encoding", OTHER_ENCODINGS)
def test_other_encodings_are_refused(refusing: Reader, encoding: str, tmp_path: Path) -> None:
    file, text, read = refusing
    path = tmp_path / file
    path.write_bytes(
        f"\ufeff{text}".encode(encoding) if encoding[-2:] in ("be", "le") else text.encode(encoding)
    )
    with pytest.raises(
        (OptionError, TokenizerError), match=r"expected text in UTF-8, found UTF-\d\d; save it"
    ) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_other_bytes_are_refused(refusing: Reader, tmp_path: Path) -> None:
    file, text, read = refusing
    path = tmp_path / file
    path.write_bytes(text.replace("é", "e").replace("a-", "ä-").encode("latin-1") + b"\xe9")
    with pytest.raises(
        (OptionError, TokenizerError),
        match=r"expected text in UTF-8, found byte 0xe\d at position \d",
    ):
        read(path)


def test_compressed_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(codecs.BOM_UTF8 + LINES.encode()))
    assert [number for number, _ in read_json_lines(path)] == [1, 3]


def test_a_file_of_a_mark_alone_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(codecs.BOM_UTF8)
    assert read_text(path) == ""
    assert [*read_json_lines(path)] == []


def test_only_the_first_mark_is_removed() -> None:
    assert decode_text("\ufeff\ufeffa\ufeff".encode(), "x") == "\ufeffa\ufeff"


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    for data in (b"caf\xc3\xa9\n", b"\xef\xbb\xbfcaf\xc3\xa9\n"):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert read_prompt(prompt="-") == "café\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("a".encode("utf-16"))))
    with pytest.raises(
        OptionError, match=r"prompt: standard input: expected text in UTF-8, found UTF-16"
    ):
        read_prompt(prompt="-")


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=r"^grammar: expected a file that can be read at .*x, found No such file"
    ):
        read_text(tmp_path / "x", "grammar")
    with pytest.raises(TokenizerError, match=r"found Is a directory; check the path"):
        read_text(tmp_path, error=TokenizerError)
