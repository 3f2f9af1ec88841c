"""Thoughts with OpenAI's client: chat completions and responses, with budgets, tools and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from pronk.sampling.params import SamplingParams
from server.clients import openai
from server.serving import KEY, Running, running
from server.test_tools import SCHEMAS, TOOLS
from server.tool_models import ALL_LAYERS, BEGIN_THOUGHT, END_THOUGHT, FEW_LAYERS, tool_model

ASK: Any = [{"role": "user", "content": "How is it in Oslo?"}]
BIAS = {str(BEGIN_THOUGHT): 40}  # pronk-tiny does not think by itself
OPTIONS: Any = {"model": "tiny", "temperature": 0.8}
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "weather", "schema": SCHEMAS["weather"]},
}
FLAT: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]


@pytest.fixture(scope="module", params=["qwen3", "deepseek"])
def thinking(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    # The thoughts of "deepseek" begin and end with texts, which few layers do not write.
    layers = ALL_LAYERS if request.param == "deepseek" else FEW_LAYERS
    with running(tool_model(tmp_path_factory.mktemp(request.param), request.param, layers)) as made:
        yield made


@pytest.fixture
def api(thinking: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def is_open(made: Running) -> bool:
    return made.llm.path.name.startswith("deepseek")


def options(made: Running, max_tokens: int, **more: Any) -> Any:
    """Return options of chat completions with thoughts of at most 9 tokens."""
    bias = {} if is_open(made) else {"logit_bias": BIAS}
    return {
        **OPTIONS,
        "max_tokens": max_tokens,
        "seed": 4,
        **bias,
        "extra_body": {"thinking_budget": 9},
        **more,
    }


def joined(chunks: Any) -> dict[int, Any]:
    """Return thoughts, text, calls and finish reason of each sample of a stream, in their order."""
    found = dict[int, Any]()
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            said = found.setdefault(
                choice.index, {"thoughts": "", "text": "", "calls": [], "reason": None}
            )
            if thoughts := getattr(delta, "reasoning_content", None):
                assert not said["text"]
                assert not said["calls"]
                said["thoughts"] += thoughts
            said["text"] += delta.content or ""
            for call in delta.tool_calls or []:
                if call.id is not None:
                    said["calls"].append([call.function.name, ""])
                said["calls"][-1][1] += call.function.arguments
            said["reason"] = choice.finish_reason or said["reason"]
    return found


def whole(reply: Any) -> dict[int, Any]:
    return {
        choice.index: {
            "thoughts": getattr(choice.message, "reasoning_content", None) or "",
            "text": choice.message.content or "",
            "calls": [
                [call.function.name, call.function.arguments]
                for call in choice.message.tool_calls or ()
            ],
            "reason": choice.finish_reason,
        }
        for choice in reply.choices
    }


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3},
        {"response_format": FORMAT},
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": TOOLS, "response_format": FORMAT, "parallel_tool_calls": False},
        {"logprobs": True, "top_logprobs": 2},
    ],
    ids=["text", "samples", "json", "tools", "tools and json", "logprobs"],
)
def test_thoughts_come_first_streamed_and_whole(
    thinking: Running, api: openai.OpenAI, more: dict[str, Any]
) -> None:
    asked = options(thinking, 120, **more)
    got = api.chat.completions.create(messages=ASK, **asked)
    stream: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [*api.chat.completions.create(messages=ASK, **asked, **stream)]
    answers = whole(got)
    assert joined(chunks) == answers
    assert got.usage is not None
    assert got.usage.completion_tokens_details is not None
    count = got.usage.completion_tokens_details.reasoning_tokens
    assert count is not None
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == count
    assert 0 < count <= len(answers) * (9 + 8)  # the end marker of "deepseek" has several tokens
    for answer in answers.values():
        assert answer["thoughts"]
        if is_open(thinking):  # the bias of the other model begins thoughts everywhere
            assert "think>" not in answer["thoughts"] + answer["text"]
        if "response_format" in more and answer["text"]:
            jsonschema.validate(json.loads(answer["text"]), SCHEMAS["weather"])
        if "tools" in more:
            assert len(answer["calls"]) == (not answer["text"])
            for name, arguments in answer["calls"]:
                jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        if "response_format" in more or "tools" in more:
            assert answer["reason"] == ("tool_calls" if answer["calls"] else "stop")
    assert thinking.drained


@pytest.mark.few(4)
@pytest.mark.parametrize("drafter", ["autoregressive", "suffix", "recycling"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_budgets_give_the_same_answer_with_every_drafter(
    thinking: Running, api: openai.OpenAI, drafter: str, temperature: float
) -> None:
    bias = None if is_open(thinking) else {**BIAS, str(END_THOUGHT): -100}
    extra: Any = {"thinking_budget": 15}
    base: Any = {
        "messages": ASK,
        "model": "tiny",
        "max_tokens": 60,
        "seed": 4,
        "temperature": temperature,
        "logit_bias": bias,
    }
    free = whole(api.chat.completions.create(**base))[0]
    want = whole(
        api.chat.completions.create(**base, extra_body={**extra, "drafter": "autoregressive"})
    )
    got = api.chat.completions.create(**base, extra_body={**extra, "drafter": drafter})
    assert whole(got) == want
    assert want[0]["thoughts"]
    assert free["thoughts"].startswith(want[0]["thoughts"])
    assert len(free["thoughts"]) > len(want[0]["thoughts"])
    usage: Any = got.usage
    if drafter in ("suffix", "recycling"):
        assert usage.model_extra["drafted"] > 0


def test_a_message_closes_thoughts_that_have_used_up_the_budget(
    thinking: Running, api: openai.OpenAI
) -> None:
    """The name of a special token in the message stays text, and drafts change nothing."""
    asked = options(thinking, 60)
    message = " Enough <|end|>."
    answers = list[Any]()
    for drafter in ("autoregressive", "recycling"):
        for more in ({}, {"reasoning_budget_message": message}):
            asked["extra_body"] = {"thinking_budget": 9, "drafter": drafter, **more}
            answers.append(whole(api.chat.completions.create(messages=ASK, **asked))[0])
    without, with_message = answers[:2]
    assert answers[2:] == [without, with_message]
    assert with_message["thoughts"] == without["thoughts"] + message
    assert with_message["text"]


def test_a_budget_of_zero_leaves_no_thoughts(thinking: Running, api: openai.OpenAI) -> None:
    asked = options(thinking, 30)
    asked["extra_body"] = {"thinking_budget": 0}
    got = whole(api.chat.completions.create(messages=ASK, **asked))[0]
    assert got["thoughts"] == ""
    assert got["text"]


@pytest.mark.parametrize("thinking", ["qwen3"], indirect=True)
@pytest.mark.parametrize(
    ("more", "thinks"),
    [
        ({}, None),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"extra_body": {"enable_thinking": False}}, False),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, False),
        (
            {
                "reasoning_effort": "low",
                "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
            },
            False,
        ),
    ],
    ids=str,
)
def test_thinking_is_switched_by_the_template(
    thinking: Running, api: openai.OpenAI, more: dict[str, Any], thinks: bool | None
) -> None:
    got = api.chat.completions.create(messages=ASK, max_tokens=4, **OPTIONS, **more)
    given = {} if thinks is None else {"enable_thinking": thinks}
    prompt = thinking.llm.tokenizer.chat(ASK, options=given)
    assert prompt.endswith("</think>\n\n") == (thinks is False)
    assert got.usage is not None
    assert got.usage.prompt_tokens == len(
        thinking.llm.tokenizer.encode(prompt, add_special_tokens=False)
    )
    json_asked: Any = {
        **OPTIONS,
        **more,
        "response_format": FORMAT,
        "logit_bias": BIAS,
        "max_tokens": 60,
        "seed": 1,
    }
    answer = whole(api.chat.completions.create(messages=ASK, **json_asked))[0]
    # a form leaves no place for thoughts that are off
    assert bool(answer["thoughts"]) == (thinks is not False)


@pytest.mark.parametrize("thinking", ["qwen3"], indirect=True)
def test_thoughts_are_sent_back(thinking: Running, api: openai.OpenAI) -> None:
    """Qwen3's template keeps the thoughts of answers after the last message of the user."""
    first = api.chat.completions.create(
        messages=ASK, **options(thinking, 120, tools=TOOLS, tool_choice=named("time_in"))
    ).choices[0]
    message = first.message.model_dump(exclude_none=True) | {"content": ""}
    assert message["reasoning_content"]
    assert len(message["tool_calls"]) == 1
    talk: Any = [
        *ASK,
        message,
        {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Noon."},
    ]
    again = api.chat.completions.create(messages=talk, **options(thinking, 4))
    prompt = thinking.llm.tokenizer.chat(talk)
    assert f"<think>\n{message['reasoning_content']}\n</think>" in prompt
    assert again.usage is not None
    assert again.usage.prompt_tokens == len(
        thinking.llm.tokenizer.encode(prompt, add_special_tokens=False)
    )


@pytest.mark.parametrize("thinking", ["qwen3"], indirect=True)
def test_thoughts_without_text_are_sent_back(thinking: Running, api: openai.OpenAI) -> None:
    """An answer that was cut off within its thoughts has no content."""
    cut: Any = {"role": "assistant", "content": None, "reasoning_content": "It is"}
    talk: Any = [*ASK, cut, *ASK]
    got = api.chat.completions.create(messages=talk, **OPTIONS, max_tokens=1)
    prompt = thinking.llm.tokenizer.chat(talk)
    assert prompt == thinking.llm.tokenizer.chat([*ASK, {**cut, "content": ""}, *ASK])
    assert "None" not in prompt
    assert got.usage is not None
    assert got.usage.prompt_tokens == len(
        thinking.llm.tokenizer.encode(prompt, add_special_tokens=False)
    )


# the bias of the other model repeats its marker
@pytest.mark.parametrize("thinking", ["deepseek"], indirect=True)
def test_stop_strings_apply_within_thoughts(thinking: Running, api: openai.OpenAI) -> None:
    asked = options(thinking, 60)
    thoughts = whole(api.chat.completions.create(messages=ASK, **asked))[0]["thoughts"]
    stop = thoughts[2:4]
    got = whole(api.chat.completions.create(messages=ASK, stop=stop, **asked))[0]
    assert got == {
        "thoughts": thoughts[: thoughts.index(stop)],
        "text": "",
        "calls": [],
        "reason": "stop",
    }


@pytest.mark.parametrize("thinking", ["qwen3"], indirect=True)
def test_a_budget_needs_the_end_marker(thinking: Running, api: openai.OpenAI) -> None:
    extra: Any = {"thinking_budget": 3, "bad_words": ["</think>"]}
    with pytest.raises(
        openai.BadRequestError, match=rf"found its token {END_THOUGHT} banned by .*bad_words"
    ) as caught:
        api.chat.completions.create(messages=ASK, **{**options(thinking, 9), "extra_body": extra})
    assert caught.value.param == "thinking_budget"
    assert thinking.drained


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tools": FLAT, "tool_choice": "required", "parallel_tool_calls": False},
        {
            "tools": FLAT,
            "text": {"format": {"type": "json_schema", "name": "w", "schema": SCHEMAS["weather"]}},
        },
    ],
    ids=["text", "tools", "tools and json"],
)
def test_responses_have_items_of_thoughts_and_calls(
    thinking: Running, api: openai.OpenAI, more: dict[str, Any]
) -> None:
    bias = {} if is_open(thinking) else {"logit_bias": BIAS}
    extra: Any = {"extra_body": {"seed": 4, "thinking_budget": 9, **bias}}
    asked: Any = {
        **OPTIONS,
        "input": "How is it in Oslo?",
        "max_output_tokens": 120,
        **more,
        **extra,
    }
    got = api.responses.create(**asked, reasoning={"effort": "medium"})
    with api.responses.stream(**asked, reasoning={"effort": "medium"}) as stream:
        events = [*stream]
        final = stream.get_final_response() if got.status == "completed" else None
    assert [event.sequence_number for event in events] == [*range(len(events))]
    last: Any = events[-1]
    for reply in (last.response, final or last.response):
        assert [without_ids(item) for item in reply.output] == [
            without_ids(item) for item in got.output
        ]
    thought, *rest = got.output
    assert thought.type == "reasoning"
    assert thought.content
    assert thought.content[0].text
    assert got.usage is not None
    assert got.usage.output_tokens_details.reasoning_tokens > 0
    deltas = {"response.reasoning_text.delta": "", "response.output_text.delta": ""}
    arguments = dict[str, str]()
    for event in events:
        if event.type in deltas:
            deltas[event.type] += event.delta  # type: ignore[union-attr]
        elif event.type == "response.function_call_arguments.delta":
            arguments[event.item_id] = arguments.get(event.item_id, "") + event.delta
    assert deltas["response.reasoning_text.delta"] == thought.content[0].text
    assert deltas["response.output_text.delta"] == got.output_text
    calls = [item for item in rest if item.type == "function_call"]
    assert [*arguments.values()] == [call.arguments for call in calls]
    added = [event for event in events if event.type == "response.output_item.added"]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert len(added) == len(done) == len(got.output)
    if "tools" in more and got.status == "completed":
        assert calls or "text" in more
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        if not calls:
            jsonschema.validate(json.loads(got.output_text), SCHEMAS["weather"])
    if calls and got.status == "completed":
        result = {"type": "function_call_output", "call_id": calls[-1].call_id, "output": "Noon."}
        items: Any = [{"role": "user", "content": "How is it in Oslo?"}, *got.output, result]
        again = api.responses.create(**{**asked, "input": items, "max_output_tokens": 2})
        talk = [
            {"role": "user", "content": "How is it in Oslo?"},
            {
                "role": "assistant", "content": "", "reasoning_content": thought.content[0].text,
                "tool_calls": [{"id": call.call_id, "function": {"name": call.name, "arguments": call.arguments}}
                               for call in calls],
            },
            {"role": "tool", "tool_call_id": calls[-1].call_id, "content": "Noon."},
        ]  # fmt: skip
        keys = ("name", "description", "parameters")
        tools = [
            {"type": "function", "function": {key: tool["function"][key] for key in keys}}
            for tool in TOOLS
        ]
        assert again.usage is not None
        assert again.usage.input_tokens == len(thinking.llm.tokenizer.chat_ids(talk, tools=tools))


