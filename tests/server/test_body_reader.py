"""Limits on sums: how deep and how many the values of a body are; large bodies are read beside the
event loop.
"""

import asyncio
import json
import re
import sys
import threading
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic_core import PydanticKnownError

from pronk.base.fair_executor import FairExecutor
from pronk.llm import LLM
from pronk.server import app
from pronk.server.app import _json_response
from pronk.server.batch import BatchLine, answer_line, batch_service
from pronk.server.bodies import BodyReader, validate
from pronk.server.errors import ApiError
from pronk.server.json_values import has_more_values, parse_json
from pronk.server.protocol.chat import ChatRequest
from pronk.server.protocol.completions import CompletionRequest
from pronk.server.protocol.request import (
    _PART,
    MAX_IDS,
    _check_biases_in_parts,
    _check_ids_in_parts,
)
from pronk.server.protocol.small_routes import DetokenizeRequest
from pronk.server.settings import RequestLimits, ServerSettings

TURN = {"role": "user", "content": "Hi"}
ASK: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [TURN], "max_tokens": 1},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": [TURN], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [TURN]},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/moderations": {"input": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5]},
}
JSON = {"Content-Type": "application/json"}
OBJECTS = ('{"a":', "1", "}")
LISTS = ("[", "1", "]")
SCHEMAS = ('{"type":"object","properties":{"a":', "{}", "}}")
# Fields of some routes; the others do not know them, or ignore them.
FIELDS = (
    "service_tier",
    "metadata",
    "user",
    "messages",
    "prompt",
    "input",
    "tokens",
    "tools",
    "tool_choice",
    "response_format",
    "guided_json",
    "chat_template_kwargs",
    "logit_bias",
    "stop",
    "options",
    "extra_body",
    "stream_options",
    "temperature",
    "drafter",
    "suffix",
    "x_unheard_of",
)


def reader_of(limits: RequestLimits) -> BodyReader:
    return BodyReader(ServerSettings("tiny", limits=limits), FairExecutor(1, "test"))


def nested(kind: tuple[str, str, str], depth: int) -> str:
    begin, middle, end = kind
    return begin * depth + middle + end * depth


def with_field(route: str, field: str, value: str) -> bytes:
    others = {name: each for name, each in ASK[route].items() if name != field}
    return f'{json.dumps(others)[:-1]}{", " if others else ""}"{field}": {value}}}'.encode()


# Kinds of nested values, each with a depth; one more level is the body itself.
TOO_DEEP = [*product((OBJECTS, LISTS), (256, 300, 960, 20_000))]
DEEPEST = [(OBJECTS, 255), (LISTS, 255), (SCHEMAS, 127)]


def check_refused(
    client: httpx.Client, route: str, field: str, kind: tuple[str, str, str], depth: int
) -> None:
    answer = client.post(route, content=with_field(route, field, nested(kind, depth)), headers=JSON)
    assert answer.status_code == 400
    assert "expected values of at most 256 levels" in answer.json()["error"]["message"]


def check_no_server_error(
    client: httpx.Client, route: str, field: str, kind: tuple[str, str, str], depth: int
) -> None:
    answer = client.post(route, content=with_field(route, field, nested(kind, depth)), headers=JSON)
    assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("route", ASK)
def test_deep_values_are_refused_in_every_field(
    client: httpx.Client, route: str, field: str
) -> None:
    """The depths take turns, so that each route and each field has all of them."""
    turn = [*ASK].index(route) + FIELDS.index(field)
    check_refused(client, route, field, *TOO_DEEP[turn % len(TOO_DEEP)])
    check_no_server_error(client, route, field, *DEEPEST[turn % len(DEEPEST)])


@pytest.mark.slow
@pytest.mark.parametrize("route", ASK)
def test_all_depths_in_every_field(client: httpx.Client, route: str) -> None:
    for field in FIELDS:
        for kind, depth in TOO_DEEP:
            check_refused(client, route, field, kind, depth)
        for kind, depth in DEEPEST:
            check_no_server_error(client, route, field, kind, depth)


