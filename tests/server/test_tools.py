"""Tool calls with OpenAI's client, streamed and whole."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

import jsonschema
import pytest

from pronk.engine.outputs import Completion, Piece
from pronk.engine.stats import Stats
from pronk.sampling.params import SamplingParams
from pronk.server.protocol.answers import AnswerParser
from pronk.server.protocol.tools import Function, ToolUse
from pronk.text.chat.answers import AnswerFormat
from server.clients import openai
from server.serving import KEY, Running, running
from server.tool_models import FEW_LAYERS, tool_model
from text.chat.tool_templates import tool_tokenizer
from waiting import processor_limit

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {"zone": {"enum": ["CET", "UTC"]}}, "required": ["zone"]}
TIME["additionalProperties"] = False  # type: ignore[assignment]
SCHEMAS: dict[str, Any] = {"weather": WEATHER, "time_in": TIME}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": name, "description": name, "parameters": schema, "strict": True},
    }
    for name, schema in SCHEMAS.items()
]
ASK: Any = [{"role": "user", "content": "How is it in Oslo?"}]
NAMED: Any = {"type": "function", "function": {"name": "time_in"}}
OPTIONS: Any = {
    "model": "tiny",
    "max_tokens": 90,
    "temperature": 0.8,
    "seed": 4,
    "reasoning_effort": "none",
}
BEGIN = 1  # the token that begins calls in the Mistral model


@pytest.fixture(scope="module", params=["hermes", "mistral list", "mistral", "llama", "channels"])
def tooled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    with running(
        tool_model(
            tmp_path_factory.mktemp(request.param.replace(" ", "_")), request.param, FEW_LAYERS
        )
    ) as made:
        yield made


@pytest.fixture
def api(tooled: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tooled.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def effort(made: Running) -> dict[str, str]:
    """Return the options of the template for ``reasoning_effort`` none: gpt-oss always thinks,
    at least a little.
    """
    return {"reasoning_effort": "low"} if family(made) == "channels" else {}


def family(made: Running) -> str:
    return made.llm.path.name.rstrip("0123456789").replace("_", " ")


def whole(stream: Any) -> dict[int, Any]:
    """Return the message of each sample, joined from its chunks as in OpenAI's clients."""
    found = dict[int, Any]()
    for chunk in stream:
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            delta = choice.delta
            said = found.setdefault(choice.index, {"content": None, "calls": [], "reason": None})
            assert said["reason"] is None, "nothing follows the finish reason"
            if "role" in delta.model_fields_set:
                assert (delta.role, delta.content, said["calls"]) == ("assistant", None, [])
            if delta.content is not None:
                assert delta.content
                said["content"] = (said["content"] or "") + delta.content
            for call in delta.tool_calls or []:
                assert call.function is not None
                if call.id is not None:  # the first chunk of a call has its name and no arguments
                    assert re.fullmatch("call_[0-9a-f]{24}", call.id)
                    assert (call.type, call.function.arguments, call.index) == (
                        "function",
                        "",
                        len(said["calls"]),
                    )
                    said["calls"].append((call.function.name, ""))
                else:
                    assert (call.type, call.function.name, call.index) == (
                        None,
                        None,
                        len(said["calls"]) - 1,
                    )
                    name, arguments = said["calls"][-1]
                    said["calls"][-1] = name, arguments + (call.function.arguments or "")
            said["reason"] = choice.finish_reason
    return found


