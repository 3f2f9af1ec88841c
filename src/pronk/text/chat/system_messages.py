"""System messages at places where a chat template does not take them.

A conversation may have system messages anywhere: agents add reminders in the middle. Few chat
templates render all of them. Some templates render only a system message at the beginning, and some
render none. For the others, a template either raises an error or leaves the message out of the
prompt without an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pronk.base.errors import PromptError
from pronk.text.tokenizer import Tokenizer

# words that no template contains
_SYSTEM = "Zanzibar"
_FIRST = "Quagga"
_ANSWER = "Okapi"
_LAST = "Ibex"


def has_system_role(tokenizer: Tokenizer) -> bool:
    """Return whether the chat template renders a system message at the beginning."""
    return _renders(tokenizer, [("system", _SYSTEM), ("user", _FIRST)])


def has_system_role_anywhere(tokenizer: Tokenizer) -> bool:
    """Return whether the chat template renders a system message between other messages, at its place."""
    turns = [("user", _FIRST), ("assistant", _ANSWER), ("system", _SYSTEM), ("user", _LAST)]
    return _renders(tokenizer, turns)


def _renders(tokenizer: Tokenizer, turns: Sequence[tuple[str, str]]) -> bool:
    """Return whether the template renders the texts of all turns, each once, in their order."""
    try:
        text = tokenizer.chat([{"role": role, "content": word} for role, word in turns])
    except PromptError:
        return False
    places = [text.find(word) for _, word in turns]
    return -1 not in places and places == sorted(places)


def place_system_messages(
    messages: Sequence[Mapping[str, Any]], *, first: bool, anywhere: bool
) -> list[Mapping[str, Any]]:
    """Return the conversation with system messages only where the chat template takes them.

    ``first`` and ``anywhere`` are the results of :func:`has_system_role` and
    :func:`has_system_role_anywhere`. System messages at the beginning become one, if the template
    takes it. All others become a part of the next user message, or of the last one if none follows
    before the next answer; so the texts before them stay the same, and with them the cached prefix.
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
    """Append contents to the last message if it is the user's, else append a message of the user."""
    if placed and placed[-1]["role"] == "user":
        placed[-1] = {**placed[-1], "content": _joined([placed[-1]["content"], *contents])}
    else:
        placed.append({"role": "user", "content": _joined(contents)})


def _joined(contents: Sequence[str | Sequence[Mapping[str, Any]]]) -> str | list[Mapping[str, Any]]:
    """Return one content: a list of parts if one content is such a list, else a text."""
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(map(str, contents))
    parts = list[Mapping[str, Any]]()
    for content in contents:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts
