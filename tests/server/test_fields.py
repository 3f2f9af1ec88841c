"""Fields that pronk does not have: what changes the answer is refused, what asks for nothing is
accepted and named.
"""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from pronk import LLM
from pronk.server.protocol.chat import ChatRequest
from pronk.server.protocol.completions import CompletionRequest
from pronk.server.protocol.field_report import IGNORED_HEADER, report_header
from server.serving import KEY, Running, running
from server.tool_models import FEW_LAYERS, tool_model

ASK: dict[str, Any] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
}
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
CLEAR_THOUGHTS = {
    "edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}]
}


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Server of a model that calls tools and thinks."""
    with running(tool_model(tmp_path_factory.mktemp("qwen3"), "qwen3", FEW_LAYERS)) as made:
        yield made


def ignored(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    header = answer.headers.get(IGNORED_HEADER, "")
    return [unquote(path) for path in header.split(", ")] if header else []


ACCEPTED: list[tuple[str, dict[str, Any], list[str]]] = [
    *(
        (route, {name: value}, [name])
        for route in ASK
        for name, value in {
            "store": True,
            "user": "me",
            "metadata": {"a": {"b": [1]}},
            "service_tier": "flex",
            "prompt_cache_key": "k",
            "prompt_cache_retention": "24h",
            "cache_prompt": True,
            "keep_alive": "5m",
            "id_slot": 3,
            "verbosity": "low",
            "x_trace": "abc",
            "my_session_id": "abc",
            "client_metadata": {"a": "b"},
        }.items()
        if not (route == RESPONSES and name == "metadata")  # which a response repeats
    ),
    (CHAT, {"stream_options": {"include_obfuscation": True, "new": 1}}, ["stream_options.include_obfuscation"]),
    (CHAT, {"messages": [{"role": "user", "content": "Hi", "phase": "x"}]}, ["messages[0].phase"]),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "e"}}]}]},
        ["messages[0].content[0].cache_control"],
    ),
    (RESPONSES, {"prediction": {"type": "content", "content": "x"}}, ["prediction"]),
    (MESSAGES, {"prediction": {"type": "content", "content": "x"}}, ["prediction"]),
    (RESPONSES, {"truncation": "auto"}, ["truncation"]),
    (RESPONSES, {"text": {"verbosity": "low"}}, ["text.verbosity"]),
    (RESPONSES, {"reasoning": {"summary": "auto"}}, ["reasoning.summary"]),
    (MESSAGES, {"context_management": CLEAR_THOUGHTS}, ["context_management"]),
    (MESSAGES, {"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, ["mcp_servers"]),
    (
        MESSAGES,
        {"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "scope": "global"}}]},
        ["system[0].cache_control"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("route", "more", "expected"), ACCEPTED)
@pytest.mark.parametrize("stream", [False, True])
def test_fields_that_ask_for_nothing_are_accepted_and_named(
    client: httpx.Client, route: str, more: dict[str, Any], expected: list[str], *, stream: bool
) -> None:
    answer = client.post(route, json={**ASK[route], "stream": stream, **more})
    assert set(expected) <= {*ignored(answer)}


@pytest.mark.parametrize("route", ASK)
@pytest.mark.parametrize(
    "more",
    [
        {"store": False},
        {"mirostat": 0, "typical_p": 1.0, "dry_multiplier": 0.0, "xtc_probability": 0},
        {"top_k": -1},
        {
            "skip_special_tokens": True,
            "use_beam_search": False,
            "best_of": 1,
            "truncate_prompt_tokens": -1,
        },
        {
            "unheard_of": None,
            "unheard_of_2": False,
            "unheard_of_3": [],
            "unheard_of_4": {},
            "unheard_of_5": "",
        },
    ],
    ids=str,
)
def test_neutral_values_are_the_same_as_no_field(
    client: httpx.Client, route: str, more: dict[str, Any]
) -> None:
    body = {**ASK[route], "temperature": 0}
    plain = client.post(route, json=body)
    got = client.post(route, json={**body, **more})
    assert [name for name in ignored(got) if name != "store"] == []
    assert text_of(got.json()) == text_of(plain.json()) != ""


@pytest.mark.parametrize("route", ASK)
def test_do_sample_chooses_the_temperature(client: httpx.Client, route: str) -> None:
    """Without a temperature, false is greedy; true samples at 1 if the model is greedy."""

    def text(**options: Any) -> str:
        return text_of(client.post(route, json={**ASK[route], "seed": 3, **options}).json())

    assert text(do_sample=False) == text(temperature=0)
    assert text(do_sample=True) == text(temperature=1)


def text_of(reply: Any) -> str:
    """Return the text of a reply in any of the formats."""
    if "choices" in reply:
        choice = reply["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    if "output" in reply:
        return "".join(part["text"] for item in reply["output"] for part in item.get("content", []))
    return "".join(block.get("text", "") for block in reply["content"])


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    *(
        (route, {name: value}, name, advice)
        for route in ASK
        for name, value, advice in (
            ("mirostat", 2, "use min_p"),
            ("typical_p", 0.5, "use top_p or min_p"),
            ("skip_special_tokens", False, "leave the field out"),
            ("images", ["x"], "send text only"),
            ("use_beam_search", True, "use n"),
            ("temprature", 0.5, "use temperature"),
            ("temprature", 0, "use temperature"),
            ("seeed", [], "use seed"),
            ("nonsense", 1, "remove it"),
        )
    ),
    (
        CHAT,
        {"grammar": "root ::= x"},
        "grammar",
        "use guided_grammar, in llguidance's dialect of Lark",
    ),
    (RESPONSES, {"grammar": "root ::= x"}, "grammar", "use text.format"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions", "use tools"),
    (CHAT, {"echo": True}, "echo", "use /v1/completions"),
    (CHAT, {"modalities": ["audio"]}, "modalities", "the model answers with text"),
    (
        RESPONSES,
        {"previous_response_id": "r"},
        "previous_response_id",
        "send the whole conversation in input",
    ),
    (RESPONSES, {"background": True}, "background", "read the stream instead"),
    (RESPONSES, {"messages": [{}]}, "messages", "use input"),
    (
        MESSAGES,
        {"response_format": {"type": "json_object"}},
        "response_format",
        "use output_config.format",
    ),
    (CHAT, {"options": {"mirostat": 1}}, "options.mirostat", "use min_p"),
    *(
        (route, {name: value}, name, "remove it")
        for route in ASK
        for name, value in (
            ("stop_words", ["x"]),
            ("system_prompt", "x"),
            ("response_schema", {"type": "object"}),
            ("json_mode", True),
            ("generation_config", {"a": 1}),
            ("banned_strings", ["x"]),
            ("greedy", True),
        )
    ),
    (CHAT, {"instructions": "x"}, "instructions", "remove it"),
    (CHAT, {"typical_p": 0}, "typical_p", "use top_p or min_p"),
    (RESPONSES, {"image": "x"}, "image", "send text only"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "x", "images": ["x"]}]},
        "messages.0.images",
        "send text only",
    ),
]


@pytest.mark.parametrize(("route", "more", "param", "advice"), REFUSED)
def test_fields_that_change_the_answer_are_refused_with_what_to_use(
    client: httpx.Client, route: str, more: dict[str, Any], param: str, advice: str
) -> None:
    answer = client.post(route, json={**ASK[route], **more})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error.get("param", param) == param  # Anthropic's errors have no such field
    assert error["message"].startswith(f"{param}: expected ")
    assert error["message"].endswith(advice)


@pytest.mark.parametrize(
    ("route", "alias", "own"),
    [
        *((route, {"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}) for route in ASK),
        (CHAT, {"n_predict": 3}, {"max_tokens": 3}),
        (CHAT, {"options": {"num_predict": 3, "num_ctx": 4096}}, {"max_tokens": 3}),
        (CHAT, {"random_seed": 3, "temperature": 1}, {"seed": 3, "temperature": 1}),
        ("/v1/completions", {"max_new_tokens": 3}, {"max_tokens": 3}),
        (RESPONSES, {"max_tokens": 3}, {"max_output_tokens": 3}),
        (MESSAGES, {"max_completion_tokens": 3}, {"max_tokens": 3}),
        (MESSAGES, {"stop": ["e"]}, {"stop_sequences": ["e"]}),
    ],
)
def test_other_names_of_a_field_are_read_as_that_field(
    client: httpx.Client, route: str, alias: dict[str, Any], own: dict[str, Any]
) -> None:
    limits = {"max_tokens", "max_output_tokens"}
    limited = {name for name in (*alias, *own) if "max" in name or name in ("n_predict", "options")}
    body = {name: value for name, value in ASK[route].items() if not (limited and name in limits)}
    body = {"temperature": 0, **body}
    named = client.post(route, json={**body, **own})
    got = client.post(route, json={**body, **alias})
    assert text_of(got.json()) == text_of(named.json()) != ""
    assert any("(as " in path for path in ignored(got))
    assert ignored(named) == []


def test_no_limit_of_top_k_is_none_whatever_is_recommended() -> None:
    body = CompletionRequest.model_validate({"prompt": "x", "top_k": -1})
    assert body.params(1).top_k == 0
    assert body.top_k is not None  # so that the recommended value does not replace it


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OTHER_SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}}}
ON = {"type": "enabled"}
OFF = {"type": "disabled"}
# Two fields that mean the same: the first with a value, the second with the same value and with
# another one.
PAIRS: list[tuple[str, dict[str, Any], str, Any, Any]] = [
    *(
        (route, {"repetition_penalty": 1.5}, name, 1.5, 1.2)
        for route in ASK
        for name in ("repeat_penalty", "rep_pen", "options.repeat_penalty", "options.repetition_penalty")
    ),
    *((route, {"temperature": 0.5}, "options.temperature", 0.5, 1.5) for route in ASK),
    *((route, {"seed": 3}, "random_seed", 3, 4) for route in ASK),
    *(
        (route, {"stop_sequences" if route == MESSAGES else "stop": ["x"]}, name, same, ["y"])
        for route in ASK
        for name in ("stop" if route == MESSAGES else "stop_sequences", "stopping_strings", "options.stop")
        for same in (["x"], "x")
    ),
    *((CHAT, {"max_tokens": 2}, name, 2, 3) for name in ("max_completion_tokens", "n_predict", "options.num_predict")),
    *((RESPONSES, {}, name, 2, 3) for name in ("max_tokens", "max_completion_tokens", "num_predict")),
    *((MESSAGES, {}, name, 2, 3) for name in ("max_output_tokens", "max_new_tokens")),
    (CHAT, {"max_tokens": None, "n_predict": 3}, "max_new_tokens", 3, 40),
    (CHAT, {"max_tokens": None, "n_predict": 3}, "max_completion_tokens", 3, 40),
    (CHAT, {"n": 1}, "n_cmpl", 1, 2),
    (CHAT, {"format": SCHEMA}, "json_schema", SCHEMA, OTHER_SCHEMA),
    (CHAT, {"response_format": {"type": "json_object"}}, "format", "json", SCHEMA),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        "guided_json",
        SCHEMA,
        OTHER_SCHEMA,
    ),
    (CHAT, {"guided_regex": "a|b"}, "structured_outputs", {"regex": "a|b"}, {"regex": "a|c"}),
    (CHAT, {"guided_regex": "a|b"}, "regex", "a|b", "a|c"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "output_format",
     {"type": "json_schema", "schema": SCHEMA}, {"type": "json_schema", "schema": OTHER_SCHEMA}),
    *(
        pair
        for route in (CHAT, RESPONSES, MESSAGES)
        for pair in (
            (route, {"reasoning_effort": "high"}, "reasoning", {"effort": "high"}, {"effort": "low"}),
            (route, {"think": True}, "reasoning", {"enabled": True}, {"enabled": False}),
            (route, {"think": "off"}, "reasoning", {"effort": "none"}, {"enabled": True}),
            (route, {"reasoning_effort": "high"}, "think", "high", "low"),
            (route, {"reasoning_effort": "high"}, "chat_template_kwargs",
             {"reasoning_effort": "high"}, {"reasoning_effort": "low"}),
            (route, {"reasoning_effort": "none"}, "enable_thinking", False, True),
            (route, {"reasoning_effort": "none"}, "chat_template_kwargs",
             {"enable_thinking": False}, {"enable_thinking": True}),
            (route, {"think": True}, "thinking", ON, OFF),
            (route, {"think": False}, "thinking", OFF, ON),
            (route, {"thinking": {**ON, "budget_tokens": 5}}, "thinking_budget", 5, 6),
            (route, {"thinking_budget": 5}, "thinking_token_budget", 5, 6),
            (route, {"thinking_budget": 5}, "reasoning", {"max_tokens": 5}, {"max_tokens": 6}),
        )
    ),
    (CHAT, {"temperature": 0}, "do_sample", False, True),
    (CHAT, {"temperature": 0.5}, "do_sample", True, False),
    (CHAT, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "parallel_tool_calls", False, True),
]  # fmt: skip


def beside(body: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return a body with a field, which may be in an envelope: ``options.seed``."""
    envelope, _, inner = name.rpartition(".")
    return {**body, **({envelope: {inner: value}} if envelope else {name: value})}


