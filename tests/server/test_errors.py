"""Messages of refused requests: each names its field once, what is there, and the form that the
client wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from pronk.async_llm import AdmissionLimit
from pronk.base.errors import OverloadedError
from pronk.server.errors import ApiError, validation_to_api_error
from server.serving import Running, running
from server.tool_models import tool_model

TURN = {"role": "user", "content": "Hi"}
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
ASK: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [TURN], "max_tokens": 1},
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 1},
    RESPONSES: {"input": "Hi", "max_output_tokens": 1},
    MESSAGES: {"messages": [TURN], "max_tokens": 1},
}


@pytest.fixture(scope="module", params=["hermes", "qwen3"])
def tooled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """Serve a model with calls alone, and one with calls and thoughts."""
    with running(tool_model(tmp_path_factory.mktemp(request.param), request.param)) as made:
        yield made


def refused(client: httpx.Client, route: str, fields: dict[str, Any]) -> str:
    answer = client.post(route, json=ASK[route] | fields)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


@pytest.mark.parametrize("route", ASK)
@pytest.mark.parametrize(
    "drafter",
    [
        "psychic",
        "suffix(",
        "suffix(size=1)",
        "suffix(num_nodes=0)",
        "retrieval(path='x')",
        "first_of(psychic)",
    ],
)
def test_an_error_of_an_option_names_its_field_once(
    client: httpx.Client, route: str, drafter: str
) -> None:
    message = refused(client, route, {"drafter": drafter})
    assert message.startswith("drafter: ")
    assert not message.startswith("drafter: drafter: ")


@pytest.mark.parametrize(
    ("route", "fields", "expected"),
    [
        (CHAT, {"messages": []}, "messages: expected at least 1 item, found 0"),
        (MESSAGES, {"messages": []}, "messages: expected at least 1 item, found 0"),
        (
            COMPLETIONS,
            {"cache_salt": "x" * 2000},
            "cache_salt: expected at most 1024 characters, found 2000",
        ),
        (
            CHAT,
            {"messages": [TURN | {"name": "x" * 300}]},
            "expected at most 256 characters, found 300",
        ),
    ],
)
def test_counts_of_one(
    client: httpx.Client, route: str, fields: dict[str, Any], expected: str
) -> None:
    assert expected in refused(client, route, fields)


QUOTED = ("at most 1 classes", "at least 1 items", "at most 1 requests")


@pytest.mark.parametrize("quoted", QUOTED)
@pytest.mark.parametrize("field", ["model", "drafter"])
def test_a_quoted_text_is_not_changed(client: httpx.Client, field: str, quoted: str) -> None:
    answer = client.post(COMPLETIONS, json={"prompt": "x", field: quoted})
    assert quoted in answer.json()["error"]["message"]


@pytest.mark.parametrize("quoted", QUOTED)
def test_the_message_of_an_error_is_that_of_its_writer(quoted: str) -> None:
    assert ApiError(400, f"expected another, found {quoted}", "invalid_value").message.endswith(
        quoted
    )


@pytest.mark.parametrize(("limit", "expected"), [(1, "1 request "), (2, "2 requests ")])
def test_limits_of_one_and_of_several(limit: int, expected: str) -> None:
    admission = AdmissionLimit(limit)
    with (
        admission.hold(limit),
        pytest.raises(OverloadedError, match=f"expected at most {expected}"),
    ):
        ExitStack().enter_context(admission.hold(1))


REQUIRED: list[tuple[str, dict[str, Any], tuple[str | int, ...]]] = [
    (CHAT, {}, ("messages",)),
    (CHAT, {"messages": [TURN]}, ("messages", 0, "role")),
    (CHAT, {"messages": [TURN]}, ("messages", 0, "content")),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, ("tools", 0, "function")),
    (MESSAGES, {}, ("messages",)),
    (MESSAGES, {}, ("max_tokens",)),
    (MESSAGES, {"messages": [TURN]}, ("messages", 0, "content")),
    (RESPONSES, {"text": {"format": {"type": "text", "name": "x"}}}, ("text", "format", "type")),
]


@pytest.mark.parametrize("is_null", [True, False])
@pytest.mark.parametrize(("route", "fields", "path"), REQUIRED, ids=str)
def test_a_missing_value_is_null_or_no_field(
    client: httpx.Client,
    route: str,
    fields: dict[str, Any],
    path: tuple[str | int, ...],
    is_null: bool,
) -> None:
    body = _without(ASK[route] | fields, path, is_null=is_null)
    answer = client.post(route, json=body)
    assert answer.status_code == 400
    found = "null; give one" if is_null else "no such field; add it"
    assert f"{'.'.join(map(str, path))}: expected a value, found {found}" in answer.text


def _without(value: Any, path: tuple[str | int, ...], *, is_null: bool) -> Any:
    """Return a value whose field at a path is missing, or null."""
    first, *rest = path
    if isinstance(value, list):
        return [_without(each, tuple(rest), is_null=is_null) for each in value]
    if rest:
        return value | {first: _without(value[first], tuple(rest), is_null=is_null)}
    others = {name: each for name, each in value.items() if name != first}
    return others | {first: None} if is_null else others


TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_regex": r"(a)\1"}, "guided_regex"),
    ({"guided_grammar": "start: nonsense"}, "guided_grammar"),
    ({"structured_outputs": {"regex": "[z-a]"}}, "structured_outputs.regex"),
]


@pytest.mark.parametrize("more", [{}, {"tools": [TOOL]}], ids=["no tools", "tools"])
@pytest.mark.parametrize(("form", "field"), FORMS, ids=str)
def test_an_error_of_a_form_quotes_the_form_alone(
    tooled: Running, form: dict[str, Any], field: str, more: dict[str, Any]
) -> None:
    """Thoughts and calls are in the same grammar as the form; clients know neither."""
    with tooled.client() as client:
        message = refused(client, CHAT, form | more)
        alone = refused(client, COMPLETIONS, form)
    assert message == alone
    assert message.startswith(f"{field}: expected ")
    assert re.search("look_up|think|tool", message) is None


SKIPPED: list[tuple[str, dict[str, Any], Any]] = [
    (CHAT, {"type": "web_search"}, {"type": "web_search"}),
    (
        CHAT,
        {"type": "custom", "name": "search"},
        {"type": "function", "function": {"name": "search"}},
    ),
    (
        CHAT,
        {"type": "function", "function": {"name": "a b"}},
        {"type": "function", "function": {"name": "a b"}},
    ),
    (
        CHAT,
        {"type": "custom", "name": "search"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "search"}]},
    ),
    (RESPONSES, {"type": "web_search"}, {"type": "web_search"}),
    (RESPONSES, {"type": "mcp", "name": "search"}, {"type": "function", "name": "search"}),
    (
        MESSAGES,
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "tool", "name": "web_search"},
    ),
    (MESSAGES, {"type": "bash_20250124", "name": "bash"}, {"type": "tool", "name": "bash"}),
]
WORDS = ("function", "tool", "custom", "any", "auto", "none", "required", "allowed_tools")


@pytest.mark.parametrize(("route", "tool", "choice"), SKIPPED, ids=str)
def test_a_choice_of_a_tool_that_the_server_skips(
    tooled: Running, route: str, tool: dict[str, Any], choice: Any
) -> None:
    with tooled.client() as client:
        message = refused(client, route, {"tools": [tool], "tool_choice": choice})
        assert message.startswith("tool_choice: expected a function of the client, found '")
        assert "a tool that this server skips; choose another" in message
        required = {"type": "any"} if route == MESSAGES else "required"
        message = refused(client, route, {"tools": [tool], "tool_choice": required})
        expected = (
            "expected tools with 'required', found only tools that this server skips; add functions"
        )
        assert message == f"tool_choice: {expected}"


def _offer(route: str, tool: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that offers a function, which it chooses, and another tool."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}}
    match route:
        case "/v1/messages":
            function = {"name": "look_up", "input_schema": schema}
            choice = {"type": "tool", "name": "look_up"}
        case "/v1/responses":
            function = {"type": "function", "name": "look_up", "parameters": schema}
            choice = {"type": "function", "name": "look_up"}
        case _:
            function = {"type": "function", "function": {"name": "look_up", "parameters": schema}}
            choice = {"type": "function", "function": {"name": "look_up"}}
    return {"tools": [function, tool], "tool_choice": choice}


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("route", [CHAT, MESSAGES, RESPONSES])
def test_a_skipped_tool_may_have_a_word_of_the_api_as_its_name(
    tooled: Running, route: str, name: str
) -> None:
    """Names of tools and types of choices are different things."""
    kind = f"{name}_of_a_server" if name in ("function", "custom") else name
    with tooled.client() as client:
        for tool in ({"type": "x", "name": name}, {"type": kind, "name": "x"}):
            answer = client.post(route, json=ASK[route] | _offer(route, tool))
            assert answer.status_code == 200, answer.text


def test_a_name_is_not_compared_with_each_index_of_a_list() -> None:
    class Name(str):
        """Counts comparisons; ``name in range(...)`` would make one per number."""

        __slots__ = ()
        comparisons = 0

        def __eq__(self, other: object) -> bool:
            Name.comparisons += 1
            return str.__eq__(self, str(other))

        __hash__ = str.__hash__

    problem = {
        "type": "int_type",
        "loc": ("prompt", Name("list[int]"), 70_000),
        "input": 1,
        "msg": "no",
    }
    error = validation_to_api_error([problem], {"prompt": [1] * 70_001})
    assert error.param == "prompt.70000"
    assert Name.comparisons < 10
