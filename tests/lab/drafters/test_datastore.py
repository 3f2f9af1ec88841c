"""Datastores against a plain search, and one-line errors for damaged ones."""

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.drafters.stores import VOCABULARY, Documents, followers, make, random_documents, write
from pronk.base.errors import CheckpointError, OptionError, PronkError
from pronk.lab.drafters.datastore import builder as datastore_build
from pronk.lab.drafters.datastore import reader as module
from pronk.lab.drafters.datastore.reader import (
    HEADER,
    SUFFIX_TYPES,
    SUFFIXES,
    TOKENS,
    Datastore,
    Header,
    Match,
)

A = 10
B = 11
C = 12
D = 13


def test_example_of_the_module(tmp_path: Path) -> None:
    store = make(tmp_path / "s", [[A, B, C], [A, B, D]])
    end = 65535
    assert np.fromfile(tmp_path / "s" / TOKENS, ">u2").tolist() == [A, B, C, end, A, B, D, end]
    assert np.fromfile(tmp_path / "s" / SUFFIXES, "<u4").tolist() == [0, 4, 1, 5, 2, 6, 7, 3]
    assert store.find([A, B], 16) == Match(2, 0, 2)
    assert store.find([C, B], 16) == Match(1, 2, 4)
    assert store.children(0, 2, 2, 9) == [(C, 0, 1), (D, 1, 2)]


@pytest.mark.parametrize("vocab_size", [4096, 65535, 65536, 200_000])
def test_suffixes_are_in_the_order_of_their_tokens(tmp_path: Path, vocab_size: int) -> None:
    dice = random.Random(vocab_size)
    ids = [0, 1, 2, 255, 256, 257, 511, vocab_size - 257, vocab_size - 1]
    documents = [[dice.choice(ids) for _ in range(40)] for _ in range(12)]
    folder = write(tmp_path / "s", documents, vocab_size=vocab_size, sources=["a.txt"])
    header = Header.read(folder)
    kind = ">u2" if vocab_size <= 65535 else ">u4"
    assert header == Header(
        VOCABULARY,
        vocab_size - 1,
        480,
        12,
        kind,
        "<u4",
        header.tokens_sha256,
        header.suffixes_sha256,
        ("a.txt",),
    )
    text = np.fromfile(folder / TOKENS, kind).tolist()
    assert text == [token for document in documents for token in [*document, header.separator]]
    assert np.fromfile(folder / SUFFIXES, "<u4").tolist() == sorted(
        range(len(text)), key=lambda at: text[at:]
    )


CORPORA: dict[str, Documents] = {
    "one token": [[5]],
    "one letter": [[5] * 30, [5] * 7, [5]],
    "two letters": random_documents(0, 40, 30, 2),
    "three letters": random_documents(1, 300, 40, 3),
    "short": random_documents(2, 300, 3, 4),
    "long": random_documents(3, 2, 4000, 6),
}


def longest(documents: Documents, tail: list[int], most: int) -> int:
    sizes = range(1, min(len(tail), most) + 1)
    return max(
        (n for n in sizes if any(token >= 0 for token in followers(documents, tail[-n:]))),
        default=0,
    )