def check_calls(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        assert json.dumps(json.loads(arguments)) == arguments


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("choice", "parallel"),
    [
        *(pytest.param(choice, True) for choice in ("auto", "none")),
        pytest.param("required", False),
        *(pytest.param(choice, True, marks=pytest.mark.slow) for choice in ("required", NAMED)),
        *(
            pytest.param(choice, False, marks=pytest.mark.slow)
            for choice in (NAMED, "auto", "none")
        ),
    ],
    ids=str,
)
def test_every_tool_choice_streamed_and_whole(
    tooled: Running, api: openai.OpenAI, choice: Any, parallel: bool
) -> None:
    options = {
        **OPTIONS,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "n": 2,
    }
    if choice in ("auto", "none"):  # texts, which have no end that the schemas of the tools bring
        options["max_tokens"] = 40
    got = api.chat.completions.create(messages=ASK, **options)
    stream: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [*api.chat.completions.create(messages=ASK, **stream, **options)]
    streamed = {} if choice == "none" else whole(chunks)
    assert chunks[-1].usage.total_tokens == got.usage.total_tokens
    for each in got.choices:
        message = each.message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]  # type: ignore[union-attr]
        ended = each.finish_reason != "length"
        check_calls(calls if ended else calls[:-1])
        if choice in ("required", NAMED):
            assert message.content is None
            assert calls
            assert each.finish_reason in ("tool_calls", "length")
            assert {name for name, _ in calls} <= ({"time_in"} if choice == NAMED else {*SCHEMAS})
        if not parallel or choice == NAMED or family(tooled) in ("llama", "channels"):
            assert len(calls) <= 1
        if choice == "none":
            assert not calls
            seeded = SamplingParams(
                max_tokens=options["max_tokens"], temperature=0.8, seed=each.model_extra["seed"]
            )  # type: ignore[index]
            assert (
                message.content
                == tooled.llm.chat(ASK, seeded, template_options=effort(tooled)).text
            )
        if choice != "none":
            said = streamed[each.index]
            assert (said["calls"], said["reason"]) == (calls, each.finish_reason)
            assert (said["content"] or "") == (message.content or "")
    assert tooled.drained


@pytest.mark.parametrize(
    "tooled", ["mistral list", "mistral"], indirect=True
)  # the other formats begin calls with text, which no bias of one token forces
def test_model_begins_a_call_by_itself(tooled: Running, api: openai.OpenAI) -> None:
    """With tool_choice ``auto``, the arguments follow the schema too."""
    options = {
        **OPTIONS,
        "tools": TOOLS,
        "logit_bias": {str(BEGIN): 100},
        "parallel_tool_calls": False,
    }
    got = api.chat.completions.create(messages=ASK, **options).choices[0]
    assert (got.finish_reason, got.message.content) == ("tool_calls", None)
    calls = [(call.function.name, call.function.arguments) for call in got.message.tool_calls or []]  # type: ignore[union-attr]
    assert calls
    check_calls(calls)
    said = whole(api.chat.completions.create(messages=ASK, stream=True, **options))[0]
    assert said == {"content": None, "calls": calls, "reason": "tool_calls"}


@pytest.mark.few(2)
def test_tool_result_is_in_the_next_prompt(tooled: Running, api: openai.OpenAI) -> None:
    first = api.chat.completions.create(messages=ASK, tools=TOOLS, tool_choice=NAMED, **OPTIONS)
    message = first.choices[0].message
    (call,) = (message.tool_calls or [])[:1]
    sent = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    talk: Any = [*ASK, sent, {"role": "tool", "tool_call_id": call.id, "content": "Noon."}]
    again = api.chat.completions.create(
        messages=talk, tools=TOOLS, tool_choice="required", **OPTIONS
    )
    tokenizer = tooled.llm.tokenizer
    plain = [{k: v for k, v in tool.items() if k != "strict"} for tool in TOOLS]
    for tool in plain:
        tool["function"] = {k: v for k, v in tool["function"].items() if k != "strict"}
    assert again.usage is not None
    expected = tokenizer.chat_ids(talk, tools=plain, options=effort(tooled))
    assert again.usage.prompt_tokens == len(expected)
    assert "Noon." in tokenizer.chat(talk, tools=plain)
    untold = api.chat.completions.create(messages=talk, **OPTIONS)
    assert untold.choices[0].message.content


