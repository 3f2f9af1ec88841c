"""Shapes of requests: what asks for nothing is the same as no field, and what can be read in one
way is read so.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from pronk.server.errors import ApiError, validation_to_api_error
from pronk.server.protocol import tools
from pronk.server.protocol.chat import ChatMessage, ChatRequest
from pronk.server.protocol.completions import CompletionRequest
from pronk.server.protocol.messages import (
    CountTokensRequest,
    MessagesRequest,
    ToolResultBlock,
    ToolUseBlock,
)
from pronk.server.protocol.request import RequestBody
from pronk.server.protocol.responses import CallItem, CallOutputItem, ResponsesRequest
from pronk.server.protocol.small_routes import EmbeddingRequest, ModerationRequest, TokenizeRequest
from pronk.server.protocol.tools import Function, FunctionTool, ToolCall, complete_arguments
from pronk.text.chat.answer_grammar import relax_tools
from server.bodies import CHAT, MESSAGES, RESPONSES, Bodies
from server.serving import Running, running
from server.tool_models import FEW_LAYERS, tool_model

TURNS = [{"role": "user", "content": "Hi"}]
LIMIT = {CHAT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
COUNT = "/v1/messages/count_tokens"


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Server of a model that calls tools and thinks."""
    with running(tool_model(tmp_path_factory.mktemp("qwen3"), "qwen3", FEW_LAYERS)) as made:
        yield made


@pytest.fixture
def asked(tooled: Running) -> Iterator[httpx.Client]:
    with tooled.client() as made:
        yield made


# The smallest valid object of each class with optional fields.
SMALLEST: list[tuple[type[RequestBody], dict[str, Any]]] = [
    (ChatRequest, {"messages": TURNS}),
    (CompletionRequest, {"prompt": "Hi"}),
    (ResponsesRequest, {"input": "Hi"}),
    (MessagesRequest, {"messages": TURNS, "max_tokens": 2}),
    (CountTokensRequest, {"messages": TURNS}),
    (EmbeddingRequest, {"input": "Hi"}),
    (ModerationRequest, {"input": "Hi"}),
    (TokenizeRequest, {"messages": TURNS}),
    (ChatMessage, {"role": "assistant", "content": "x"}),
    (ChatMessage, {"role": "user", "content": "x"}),
    (ChatMessage, {"role": "tool", "content": "x"}),
    (ToolCall, {"function": {"name": "f"}}),
    (FunctionTool, {"function": {"name": "f"}}),
    (Function, {"name": "f"}),
    (ToolUseBlock, {"type": "tool_use", "name": "f"}),
    (ToolResultBlock, {"type": "tool_result"}),
    (CallItem, {"type": "function_call", "name": "f"}),
    (CallOutputItem, {"type": "function_call_output"}),
]
# Empty values that mean something: forms of the answer, any object as arguments, a text of no
# characters.
MEANINGFUL = {
    *(
        ("guided_json", "{}"),
        ("guided_regex", '""'),
        ("guided_choice", "[]"),
        ("guided_grammar", '""'),
    ),
    *(("parameters", "{}"), ("prompt", '""')),
}


@pytest.mark.parametrize(
    ("kind", "smallest"), SMALLEST, ids=lambda value: getattr(value, "__name__", "")
)
def test_empty_optional_fields_are_the_same_as_none(
    kind: type[RequestBody], smallest: dict[str, Any]
) -> None:
    plain = kind.model_validate(smallest).model_dump()
    for name in kind.about.optional:
        for empty in (None, "", [], {}):
            if name not in smallest and (name, json.dumps(empty)) not in MEANINGFUL:
                assert kind.model_validate({**smallest, name: empty}).model_dump() == plain, (
                    name,
                    empty,
                )


