"""Files of a corpus: a byte order mark is not a part of the text, other encodings are refused."""

from pathlib import Path

import pytest

from base.files.test_text import (  # noqa: F401 - tests, which the fixtures below run with other readers
    LINES,
    Reader,
    test_a_byte_order_mark_is_not_a_part_of_the_text,
    test_other_bytes_are_refused,
    test_other_encodings_are_refused,
)
from pronk.train.corpus.sources import read_source, spec_of


def source_texts(path: Path) -> list[str]:
    return [document.text for document in read_source(spec_of(path, "text"))]


READERS: dict[str, Reader] = {
    "train/corpus": ("a.txt", "é\r\nb", source_texts),
    "corpus as JSON": ("a.jsonl", LINES, source_texts),
}


@pytest.fixture(params=READERS.values(), ids=READERS)
def reader(request: pytest.FixtureRequest) -> Reader:
    found: Reader = request.param
    return found


@pytest.fixture
def refusing(reader: Reader) -> Reader:
    return reader