@pytest.mark.few(2)
def test_truncated_calls_are_returned_as_far_as_generated(
    tooled: Running, api: openai.OpenAI
) -> None:
    options = {**OPTIONS, "tools": TOOLS, "tool_choice": NAMED, "temperature": 0}
    full = api.chat.completions.create(messages=ASK, **options).choices[0].message.tool_calls or []
    assert full
    seen = set[str]()
    for most in range(1, 40, 2):
        got = api.chat.completions.create(messages=ASK, **{**options, "max_tokens": most}).choices[
            0
        ]
        said = whole(
            api.chat.completions.create(
                messages=ASK, stream=True, **{**options, "max_tokens": most}
            )
        )[0]
        calls = [
            (call.function.name, call.function.arguments) for call in got.message.tool_calls or []
        ]  # type: ignore[union-attr]
        assert said == {
            "content": got.message.content or None,
            "calls": calls,
            "reason": got.finish_reason,
        }
        for (name, arguments), call in zip(calls, full, strict=False):
            assert name == "time_in"
            assert call.function.arguments.startswith(arguments)  # type: ignore[union-attr]
            seen.add(arguments)
        if got.finish_reason == "tool_calls":
            break
        assert got.finish_reason == "length"
    assert len(seen) > 2


def test_every_token_has_logprobs_and_leaps(tooled: Running, api: openai.OpenAI) -> None:
    options = {
        **OPTIONS,
        "tools": TOOLS,
        "tool_choice": "required",
        "logprobs": True,
        "extra_body": {"leaps": True},
    }
    stream: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [*api.chat.completions.create(messages=ASK, **stream, **options)]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    leaps = [leap for choice in choices for leap in (choice.model_extra or {}).get("leaps", ())]
    entries = [
        entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or ()
    ]
    assert chunks[-1].usage is not None
    assert len(leaps) == len(entries) == chunks[-1].usage.completion_tokens
    jumped = api.chat.completions.create(
        messages=ASK,
        tools=TOOLS,
        tool_choice=NAMED,
        parallel_tool_calls=False,
        extra_body={"guide_mode": "jump"},
        **OPTIONS,
    ).choices[0]
    check_calls(
        [(call.function.name, call.function.arguments) for call in jumped.message.tool_calls or []]
    )  # type: ignore[union-attr]
    assert jumped.message.tool_calls


def test_tools_without_parameters(tooled: Running, api: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "stop"}}]
    got = api.chat.completions.create(
        messages=ASK, tools=tools, tool_choice="required", parallel_tool_calls=False, **OPTIONS
    ).choices[0]
    (call,) = got.message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("stop", "{}")  # type: ignore[union-attr]


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [tool(name=5)]}, "tools.0.function.name", "expected a valid string"),
    ({"tools": [tool(), tool()]}, "tools", "expected distinct names, found"),
    ({"tools": [tool(name=f"f{n}") for n in range(1025)]}, "tools", "expected at most 1024 items"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", ("expected tools with "
        "'required'")),
    ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice", "found the type 'web_search'"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "rm"}]}},
     "tool_choice", "found 'rm'"),
    ({"tools": [tool(description="x" * 300_000)]}, "tools", "expected at most 262144 characters"),
    ({"tools": [tool(parameters={"title": "x" * 300_000})]}, "tools", ("expected at most 262144 "
        "characters")),
    ({"tools": [tool(description="x " * 50_000)]}, "", "(context 2048)"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", ("expected 'none', 'auto', 'required' or "
        "'any'")),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice", "found 'rm'"),
    ({"tool_choice": "required"}, "tool_choice", "expected tools with 'required', found none"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", ("expected tools with 'required', found "
        "none")),
    ({"tools": TOOLS, "guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", ("expected one form of the "
        "answer")),
    ({"tools": TOOLS, "guided_regex": "("}, "guided_regex", "expected one that can be followed"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls", "expected a valid boolean"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, "messages", "with the role 'tool'"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", ("expected a value, found no such "
        "field")),
    ({"messages": [{"role": "user", "images": ["x"], "content": "x"}]}, "messages.0.images", "send text only"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages", "with the role 'assistant'"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": 5}}]}]},
     "messages.0.tool_calls.0.function.arguments", "expected a valid string"),
]  # fmt: skip


DEEP: Any = {"type": "object"}
for _ in range(80):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
RELAXED: list[tuple[dict[str, Any], Any]] = [
    (DEEP, [".".join(["properties.a"] * 33)]),
    ({"not": {}}, ["not"]),
    ({"$ref": "http://x"}, ["$ref"]),
    ({"properties": {"m": {"uniqueItems": True, "format": "colour"}}, "if": {}, "then": {}},
     ["if", "then", "properties.m.uniqueItems"]),
    ({"properties": {"m": {"propertyNames": {"type": "string"}, "uniqueItems": False}}}, []),
    ({"type": "object", "properties": [], "required": "a", "$schema": "http://unknown/"}, ["properties", "required"]),
    ({"properties": {"a": {}}, "required": ["a", "b"], "additionalProperties": False}, ["required"]),
]  # fmt: skip


