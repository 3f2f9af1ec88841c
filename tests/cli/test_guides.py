from pathlib import Path
from typing import Any

import pytest

from pronk.base.errors import OptionError
from pronk.cli.values import read_guide
from pronk.text.guide import MAX_SIZE, Guide


def test_each_option_is_a_guide(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    grammar = tmp_path / "sums.lark"
    schema.write_text('{"type": "integer"}', encoding="utf-8")
    grammar.write_text('start: "é"', encoding="utf-8")
    assert read_guide() is None
    assert read_guide(choice=[]) is None
    assert read_guide(json_schema=str(schema)) == Guide(json={"type": "integer"})
    assert read_guide(json_schema="object") == Guide(json={"type": "object"})
    assert read_guide(regex="[ab]") == Guide(regex="[ab]")
    assert read_guide(choice=["a", "b"]) == Guide(choice=["a", "b"])
    assert read_guide(grammar=str(grammar)) == Guide(grammar='start: "é"')


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "expected a file that can be read at .*, found No such file"),
        (b"\xff\xfe", "expected text in UTF-8"),
        (b"{", "expected a schema, found a mistake at line 1, column 2"),
        (b" " * (5 * MAX_SIZE), f"expected at most {MAX_SIZE} characters"),
    ],
)
def test_files_that_cannot_be(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "schema.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OptionError, match=message) as raised:
        read_guide(json_schema=str(path))
    assert "\n" not in str(raised.value)


def test_one_of_them(tmp_path: Path) -> None:
    given: dict[str, Any] = {"regex": "a", "choice": ["b"]}
    with pytest.raises(OptionError, match="found --regex and --choice"):
        read_guide(**given)
