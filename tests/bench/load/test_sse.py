"""The parser of server-sent events: the standard's own cases, and any way to cut the bytes."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from pronk.bench.load.sse import Event, EventStream

STREAM = (
    b"\xef\xbb\xbf: hello\r\n\r\n"
    b'data: {"a": 1}\n\n'
    b"data:one\r\ndata: two\r\n\r\n"
    b"event: error\rdata:  spaced\r\r"
    b"id: 7\nretry: 100\nnonsense\n\n"
    b"data\n\n"
    b": keep-alive\n\n"
    b"event: gone\n\n"
    b"data: " + "ħ🐎é\u2028".encode() + b"\n\n"
    b"data: [DONE]\r\n\r\n"
)
EVENTS = [
    Event('{"a": 1}'),
    Event("one\ntwo"),
    Event(" spaced", "error"),
    Event(""),
    Event("ħ🐎é\u2028"),
    Event("[DONE]"),
]


def parse(*parts: bytes) -> list[Event]:
    stream = EventStream()
    return [event for part in parts for event in stream.feed(part)] + stream.close()


def test_whole() -> None:
    assert parse(STREAM) == EVENTS


def test_byte_by_byte() -> None:
    assert parse(*(STREAM[i : i + 1] for i in range(len(STREAM)))) == EVENTS


def test_every_cut_in_two() -> None:
    for cut in range(len(STREAM) + 1):
        assert parse(STREAM[:cut], STREAM[cut:]) == EVENTS, cut


@pytest.mark.parametrize("seed", range(100))
def test_any_cuts_of_any_stream(seed: int) -> None:
    """Streams of random lines and line ends, too: however they are cut, the events are those of the whole."""
    random = Random(seed)
    lines = [b"data: x", b"data:", b"data", b"event: e", b": c", b"", b"", "data: ü🐎".encode(), b"id: 1"]
    stream = b"".join(random.choice(lines) + random.choice([b"\n", b"\r", b"\r\n"]) for _ in range(40))
    cuts = sorted(random.choices(range(len(stream) + 1), k=random.randrange(30)))
    parts = [stream[a:b] for a, b in pairwise([0, *cuts, len(stream)])]
    assert parse(*parts) == parse(stream)


def test_an_event_comes_as_soon_as_it_is_whole() -> None:
    """A lone carriage return ends a line at once, though a line feed may follow and belong to it."""
    stream = EventStream()
    assert stream.feed(b"data: x\r") == []
    assert stream.feed(b"") == []
    assert stream.feed(b"\n") == []
    assert stream.feed(b"\r") == [Event("x")]
    assert stream.feed(b"\ndata: y\n\n") == [Event("y")]


def test_what_the_end_leaves() -> None:
    assert parse(b"data: [DONE]") == [Event("[DONE]")]
    assert parse(b"data: [DONE]\n") == [Event("[DONE]")]
    assert parse(b"da") == []
    assert parse() == []


def test_bytes_that_are_no_utf8() -> None:
    assert parse(b"data: a\xffb\n\n") == [Event("a\ufffdb")]
