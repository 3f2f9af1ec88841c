"""Conversations for chat templates of the harmony format, which gpt-oss uses.

The published template writes one call per message, fails if a message with a call has both thoughts and text, and
needs a description of every tool. It knows three values of ``reasoning_effort``. The functions of this module convert
what clients send to what such templates accept. Source of the format: OpenAI's cookbook, ``openai-harmony.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

__all__ = ["describe_tools", "nearest_effort", "separate_calls", "uses_harmony"]

# Each effort of OpenAI's API that gpt-oss does not know, and the nearest one that it knows.
_NEAREST_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high"}


def uses_harmony(source: str) -> bool:
    """Return whether the source of a chat template writes messages in the harmony format."""
    return "<|channel|>" in source and "<|message|>" in source


def separate_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with at most one call each, followed by the results of the call.

    A text beside a call is appended to the thoughts; without thoughts, the template itself writes it there.
    """
    separated, at = list[dict[str, Any]](), 0
    while at < len(messages):
        message = dict(messages[at])
        at += 1
        calls = message.get("tool_calls")
        if message.get("role") != "assistant" or not isinstance(calls, (list, tuple)) or not calls:
            separated.append(message)
            continue
        results = list(takewhile(lambda each: each.get("role") == "tool", messages[at:]))
        at += len(results)
        for call in calls[:-1]:
            separated.append(_with_call(message, call))
            message = {"role": "assistant", "content": ""}  # thoughts and text belong to the first call
            found = next((each for each in results if each.get("tool_call_id") in (None, _ident(call))), None)
            if found is not None:
                results.remove(found)
                separated.append(dict(found))
        separated += [_with_call(message, calls[-1]), *map(dict, results)]
    return separated


def _with_call(message: Mapping[str, Any], call: object) -> dict[str, Any]:
    """Return a message with one call, and with its text joined to its thoughts if it has both."""
    content, thoughts = message.get("content"), message.get("thinking")
    if content and isinstance(content, str) and isinstance(thoughts, str):
        message = {**message, "thinking": f"{thoughts}\n\n{content}", "content": ""}
    return {**message, "tool_calls": [call]}


def _ident(call: object) -> object:
    return call.get("id") if isinstance(call, Mapping) else None


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the tools with an empty description where one is missing."""
    return [_described(tool) for tool in tools]


def _described(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or function.get("description") is not None:
        return tool
    return {**tool, "function": {**function, "description": ""}}


def nearest_effort(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a template with an effort that gpt-oss knows: low, medium or high.

    gpt-oss always thinks, so that thoughts that are switched off become the lowest effort.
    """
    effort = options.get("reasoning_effort")
    if effort is None and options.get("enable_thinking") is False:
        effort = "none"
    if isinstance(effort, str):
        return {**options, "reasoning_effort": _NEAREST_EFFORTS.get(effort, effort)}
    return dict(options)
