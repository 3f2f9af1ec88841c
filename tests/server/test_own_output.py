"""Whatever the server returned is accepted again, in all three APIs, wherever the answer was cut."""

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pronk.server.protocol.tools import complete_arguments
from server.serving import Running, running
from server.tool_models import tool_model

FIELDS = {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}, "deep": {}}
SCHEMA = {"type": "object", "properties": FIELDS, "required": ["city", "days", "deep"]}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TOOLS: dict[str, Any] = {
    CHAT: {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
    RESPONSES: {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
    MESSAGES: {"tools": [{"name": "weather", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
}
TEXT: dict[str, Any] = {CHAT: {}, RESPONSES: {}, MESSAGES: {}}
LIMIT = {CHAT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
USER = {"role": "user", "content": "Weather?"}
FAMILIES = ("hermes", "qwen3", "mistral list", "llama", "channels")


@pytest.fixture(scope="module", params=FAMILIES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tool_model(tmp_path_factory.mktemp("model"), request.param)) as made:
        yield made


def joined_chat(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of a streamed chat as OpenAI's client joins it: fields that never came are null."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                if delta.get(name) is not None:
                    message[name] = (message.get(name) or "") + delta[name]
            for part in delta.get("tool_calls", []):
                call = calls.setdefault(part["index"], {"function": {"arguments": ""}})
                call |= {name: part[name] for name in ("id", "type", "index") if name in part}
                call["function"] |= {name: value for name, value in part["function"].items() if name != "arguments"}
                call["function"]["arguments"] += part["function"]["arguments"]
    return message | ({"tool_calls": [*calls.values()]} if calls else {"tool_calls": None})


def history(route: str, client: httpx.Client, body: dict[str, Any], *, stream: bool) -> list[Any]:
    """Return the server's answer as the client sends it back."""
    if not stream:
        reply = client.post(route, json=body).json()
        if route == CHAT:
            return [reply["choices"][0]["message"]]
        return list(reply["output"]) if route == RESPONSES else [{"role": "assistant", "content": reply["content"]}]
    text = client.post(route, json={**body, "stream": True}).text
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in data if line != "[DONE]"]
    if route == CHAT:
        return [joined_chat(events)]
    if route == RESPONSES:
        return list(events[-1]["response"]["output"])
    blocks: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = event["content_block"] | {"partial": ""}
        elif event["type"] == "content_block_delta":
            (value,) = [value for name, value in event["delta"].items() if name != "type"]
            blocks[event["index"]]["partial"] += value if event["delta"]["type"] != "signature_delta" else ""
    for block in blocks.values():
        partial = block.pop("partial")
        if block["type"] == "tool_use":  # Anthropic's client reads the incomplete JSON
            block["input"] = json.loads(complete_arguments(partial) or "{}")
        else:
            block[block["type"]] = partial
    return [{"role": "assistant", "content": [*blocks.values()]}]


def results(route: str, answer: list[Any]) -> list[Any]:
    """Return the next message: the results of all calls, or a text of the user."""
    if route == CHAT:
        calls = answer[0].get("tool_calls") or []
        return [*({"role": "tool", "tool_call_id": call["id"], "content": "?"} for call in calls), USER]
    if route == RESPONSES:
        calls = [item for item in answer if item["type"] == "function_call"]
        return [*({"type": "function_call_output", "call_id": c["call_id"], "output": "?"} for c in calls), USER]
    ids = [block["id"] for block in answer[0]["content"] if block["type"] == "tool_use"]
    blocks = [{"type": "tool_result", "tool_use_id": ident, "content": "?"} for ident in ids]
    return [{"role": "user", "content": [*blocks, {"type": "text", "text": "Weather?"}]}]


@pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES])
def test_cut_answers_are_accepted_again(server: Running, route: str) -> None:
    """Answers that ``max_tokens`` cuts at a random place: within thoughts, texts, names and arguments of calls."""
    draw = random.Random(f"{route}")
    field = "input" if route == RESPONSES else "messages"
    num_calls = 0
    with server.client() as client:
        for number in range(12):
            options = (TOOLS if number % 3 else TEXT)[route]
            body = {field: [USER], LIMIT[route]: draw.randint(1, 90), "seed": number, "temperature": 1.0, **options}
            answer = history(route, client, body, stream=number % 2 == 1)
            num_calls += "weather" in json.dumps(answer)
            again = [USER, *answer, *results(route, answer)]
            for following in (again, again[:-1]):  # also without a further message of the user
                got = client.post(route, json={**body, field: following, LIMIT[route]: 1})
                assert got.status_code == 200, (got.text, json.dumps(following))
    assert num_calls > 1
    assert server.drained


@pytest.mark.parametrize(
    ("cut", "whole"),
    [
        ("", ""),
        ("{", {}),
        ('{"a', {}),
        ('{"a": ', {}),
        ('{"a": "b', {"a": "b"}),
        ('{"a": "b\\', {"a": "b"}),
        ('{"a": "\\ud83d', {"a": ""}),
        ('{"a": [1, {"b": "c"', {"a": [1, {"b": "c"}]}),
        ('{"a": 1, "b": tr', {"a": 1}),
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
    ],
)
def test_incomplete_arguments_are_completed(cut: Any, whole: Any) -> None:
    completed = complete_arguments(cut)
    assert (json.loads(completed) if completed else completed) == whole


def test_every_prefix_of_arguments_is_completed_to_an_object() -> None:
    value = {"a": 'x"\\\n😀é', "b": [1.5e-3, True, None, {"c": []}], "long key": {"d": "y" * 20}}
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        for end in range(1, len(text) + 1):
            completed = json.loads(complete_arguments(text[:end]))
            assert isinstance(completed, dict)
        assert completed == value


def test_arguments_that_are_no_json_stay_as_they_are() -> None:
    for text in ("garbage", "}{", "[" * 10_000):
        assert complete_arguments(text) == text or json.loads(complete_arguments(text)) is not None