@pytest.mark.few(4)
@pytest.mark.parametrize("name", CORPORA)
@pytest.mark.parametrize("sample", [1024, 7], ids=["all looked at", "sampled"])
def test_matches_and_children_equal_a_plain_search(
    name: str, sample: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SAMPLE", sample)
    documents = CORPORA[name]
    store = make(tmp_path / "s", documents)
    dice = random.Random(4)
    lengths = set[int]()
    letters = max(max(document) for document in documents) + 1
    for _ in range(60):
        source = dice.choice(documents)
        size = dice.randint(1, 12)
        start = dice.randrange(len(source))
        tail = [dice.randrange(letters + 1) for _ in range(3)] + list(source[start : start + size])
        most = dice.choice((1, 2, 5, 16))
        length, low, high = store.find(tail, most)
        assert length == longest(documents, tail, most)
        lengths.add(length)
        if length:
            check_children(store, documents, tail[-length:], low, high)
    assert len(lengths) > 1 or name == "one token"


def check_children(
    store: Datastore, documents: Documents, phrase: list[int], low: int, high: int
) -> None:
    """Compare a phrase's next tokens with a count over all documents, and look up each token's
    interval.
    """
    want = Counter(token for token in followers(documents, phrase) if token >= 0)
    assert high - low == want.total()
    found = store.children(low, high, len(phrase), 99)
    certain = -(-(high - low) // module._SAMPLE)
    assert {token for token, count in want.items() if count >= certain} <= {
        child.token for child in found
    }
    assert [(child.token, child.high - child.low) for child in found] == sorted(
        ((child.token, want[child.token]) for child in found), key=lambda pair: (-pair[1], pair[0])
    )
    if high - low <= module._SAMPLE:
        assert len(found) == len(want)
        for most in (0, 1, 2):
            assert store.children(low, high, len(phrase), most) == found[:most]
    for token, start, stop in found:
        longer = [*phrase, token]
        after = Counter(token for token in followers(documents, longer) if token >= 0)
        if stop - start <= module._SAMPLE:
            deeper = store.children(start, stop, len(longer), 99)
            assert {child.token: child.high - child.low for child in deeper} == after


def test_suffixes_of_eight_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = random_documents(6, 50, 30, 3)
    small = make(tmp_path / "4", documents)
    monkeypatch.setattr(datastore_build, "SUFFIX_TYPES", SUFFIX_TYPES[1:] * 2)
    large = make(tmp_path / "8", documents)
    assert large.header.file_sizes() == {
        TOKENS: small.header.file_sizes()[TOKENS],
        SUFFIXES: 2 * small.header.file_sizes()[SUFFIXES],
    }
    for tail in ([0, 1, 2], [2, 2], [1]):
        length, low, high = large.find(tail, 16)
        assert (length, low, high) == small.find(tail, 16)
        assert large.children(low, high, length, 9) == small.children(low, high, length, 9)


@pytest.mark.parametrize("tail", [[], [65535], [B, 65535], [A, -1], [70_000], [2**70], [4095]])
def test_ids_outside_the_datastore_match_nothing(tail: list[int], tmp_path: Path) -> None:
    store = make(tmp_path / "s", [[A, B], [C, D]])
    assert store.find(tail, 16) == Match(0, 0, 0)
    assert store.find([*tail, A], 16).length == 1


def test_a_wide_vocabulary(tmp_path: Path) -> None:
    documents = [[100_000, 65_535, 7], [100_000, 65_535, 150_000, 7]]
    store = make(tmp_path / "s", documents, vocab_size=151_936)
    length, low, high = store.find([3, 100_000, 65_535], 16)
    assert (length, high - low) == (2, 2)
    assert [child.token for child in store.children(low, high, 2, 9)] == [7, 150_000]


def test_limit_and_empty_documents(tmp_path: Path) -> None:
    taken = list[int]()

    def documents() -> Any:
        for number in range(9):
            taken.append(number)
            yield [number] * number

    reported = list[int]()
    store = make(tmp_path / "s", documents(), limit=5, on_progress=reported.append)
    assert (store.header.tokens, store.header.documents, store.header.largest_id) == (5, 3, 3)
    assert taken == [0, 1, 2, 3]
    assert reported == [0, 0, 1, 3, -1]
    with pytest.raises(OptionError, match="expected documents with tokens, found none"):
        make(tmp_path / "empty", [[], []])


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    for number, wrong in enumerate(([65_535], [-1])):
        with pytest.raises(AssertionError):
            make(tmp_path / str(number), [wrong])


def refuse(folder: Path, expected: str, error: type[PronkError] = CheckpointError) -> None:
    with pytest.raises(error, match=expected) as caught:
        Datastore.open(folder)
    assert "\n" not in str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "s", random_documents(5, 60, 30, 3))


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    refuse(
        tmp_path / "nowhere",
        "nowhere: expected a datastore with datastore.json, found none; make one",
    )
    for name in (TOKENS, SUFFIXES, HEADER):
        (folder / name).rename(folder / "away")
        refuse(
            folder, f"expected .*{name}" if name == HEADER else f"{name}: expected a readable file"
        )
        (folder / "away").rename(folder / name)
    Datastore.open(folder)


@pytest.mark.parametrize("name", [TOKENS, SUFFIXES])
@pytest.mark.parametrize("change", [-1, 1])
def test_wrong_file_sizes_are_refused(name: str, change: int, folder: Path) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-1] if change < 0 else data + b"\0")
    refuse(folder, f"{name}: expected {len(data)} bytes, found {len(data) + change}")
    (folder / name).write_bytes(b"")
    refuse(folder, f"{name}: expected {len(data)} bytes, found 0")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "expected JSON, found a mistake at line 1, column 2"),
        ("[]", "expected a JSON object, found list"),
        ("{}", "expected format 'pronk-datastore/1', found None"),
        ("\udcff", "expected JSON"),
    ],
)
def test_damaged_json_is_refused(text: str, expected: str, folder: Path) -> None:
    (folder / HEADER).write_text(text, encoding="utf-8", errors="surrogateescape")
    refuse(folder, expected)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "pronk-datastore/2"},
        {"vocabulary": None},
        {"tokens": "5"},
        {"tokens": 0},
        {"tokens": True},
        {"documents": 0},
        {"documents": 10**9},
        {"token_type": "float32"},
        {"token_type": "<u2"},
        {"suffix_type": ">u4"},
        {"suffix_type": None},
        {"largest_id": -1},
        {"largest_id": 65535},
        {"tokens_sha256": 3},
        {"sources": "a"},
        {"sources": [1]},
    ],
    ids=str,
)
def test_damaged_values_are_named(change: dict[str, Any], folder: Path) -> None:
    raw = json.loads((folder / HEADER).read_text())
    (folder / HEADER).write_text(json.dumps(raw | change))
    ((name, value),) = change.items()
    refuse(folder, f"{name}.*found '?{value}" if name == "format" else f"damaged {name}: ")
    (folder / HEADER).write_text(json.dumps({key: raw[key] for key in raw if key != name}))
    refuse(folder, name)


