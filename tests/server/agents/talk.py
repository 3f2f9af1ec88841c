"""Answers of each route: the types of the client's library, the calls, and the next turn of the conversation."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
# Types of whole answers and of events in the clients' libraries.
WHOLE: Mapping[str, TypeAdapter[Any]] = {
    CHAT: TypeAdapter(ChatCompletion),
    COMPLETIONS: TypeAdapter(Completion),
    RESPONSES: TypeAdapter(Response),
    MESSAGES: TypeAdapter(Message),
}
EVENTS: Mapping[str, TypeAdapter[Any]] = {
    CHAT: TypeAdapter(ChatCompletionChunk),
    COMPLETIONS: TypeAdapter(Completion),
    RESPONSES: TypeAdapter(ResponseStreamEvent),
    MESSAGES: TypeAdapter(RawMessageStreamEvent),
}
# Fields that require exactly one call.
ONE_CALL: Mapping[str, Mapping[str, Any]] = {
    CHAT: {"tool_choice": "required", "parallel_tool_calls": False},
    RESPONSES: {"tool_choice": "required", "parallel_tool_calls": False},
    MESSAGES: {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
}


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
        EVENTS[route].validate_python(event)
        events.append(event)
    return events


def streamed_text(route: str, events: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of an answer's events, without thoughts and calls."""
    if route == MESSAGES:
        return "".join(event.get("delta", {}).get("text", "") for event in events)
    if route == RESPONSES:
        return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    choices = [choice for event in events for choice in event["choices"]]
    if route == COMPLETIONS:
        return "".join(choice["text"] for choice in choices)
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def whole_text(route: str, answer: Mapping[str, Any]) -> str:
    """Return the text of a whole answer, without thoughts and calls."""
    if route == MESSAGES:
        return "".join(block.get("text", "") for block in answer["content"])
    if route == RESPONSES:
        parts = [part for item in answer["output"] if item["type"] == "message" for part in item["content"]]
        return "".join(part["text"] for part in parts)
    (choice,) = answer["choices"]
    return str(choice["text"] if route == COMPLETIONS else choice["message"]["content"] or "")


def calls(route: str, answer: Mapping[str, Any]) -> list[Call]:
    """Return the calls of a whole answer."""
    if route == MESSAGES:
        blocks = [block for block in answer["content"] if block["type"] == "tool_use"]
        return [Call(block["id"], block["name"], block["input"]) for block in blocks]
    if route == RESPONSES:
        items = [item for item in answer["output"] if item["type"] == "function_call"]
        return [Call(item["call_id"], item["name"], json.loads(item["arguments"])) for item in items]
    found = answer["choices"][0]["message"].get("tool_calls") or []
    return [Call(each["id"], each["function"]["name"], json.loads(each["function"]["arguments"])) for each in found]


def num_prompt(route: str, answer: Mapping[str, Any]) -> int:
    """Return the number of tokens of an answer's prompt."""
    usage = answer["usage"]
    if route == MESSAGES:
        return int(usage["input_tokens"] + usage["cache_read_input_tokens"])
    return int(usage["input_tokens" if route == RESPONSES else "prompt_tokens"])


def next_turn(route: str, body: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body after an answer: the answer as it is, and results of its calls or another question."""
    made = calls(route, answer)
    if route == MESSAGES:
        results = [{"type": "tool_result", "tool_use_id": call.ident, "content": "done"} for call in made]
        question = [{"type": "text", "text": "Go on."}]
        said = [{"role": "assistant", "content": answer["content"]}] if answer["content"] else []
        return {**body, "messages": [*body["messages"], *said, {"role": "user", "content": results or question}]}
    if route == RESPONSES:
        outputs = [{"type": "function_call_output", "call_id": call.ident, "output": "done"} for call in made]
        question = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]}]
        return {**body, "input": [*body["input"], *answer["output"], *(outputs or question)]}
    message = answer["choices"][0]["message"]
    replies = [{"role": "tool", "tool_call_id": call.ident, "content": "done"} for call in made]
    return {**body, "messages": [*body["messages"], message, *(replies or [{"role": "user", "content": "Go on."}])]}
