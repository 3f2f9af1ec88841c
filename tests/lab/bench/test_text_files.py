"""Files of prompts: a byte order mark is not a part of the text, other encodings are refused."""

import pytest

from base.files.test_text import (  # noqa: F401 - tests, which the fixtures below run with other readers
    Reader,
    test_a_byte_order_mark_is_not_a_part_of_the_text,
    test_other_bytes_are_refused,
    test_other_encodings_are_refused,
)
from pronk.lab.bench.prompts import load_prompts

READERS: dict[str, Reader] = {
    "prompts": ("a.txt", "é\nb\n", load_prompts),
    "prompts as JSON": ("a.jsonl", '{"prompt": "é"}', load_prompts),
}


@pytest.fixture(params=READERS.values(), ids=READERS)
def reader(request: pytest.FixtureRequest) -> Reader:
    found: Reader = request.param
    return found


@pytest.fixture
def refusing(reader: Reader) -> Reader:
    return reader