@pytest.mark.parametrize(("route", "given", "name", "same", "other"), PAIRS, ids=str)
def test_two_fields_that_mean_the_same_must_have_one_value(
    tooled: Running, route: str, given: dict[str, Any], name: str, same: Any, other: Any
) -> None:
    body = {**ASK[route], **given}
    with tooled.client() as client:
        for fine in (body, beside(body, name, same)):
            answer = client.post(route, json=fine)
            assert answer.status_code == 200, answer.text
        answer = client.post(route, json=beside(body, name, other))
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert name in message
    assert any(own in message for own in [*given, *ASK[route]]), message
    assert "leave" in message or "use" in message


@pytest.mark.parametrize("value", [-1, -2])
def test_a_negative_limit_is_no_limit(client: httpx.Client, value: int) -> None:
    for route in (CHAT, "/v1/completions"):
        long = (
            {"prompt": [5] * 2000}
            if route != CHAT
            else {"messages": [{"role": "user", "content": "a " * 990}]}
        )
        body = {**long, "max_tokens": value, "temperature": 0, "ignore_eos": True}
        answer = client.post(route, json=body).json()
        assert answer["usage"]["total_tokens"] == 2048  # the model's context


TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
FLAT = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
OTHER_TOOLS = [
    "web_search",
    "image_generation",
    "tool_search",
    "custom",
    "mcp",
    "local_shell",
    "unheard_of",
]