@pytest.mark.few(5)
@pytest.mark.parametrize("tooled", ["hermes"], indirect=True)
@pytest.mark.parametrize(("parameters", "dropped"), RELAXED, ids=range(len(RELAXED)))
@pytest.mark.parametrize("strict", [None, True])
def test_keywords_of_tools_that_no_grammar_enforces_are_left_out(
    tooled: Running, parameters: dict[str, Any], dropped: list[str], strict: bool | None
) -> None:
    function = {"parameters": parameters} | ({} if strict is None else {"strict": strict})
    tools = [tool(name="g"), tool(**function)]
    for choice in ("auto", "required"):
        asked = {"messages": ASK, "max_tokens": 4, "tools": tools, "tool_choice": choice}
        with tooled.client() as client:
            answer = client.post("/v1/chat/completions", json=asked)
        assert answer.status_code == 200, answer.text
        paths = [f"tools[1].function.parameters.{path}" for path in sorted(dropped)]
        assert (
            sorted(filter(None, unquote(answer.headers.get("X-Pronk-Ignored", "")).split(", ")))
            == paths
        )
    use = ToolUse([Function(name="g"), Function(name="f", **function)])
    assert sorted(use.not_enforced()) == paths
    assert replace(use, choice="none").not_enforced() == []
    assert replace(use, name="g").not_enforced() == []


@pytest.mark.parametrize("tooled", ["hermes"], indirect=True)
@pytest.mark.parametrize(("asked", "param", "message"), BAD, ids=range(len(BAD)))
def test_invalid_tools_are_refused(tooled: Running, asked: Any, param: str, message: str) -> None:
    with tooled.client() as client, processor_limit(20):
        answer = client.post(
            "/v1/chat/completions", json={"messages": ASK, "max_tokens": 4} | asked
        )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"] or "", error["type"]) == (param, "invalid_request_error")
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert tooled.drained


def test_stop_strings_apply_within_arguments(tooled: Running, api: openai.OpenAI) -> None:
    options = {**OPTIONS, "tools": TOOLS, "tool_choice": NAMED}
    whole_call = (
        api.chat.completions.create(messages=ASK, **options).choices[0].message.tool_calls or []
    )
    arguments = whole_call[0].function.arguments  # type: ignore[union-attr]
    got = api.chat.completions.create(messages=ASK, stop=['": "', "never"], **options).choices[0]
    assert (got.finish_reason, got.message.content or None) == ("stop", None)
    # the stop string is in the text before the arguments
    if family(tooled) in ("hermes", "mistral list", "llama"):
        assert not got.message.tool_calls
    else:
        (call,) = got.message.tool_calls or []
        assert call.function.arguments == arguments[: arguments.index('": "')]  # type: ignore[union-attr]
    got = api.chat.completions.create(messages=ASK, stop="zone", **options).choices[0]
    (call,) = got.message.tool_calls or []
    assert call.function.arguments == arguments[: arguments.index("zone")]  # type: ignore[union-attr]
    assert got.finish_reason == "stop"


@pytest.mark.parametrize("tooled", ["hermes"], indirect=True)
@pytest.mark.parametrize(
    "calls", [[], [{"id": "b", "function": {"name": "time_in", "arguments": "{}"}}]]
)
def test_results_without_their_call_are_texts(tooled: Running, calls: list[Any]) -> None:
    """Agents shorten conversations, and keep results whose calls they have left out."""
    earlier = [{"role": "assistant", "tool_calls": calls}] if calls else []
    result = {"role": "tool", "tool_call_id": "a", "content": "Noon."}
    text = {"role": "user", "content": "Result of an earlier tool call:\nNoon."}
    item = {"type": "function_call_output", "call_id": "a", "output": "Noon."}
    block = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "a", "content": "Noon."}],
    }
    with tooled.client() as client:
        want = client.post(
            "/v1/chat/completions", json={"messages": [*ASK, *earlier, text], "max_tokens": 1}
        ).json()
        count = want["usage"]["prompt_tokens"]
        for route, field, talk in (
            ("/v1/chat/completions", "messages", [*ASK, *earlier, result]),
            ("/v1/responses", "input", [*ASK, item]),
            ("/v1/messages", "messages", [*ASK, block]),
        ):
            limit = "max_output_tokens" if field == "input" else "max_tokens"
            answer = client.post(route, json={field: talk, limit: 1})
            assert "its call is missing" in answer.headers["X-Pronk-Ignored"]
            usage = answer.json()["usage"]
            if route.endswith("completions"):
                assert usage["prompt_tokens"] == count


