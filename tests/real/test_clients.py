"""The official clients on real models with their own templates: tools, thinking options and a
JSON schema at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from server.clients import anthropic, openai
from server.serving import KEY, Running, running

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
FUNCTION = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": SCHEMA,
}
ASK: Any = [{"role": "user", "content": "How is the weather in Oslo, in celsius? Use the tool."}]
ONE: Any = {"type": "any", "disable_parallel_tool_use": True}
SEEDED: Any = {"seed": 1, "temperature": 0.0}


@pytest.fixture(scope="module")
def made(llm: LLM) -> Iterator[Running]:
    with running(llm, name="real.gguf") as server:
        yield server


def has_tools(made: Running) -> bool:
    return "tool" in (made.llm.tokenizer.chat_template or "")


@pytest.mark.slow  # the same as server/test_openai_client.py on a tiny model
def test_openai(made: Running) -> None:
    tools: Any = [{"type": "function", "function": FUNCTION}]
    form: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    more: Any = {"seed": 1, "thinking_budget": 20}
    asked: Any = {
        "model": "REAL",
        "messages": ASK,
        "max_tokens": 60,
        "temperature": 0.0,
        "extra_body": more,
    }
    asked |= {"response_format": form, "reasoning_effort": "low"}
    with openai.OpenAI(base_url=f"{made.url}/v1", api_key=KEY, max_retries=0) as api:
        if has_tools(made):
            asked["tools"] = tools
        message = api.chat.completions.create(**asked).choices[0].message
        text = ""
        arguments = ""
        for chunk in api.chat.completions.create(stream=True, **asked):
            delta = chunk.choices[0].delta
            text += delta.content or ""
            arguments += "".join(call.function.arguments for call in delta.tool_calls or ())
        calls: Any = message.tool_calls or []
        assert text == (message.content or "")
        assert arguments == "".join(call.function.arguments for call in calls)
        jsonschema.validate(json.loads(calls[0].function.arguments if calls else text), SCHEMA)
        if not has_tools(made):
            return
        choice: Any = {"type": "function", "function": {"name": "get_weather"}}
        message = api.chat.completions.create(**asked, tool_choice=choice).choices[0].message
        (call,) = message.tool_calls or []
        assert json.loads(call.function.arguments)["city"].lower() == "oslo"  # type: ignore[union-attr]
        result = {"role": "tool", "tool_call_id": call.id, "content": "4 degrees and rain"}
        talk: Any = [*ASK, message.model_dump(exclude_none=True), result]
        plain = {
            "model": "real",
            "max_tokens": 40,
            "temperature": 0.0,
            "tools": tools,
            "tool_choice": "none",
        }
        again = api.chat.completions.create(messages=talk, **plain).choices[0].message  # type: ignore[call-overload]
        assert "4" in again.content


def test_calls_that_the_model_begins_by_itself_follow_the_schema(made: Running) -> None:
    """Qwen2.5-Coder writes such calls without markers."""
    if not has_tools(made):
        pytest.skip("the model calls no tools")
    narrow: Any = {
        **SCHEMA,
        "properties": {**SCHEMA["properties"], "city": {"enum": ["paris", "tokyo"]}},
    }
    tools: Any = [
        {"type": "function", "function": {**FUNCTION, "parameters": narrow, "strict": True}}
    ]
    asked: Any = {
        "model": "real",
        "messages": ASK,
        "max_tokens": 80,
        "temperature": 0.0,
        "tools": tools,
    }
    with openai.OpenAI(base_url=f"{made.url}/v1", api_key=KEY, max_retries=0) as api:
        choice = api.chat.completions.create(**asked).choices[0]
        plain = made.llm.chat_ids(ASK, tools=tools)
        text = made.llm.generate(plain, SamplingParams(max_tokens=80, temperature=0.0)).text
        for drafter in ("autoregressive", "suffix"):
            again = api.chat.completions.create(**asked, extra_body={"drafter": drafter}).choices[0]
            assert again.message.content == choice.message.content
            assert [each.function for each in again.message.tool_calls or ()] == [  # type: ignore[union-attr]
                each.function
                for each in choice.message.tool_calls or ()  # type: ignore[union-attr]
            ]
    assert "get_weather" in text
    assert "<tool_call>" not in text
    (call,) = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls"
    jsonschema.validate(json.loads(call.function.arguments), narrow)  # type: ignore[union-attr]


@pytest.mark.slow  # the same as server/test_messages.py on a tiny model
def test_anthropic(made: Running) -> None:
    tools: Any = [
        {"name": "get_weather", "description": FUNCTION["description"], "input_schema": SCHEMA}
    ]
    asked: Any = {"model": "real", "max_tokens": 60, "system": "Be brief.", "extra_body": SEEDED}
    both: Any = {
        "messages": ASK,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    }
    with anthropic.Anthropic(base_url=made.url, api_key=KEY, max_retries=0) as api:
        if has_tools(made):
            both |= {"tools": tools}
        got = api.messages.create(**asked, **both)
        with api.messages.stream(**asked, **both) as stream:
            joined = stream.get_final_message()
        for reply in (got, joined):
            assert reply.stop_reason in ("end_turn", "tool_use")
            block: Any = reply.content[-1]
            jsonschema.validate(
                block.input if block.type == "tool_use" else json.loads(block.text), SCHEMA
            )
        assert len(got.content) == len(joined.content)
        if not has_tools(made):
            return
        first = api.messages.create(messages=ASK, tools=tools, tool_choice=ONE, **asked)
        call: Any = first.content[-1]
        assert (first.stop_reason, call.name, call.input["city"].lower()) == (
            "tool_use",
            "get_weather",
            "oslo",
        )
        result: Any = {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": "4 degrees and rain",
        }
        talk: Any = [
            *ASK,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        again: Any = api.messages.create(
            messages=talk, tools=tools, tool_choice={"type": "none"}, **asked
        )
        assert "4" in again.content[0].text
        counted = api.messages.count_tokens(model="real", messages=talk, system="Be brief.")
        assert counted.input_tokens == again.usage.input_tokens + (
            again.usage.cache_read_input_tokens or 0
        )