@pytest.mark.parametrize("kind", OTHER_TOOLS)
def test_tools_of_other_kinds_are_skipped(tooled: Running, kind: str) -> None:
    own = {CHAT: TOOL, RESPONSES: FLAT, MESSAGES: {"name": "f", "input_schema": {"type": "object"}}}
    with tooled.client() as client:
        for route, tool in own.items():
            other = {
                "type": kind if kind != "custom" or route != MESSAGES else "web_search_20250305",
                "name": "w",
            }
            answer = client.post(route, json={**ASK[route], "tools": [other, tool]})
            assert ignored(answer) == [f"tools[0] ({other['type']})"]
            only = client.post(route, json={**ASK[route], "tools": [other]})
            assert ignored(only) == [f"tools[0] ({other['type']})"]


@pytest.mark.parametrize(
    "item",
    [
        {
            "type": "web_search_call",
            "id": "w",
            "status": "completed",
            "action": {"type": "search", "query": "x"},
        },
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "x"},
        {"type": "image_generation_call", "id": "i", "result": None},
        {"type": "tool_search_call", "call_id": "t", "arguments": {}},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "unheard_of"},
    ],
    ids=lambda item: item["type"],
)
def test_items_of_other_tools_are_skipped(client: httpx.Client, item: dict[str, Any]) -> None:
    ask = {"role": "user", "content": "Hi"}
    body = {"max_output_tokens": 4, "temperature": 0}
    plain = client.post(RESPONSES, json={**body, "input": [ask]})
    got = client.post(RESPONSES, json={**body, "input": [item, ask]})
    assert ignored(got) == [f"input[0] ({item['type']})"]
    assert text_of(got.json()) == text_of(plain.json())