TOOL = {"type": "function", "function": {"name": "f", "parameters": "DEEP"}}
CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}", "more": "DEEP"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": "DEEP"}}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{**TURN, "more": "DEEP"}]},
        {"messages": [{**TURN, "content": [{"type": "text", "text": "x", "more": "DEEP"}]}]},
        {"messages": [TURN, {"role": "assistant", "tool_calls": [CALL]}]},
        {"tools": [TOOL]},
        {"response_format": FORMAT},
        {"guided_json": "DEEP"},
        {"extra_body": {"metadata": {"x": "DEEP"}}},
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("levels", [40, 110, 200, 240, 480, 960])
@pytest.mark.parametrize("kind", [OBJECTS, SCHEMAS])
def test_deep_values_within_fields_are_no_server_error(
    client: httpx.Client, fields: dict[str, Any], levels: int, kind: tuple[str, str, str]
) -> None:
    depth = levels // kind[0].count("{")
    text = json.dumps(ASK["/v1/chat/completions"] | fields).replace('"DEEP"', nested(kind, depth))
    answer = client.post("/v1/chat/completions", content=text.encode(), headers=JSON)
    assert answer.status_code in ((200, 400) if levels < 256 else (400,)), answer.text
    assert "levels" in answer.text or levels < 256


@pytest.mark.parametrize("depth", [40, 120, 300, 960, 20_000])
def test_deep_arguments_of_calls_are_no_server_error(client: httpx.Client, depth: int) -> None:
    """Arguments are a text with JSON in it; the limit on levels does not see them."""
    call = {**CALL, "function": {"name": "f", "arguments": nested(OBJECTS, depth)}}
    turns = [
        TURN,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": ""},
    ]
    answer = client.post("/v1/chat/completions", json={"messages": turns, "max_tokens": 1})
    assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize(
    "route", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
)
def test_deep_values_in_a_batch_are_an_answer_with_400(model: LLM, route: str) -> None:
    service = batch_service(model, "tiny")

    async def answers() -> None:
        for depth in (256, 300, 960):
            value: Any = 1
            for _ in range(depth):
                value = {"a": value}
            body = {**ASK[route], "service_tier": value}
            status, reply = await answer_line(service, BatchLine("1", route, body))
            assert (status, "256 levels" in reply["error"]["message"]) == (400, True)

    try:
        asyncio.run(answers())
    finally:
        service.close()


@pytest.mark.parametrize(
    "value",
    [
        "[" + ",".join(["{}"] * 1001) + "]",
        "[" + ",".join(["[]"] * 1001) + "]",
        "[" + ",".join(['""'] * 1001) + "]",
        "[" + ",".join(['"\\\\\\""'] * 1001) + "]",
        "{" + ",".join(f'"{n}":0' for n in range(1001)) + "}",
        "[" + ",".join(['{"a":[]}'] * 400) + "]",
    ],
    ids=lambda value: value[:9],
)
def test_bodies_of_too_many_values_are_refused_before_they_are_parsed(value: str) -> None:
    reader = reader_of(RequestLimits(values=1000))
    for text in (
        f'{{"messages": {value}}}',
        f'{{"metadata": {value}}}',
        f'{{"metadata": {value}, NO JSON',
    ):
        with pytest.raises(
            ApiError, match="expected at most 1000 texts, lists and objects, found more"
        ):
            asyncio.run(reader.read(ChatRequest, text.encode()))


@pytest.mark.parametrize(
    "text", ["{[" * 5000, '\\"{' * 5000, "\\\\" * 5001, "a, b: {}" * 5000, '\\"' * 5000]
)
def test_characters_of_json_within_texts_count_as_one_text(text: str) -> None:
    reader = reader_of(RequestLimits(values=12))
    body = f'{{"messages": [{{"role": "user", "content": "{text}"}}]}}'.encode()
    assert asyncio.run(reader.read(ChatRequest, body)).messages[0].content == json.loads(
        f'"{text}"'
    )
    with pytest.raises(ApiError, match="expected JSON"):  # a text without an end
        asyncio.run(reader.read(ChatRequest, body[: -len('"}]}')]))


def test_numbers_do_not_count() -> None:
    ids = [*range(5000)]
    reader = reader_of(RequestLimits(values=12))
    assert (
        asyncio.run(reader.read(DetokenizeRequest, json.dumps({"tokens": ids}).encode())).tokens
        == ids
    )


@pytest.mark.parametrize("body", [b"[]", b"null", b"1", b'"x"', b"true"])
@pytest.mark.parametrize("route", ASK)
def test_bodies_that_are_no_objects_are_refused(
    client: httpx.Client, route: str, body: bytes
) -> None:
    answer = client.post(route, content=body, headers=JSON)
    assert answer.status_code == 400
    assert "body: expected a JSON object" in answer.json()["error"]["message"]


