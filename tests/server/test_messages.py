"""Anthropic's client on /v1/messages: text, thoughts, tools and JSON, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import jsonschema
import pytest

from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from server.clients import anthropic
from server.serving import KEY, Running, running
from server.test_tools import SCHEMAS
from server.tool_models import ALL_LAYERS, BEGIN_THOUGHT, END_THOUGHT, FEW_LAYERS, tool_model

ASK: Any = [{"role": "user", "content": "How is it in Oslo?"}]
TOOLS: Any = [
    {"name": name, "description": name, "input_schema": schema} for name, schema in SCHEMAS.items()
]
SEEDED: Any = {"seed": 4, "temperature": 0.8}
OPTIONS: Any = {"model": "tiny", "max_tokens": 120, "extra_body": SEEDED}
SCHEMA: Any = SCHEMAS["weather"]
FORMAT: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
# A token of thoughts is unlikely for pronk-tiny, so a bias begins them.
THINK: Any = {**SEEDED, "logit_bias": {str(BEGIN_THOUGHT): 40}}
BUDGET: Any = {"type": "enabled", "budget_tokens": 9}


@pytest.fixture(scope="module", params=["qwen3", "deepseek", "hermes", "mistral", "channels"])
def tooled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    # Some tests need the texts of all layers: thoughts between texts as markers, and answers that
    # end.
    layers = ALL_LAYERS if request.param in ("deepseek", "hermes") else FEW_LAYERS
    with running(tool_model(tmp_path_factory.mktemp(request.param), request.param, layers)) as made:
        yield made


@pytest.fixture
def api(tooled: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tooled.url, api_key=KEY, max_retries=0) as made:
        yield made


def family(made: Running) -> str:
    return made.llm.path.name.rstrip("0123456789")


def streamed(api: anthropic.Anthropic, **options: Any) -> tuple[list[str], anthropic.types.Message]:
    """Return the event types of a stream and the message that the client joins."""
    with api.messages.stream(**options) as stream:
        kinds = [event.type for event in stream]
        return kinds, stream.get_final_message()


def check_same(one: anthropic.types.Message, other: anthropic.types.Message) -> None:
    """Check that two replies have the same content, apart from random ids and from tokens found
    in the cache.
    """
    for reply in (one, other):
        for block in reply.content:
            if isinstance(block, anthropic.types.ToolUseBlock):
                assert block.id.startswith("call_")
    contents = [
        [block.model_dump(exclude={"id", "parsed_output"}) for block in reply.content]
        for reply in (one, other)
    ]
    assert contents[0] == contents[1]
    assert (one.stop_reason, one.stop_sequence) == (other.stop_reason, other.stop_sequence)
    assert one.usage.output_tokens == other.usage.output_tokens
    read = [
        each.usage.input_tokens + (each.usage.cache_read_input_tokens or 0) for each in (one, other)
    ]
    assert read[0] == read[1]


# no thoughts and no headers
@pytest.mark.few(1)
@pytest.mark.parametrize("tooled", ["qwen3", "hermes", "mistral"], indirect=True)
def test_text_streamed_and_whole(tooled: Running, api: anthropic.Anthropic) -> None:
    system: Any = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    talk: Any = [
        *ASK,
        {"role": "assistant", "content": "Cold."},
        {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
    ]
    options = {
        **OPTIONS,
        "max_tokens": 20,
        "system": system,
        "messages": talk,
        "metadata": {"user_id": "me"},
    }
    got = api.messages.create(**options)
    kinds, joined = streamed(api, **options)
    check_same(got, joined)
    plain = [
        {"role": "system", "content": "Be kind."},
        ASK[0],
        talk[1],
        {"role": "user", "content": "And now?"},
    ]
    template = {"enable_thinking": False}
    ids = tooled.llm.tokenizer.chat_ids(plain, options=template)
    want = tooled.llm.generate(ids, SamplingParams(max_tokens=20, temperature=0.8, seed=4))
    assert [
        block.text for block in got.content if isinstance(block, anthropic.types.TextBlock)
    ] == [want.text]
    assert got.stop_reason == ("max_tokens" if want.finish_reason == "length" else "end_turn")
    assert joined.usage.input_tokens + (joined.usage.cache_read_input_tokens or 0) == len(ids)
    assert joined.usage.cache_read_input_tokens
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    count = api.messages.count_tokens(model="TINY.gguf", system="Be kind.", messages=talk)
    assert count.input_tokens == len(ids)


CHOICES: Any = [
    {"type": "any"},
    {"type": "auto"},
    {"type": "tool", "name": "time_in"},
    {"type": "none"},
]


@pytest.mark.few(2)
def test_every_tool_choice(tooled: Running, api: anthropic.Anthropic) -> None:
    """A name and the lack of tools mean the same in every format of calls, so one model has all
    choices.
    """
    for choice in CHOICES if family(tooled) == "qwen3" else CHOICES[:2]:
        check_tool_choice(tooled, api, choice)


def check_tool_choice(tooled: Running, api: anthropic.Anthropic, choice: Any) -> None:
    options = {
        **OPTIONS,
        "messages": ASK,
        "tools": TOOLS,
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
    }
    # its prompt begins thoughts, which pronk-tiny does not end by itself
    if family(tooled) == "deepseek":
        options["thinking"] = BUDGET
    got = api.messages.create(**options)
    _, joined = streamed(api, **options)
    check_same(got, joined)
    calls = [block for block in got.content if isinstance(block, anthropic.types.ToolUseBlock)]
    if choice["type"] in ("any", "tool"):
        assert not any(isinstance(block, anthropic.types.TextBlock) for block in got.content)
        assert len(calls) == 1
        if got.stop_reason == "tool_use":
            jsonschema.validate(calls[0].input, SCHEMAS[calls[0].name])
            assert calls[0].name == choice.get("name", calls[0].name)
    assert choice["type"] != "none" or not calls
    assert got.usage.output_tokens > 0
    assert tooled.drained


def test_a_conversation_with_a_tool(tooled: Running, api: anthropic.Anthropic) -> None:
    """The blocks of an answer are sent back unchanged, with the result of the tool."""
    thinking: Any = BUDGET if family(tooled) in ("qwen3", "deepseek") else {"type": "disabled"}
    body: Any = THINK if family(tooled) == "qwen3" else SEEDED
    options: Any = {**OPTIONS, "tools": TOOLS, "thinking": thinking, "extra_body": body}
    first = api.messages.create(
        messages=ASK, tool_choice={"type": "tool", "name": "time_in"}, **options
    )
    assert first.stop_reason == "tool_use"
    *thoughts, call = first.content
    assert isinstance(call, anthropic.types.ToolUseBlock)
    assert (len(thoughts) == 1) == (thinking is BUDGET)
    result: Any = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": "Noon."}],
    }
    talk: Any = [
        *ASK,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    again = api.messages.create(messages=talk, tool_choice={"type": "any"}, **options)
    assert again.content
    plain: Any = [
        {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
        for name, schema in SCHEMAS.items()
    ]
    template: Any = {"enable_thinking": thinking is BUDGET}
    written = [
        thought.thinking
        for thought in thoughts
        if isinstance(thought, anthropic.types.ThinkingBlock)
    ]
    function = {"name": "time_in", "arguments": json.dumps(call.input)}
    sent: Any = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call.id, "function": function}],
    }
    if written:
        sent |= {"reasoning_content": written[0], "thinking": written[0]}
    prompt: Any = [*ASK, sent, {"role": "tool", "tool_call_id": call.id, "content": "Noon."}]
    ids = tooled.llm.tokenizer.chat_ids(prompt, tools=plain, options=template)
    assert again.usage.input_tokens + (again.usage.cache_read_input_tokens or 0) == len(ids)
    assert not written or written[0] in tooled.llm.tokenizer.chat(
        prompt, tools=plain, options=template
    )


@pytest.mark.parametrize("tooled", ["qwen3", "deepseek"], indirect=True)
@pytest.mark.parametrize("tools", [False, True])
def test_thoughts_then_tools_or_json(
    tooled: Running, api: anthropic.Anthropic, tools: bool
) -> None:
    """One request has a thinking budget, tools and a JSON schema."""
    opened = family(tooled) == "deepseek"
    more = (
        {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
        if tools
        else {}
    )
    options = {**OPTIONS, "messages": ASK, "thinking": BUDGET, "output_config": FORMAT, **more}
    options["extra_body"] = SEEDED if opened else THINK
    got = api.messages.create(**options)
    kinds, joined = streamed(api, **options)
    check_same(got, joined)
    thought, *rest = got.content
    assert isinstance(thought, anthropic.types.ThinkingBlock)
    tokens = tooled.llm.tokenizer.encode(thought.thinking, add_special_tokens=False)
    assert 0 < len(tokens) <= BUDGET["budget_tokens"] + 2
    assert got.usage.output_tokens_details is not None
    assert (
        len(tokens)
        <= got.usage.output_tokens_details.thinking_tokens
        <= BUDGET["budget_tokens"] + 9
    )
    assert len(rest) == 1
    if isinstance(rest[0], anthropic.types.TextBlock):
        assert got.stop_reason == "end_turn"
        jsonschema.validate(json.loads(rest[0].text), SCHEMA)
    else:
        assert tools
        assert isinstance(rest[0], anthropic.types.ToolUseBlock)
        assert got.stop_reason == "tool_use"
        jsonschema.validate(rest[0].input, SCHEMAS[rest[0].name])
    assert kinds.count("content_block_start") == 2
    if opened:
        return
    off = api.messages.create(**{**options, "thinking": {"type": "disabled"}})
    assert not any(isinstance(block, anthropic.types.ThinkingBlock) for block in off.content)


@pytest.mark.parametrize("tooled", ["qwen3"], indirect=True)
def test_the_budget_is_exact(tooled: Running, api: anthropic.Anthropic) -> None:
    """Thoughts are those without a budget, cut after so many tokens, with every drafter."""
    body = {"logit_bias": {str(BEGIN_THOUGHT): 40, str(END_THOUGHT): -100}, **SEEDED}
    options = {**OPTIONS, "messages": ASK, "max_tokens": 40}
    free = api.messages.create(**{**options, "thinking": {"type": "adaptive"}, "extra_body": body})
    assert free.stop_reason == "max_tokens"
    (whole,) = free.content
    assert isinstance(whole, anthropic.types.ThinkingBlock)
    for drafter in ("autoregressive", "suffix", "recycling"):
        asked = {
            **options,
            "thinking": {"type": "enabled", "budget_tokens": 12},
            "extra_body": {**body, "drafter": drafter},
        }
        got = api.messages.create(**asked)
        assert isinstance(got.content[0], anthropic.types.ThinkingBlock)
        assert whole.thinking.startswith(got.content[0].thinking)
        assert got.usage.output_tokens_details is not None
        assert got.usage.output_tokens_details.thinking_tokens == 12 + 2  # both markers are counted


@pytest.mark.parametrize("tooled", ["hermes"], indirect=True)
def test_stop_sequences(tooled: Running, api: anthropic.Anthropic) -> None:
    options = {**OPTIONS, "messages": ASK, "max_tokens": 60}
    whole = api.messages.create(**options).content[0]
    assert isinstance(whole, anthropic.types.TextBlock)
    stop = whole.text[1:7]
    assert whole.text.index(stop) > 0
    got = api.messages.create(**options, stop_sequences=["never this", stop])
    assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", stop)
    assert isinstance(got.content[0], anthropic.types.TextBlock)
    assert got.content[0].text == whole.text[: whole.text.index(stop)]
    check_same(got, streamed(api, **options, stop_sequences=["never this", stop])[1])


IMAGE: Any = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
}
DOCUMENT: Any = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "x"},
}
DEEP: Any = reduce(lambda value, _: {"a": value}, range(700), {})
BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": [IMAGE]}]},
     "expected a part with a text, found the type 'image'"),
    ({"messages": [{"role": "user", "content": [DOCUMENT]}]}, ("messages.0.content.0.source.type: expected "
        "'text'")),
    ({"messages": [{"role": "assistant", "content": "The answer is"}]}, "expected at least one message"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
     "no block 'tool_use'"),
    ({"messages": [
        *ASK,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": DEEP}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]},
    ]}, "body: expected values of at most 256 levels"),
    ({"messages": []}, "messages: expected at least 1 item, found 0"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}],
      "tool_choice": {"type": "tool", "name": "web_search"}}, ("tool_choice: expected a function of the "
          "client")),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format: "),
    ({"tool_choice": {"type": "tool", "name": "f"}}, ("tool_choice: expected the name of one of the "
        "tools")),
    ({"tool_choice": {"type": "tool"}}, "tool_choice: expected a name with the type 'tool'"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: expected tools"),
    ({"response_format": {"type": "json_object"}}, "response_format: expected no such field"),
    ({"model": "claude"}, "model: expected 'tiny'"),
]  # fmt: skip


@pytest.mark.parametrize("tooled", ["hermes"], indirect=True)
@pytest.mark.parametrize(("asked", "message"), BAD, ids=range(len(BAD)))
def test_errors_have_the_format_of_anthropic(
    tooled: Running, asked: dict[str, Any], message: str
) -> None:
    with tooled.client(headers={"X-Api-Key": KEY, "anthropic-version": "2023-06-01"}) as client:
        answer = client.post("/v1/messages", json={"messages": ASK, "max_tokens": 4, **asked})
    body = answer.json()
    assert answer.status_code == (404 if "model" in asked else 400)
    assert body["type"] == "error"
    assert body["error"]["type"] == (
        "not_found_error" if "model" in asked else "invalid_request_error"
    )
    assert message in body["error"]["message"]
    assert "\n" not in body["error"]["message"]


@pytest.mark.parametrize("tooled", ["hermes"], indirect=True)
def test_keys(tooled: Running, api: anthropic.Anthropic) -> None:
    with (
        anthropic.Anthropic(base_url=tooled.url, api_key="another-key", max_retries=0) as other,
        pytest.raises(anthropic.AuthenticationError, match="authentication_error"),
    ):
        other.messages.create(messages=ASK, **OPTIONS)
    with anthropic.Anthropic(base_url=tooled.url, auth_token=KEY, max_retries=0) as bearer:
        assert (
            bearer.messages.create(messages=ASK, **{**OPTIONS, "max_tokens": 1}).usage.output_tokens
            == 1
        )
    with pytest.raises(anthropic.BadRequestError, match="context"):
        api.messages.create(messages=[{"role": "user", "content": "x " * 5000}], **OPTIONS)


@pytest.mark.parametrize("tooled", ["hermes"], indirect=True)
def test_an_error_in_a_stream(
    tooled: Running, api: anthropic.Anthropic, fail: Callable[[LLM], None]
) -> None:
    fail(tooled.llm)
    body = {"ignore_eos": True, "drafter": "autoregressive"}
    with pytest.raises(anthropic.APIError, match="internal server error") as caught:
        streamed(api, messages=ASK, **{**OPTIONS, "extra_body": body})
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("tooled", ["qwen3"], indirect=True)
@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_aborted_streams_leave_nothing(
    tooled: Running, api: anthropic.Anthropic, count: int
) -> None:
    """Clients disconnect within thoughts, text and calls; a later answer is as before."""
    options: Any = {
        **OPTIONS,
        "messages": ASK,
        "tools": TOOLS,
        "thinking": BUDGET,
        "extra_body": THINK,
    }
    options |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    want = api.messages.create(**options)
    for number in range(count):
        with api.messages.stream(**options) as stream:
            for _, _event in zip(range(number % 13), stream, strict=False):
                pass
    assert tooled.drained
    check_same(api.messages.create(**options), want)


@pytest.mark.parametrize("tooled", ["hermes"], indirect=True)
def test_more_tokens_than_fit_mean_what_fits(tooled: Running, api: anthropic.Anthropic) -> None:
    """Agents send one large number to all models."""
    got = api.messages.create(**{**OPTIONS, "messages": ASK, "max_tokens": 20_000})
    room = tooled.llm.config.context - got.usage.input_tokens
    assert got.stop_reason in ("end_turn", "max_tokens")
    assert got.usage.output_tokens <= room
    assert got.stop_reason == "end_turn" or got.usage.output_tokens == room