def test_functions_that_no_call_can_name_are_skipped(tooled: Running) -> None:
    spaces = [
        {"type": "namespace", "name": name, "tools": [FLAT]}
        for name in ("a b", 'a"b', "<think>", "fine")
    ]
    body = {**ASK[RESPONSES], "max_output_tokens": 40, "tools": spaces, "tool_choice": "required"}
    with tooled.client() as client:
        answer = client.post(RESPONSES, json={**body, "parallel_tool_calls": False})
        (call,) = [item for item in answer.json()["output"] if item["type"] == "function_call"]
        assert (call["namespace"], call["name"]) == ("fine", "f")
        unusable = {
            CHAT: {"name": "bad name!"},
            MESSAGES: {"name": "bad name!", "input_schema": {}},
        }
        for route, tool in unusable.items():
            assert ignored(client.post(route, json={**ASK[route], "tools": [tool]})) == [
                "tools[0] (function)"
            ]


def test_tools_that_items_repeat_are_offered_once(tooled: Running) -> None:
    added = {"type": "tool_search_output", "tools": [FLAT]}
    body = {
        **ASK[RESPONSES],
        "tools": [FLAT],
        "input": [added, {"role": "user", "content": "Hi"}, added],
    }
    with tooled.client() as client:
        assert client.post(RESPONSES, json=body).status_code == 200