def test_large_bodies_are_read_and_checked_in_other_threads(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = dict[str, str]()

    def noted(name: str) -> Any:
        function = getattr(ChatRequest, name)

        def note(*arguments: Any, **options: Any) -> Any:
            threads[name] = threading.current_thread().name
            return function(*arguments, **options)

        return note

    for name in ("model_validate", "check", "ignored"):
        monkeypatch.setattr(ChatRequest, name, noted(name))
    for stream in (False, True):
        body = {**ASK["/v1/chat/completions"], "stream": stream, "metadata": {"a": "x" * 20_000}}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        assert {name: thread.rpartition("_")[0] for name, thread in threads.items()} == {
            "model_validate": "pronk-requests",
            "check": "pronk-requests",
            "ignored": "pronk-requests",
        }


@pytest.mark.parametrize(
    "route", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"]
)
def test_the_sum_of_a_conversation_is_checked_before_it_is_rendered(
    client: httpx.Client, model: LLM, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    monkeypatch.setattr(type(model.tokenizer), "chat_ids", lambda *_, **__: pytest.fail("rendered"))
    for turns in (
        [{"role": "user", "content": ""}] * 2049,
        [{"role": "user", "content": "x" * 2000}] * 100,
    ):
        body = {"messages": turns} | ({} if route == "/tokenize" else {"max_tokens": 1})
        answer = client.post(route, json=body)
        assert answer.status_code == 400
        assert "expected at most" in answer.json()["error"]["message"]


def test_long_texts_and_lists_of_ids_are_read_like_short_ones(model: LLM) -> None:
    """They take functions of the tokenizers package that let other threads run."""
    tokenizer = model.tokenizer
    text = "def f(x):\n    return 'naïve 😀' <|end|> " * 500
    ids = tokenizer.encode(text)
    assert ids == tokenizer.backend.encode(text).ids
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids)
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert whole == tokenizer.backend.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("item", ["{}", '{"a":1}', "1", "-2.5", "1e5", '[{"a":["x"]}]'])
def test_other_threads_may_run_while_a_body_is_parsed(item: str) -> None:
    """Between two calls of Python functions, no other thread runs; there is one for each value that
    has no limit.
    """
    text = f"[{','.join([item] * 3000)}]"
    num_calls = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        found = parse_json(text)
    finally:
        sys.setprofile(None)
    assert found == json.loads(text)
    assert num_calls >= 3000


@pytest.mark.parametrize("limit", [1, 100, 2**16])
@pytest.mark.parametrize("item", ['""', "[]", "{}", '"a[{\\""'])
def test_values_of_json_are_counted(item: str, limit: int) -> None:
    for number in (limit - 1, limit, limit + 1):
        text = ",".join([item] * number)
        assert has_more_values(text.encode(), limit) == (number > limit)


@pytest.mark.parametrize(
    ("route", "field"),
    [
        ("/v1/completions", "prompt"),
        ("/v1/embeddings", "input"),
        ("/detokenize", "tokens"),
        ("/v1/completions", "stop_token_ids"),
    ],
)
def test_lists_of_too_many_ids_are_refused(client: httpx.Client, route: str, field: str) -> None:
    ids = [5] * (MAX_IDS + 1)
    answer = client.post(route, json=ASK[route] | {field: ids})
    assert answer.status_code == 400
    assert (
        answer.json()["error"]["message"]
        == f"{field}: expected at most 1048576 items, found 1048577"
    )


@pytest.mark.parametrize("place", [0, 20_000, 40_000])
@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("5", "expected a valid integer, found the string '5'"),
        (2**63, "expected less than 9223372036854775808, found 9223372036854775808"),
        (None, "expected a valid integer, found null"),
        ([], "expected a valid integer, found a list"),
    ],
)
def test_a_wrong_id_in_a_long_list_is_named(place: int, wrong: Any, problem: str) -> None:
    """The list is checked in parts, and the index is that in the whole list."""
    ids = [5] * 40_001
    ids[place] = wrong
    with pytest.raises(ApiError, match=re.escape(f"tokens.{place}: {problem}")) as found:
        validate(DetokenizeRequest, {"tokens": ids})
    assert found.value.param == f"tokens.{place}"