def without_ids(item: Any) -> Any:
    values = item.model_dump(exclude={"id", "call_id", "parsed_arguments"})
    for part in values.get("content") or ():
        part.pop("parsed", None)
    return values


BAD: list[tuple[dict[str, Any], str, str]] = [
    (
        {"chat_template_kwargs": {"messages": "x"}},
        "chat_template_kwargs",
        "expected names of template variables",
    ),
    (
        {"chat_template_kwargs": {"mode": "<|im_end|>"}},
        "chat_template_kwargs",
        "mode: expected a boolean, a number or a name",
    ),
    (
        {"chat_template_kwargs": {f"a{n}": 1 for n in range(17)}},
        "chat_template_kwargs",
        "expected at most 16 names",
    ),
    ({"chat_template_kwargs": {"deep": [1]}}, "chat_template_kwargs", "deep: expected a boolean"),
    ({"thinking_budget": -2}, "thinking_budget", "greater than or equal to 0"),
    ({"reasoning_effort": [5]}, "reasoning_effort", "found a list"),
]


@pytest.mark.parametrize("thinking", ["qwen3"], indirect=True)
@pytest.mark.parametrize(("asked", "param", "message"), BAD, ids=range(len(BAD)))
def test_invalid_options_are_refused(
    thinking: Running, asked: dict[str, Any], param: str, message: str
) -> None:
    with thinking.client() as client:
        answer = client.post(
            "/v1/chat/completions", json={"messages": ASK, "max_tokens": 4} | asked
        )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert message in answer.json()["error"]["message"]


