"""Whatever the server returned is accepted again, in all three APIs, wherever the answer was
cut.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from covering import covering
from pronk.server.protocol.tools import complete_arguments
from server.replies import answer_of, results
from server.serving import Running, running
from server.tool_models import FEW_LAYERS, SOURCES, tool_model

FIELDS = {
    "city": {"type": "string"},
    "days": {"type": "array", "items": {"type": "integer"}},
    "deep": {},
}
SCHEMA = {"type": "object", "properties": FIELDS, "required": ["city", "days", "deep"]}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
TOOLS: dict[str, Any] = {
    CHAT: {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
    RESPONSES: {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
    MESSAGES: {
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
    },
}
TEXT: dict[str, Any] = {CHAT: {}, RESPONSES: {}, MESSAGES: {}}
LIMIT = {CHAT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
USER = {"role": "user", "content": "Weather?"}
FAMILIES = tuple(SOURCES)


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    with running(tool_model(tmp_path_factory.mktemp("model"), request.param, FEW_LAYERS)) as made:
        yield made


def ask(route: str, client: httpx.Client, body: dict[str, Any]) -> list[Any]:
    """Return the server's answer as the client sends it back."""
    reply = client.post(route, json=body)
    assert reply.status_code == 200, reply.text
    return answer_of(route, reply, stream=body["stream"])


@pytest.mark.few(6)
@pytest.mark.parametrize("count", [4, pytest.param(24, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("server", "route"),
    covering(FAMILIES, [CHAT, RESPONSES, MESSAGES], strength=1),
    indirect=["server"],
)
def test_cut_answers_are_accepted_again(server: Running, route: str, count: int) -> None:
    """Answers that ``max_tokens`` cuts at a random place: within thoughts, texts, names and
    arguments of calls.
    """
    draw = random.Random(f"{route} {count}")
    field = "input" if route == RESPONSES else "messages"
    num_calls = 0
    with server.client() as client:
        for number in range(count):
            options = (TOOLS if number % 3 else TEXT)[route]
            body = {
                field: [USER],
                LIMIT[route]: draw.randint(1, 90),
                "seed": number,
                "temperature": 1.0,
                **options,
            }
            body["thinking_budget"] = draw.randint(1, 40)
            answer = ask(route, client, {**body, "stream": number % 2 == 1})
            num_calls += "weather" in json.dumps(answer)
            again = [USER, *answer, *results(route, answer)]
            for following in (again, again[:-1]):  # also without a further message of the user
                got = client.post(route, json={**body, field: following, LIMIT[route]: 1})
                assert got.status_code == 200, (got.text, json.dumps(following))
    assert num_calls
    assert server.drained


@pytest.mark.parametrize(
    ("cut", "whole"),
    [
        ('{"a": "\\ud83d"}', {"a": "\ufffd"}),
        ('{"a": "\\ud83d\\ude00"}', {"a": "\U0001f600"}),
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
