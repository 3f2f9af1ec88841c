"""Files of prompts: a byte order mark is not a part of the text, other encodings are refused."""

from pathlib import Path

import pytest

from base.files import test_text as text
from base.files.test_text import OTHER_ENCODINGS, Reader
from pronk.lab.bench.prompts import load_prompts

READERS: dict[str, Reader] = {
    "prompts": ("a.txt", "é\nb\n", load_prompts),
    "prompts as JSON": ("a.jsonl", '{"prompt": "é"}', load_prompts),
}
EACH = pytest.mark.parametrize("reader", READERS.values(), ids=READERS)


@EACH
def test_a_byte_order_mark_is_not_a_part_of_the_text(reader: Reader, tmp_path: Path) -> None:
    text.test_a_byte_order_mark_is_not_a_part_of_the_text(reader, tmp_path)


@EACH
@pytest.mark.parametrize("encoding", OTHER_ENCODINGS)
def test_other_encodings_are_refused(reader: Reader, encoding: str, tmp_path: Path) -> None:
    text.test_other_encodings_are_refused(reader, encoding, tmp_path)


@EACH
def test_other_bytes_are_refused(reader: Reader, tmp_path: Path) -> None:
    text.test_other_bytes_are_refused(reader, tmp_path)