def test_models_that_do_not_think_take_the_options(served: Running) -> None:
    """A budget is an upper bound, and clients send the same options to every model."""
    body = {"messages": ASK, "max_tokens": 8, "seed": 1}
    with served.client() as client:
        plain, got = (
            client.post("/v1/chat/completions", json=body | more).json()["choices"][0]["message"]
            for more in (
                {},
                {"thinking_budget": 3, "reasoning_effort": "low", "enable_thinking": True},
            )
        )
    assert got == plain


def test_budgets_in_python(thinking: Running) -> None:
    llm = thinking.llm
    ids = llm.chat_ids(ASK)
    bias = {BEGIN_THOUGHT: 40.0} if not is_open(thinking) else {}
    params = SamplingParams(
        max_tokens=30, thinking_budget=5, temperature=0.8, seed=2, logit_bias=bias
    )
    done = llm.generate(ids, params)
    assert "</think>" in done.text
    assert llm.generate(ids, params, drafter="autoregressive").token_ids == done.token_ids


def test_all_guide_modes_give_the_same_answer(thinking: Running, api: openai.OpenAI) -> None:
    """Forced text after the thoughts may be proposed, generated or appended without a forward
    pass.
    """
    asked = options(
        thinking, 120, response_format=FORMAT, tools=TOOLS, tool_choice=named("weather")
    )
    answers = []
    for mode in ("forced", "plain", "jump"):
        asked["extra_body"] = {"thinking_budget": 9, "guide_mode": mode}
        answers.append(whole(api.chat.completions.create(messages=ASK, **asked))[0])
    assert answers[0] == answers[1] == answers[2]
    assert answers[0]["thoughts"]
    assert len(answers[0]["calls"]) == 1
