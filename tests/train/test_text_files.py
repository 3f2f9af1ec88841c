"""Files of a corpus: a byte order mark is not a part of the text, other encodings are refused."""

from pathlib import Path

import pytest

from base.files import test_text as text
from base.files.test_text import LINES, OTHER_ENCODINGS, Reader
from pronk.train.corpus.sources import read_source, spec_of


def source_texts(path: Path) -> list[str]:
    return [document.text for document in read_source(spec_of(path, "text"))]


READERS: dict[str, Reader] = {
    "train/corpus": ("a.txt", "é\r\nb", source_texts),
    "corpus as JSON": ("a.jsonl", LINES, source_texts),
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