def test_very_many_tools_cost_little(tooled: Running) -> None:
    many = [{**FLAT, "name": f"f{n}"} for n in range(20_000)]
    space = {"type": "namespace", "name": "n", "tools": many}
    items = [{"type": "additional_tools", "tools": many}, {"role": "user", "content": "Hi"}]
    for body in ({"tools": [space]}, {"input": items}):
        with tooled.client() as client:
            answer = client.post(RESPONSES, json={**ASK[RESPONSES], **body})
        assert answer.status_code == 400
        assert "expected at most 1024, found 20000" in answer.text


@pytest.mark.parametrize("kind", ["input_image", "input_file", "item_reference"])
def test_items_that_the_answer_needs_are_refused(client: httpx.Client, kind: str) -> None:
    items = [{"role": "user", "content": "Hi"}, {"type": kind, "id": "x"}]
    assert client.post(RESPONSES, json={**ASK[RESPONSES], "input": items}).status_code == 400
    texts = [
        [*items[:1], {"type": "input_text", "text": "x"}],
        [*items[:1], {"role": "user", "content": "x"}],
    ]
    counts = [
        client.post(RESPONSES, json={**ASK[RESPONSES], "input": each}).json()["usage"]
        for each in texts
    ]
    assert counts[0]["input_tokens"] == counts[1]["input_tokens"]


def test_functions_of_a_namespace_are_called_by_their_own_names(tooled: Running) -> None:
    space = {
        "type": "namespace",
        "name": "mcp__git",
        "description": "d",
        "tools": [FLAT, {"type": "custom", "name": "c"}],
    }
    body = {"max_output_tokens": 64, "tool_choice": "required", "temperature": 0}
    for more in (
        {"tools": [space]},
        {"input": [{"type": "additional_tools", "role": "developer", "tools": [space]}]},
    ):
        asked = [*more.get("input", []), {"role": "user", "content": "Hi"}]
        with tooled.client() as client:
            answer = client.post(
                RESPONSES, json={**body, **more, "input": asked, "parallel_tool_calls": False}
            )
            assert len(ignored(answer)) == 1
            (call,) = [item for item in answer.json()["output"] if item["type"] == "function_call"]
            assert (call["namespace"], call["name"]) == ("mcp__git", "f")
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
            again = client.post(RESPONSES, json={**body, **more, "input": [*asked, call, result]})
        assert again.status_code == 200, again.text


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}}, "f"),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "g"}],
            },
            "g",
        ),
        ({"type": "function", "name": "g"}, "g"),
        ({"type": "tool", "name": "g"}, "g"),
        ("any", "fg"),
        ({"type": "any"}, "fg"),
    ],
    ids=str,
)
def test_choices_of_tools_in_the_forms_of_other_apis(
    tooled: Running, choice: Any, names: str
) -> None:
    tools = [TOOL, {"name": "g", "input_schema": {"type": "object", "properties": {}}}]
    body = {
        **ASK[CHAT],
        "max_tokens": 40,
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    with tooled.client() as client:
        message = client.post(CHAT, json=body).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] in names


