"""Files of JSON lines: accepted content, and errors that name the damaged line."""

import gzip
from pathlib import Path

import pytest

from pronk.base.errors import OptionError
from pronk.base.files.json_lines import read_json_lines


def test_empty_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n{"b": 2}\n')
    assert list(read_json_lines(path)) == [(1, {"a": 1}), (3, {"b": 2})]


@pytest.mark.parametrize("line", ["[1]", "{", "\udcff"])
def test_damaged_json_lines_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\n' + line.encode(errors="surrogateescape"))
    with pytest.raises(
        OptionError, match=r"a\.jsonl, line 2: expected ((one|a) JSON object|text in UTF-8)"
    ):
        list(read_json_lines(path))


def test_compressed_and_truncated_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(b'{"text": "x"}\n' * 1000)
    path.write_bytes(whole)
    assert len(list(read_json_lines(path))) == 1000
    path.write_bytes(whole[:-12])
    with pytest.raises(OptionError, match=r"expected .*one JSON object a line"):
        list(read_json_lines(path))


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"a": 1', "column 8 (Expecting ',' delimiter, found the end)"),
        ('{"a": ', "column 7 (Expecting value, found the end)"),
        ('{"a" 1}', "column 6 (Expecting ':' delimiter, found '1}')"),
        ("{} {}", "column 4 (Extra data, found '{}')"),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_a_mistake_has_the_line_of_the_file_and_the_column(
    tmp_path: Path, line: str, found: str, end: str, suffix: str
) -> None:
    path = tmp_path / f"a.{suffix}"
    content = f'{{"a": 0}}\n\n{line}{end}'.encode()
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    with pytest.raises(OptionError) as error:
        list(read_json_lines(path))
    expected = (
        f"{path}, line 3: expected one JSON object a line, found a mistake at line 3, {found}; "
        "correct the line"
    )
    assert str(error.value) == expected
