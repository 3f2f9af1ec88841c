"""Answers of each route: types of the client's library, texts, calls, and the next turn."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from server.clients import anthropic, openai

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
# Fields that require exactly one call.
ONE_CALL: Mapping[str, Mapping[str, Any]] = {
    CHAT: {"tool_choice": "required", "parallel_tool_calls": False},
    RESPONSES: {"tool_choice": "required", "parallel_tool_calls": False},
    MESSAGES: {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
}


@cache
def type_of_answer(route: str) -> TypeAdapter[Any]:
    """Return the type of a whole answer in the client's library."""
    types = {
        CHAT: lambda: openai.types.chat.ChatCompletion,
        COMPLETIONS: lambda: openai.types.Completion,
        RESPONSES: lambda: openai.types.responses.Response,
        MESSAGES: lambda: anthropic.types.Message,
    }
    return TypeAdapter(types[route]())


@cache
def type_of_event(route: str) -> TypeAdapter[Any]:
    """Return the type of an event of a stream in the client's library."""
    types = {
        CHAT: lambda: openai.types.chat.ChatCompletionChunk,
        COMPLETIONS: lambda: openai.types.Completion,
        RESPONSES: lambda: openai.types.responses.ResponseStreamEvent,
        MESSAGES: lambda: anthropic.types.RawMessageStreamEvent,
    }
    return TypeAdapter(types[route]())


class Call(NamedTuple):
    """A call of an answer; the arguments are parsed."""

    ident: str
    name: str
    arguments: Any


def parse_events(route: str, text: str) -> list[dict[str, Any]]:
    """Return the events of a stream; each must have the type of the client's library."""
    events = []
    for block in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        if lines["data"] == "[DONE]":
            assert route in (CHAT, COMPLETIONS)
            continue
        event = json.loads(lines["data"])
        assert lines.get("event", event.get("type")) == event.get("type")
        type_of_event(route).validate_python(_typed(route, event))
        events.append(event)
    return events


def _typed(route: str, event: dict[str, Any]) -> dict[str, Any]:
    """Return an event without the nulls that OpenAI sends before the last event, and whose type
    does not have them.
    """
    if route != COMPLETIONS:
        return event
    choices = [choice for choice in event["choices"] if choice["finish_reason"] is not None]
    return {**event, "choices": choices}


def streamed_text(route: str, events: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of an answer's events, without thoughts and calls."""
    if route == MESSAGES:
        return "".join(event.get("delta", {}).get("text", "") for event in events)
    if route == RESPONSES:
        kind = "response.output_text.delta"
        return "".join(event["delta"] for event in events if event["type"] == kind)
    choices = [choice for event in events for choice in event["choices"]]
    if route == COMPLETIONS:
        return "".join(choice["text"] for choice in choices)
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def whole_text(route: str, answer: Mapping[str, Any]) -> str:
    """Return the text of a whole answer, without thoughts and calls."""
    if route == MESSAGES:
        return "".join(block.get("text", "") for block in answer["content"])
    if route == RESPONSES:
        messages = [item for item in answer["output"] if item["type"] == "message"]
        return "".join(part["text"] for message in messages for part in message["content"])
    (choice,) = answer["choices"]
    return str(choice["text"] if route == COMPLETIONS else choice["message"]["content"] or "")


def calls(route: str, answer: Mapping[str, Any]) -> list[Call]:
    """Return the calls of a whole answer."""
    if route == MESSAGES:
        blocks = [block for block in answer["content"] if block["type"] == "tool_use"]
        return [Call(block["id"], block["name"], block["input"]) for block in blocks]
    if route == RESPONSES:
        items = [item for item in answer["output"] if item["type"] == "function_call"]
        return [_call(item["call_id"], item) for item in items]
    found = answer["choices"][0]["message"].get("tool_calls") or []
    return [_call(each["id"], each["function"]) for each in found]


def _call(ident: str, function: Mapping[str, Any]) -> Call:
    return Call(ident, function["name"], json.loads(function["arguments"]))


def num_prompt(route: str, answer: Mapping[str, Any]) -> int:
    """Return the number of tokens of an answer's prompt."""
    usage = answer["usage"]
    if route == MESSAGES:
        return int(usage["input_tokens"] + usage["cache_read_input_tokens"])
    return int(usage["input_tokens" if route == RESPONSES else "prompt_tokens"])


def next_turn(route: str, body: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of the next turn.

    The answer is added as it is, then a result of each call or, without calls, another question.
    """
    field = "input" if route == RESPONSES else "messages"
    added = {MESSAGES: _add_blocks, RESPONSES: _add_items, CHAT: _add_messages}[route]
    return {**body, field: [*body[field], *added(answer, calls(route, answer))]}


def _add_blocks(answer: Mapping[str, Any], made: Sequence[Call]) -> list[dict[str, Any]]:
    """Return the messages that Claude Code adds."""
    result = {"type": "tool_result", "content": "done"}
    results: list[dict[str, Any]] = [{**result, "tool_use_id": call.ident} for call in made]
    user = {"role": "user", "content": results or [{"type": "text", "text": "Go on."}]}
    if not answer["content"]:
        return [user]
    return [{"role": "assistant", "content": answer["content"]}, user]


def _add_items(answer: Mapping[str, Any], made: Sequence[Call]) -> list[dict[str, Any]]:
    """Return the items that Codex adds."""
    output = {"type": "function_call_output", "output": "done"}
    outputs = [{**output, "call_id": call.ident} for call in made]
    text = {"type": "input_text", "text": "Go on."}
    question = {"type": "message", "role": "user", "content": [text]}
    return [*answer["output"], *(outputs or [question])]


def _add_messages(answer: Mapping[str, Any], made: Sequence[Call]) -> list[dict[str, Any]]:
    """Return the messages that clients of chat completions add."""
    results = [{"role": "tool", "tool_call_id": call.ident, "content": "done"} for call in made]
    return [answer["choices"][0]["message"], *(results or [{"role": "user", "content": "Go on."}])]