EFFORTS = [
    ("qwen3", {"reasoning_effort": "max"}, ["reasoning_effort (as on)"]),
    ("qwen3", {"reasoning_effort": "none"}, []),
    ("qwen3", {"reasoning_effort": "default"}, ["reasoning_effort"]),
    ("qwen3", {"reasoning": {"effort": "ultra"}}, ["reasoning.effort"]),
    ("qwen3", {"think": True}, []),
    ("qwen3", {"think": "high"}, ["think (as on)"]),
    ("qwen3", {"thinking": {"type": "enabled", "budget_tokens": 4}}, []),
    ("none", {"reasoning_effort": "max"}, ["reasoning_effort"]),
    ("none", {"thinking": {"type": "adaptive"}}, ["thinking"]),
    ("none", {"thinking": {"type": "disabled"}}, []),
    ("none", {"think": False}, []),
]


@pytest.mark.parametrize(("family", "more", "expected"), EFFORTS)
def test_hints_of_thinking_are_mapped_or_named(
    tooled: Running, client: httpx.Client, family: str, more: dict[str, Any], expected: list[str]
) -> None:
    with tooled.client() as thinking:
        answer = (thinking if family == "qwen3" else client).post(CHAT, json={**ASK[CHAT], **more})
    assert ignored(answer) == expected


