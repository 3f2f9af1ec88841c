"""Conversations as OpenAI's interface has them.

A message has a ``role`` and a ``content``: a text, or a list of parts, ``{"type": "text", "text": "…"}``, of which
models of text can read no other type. An assistant's message that calls tools may do without a content. What else a
message has is for the template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pronk.errors import PromptError

__all__ = ["Messages", "check_messages", "join_parts"]

Messages = Sequence[Mapping[str, object]]


def check_messages(messages: object) -> list[dict[str, Any]]:
    """The messages as plain dictionaries.

    Raises:
        PromptError: they are none, or malformed.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        msg = f"messages: expected a list of objects with 'role' and 'content', found {_shown(messages)}"
        raise PromptError(msg)
    if not messages:
        msg = "messages: expected at least one message with 'role' and 'content', found none"
        raise PromptError(msg)
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def join_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the parts of its content as lines of one text, for templates that know texts alone."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _check_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        msg = f"{where}: expected an object with 'role' and 'content', found {_shown(message)}"
        raise PromptError(msg)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        msg = f"{where}: expected a string for 'role', found {_found(message, 'role')}"
        raise PromptError(msg)
    if isinstance(content, str) or (content is None and role == "assistant" and message.get("tool_calls")):
        return dict(message)
    if not isinstance(content, (list, tuple)):
        msg = f"{where}: expected a string or a list of parts for 'content', found {_found(message, 'content')}"
        raise PromptError(msg)
    return {**message, "content": [_check_part(part, f"{where}, part {index}") for index, part in enumerate(content)]}


def _check_part(part: object, where: str) -> dict[str, Any]:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        msg = f"{where}: expected an object such as {{'type': 'text', 'text': '…'}}, found {_shown(part)}"
        raise PromptError(msg)
    if part["type"] != "text":
        msg = f"{where}: expected the type 'text', found {part['type']!r}; the model reads text alone, so leave it out"
        raise PromptError(msg)
    if not isinstance(part.get("text"), str):
        msg = f"{where}: expected a string for 'text', found {_found(part, 'text')}"
        raise PromptError(msg)
    return dict(part)


def _found(given: Mapping[Any, Any], key: str) -> str:
    return _shown(given[key]) if key in given else "no such key"


def _shown(value: object) -> str:
    """A few words of one line."""
    return "None" if value is None else f"{type(value).__name__} {' '.join(repr(value).split()):.40}"
