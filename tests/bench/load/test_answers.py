"""Answers as they stream in: times, tokens, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pronk.bench.load.answers import CUT_OFF, NOT_PROTOCOL, STREAMED_ERROR, Answer, AnswerError, explain
from pronk.bench.load.records import Call
from pronk.bench.load.sse import Event


def said(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


def answer_of(*chunks: tuple[float, Any]) -> Answer:
    answer = Answer()
    for at, chunk in chunks:
        answer.take(Event(chunk if isinstance(chunk, str) else json.dumps(chunk)), at)
    answer.check_end()
    return answer


def call_of(*chunks: tuple[float, Any], most: int = 50) -> Call:
    return answer_of(*chunks).to_call("t/1", due=10.0, sent=10.5, origin=8.0, max_tokens=most)


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 7, "completion_tokens": 11, "steps": 4, "drafted": 12, "accepted": 7},
}


def test_times_count_from_when_it_was_due() -> None:
    """By hand: due at 10, sent late; text at 12, 13, 16; usage at 16.5, the end at 17. 11 tokens: 4 s over 10."""
    call = call_of(
        (11.0, said("")),
        (12.0, said("a")),
        (13.0, said("b")),
        (16.0, said("c", "stop")),
        (16.5, USAGE),
        (17.0, "[DONE]"),
    )
    assert (call.due, call.late, call.ttft, call.last, call.e2e) == (2.0, 0.5, 2.0, 6.0, 7.0)
    assert (call.gaps, call.chunks, call.tokens, call.counted) == ((1.0, 3.0), 3, 11, "usage")
    assert call.tpot == pytest.approx(0.4)
    assert (call.prompt_tokens, call.steps, call.drafted, call.accepted) == (7, 4, 12, 7)
    assert "gaps" not in call.to_dict()


@pytest.mark.parametrize(("finish", "tokens", "counted"), [("length", 50, "length"), ("stop", 2, "chunks")])
def test_tokens_without_usage(finish: str, tokens: int, counted: str) -> None:
    call = call_of((11.0, said("a")), (12.0, said("b", finish)), (12.0, "[DONE]"))
    assert (call.tokens, call.counted, call.prompt_tokens, call.steps) == (tokens, counted, None, None)


def test_the_last_usage_counts_and_nonsense_does_not() -> None:
    usages = ({"completion_tokens": 1}, {"completion_tokens": 3, "prompt_tokens": True, "steps": -1, "drafted": 1.5})
    call = call_of(*((11.0, said("a", "stop") | {"usage": usage}) for usage in usages))
    assert (call.tokens, call.prompt_tokens, call.steps, call.drafted) == (3, None, None, None)


def test_cached_tokens() -> None:
    usage = {"completion_tokens": 3, "prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}
    assert call_of((11.0, said("a", "stop") | {"usage": usage})).cached_tokens == 8
    assert call_of((11.0, said("a", "stop") | {"usage": {"prompt_tokens_details": None}})).cached_tokens is None


def test_an_answer_without_text() -> None:
    call = call_of((11.0, said("", "stop")), (12.0, "[DONE]"))
    assert (call.ttft, call.e2e, call.tokens, call.chunks, call.tpot) == (2.0, 2.0, 0, 0, None)


@pytest.mark.parametrize(
    "choice",
    [
        {"text": "a"},
        {"delta": {"reasoning_content": "a"}},
        {"delta": {"reasoning": "a"}},
        {"delta": {"tool_calls": [{"index": 0}]}},
    ],
)
def test_all_that_a_model_says_is_text(choice: dict[str, Any]) -> None:
    assert answer_of((1.0, {"choices": [choice]}), (2.0, said("", "stop"))).times == [1.0]


def test_nothing_counts_after_the_end() -> None:
    answer = answer_of((1.0, said("a", "stop")), (2.0, "[DONE]"), (9.0, "anything"))
    assert (answer.done, answer.ended) == (True, 2.0)


@pytest.mark.parametrize(
    ("event", "label", "reason"),
    [
        (Event('{"error": {"message": "no memory\\n left", "code": 500}}'), STREAMED_ERROR, "no memory left"),
        (Event('{"detail": "gone"}', "error"), STREAMED_ERROR, "gone"),
        (Event("oops"), NOT_PROTOCOL, "oops"),
        (Event("[1]"), NOT_PROTOCOL, "[1]"),
    ],
)
def test_errors_in_the_stream(event: Event, label: str, reason: str) -> None:
    with pytest.raises(AnswerError) as caught:
        Answer().take(event, 1.0)
    assert caught.value.label == label
    assert reason in caught.value.reason


@pytest.mark.parametrize("end", [(), ((2.0, "[DONE]"),)])
def test_a_stream_that_stops(end: tuple[tuple[float, str], ...]) -> None:
    """With or without the mark: a server that gives an answer up to take the next one sends it, too."""
    with pytest.raises(AnswerError, match=CUT_OFF):
        answer_of((1.0, said("a")), *end)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "busy"}}', "busy"),
        (b'{"error": "busy"}', "busy"),
        (b'{"object": "error", "message": "busy"}', "busy"),
        (b'{"detail": [{"msg": "wrong"}]}', "[{'msg': 'wrong'}]"),
        (b"{}", "{}"),
        (b"<html>\nbusy", "<html> busy"),
        (b"\xff", "\ufffd"),
    ],
)
def test_what_servers_say(body: bytes, words: str) -> None:
    assert explain(body) == words
