"""Files of JSON lines: accepted content, and errors that name the damaged line."""

import gzip
from pathlib import Path

import pytest

from pronk.errors import OptionError
from pronk.files.json_lines import read_json_lines


def test_empty_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n{"b": 2}\n')
    assert list(read_json_lines(path)) == [(1, {"a": 1}), (3, {"b": 2})]


@pytest.mark.parametrize("line", ["[1]", "{", "\udcff"])
def test_damaged_json_lines_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\n' + line.encode(errors="surrogateescape"))
    with pytest.raises(OptionError, match=r"a\.jsonl, line 2: expected ((one|a) JSON object|text in UTF-8)"):
        list(read_json_lines(path))


def test_compressed_and_truncated_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(b'{"text": "x"}\n' * 1000)
    path.write_bytes(whole)
    assert len(list(read_json_lines(path))) == 1000
    path.write_bytes(whole[:-12])
    with pytest.raises(OptionError, match=r"expected .*one JSON object a line"):
        list(read_json_lines(path))