@pytest.mark.parametrize("tooled", ["hermes"], indirect=True)
def test_calls_and_results_without_ids_belong_together_in_their_order(tooled: Running) -> None:
    calls = [{"function": {"name": "time_in", "arguments": {"n": n}}} for n in range(2)]
    results = [{"role": "tool", "content": f"result {n}"} for n in range(2)]
    ids = [{**call, "id": f"id{n}", "type": "function"} for n, call in enumerate(calls)]
    known = [{**result, "tool_call_id": f"id{n}"} for n, result in enumerate(results)]
    with tooled.client() as client:
        counts = []
        for talk in ([{"role": "assistant", "tool_calls": calls}, *results],
                     [{"role": "assistant", "tool_calls": ids}, *known]):  # fmt: skip
            answer = client.post(
                "/v1/chat/completions", json={"messages": [*ASK, *talk], "max_tokens": 1}
            )
            assert "X-Pronk-Ignored" not in answer.headers
            counts.append(answer.json()["usage"]["prompt_tokens"])
    assert counts[0] == counts[1]


def test_special_tokens_in_tools_are_text(tooled: Running) -> None:
    names = [
        token.content for token in tooled.llm.tokenizer.backend.get_added_tokens_decoder().values()
    ]
    bad = tool(
        description=" ".join(names),
        parameters={"type": "object", "properties": {"".join(names): {}}},
    )
    asked: Any = {"messages": ASK, "tools": [bad], "max_tokens": 1, "tool_choice": "required"}
    with tooled.client() as client:
        counts = client.post("/v1/chat/completions", json=asked).json()["usage"]
    tokenizer = tooled.llm.tokenizer
    assert counts["prompt_tokens"] == len(tokenizer.chat_ids(ASK, tools=[bad], trusted=False))
    assert counts["prompt_tokens"] > len(tokenizer.chat_ids(ASK, tools=[bad]))


def test_tool_calls_do_not_change_other_requests(tooled: Running, api: openai.OpenAI) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=4)
    want = tooled.llm.chat(ASK, params).text
    with tooled.client() as client:
        body = {"messages": ASK, "max_tokens": 20, "temperature": 0.8, "seed": 4}
        calling = api.chat.completions.create(
            messages=ASK, tools=TOOLS, tool_choice="required", stream=True, **OPTIONS
        )
        next(calling)
        assert (
            client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"][
                "content"
            ]
            == want
        )
        calling.close()


def test_finish_reason_and_content_of_stopped_calls() -> None:
    """A stop string may end a call; the start of a required call is no content."""
    tokenizer = tool_tokenizer("llama", tokens=False)

    def read(text: str, *, free: bool) -> tuple[list[tuple[str, str]], bool]:
        done = Completion(text, [1], "stop", None, 0, [1], None, None, Stats())
        made = AnswerParser(
            AnswerFormat(tokenizer).reader({"add": "{}"}, opened=False), allows_text=free
        )
        made.parse([Piece(1, text, completion=done)])
        return [(block.kind, block.content) for block in made.blocks], made.ends_with_call(done)

    assert read('{"name": "add", "parameters": {"a": 1}}', free=True) == (
        [("call", '{"a": 1}')],
        True,
    )
    assert read('{"name": "add", "parameters": {"a": ', free=True) == ([("call", '{"a": ')], False)
    assert read('{"name": "ad', free=True) == ([("text", '{"name": "ad')], False)
    assert read('{"name": "ad', free=False) == ([], False)
