"""Answers of the three APIs as clients send them back in the next request."""

from __future__ import annotations

import json
from typing import Any

import httpx

from pronk.server.protocol.tools import complete_arguments

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
NEXT = {"role": "user", "content": "And then?"}


def joined_chat(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first message of a streamed chat as OpenAI's client joins it: fields that never
    came are null.
    """
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            if choice["index"]:
                continue
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                if delta.get(name) is not None:
                    message[name] = (message.get(name) or "") + delta[name]
            for part in delta.get("tool_calls", []):
                call = calls.setdefault(part["index"], {"function": {"arguments": ""}})
                call |= {name: part[name] for name in ("id", "type", "index") if name in part}
                call["function"] |= {
                    name: value for name, value in part["function"].items() if name != "arguments"
                }
                call["function"]["arguments"] += part["function"]["arguments"]
    return message | ({"tool_calls": [*calls.values()]} if calls else {"tool_calls": None})


def answer_of(route: str, reply: httpx.Response, *, stream: bool) -> list[Any]:
    """Return an answer as a client appends it to the conversation; of a stream, as clients join its
    events.
    """
    if not stream:
        whole = reply.json()
        if route == CHAT:
            return [whole["choices"][0]["message"]]
        return (
            list(whole["output"])
            if route == RESPONSES
            else [{"role": "assistant", "content": whole["content"]}]
        )
    text = reply.text
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in data if line != "[DONE]"]
    if route == CHAT:
        return [joined_chat(events)]
    if route == RESPONSES:
        return list(events[-1]["response"]["output"])
    blocks: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = event["content_block"] | {"partial": ""}
        elif event["type"] == "content_block_delta":
            (value,) = [value for name, value in event["delta"].items() if name != "type"]
            blocks[event["index"]]["partial"] += (
                value if event["delta"]["type"] != "signature_delta" else ""
            )
    for block in blocks.values():
        partial = block.pop("partial")
        if block["type"] == "tool_use":  # Anthropic's client reads the incomplete JSON
            block["input"] = json.loads(complete_arguments(partial) or "{}")
        else:
            block[block["type"]] = partial
    return [{"role": "assistant", "content": [*blocks.values()]}]


def results(route: str, answer: list[Any]) -> list[Any]:
    """Return the next message: the results of all calls, or a text of the user."""
    if route == CHAT:
        calls = answer[0].get("tool_calls") or []
        return [
            *({"role": "tool", "tool_call_id": call["id"], "content": "?"} for call in calls),
            NEXT,
        ]
    if route == RESPONSES:
        calls = [item for item in answer if item["type"] == "function_call"]
        return [
            *(
                {"type": "function_call_output", "call_id": c["call_id"], "output": "?"}
                for c in calls
            ),
            NEXT,
        ]
    ids = [block["id"] for block in answer[0]["content"] if block["type"] == "tool_use"]
    blocks = [{"type": "tool_result", "tool_use_id": ident, "content": "?"} for ident in ids]
    return [{"role": "user", "content": [*blocks, {"type": "text", "text": "And then?"}]}]