def test_images_in_results_of_tools_become_notes(tooled: Running) -> None:
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
    }
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [{"type": "text", "text": "seen"}, image],
    }
    talk = [
        *ASK[MESSAGES]["messages"],
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    with tooled.client() as client:
        answer = client.post(MESSAGES, json={**ASK[MESSAGES], "messages": talk})
        assert ignored(answer) == ["messages[2].content[0].content[1] (image)"]
        seen = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
        items = [
            {"role": "user", "content": "Hi"},
            {"type": "function_call", "call_id": "t", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "t", "output": [seen]},
        ]
        answer = client.post(RESPONSES, json={**ASK[RESPONSES], "input": items})
        assert ignored(answer) == ["input[2].output[0] (input_image)"]
        refused = client.post(
            RESPONSES, json={**ASK[RESPONSES], "input": [{"role": "user", "content": [seen]}]}
        )
        assert refused.status_code == 400


NESTED = '{"a":' * 900 + "1" + "}" * 900
HALF = '"\\ud800"'  # half of a surrogate pair, which JSON can escape and no response can have


@pytest.mark.parametrize(
    "more",
    [
        f'"options": {NESTED}',
        '"options": ' + '{"options":' * 600 + "1" + "}" * 600,
        f'"service_tier": {NESTED}',
        f'"x_trace": {NESTED}',
        f'"images": {NESTED}',
        f'"unheard_of": {NESTED}',
        f'"n_predict": {NESTED}',
        f'"metadata": {NESTED}',
        f'{HALF}: "x"',
        f"{HALF}: 5",
        f'"metadata": {{{HALF}: {HALF}}}',
        f'"tools": [{{"type": {HALF}}}]',
        f'"tools": [{{"type": "function", "name": "f", "parameters": {{"title": {HALF}}}}}]',
        (
            f'"tools": [{{"name": "f", "input_schema": {{"properties": {{{HALF}: {{"not": '
            f"{{}}}}}}}}}}]"
        ),
        f'"reasoning_effort": {HALF}',
        f'"instructions": {HALF}',
        f'"mirostat": {HALF}',
        f'"tool_choice": {{"type": {HALF}}}',
    ],
    ids=lambda text: text[:40],
)
@pytest.mark.parametrize("route", ASK)
def test_deep_values_and_half_characters_are_no_server_error(
    tooled: Running, route: str, more: str
) -> None:
    body = f"{json.dumps(ASK[route])[:-1]}, {more}}}"
    with tooled.client(
        headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    ) as client:
        answer = client.post(route, content=body)
    assert answer.status_code in (200, 400), answer.text
    assert answer.json()


@pytest.mark.parametrize("route", ASK)
def test_very_many_fields_cost_little(client: httpx.Client, route: str) -> None:
    """Of the options only the first are compared with names; of a message only the first are
    reported.
    """
    many = {f"temperatur{n}": "x" for n in range(100_000)}
    answer = client.post(route, json={**ASK[route], **many})
    assert answer.status_code == 400
    assert "expected at most 128 fields" in answer.json()["error"]["message"]
    if route != "/v1/completions":
        field = "input" if route == RESPONSES else "messages"
        described = {**ASK[route], field: [{"role": "user", "content": "x", **many}]}
        header = client.post(route, json=described).headers[IGNORED_HEADER]
        assert header.endswith(f"{field}[0].and 99968 more")


def test_the_header_is_one_line_of_limited_length() -> None:
    paths = [f"tools[{n}].function.parameters.properties.naïve,\r\nX: y" for n in range(99)]
    header = report_header(paths)
    assert header.isascii()
    assert header.isprintable()
    assert len(header) < 1100
    first, *_, last = header.split(", ")
    assert unquote(first) == paths[0]
    assert last == f"and {99 - header.count(', ')} more"


def test_fields_of_a_long_conversation_are_named_once() -> None:
    messages = [{"role": "user", "content": "x", "id": str(n)} for n in range(50)]
    body = ChatRequest.model_validate(
        {"messages": [*messages, {"role": "user", "content": "x", "phase": "y"}]}
    )
    assert body.ignored() == ["messages[].id", "messages[50].phase"]


def test_log_of_a_server_names_what_was_ignored_once(
    model: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    """Each server logs each set of ignored fields once, whatever other servers of the process have
    logged.
    """
    caplog.set_level("INFO", "pronk")
    for _ in range(2):
        caplog.clear()
        with running(model) as made, made.client() as client:
            for name in ("my_trace", "your_trace", "my_trace"):
                client.post(CHAT, json={**ASK[CHAT], "store": True, name: json.dumps("secret")})
        found = [message for message in caplog.messages if "_trace" in message]
        assert ["my_trace" in message for message in found] == [True, False]
        assert not any("secret" in message for message in found)


@pytest.mark.parametrize(
    "route", ["/v1/completions", CHAT, "/v1/messages", "/v1/embeddings", "/tokenize"]
)
@pytest.mark.parametrize(
    ("body", "found"),
    [
        (
            b'{"prompt": "x",\n "n" 2}',
            "a mistake at line 2, column 6 (Expecting ':' delimiter, found '2}')",
        ),
        (
            b'{"prompt": "x"',
            "a mistake at line 1, column 15 (Expecting ',' delimiter, found the end)",
        ),
        (b'{"prompt": tru', "a mistake at line 1, column 12 (Expecting value, found 'tru')"),
        (b"{} {}", "a mistake at line 1, column 4 (Extra data, found '{}')"),
        (b'{"prompt": "\xff"}', "a byte at position 12 that is not UTF-8"),
        (b'{"n": ' + b"1" * 5000 + b"}", "an integer of more than 4300 digits"),
    ],
    ids=range(6),
)
def test_a_body_that_is_no_json_is_located(
    client: httpx.Client, route: str, body: bytes, found: str
) -> None:
    answer = client.post(route, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"body: expected JSON, found {found}"


@pytest.mark.parametrize(
    ("body", "found"),
    [("", "none"), ("null", "null"), ('"x"', "the string 'x'"), ("[]", "a list"), ("1", "1")],
)
def test_a_body_that_is_no_object_is_named(client: httpx.Client, body: str, found: str) -> None:
    answer = client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert (
        answer.json()["error"]["message"]
        == f"body: expected a JSON object, found {found}; send one"
    )


@pytest.mark.parametrize("limit", [2**31 + 1, 2**53 - 1, 2**63 - 1])
def test_very_large_limits_are_no_limit(client: httpx.Client, limit: int) -> None:
    body = {"prompt": "Hi", "max_tokens": limit, "stop": ["e", "a", "o", " "], "seed": 2**64 - 1}
    assert client.post("/v1/completions", json=body).status_code == 200


def test_parts_of_a_reply_that_responses_do_not_have_are_named(client: httpx.Client) -> None:
    body = {
        **ASK[RESPONSES],
        "include": ["message.output_text.logprobs", "file_search_call.results"],
    }
    assert "include" in ignored(client.post(RESPONSES, json=body))
    del body["include"][1:]
    assert "include" not in ignored(client.post(RESPONSES, json=body))