def test_suffixes_that_do_not_sort_the_tokens_are_refused(folder: Path) -> None:
    suffixes = np.fromfile(folder / SUFFIXES, "<u4")
    for wrong in (suffixes[::-1], suffixes + 10**6, suffixes * 0 + (2**32 - 1)):
        wrong.astype("<u4").tofile(folder / SUFFIXES)
        refuse(
            folder,
            "expected suffixes.bin to sort tokens.bin, found otherwise; build the datastore again",
        )
    suffixes.tofile(folder / SUFFIXES)
    (folder / TOKENS).write_bytes(bytes(len((folder / TOKENS).read_bytes())))
    refuse(folder, "expected suffixes.bin to sort tokens.bin")


@pytest.mark.parametrize("name", [TOKENS, SUFFIXES])
def test_checksums_find_a_changed_byte(name: str, folder: Path) -> None:
    Datastore.open(folder).verify()
    data = bytearray((folder / name).read_bytes())
    data[40] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name}: expected sha256 [0-9a-f]{{16}}…, found"):
        Datastore.open(folder).verify()


def test_random_files_raise_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check for damage, searches in random files return arbitrary known tokens."""
    monkeypatch.setattr(Datastore, "_spot_check", lambda _: None)
    dice = np.random.default_rng(0)
    for name in (SUFFIXES, TOKENS):
        size = (folder / name).stat().st_size
        for _ in range(20):
            (folder / name).write_bytes(dice.bytes(size))
            store = Datastore.open(folder)
            for tail in ([0, 1, 2], [1], [2, 2]):
                length, low, high = store.find(tail, 16)
                for sample in (1024, 8):
                    monkeypatch.setattr(module, "_SAMPLE", sample)
                    for place in ((low, high), (0, store.header.num_entries)):
                        for child in store.children(*place, length, 20):
                            assert 0 <= child.token <= store.header.largest_id
                            store.children(child.low, child.high, length + 1, 20)


def test_a_missing_sorting_library_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    with pytest.raises(
        OptionError,
        match=r"expected pydivsufsort .*run pip install '\.\[datastore\]' in a clone of pronk",
    ) as caught:
        make(tmp_path / "new", [[A]])
    assert "\n" not in str(caught.value)
    assert Datastore.open(folder).find([0, 1], 16).length
