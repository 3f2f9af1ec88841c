"""System messages at places where a chat template does not take them.

A conversation may have system messages anywhere: agents add reminders in the middle. Few chat
templates render all system messages. Some templates render only one at the beginning, and some
render none. A system message elsewhere either causes an error or is missing in the prompt without
an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pronk.base.errors import PromptError

# Function that renders a conversation, such as :meth:`pronk.text.tokenizer.Tokenizer.chat`.
Render = Callable[[list[dict[str, str]]], str]
# Contents of the messages of a trial rendering: words that no template contains.
_SYSTEM = "Zanzibar"
_FIRST = "Quagga"
_ANSWER = "Okapi"
_LAST = "Ibex"


def has_system_role(render: Render) -> bool:
    """Return whether the chat template renders a system message at the beginning."""
    return _renders(render, [("system", _SYSTEM), ("user", _FIRST)])


def has_system_role_anywhere(render: Render) -> bool:
    """Return whether the chat template renders a system message between other messages.

    The rendered text must have the system message between those messages, too.
    """
    turns = [("user", _FIRST), ("assistant", _ANSWER), ("system", _SYSTEM), ("user", _LAST)]
    return _renders(render, turns)


def _renders(render: Render, turns: Sequence[tuple[str, str]]) -> bool:
    """Return whether the template renders the texts of all ``turns``, in their order.

    Each turn is a role and a text.
    """
    try:
        text = render([{"role": role, "content": word} for role, word in turns])
    except PromptError:
        return False
    places = [text.find(word) for _, word in turns]
    return -1 not in places and places == sorted(places)


def place_system_messages(
    messages: Sequence[Mapping[str, Any]], *, first: bool, anywhere: bool
) -> list[Mapping[str, Any]]:
    """Return the conversation with system messages only where the chat template takes them.

    System messages at the beginning become one system message if the template renders it. Every
    other system message becomes a part of the next user message, or of the last user message if
    none follows before the next answer. The prompt before a system message stays the same, so that
    the prefix cache still serves it.

    Args:
        messages: conversation in OpenAI's format.
        first: result of :func:`has_system_role`.
        anywhere: result of :func:`has_system_role_anywhere`.
    """
    if anywhere:
        return [*messages]
    placed = list[Mapping[str, Any]]()
    waiting = list[Any]()
    for message in messages:
        role = message["role"]
        if role == "system":
            waiting += [message["content"]] if message["content"] else []
            continue
        if first and not placed and waiting:
            placed.append({"role": "system", "content": _joined(waiting)})
            waiting = []
        if role == "user" and waiting:
            placed.append({**message, "content": _joined([*waiting, message["content"]])})
            waiting = []
            continue
        if role == "assistant" and waiting:
            _add_to_user(placed, waiting)
            waiting = []
        placed.append(message)
    if waiting and first and not placed:
        placed.append({"role": "system", "content": _joined(waiting)})
    elif waiting:
        _add_to_user(placed, waiting)
    return placed


def _add_to_user(placed: list[Mapping[str, Any]], contents: Sequence[Any]) -> None:
    """Append contents to a user message: to the last message if it is one, else to a new one."""
    if placed and placed[-1]["role"] == "user":
        placed[-1] = {**placed[-1], "content": _joined([placed[-1]["content"], *contents])}
    else:
        placed.append({"role": "user", "content": _joined(contents)})


def _joined(contents: Sequence[str | Sequence[Mapping[str, Any]]]) -> str | list[Mapping[str, Any]]:
    """Return several contents of messages as one content.

    The result is a list of parts if one of the contents is a list, else a text.
    """
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(map(str, contents))
    parts = list[Mapping[str, Any]]()
    for content in contents:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts
