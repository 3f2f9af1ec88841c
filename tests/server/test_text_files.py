"""Text files that the server reads: a byte order mark is not a part, other encodings are refused."""

import json
from pathlib import Path

import pytest

from base.files import test_text as text
from base.files.test_text import OTHER_ENCODINGS, Reader
from pronk.server.batch import read_batch
from pronk.server.cli.serve import _guardrails
from pronk.server.settings import read_keys

BATCH = {"custom_id": "é", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
READERS: dict[str, Reader] = {
    "guardrails": ("a.txt", "Be kind, é.", lambda path: _guardrails(str(path))),
    "keys": ("a.txt", "a-secret-key\n# no key\n", read_keys),
    "batch": ("a.jsonl", json.dumps(BATCH), lambda path: [*read_batch(path)]),
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