def test_empty_schemas_allow_any_value() -> None:
    assert Function.model_validate({"name": "f", "parameters": {}}).parameters == {}
    body = ChatRequest.model_validate({"messages": TURNS, "guided_json": {}})
    assert body.guide_arguments() == {"guided_json": {"json": {}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    body = ChatRequest.model_validate({"messages": TURNS, "response_format": form})
    assert body.guide_arguments() == {"response_format": {"json": {}}}


@pytest.mark.parametrize("value", ["", [], [""], ["", ""]], ids=str)
def test_empty_stop_strings_stop_nothing(client: httpx.Client, value: Any) -> None:
    body = {"prompt": "Hi", "max_tokens": 9, "temperature": 0}
    plain = client.post("/v1/completions", json=body).json()["choices"][0]
    for name in ("stop", "stop_sequences", "bad_words"):
        got = client.post("/v1/completions", json={**body, name: value})
        assert got.status_code == 200, got.text
        assert got.json()["choices"][0]["text"] == plain["text"]
    text = plain["text"]
    stopped = client.post("/v1/completions", json={**body, "stop": ["", text[-2:]]}).json()[
        "choices"
    ][0]
    assert stopped["text"] == text[: text.index(text[-2:])]


def call(**more: Any) -> dict[str, Any]:
    """Return a call of a chat, and its result, with other fields."""
    return {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}", **more}}


def called(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [*calls]}


def result(content: Any = "ok", **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "a", "content": content, **more}


PART = {"type": "text", "text": "Hi"}
SILENT = {"role": "assistant", "content": ""}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
DONE = {"type": "tool_result", "tool_use_id": "a", "content": "ok"}
ITEM = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "ok"}


def used(block: dict[str, Any], answer: dict[str, Any]) -> list[Any]:
    return [
        *TURNS,
        {"role": "assistant", "content": [block]},
        {"role": "user", "content": [answer]},
    ]


# Conversations in an unusual form, and in the usual one.
READ_AS: list[tuple[str, Any, Any]] = [
    *(
        (route, [{"role": "user", "content": content}], [{"role": "user", "content": [PART]}])
        for route in (CHAT, RESPONSES, MESSAGES)
        for content in (["Hi"], PART, [{"text": "Hi"}], {"text": "Hi"})
    ),
    *(
        (route, [{"role": "user", "content": {}}], [{"role": "user", "content": []}])
        for route in (CHAT, RESPONSES, MESSAGES)
    ),
    *(
        (route, [*TURNS, {**SILENT, "content": None}, *TURNS], [*TURNS, SILENT, *TURNS])
        for route in (CHAT, MESSAGES)
    ),
    *(
        (RESPONSES, [*TURNS, {"type": "reasoning", "summary": given}, *TURNS],
         [*TURNS, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Well"}]}, *TURNS])
        for given in ("Well", ["Well"], {"text": "Well"})
    ),
    (RESPONSES, ["Hi"], TURNS),
    (RESPONSES, TURNS[0], TURNS),
    (CHAT, [{**TURNS[0], "tool_call_id": "", "tool_calls": [], "name": ""}], TURNS),
    (CHAT, [{**TURNS[0], "tool_calls": {}, "function_call": None}], TURNS),
    *(
        (CHAT, [*TURNS, called(call(arguments=given)), result()], [*TURNS, called(call(arguments=read)), result()])
        for given, read in [
            (None, "{}"),
            ("", "{}"),
            ("null", "{}"),
            ("[]", "{}"),
            ([], "{}"),
            ("[1]", '{"arguments": [1]}'),
            ("no JSON", '{"arguments": "no JSON"}'),
            ('{"x": NaN, "y": [Infinity]}', '{"x": null, "y": [null]}'),
            ('{"x": 1', '{"x": 1}'),
        ]
    ),
    *(
        (MESSAGES, used({**USE, "input": given}, DONE), used({**USE, "input": read}, DONE))
        for given, read in [(None, {}), ([], {}), ("", {}), ('{"x": 1}', {"x": 1}), ([1], {"arguments": [1]})]
    ),
    *(
        (RESPONSES, [*TURNS, {**ITEM, "arguments": given}, OUTPUT], [*TURNS, ITEM, OUTPUT])
        for given in (None, "", "null", {}, "[]")
    ),
    *(
        (route, given(output), given(read))
        for route, given in (
            (CHAT, lambda output: [*TURNS, called(call()), result(output)]),
            (RESPONSES, lambda output: [*TURNS, ITEM, {**OUTPUT, "output": output}]),
            (MESSAGES, lambda output: used(USE, {**DONE, "content": output})),
        )
        for output, read in [
            (None, ""),
            ([], ""),
            (["ok"], "ok"),
            (PART, "Hi"),
            ([PART, "ok"], "Hi\nok"),
            ({"n": 1}, '{"n": 1}'),
            ([{"n": 1}], '[{"n": 1}]'),
            (5, "5"),
            (True, "true"),
        ]
    ),
    (CHAT, [*TURNS, called({**call(), "id": ""}), result(tool_call_id="")], [*TURNS, called(call()), result()]),
    (RESPONSES, [*TURNS, {**ITEM, "call_id": ""}, {**OUTPUT, "call_id": ""}], [*TURNS, ITEM, OUTPUT]),
    (MESSAGES, used({**USE, "id": ""}, {**DONE, "tool_use_id": ""}), used(USE, DONE)),
    (
        CHAT,
        [*TURNS, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
         {"role": "function", "name": "f", "content": "ok"}],
        [*TURNS, called(call()), result(name="f")],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("route", "given", "read"), READ_AS, ids=str)
def test_conversations_in_unusual_forms_are_read(
    asked: httpx.Client, route: str, given: Any, read: Any
) -> None:
    """Both forms give the same prompt; neither is said to lack a call."""
    field = "input" if route == RESPONSES else "messages"
    options = {LIMIT[route]: 2, "temperature": 0}
    counts = []
    for talk in (given, read):
        answer = asked.post(route, json={field: talk, **options})
        assert answer.status_code == 200, answer.text
        assert "missing" not in answer.headers.get("X-Pronk-Ignored", "")
        usage = answer.json()["usage"]
        cached = usage.get("cache_read_input_tokens", 0)
        counts.append(usage["prompt_tokens"] if route == CHAT else usage["input_tokens"] + cached)
    assert counts[0] == counts[1]


def test_a_result_as_one_text_and_as_parts_is_the_same(asked: httpx.Client) -> None:
    for system in ("Be kind.", ["Be kind."], {"type": "text", "text": "Be kind."}):
        answer = asked.post(COUNT, json={"messages": TURNS, "system": system})
        assert (
            answer.json()
            == asked.post(COUNT, json={"messages": TURNS, "system": "Be kind."}).json()
        )


@pytest.mark.parametrize(
    ("route", "field", "word"),
    [
        (CHAT, "response_format", "json_object"),
        (CHAT, "response_format", "text"),
        (RESPONSES, "text", {"format": "json_object"}),
        (MESSAGES, "tool_choice", "any"),
        (MESSAGES, "tool_choice", "none"),
    ],
)
def test_a_word_stands_for_an_object_with_this_type(
    asked: httpx.Client, route: str, field: str, word: Any
) -> None:
    typed = {"format": {"type": word["format"]}} if isinstance(word, dict) else {"type": word}
    body = {"input" if route == RESPONSES else "messages": TURNS, LIMIT[route]: 9, "temperature": 0}
    if route == MESSAGES:
        body["tools"] = [{"name": "f", "input_schema": {"type": "object"}}]
    replies = [asked.post(route, json={**body, field: value}) for value in (word, typed)]
    assert [reply.status_code for reply in replies] == [200, 200], replies[0].text
    usages = [reply.json()["usage"] for reply in replies]
    counted = [usage.get("completion_tokens", usage.get("output_tokens")) for usage in usages]
    assert counted[0] == counted[1]


def test_tools_are_relaxed_once_per_request(
    asked: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schema may be large, and several parts of the server ask for the tools of a request."""
    sizes = list[int]()

    def relax(parameters: Sequence[Any]) -> Any:
        sizes.append(len(parameters))
        return relax_tools(parameters)

    monkeypatch.setattr(tools, "relax_tools", relax)
    flat = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    for route, tool in (
        (CHAT, TOOL),
        (RESPONSES, flat),
        (RESPONSES, {"type": "namespace", "name": "n", "tools": [flat]}),
        (MESSAGES, {"name": "f", "input_schema": {"type": "object"}}),
    ):
        body = {
            "input" if route == RESPONSES else "messages": TURNS,
            LIMIT[route]: 2,
            "tools": [tool],
        }
        for more in ({}, {"stream": True}):
            assert asked.post(route, json={**body, **more}).status_code == 200
            assert sizes == [1]
            sizes.clear()


@pytest.mark.parametrize("value", [5, 1.5, True])
def test_numbers_are_no_arguments(value: Any) -> None:
    assert complete_arguments(value) is value  # which is refused
    with pytest.raises(ValidationError):
        ToolCall.model_validate(call(arguments=value))


@pytest.mark.parametrize("text", ['{"a": 1}', '{ "a" : 1.50 }', "{}"])
def test_arguments_that_are_an_object_stay_as_they_are(text: str) -> None:
    assert complete_arguments(text) == text


@pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    ("given", "switch", "effort", "budget"),
    [
        ({"reasoning": "high"}, None, "high", None),
        ({"reasoning": True}, True, None, None),
        ({"reasoning": False}, False, None, None),
        ({"reasoning": {"effort": 3}}, None, "3", None),
        ({"reasoning_effort": 3}, None, "3", None),
        ({"reasoning_effort": "HIGH"}, None, "high", None),
        ({"thinking": "enabled"}, True, None, None),
        ({"thinking": True}, True, None, None),
        ({"thinking": {"budget_tokens": 9}}, True, None, 9),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, True, None, None),
        ({"thinking_budget": -1, "think": True}, True, None, None),
        ({"reasoning": {"max_tokens": -1, "enabled": True}}, True, None, None),
        ({"think": 1}, True, None, None),
        ({"think": 0}, False, None, None),
        ({"think": "high"}, None, "high", None),
        ({"enable_thinking": "false"}, False, None, None),
        # Several fields complete each other.
        (
            {"reasoning_effort": "low", "thinking": {"type": "enabled", "budget_tokens": 9}},
            True,
            "low",
            9,
        ),
        ({"think": True, "thinking_budget": 9}, True, None, 9),
        # An effort contradicts no switch.
        ({"reasoning_effort": "medium", "think": False}, False, "medium", None),
    ],
    ids=str,
)
def test_wishes_about_thinking_in_any_form_and_api(
    asked: httpx.Client,
    route: str,
    given: dict[str, Any],
    switch: bool | None,
    effort: str | None,
    budget: int | None,
) -> None:
    kind = {CHAT: ChatRequest, RESPONSES: ResponsesRequest, MESSAGES: MessagesRequest}[route]
    body = {"input" if route == RESPONSES else "messages": TURNS, LIMIT[route]: 2, **given}
    wish = kind.model_validate(body).thinking_wish()  # type: ignore[attr-defined]
    assert (wish.enabled, wish.effort, wish.budget) == (switch, effort, budget)
    assert asked.post(route, json=body).status_code == 200


@pytest.mark.parametrize("value", [{}, "", [], None], ids=str)
@pytest.mark.parametrize(
    "name", ["thinking", "reasoning", "think", "enable_thinking", "reasoning_effort"]
)
def test_thinking_is_off_by_default_in_anthropics_api(name: str, value: Any) -> None:
    body = MessagesRequest.model_validate({"messages": TURNS, "max_tokens": 2, name: value})
    assert body.thinking_wish().enabled is False


def test_an_effort_without_thinking_is_named(asked: httpx.Client) -> None:
    answer = asked.post(
        CHAT, json={"messages": TURNS, "max_tokens": 2, "reasoning_effort": "low", "think": False}
    )
    assert answer.headers["X-Pronk-Ignored"] == "reasoning_effort"


@pytest.mark.parametrize(
    ("route", "more"),
    [
        (CHAT, {"chat_template_kwargs": {"enable_thinking": None, "a": [], "b": {}, "c": ""}}),
        (RESPONSES, {"include": "x"}),
        (RESPONSES, {"metadata": "x"}),
        (RESPONSES, {"metadata": ["x"]}),
        (RESPONSES, {"include": "message.output_text.logprobs"}),
        *(
            (route, {name: value})
            for route in (CHAT, RESPONSES, MESSAGES, "/v1/completions")
            for name, value in {
                "timestamp": 1764000000,
                "created": 1764000000,
                "created_at": 1.5,
                "attempt": 2,
                "turn_index": 4,
                "user_age": 30,
                "retry_count": 1,
                "api_version": 3,
                "dynatemp_low": 1,
                "num_beam_groups": 1,
                "no_repeat_ngram_size": 0,
                "parallel_tool_calls": True,
                "add_generation_prompt": True,
                "tool_choice": {"type": "auto"} if route == MESSAGES else "auto",
                "input_type": "x",  # of /v1/embeddings
                "client_metadata": {"a": 1},  # of /v1/responses
                "container": "x",  # of /v1/messages
            }.items()
        ),
        *(
            (route, {name: value})
            for route in ("/v1/embeddings", "/v1/moderations", "/tokenize")
            for name, value in {
                "user": "me",
                "store": True,
                "mirostat": 0,
                "timestamp": 5,
                "tags": ["x"],
            }.items()
        ),
    ],
    ids=str,
)
def test_options_that_ask_for_nothing_are_accepted(
    asked: httpx.Client, route: str, more: dict[str, Any]
) -> None:
    own: dict[str, dict[str, Any]] = {
        RESPONSES: {"input": "Hi", "max_output_tokens": 2},
        "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
        "/v1/embeddings": {"input": "Hi"},
        "/v1/moderations": {"input": "Hi"},
        "/tokenize": {"prompt": "Hi"},
    }
    answer = asked.post(
        route, json={**own.get(route, {"messages": TURNS, "max_tokens": 2}), **more}
    )
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("route", "more", "param"),
    [
        ("/v1/embeddings", {"input": "Hi", "mirostat": 2}, "mirostat"),
        (CHAT, {"messages": TURNS, "background": True}, "background"),
        (CHAT, {"messages": TURNS, "previous_response_id": "r"}, "previous_response_id"),
        (CHAT, {"messages": TURNS, "input": "x"}, "input"),
        (RESPONSES, {"input": "Hi", "guided_json": {"type": "object"}}, "guided_json"),
        ("/v1/completions", {"prompt": "Hi", "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": TURNS, "max_time": 5}, "max_time"),
    ],
    ids=str,
)
def test_options_of_other_routes_that_change_the_answer_are_refused_with_advice(
    asked: httpx.Client, route: str, more: dict[str, Any], param: str
) -> None:
    error = asked.post(route, json=more).json()["error"]
    assert (error["param"], error["code"]) == (param, "unsupported")
    assert "remove it" not in error["message"]


TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}
ANSWERED = [*TURNS, {"role": "assistant", "content": "Well"}]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"messages": ANSWERED, "continue_final_message": True},
        {"messages": ANSWERED, "continue_final_message": True, "add_generation_prompt": False},
        {"messages": [*TURNS, called(call()), result()], "tools": [TOOL]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]},
    ],
    ids=str,
)
def test_tokens_of_a_conversation_are_those_of_a_chat(
    asked: httpx.Client, more: dict[str, Any]
) -> None:
    body = {"messages": TURNS, "max_tokens": 1, "temperature": 0, **more}
    counted = asked.post("/tokenize", json=body)
    answer = asked.post(CHAT, json=body)
    assert counted.status_code == answer.status_code == 200, counted.text
    assert counted.json()["count"] == answer.json()["usage"]["prompt_tokens"]


def test_a_conversation_may_end_without_the_header_of_an_answer(
    tooled: Running, asked: httpx.Client
) -> None:
    got = asked.post("/tokenize", json={"messages": TURNS, "add_generation_prompt": False}).json()[
        "tokens"
    ]
    assert got == tooled.llm.tokenizer.chat_ids(TURNS, add_generation_prompt=False)
    assert asked.post("/tokenize", json={"messages": TURNS, "tools": [{}]}).json()["error"]["param"]


ROUTES: dict[type[RequestBody], str] = {
    ChatRequest: CHAT,
    ResponsesRequest: RESPONSES,
    MessagesRequest: MESSAGES,
}
WRONG: Sequence[Any] = (
    5,
    -7,
    True,
    "?",
    [5],
    ["x"],
    {"x": 1},
    {"type": 5},
    {"type": "?"},
    {"text": 5},
    [[[]]],
    1e9,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in a body."""
    if path:
        yield path
    pairs = (
        value.items()
        if isinstance(value, Mapping)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in pairs:
        yield from places(inner, (*path, key))


def replaced(body: Any, path: tuple[Any, ...], value: Any, *, remove: bool) -> Any:
    """Return a body with another value at a path, or without the value."""
    changed = json.loads(json.dumps(body))
    *parents, last = path
    parent = changed
    for part in parents:
        parent = parent[part]
    if remove:
        del parent[last]
    else:
        parent[last] = value
    return changed


def resolves(body: Any, names: list[str]) -> bool:
    """Return whether a path of names and indices leads to a value of a body, or to a missing field
    of one.
    """
    value = body
    for number, name in enumerate(names, 1):
        if isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, Mapping) and name in value:
            value = value[name]
        else:
            return isinstance(value, Mapping) and number == len(names)
    return True


@pytest.mark.parametrize("count", [400, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ROUTES, ids=lambda kind: kind.__name__)
def test_errors_name_fields_as_the_client_wrote_them(kind: type[RequestBody], count: int) -> None:
    """For bodies with a wrong value somewhere, the field of the error is in the body, or is missing
    in it.
    """
    num_errors = 0
    for seed in range(count):
        draw = random.Random(f"{kind.__name__} {seed}")
        body = Bodies(draw).body(ROUTES[kind])
        path = draw.choice([*places(body)])
        wrong = replaced(body, path, draw.choice(WRONG), remove=draw.random() < 0.2)
        try:
            kind.model_validate(wrong)
        except ApiError as error:
            param = error.param
        except ValidationError as error:
            param = validation_to_api_error(error.errors(), wrong).param
        else:
            continue
        num_errors += 1
        names = (param or "").split(".") if param else []
        assert resolves(wrong, names), (param, wrong)
    assert num_errors > count // 20


@pytest.mark.parametrize(
    ("route", "more", "param"),
    [
        (CHAT, {"tool_choice": {}, "n": 0}, "n"),
        (CHAT, {"tool_choice": {"x": 1}}, "tool_choice.type"),
        (CHAT, {"stop": {"x": 1}}, "stop"),
        (CHAT, {"messages": [{"role": "user", "content": {"type": "image_url"}}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        (CHAT, {"n_predict": "x", "max_tokens": None}, "n_predict"),
        (CHAT, {"options": {"num_predict": "x"}, "max_tokens": None}, "options.num_predict"),
        (CHAT, {"options": {"temperature": "x"}}, "options.temperature"),
        (CHAT, {"options": {"temprature": 1}}, "options.temprature"),
        (CHAT, {"options": {"mirostat": 2}}, "options.mirostat"),
        (CHAT, {"stopping_strings": ["x" * 300]}, "stopping_strings"),
        (CHAT, {"tools": [{"name": "f", "input_schema": 5}]}, "tools.0.input_schema"),
        (CHAT, {"tools": [{"name": "f", "parameters": 5}]}, "tools.0.parameters"),
        (CHAT, {"format": "xml"}, "format"),
        (CHAT, {"json_schema": {"type": "string", "pattern": "("}}, "json_schema"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "body": 1}, 5]}, "messages.1"),
        (RESPONSES, {"max_tokens": 0}, "max_tokens"),
        (RESPONSES, {"stop_sequences": ["x" * 300]}, "stop_sequences"),
        (RESPONSES, {"input": [{"type": "additional_tools",
                                "tools": [{"type": "function", "name": "f", "parameters": 5}]},
                               *TURNS]}, "input.0.tools.0.parameters"),
    ],
    ids=str,
)  # fmt: skip
def test_errors_name_the_field_of_another_name_or_form(
    asked: httpx.Client, route: str, more: dict[str, Any], param: str
) -> None:
    own: dict[str, Any] = (
        {"input": "Hi"} if route == RESPONSES else {"messages": TURNS, "max_tokens": 2}
    )
    answer = asked.post(route, json={**own, **more})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"].startswith(f"{param}: ")
    assert error.get("param", param) == param


def test_errors_about_stop_sequences_name_them(asked: httpx.Client) -> None:
    body = {"messages": TURNS, "max_tokens": 2, "stop_sequences": ["x" * 300]}
    assert asked.post(MESSAGES, json=body).json()["error"]["message"].startswith("stop_sequences: ")
