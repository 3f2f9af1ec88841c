"""Text files that the server reads: a byte order mark is not a part, other encodings are
refused.
"""

import json

import pytest

from base.files.test_text import (  # noqa: F401 - tests, which the fixtures below run with other readers
    Reader,
    test_a_byte_order_mark_is_not_a_part_of_the_text,
    test_other_bytes_are_refused,
    test_other_encodings_are_refused,
)
from pronk.server.batch import read_batch
from pronk.server.cli.serve import _guardrails
from pronk.server.settings import read_keys

BATCH = {"custom_id": "é", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
READERS: dict[str, Reader] = {
    "guardrails": ("a.txt", "Be kind, é.", lambda path: _guardrails(str(path))),
    "keys": ("a.txt", "a-secret-key\n# no key\n", read_keys),
    "batch": ("a.jsonl", json.dumps(BATCH), lambda path: [*read_batch(path)]),
}


@pytest.fixture(params=READERS.values(), ids=READERS)
def reader(request: pytest.FixtureRequest) -> Reader:
    found: Reader = request.param
    return found


@pytest.fixture
def refusing(reader: Reader) -> Reader:
    return reader