def test_other_threads_may_run_while_ids_and_biases_are_checked() -> None:
    """No other thread runs during a call of pydantic: it checks few ids, and none of a list that is
    too long.
    """
    counts = list[int]()

    def check(values: Any) -> Any:
        counts.append(len(values))
        return values

    ids = [*range(100_000)]
    assert _check_ids_in_parts(ids, check) == ids
    biases = {str(token): 0.5 for token in ids}
    assert _check_biases_in_parts(biases, check) == biases
    assert sum(counts) == 2 * len(ids)
    assert max(counts) <= _PART
    counts.clear()
    with pytest.raises(PydanticKnownError, match="at most 1048576 items"):
        _check_ids_in_parts([5] * (MAX_IDS + 1), check)
    assert not counts


def test_a_wrong_bias_among_many_is_named() -> None:
    biases: dict[str, Any] = {str(token): 1 for token in range(50_000)}
    body = {"prompt": "x", "logit_bias": biases}
    assert validate(CompletionRequest, body).logit_bias == biases
    biases["30000"] = "5"
    with pytest.raises(ApiError, match=r"logit_bias\.30000: expected a valid number") as found:
        validate(CompletionRequest, body)
    assert found.value.param == "logit_bias.30000"


@pytest.mark.parametrize("text", ["[[],[]", '{"a": [', '["\u0061",', "[{}, "])
def test_arguments_of_too_many_values_are_refused(client: httpx.Client, text: str) -> None:
    """They are JSON in a text, whose values the limit on a body does not see."""
    for number, status in ((10, 200), (2**16, 400)):
        call = {
            "id": "x",
            "type": "function",
            "function": {"name": "f", "arguments": text * number},
        }
        turns = [
            TURN,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "x", "content": ""},
        ]
        answer = client.post("/v1/chat/completions", json={"messages": turns, "max_tokens": 1})
        assert answer.status_code == status, answer.text
        assert status == 200 or "expected at most 65536 texts, lists and objects" in answer.text


REPORT = {
    "token": "x",
    "logprob": -0.5,
    "bytes": [120],
    "top_logprobs": [{"token": "é", "logprob": -1}] * 20,
}
REPLIES: dict[str, dict[str, Any]] = {
    "log-probabilities": {"choices": [{"index": 0, "logprobs": {"content": [REPORT] * 500}}] * 2},
    "vectors": {"data": [{"index": n, "embedding": [0.5] * 3000} for n in range(4)]},
    "ids": {"tokens": [*range(10_000)], "count": 10_000},
}


def num_values(text: str) -> int:
    return text.count(",") + 1


@pytest.mark.parametrize("kind", REPLIES)
def test_no_call_of_json_writes_a_large_reply(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    written = list[int]()
    to_json = app._to_json

    def note(value: Any) -> str:
        text = to_json(value)
        written.append(num_values(text))
        return text

    monkeypatch.setattr(app, "_to_json", note)
    text = "".join(app._json_parts(REPLIES[kind]))
    assert json.loads(text) == REPLIES[kind]
    assert max(written) <= app._PART < num_values(text)


def test_an_event_of_a_stream_does_not_hold_the_event_loop() -> None:
    """The last one may have the log-probabilities of the whole answer."""
    event = {"type": "response.completed", **REPLIES["log-probabilities"]}
    longest = max(map(len, app._json_parts(event)))
    num_turns = 0

    async def main() -> str:
        async def take_turns() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        other = asyncio.ensure_future(take_turns())
        text = await app._encode([event], "named events")
        other.cancel()
        return text

    text = asyncio.run(main())
    assert text.startswith("event: response.completed\ndata: {")
    assert json.loads(text.partition("data: ")[2]) == event
    assert num_turns >= len(text) // (app._WRITTEN_AT_ONCE + longest) > 10


def test_a_small_event_is_written_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    written = list[Any]()
    to_json = app._to_json
    monkeypatch.setattr(app, "_to_json", lambda value: written.append(value) or to_json(value))
    event = {
        "type": "x",
        "choices": [{"index": 0, "delta": {"content": "word"}, "logprobs": [REPORT]}],
    }
    asyncio.run(app._encode([event], "named events"))
    assert written == [event]


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000])
def test_replies_in_parts_are_the_whole_reply(count: int) -> None:
    body = DetokenizeRequest.model_validate({"tokens": []})
    reply = {
        "data": [{"x": [n, 0.1, "é"]} for n in range(count)],
        "ids": [*range(count)],
        "none": None,
        "s": {"a": []},
    }
    found = _json_response(reply, body)
    assert json.loads(bytes(found.body)) == reply
    assert found.headers["content-type"] == "application/json"


def test_schema_of_the_routes_still_describes_their_bodies(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    for route in ASK:
        schema = paths[route]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert Path(schema["$ref"]).name.endswith("Request")
