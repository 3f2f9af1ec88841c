"""Messages of a conversation, in the format of OpenAI's chat completions: checks and conversions.

A message has a ``role``, one of :data:`ROLES`, and a ``content``: a text, or a list of parts
``{"type": "text", "text": "…"}``. Other types of parts are refused. A message of the assistant with
tool calls or thoughts needs no content. The arguments of a call are the JSON text of an object, and
the template receives that object. Templates get the role ``system`` in place of ``developer``,
which most of them do not know. All other keys of a message go to the template unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, NoReturn

from pronk.base.errors import PromptError, refuse
from pronk.text.chat.keywords import write_call

Messages = Sequence[Mapping[str, object]]
Tools = Sequence[Mapping[str, object]]
TemplateOptions = Mapping[str, object]  # further variables of a chat template by name; JSON values

ROLES = ("system", "developer", "user", "assistant", "tool")
# Names of these roles in other formats, for error messages.
_OTHER_NAMES = {
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "gpt": "assistant",
    "human": "user",
}
_ID_LENGTH = 9  # number of letters and digits in a call's id, as Mistral's templates require


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Return the messages as new dictionaries, with the arguments of calls parsed.

    Messages that are empty or malformed raise a PromptError.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        msg = (
            "messages: expected a list of objects with 'role' and 'content', found "
            f"{_describe(messages)}"
        )
        raise PromptError(msg)
    if not messages:
        refuse(
            "messages",
            "expected at least one message with 'role' and 'content', found none",
            PromptError,
        )
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def join_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its content parts joined by line breaks, for templates that expect a string."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": "\n".join(part["text"] for part in content)}


def write_calls(
    message: Mapping[str, Any], begin: str, separator: str, end: str, *, keywords: bool = False
) -> dict[str, Any]:
    """Return a message with its calls as text of its content, for templates that write no calls.

    ``begin`` precedes the calls, ``separator`` stands between two of them, and ``end`` follows. A
    call is a JSON object; with ``keywords``, it has Python's syntax.
    """
    calls = message.get("tool_calls")
    content = message.get("content") or ""
    if not isinstance(calls, list) or not calls:
        return dict(message)
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)]
    objects = [
        {key: function[key] for key in ("name", "arguments") if key in function}
        for function in functions
        if isinstance(function, Mapping)
    ]
    if keywords:
        calls = [write_call(str(each.get("name")), each.get("arguments") or {}) for each in objects]
    else:
        calls = [json.dumps(each, ensure_ascii=False) for each in objects]
    text = f"{begin}{separator.join(calls)}{end}"
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    parts = (
        [*content, {"type": "text", "text": text}]
        if isinstance(content, list)
        else f"{content}{text}"
    )
    return {**others, "content": parts}


def shorten_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with call ids reduced to their last nine letters and digits, for Mistral."""
    changed = _shorten_id(message, "tool_call_id")
    if isinstance(calls := message.get("tool_calls"), (list, tuple)):
        changed["tool_calls"] = [
            _shorten_id(call, "id") if isinstance(call, Mapping) else call for call in calls
        ]
    return changed


def _shorten_id(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return ``values`` with a shorter id under ``key``.

    Ids of up to nine characters are not changed.
    """
    letters = "".join(re.findall("[0-9a-zA-Z]", str(values.get(key))))
    too_long = isinstance(values.get(key), str) and len(letters) > _ID_LENGTH
    return {**values, key: letters[-_ID_LENGTH:]} if too_long else dict(values)


def _check_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        refuse(
            where,
            f"expected an object with 'role' and 'content', found {_describe(message)}",
            PromptError,
        )
    role = message.get("role")
    content = message.get("content")
    if not isinstance(role, str):
        refuse(
            where,
            f"expected a string for 'role', found {_describe_key(message, 'role')}",
            PromptError,
        )
    message = {**message, **_check_role(message, where), **_read_calls(message, where)}
    if (
        content is None
        and role == "assistant"
        and message.get("reasoning_content")
        and not message.get("tool_calls")
    ):
        return {**message, "content": ""}  # some templates would write None
    if isinstance(content, str) or (
        content is None and role == "assistant" and message.get("tool_calls")
    ):
        return message
    if not isinstance(content, (list, tuple)):
        msg = (
            f"{where}: expected a string or a list of parts for 'content', found "
            f"{_describe_key(message, 'content')}"
        )
        raise PromptError(msg)
    return {
        **message,
        "content": [
            _check_part(part, f"{where}, part {index}") for index, part in enumerate(content)
        ],
    }


def _check_role(message: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return ``{"role": …}`` for templates; refuse unknown roles, and fields of another role."""
    role = message["role"]
    if role not in ROLES:
        near = _OTHER_NAMES.get(role.lower()) or next(
            iter(get_close_matches(role.lower(), ROLES, 1)), None
        )
        hint = "" if near is None else f"; did you mean {near!r}?"
        refuse(
            where,
            f"expected a role of {', '.join(ROLES)}, found {_shorten(repr(role))}{hint}",
            PromptError,
        )
    for field, owner in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if message.get(field) and role != owner:
            refuse(
                where,
                f"expected {field} with the role {owner!r} only, found the role {role!r}",
                PromptError,
            )
    return {"role": "system" if role == "developer" else role}


def _read_calls(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return ``{"tool_calls": …}`` with all arguments parsed.

    ``{}`` if the message has no calls.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, (list, tuple)):
        return {}
    parsed_calls = [*calls]
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            arguments = _read_object(function["arguments"], f"{where}, call {index}")
            parsed_calls[index] = {**call, "function": {**function, "arguments": arguments}}
    return {"tool_calls": parsed_calls}


def _read_object(text: str, where: str) -> dict[str, Any]:
    """Return a call's arguments, parsed from JSON.

    ``{}`` if ``text`` is empty (an incomplete call).
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant) if text.strip() else {}
    except (ValueError, RecursionError):
        # no JSON, a number of too many digits, or too deep nesting
        value = None
    if not isinstance(value, dict):
        refuse(
            where,
            f"expected arguments that are a JSON object, found {_describe(text)}",
            PromptError,
        )
    return value


def _refuse_constant(name: str) -> NoReturn:
    msg = f"expected JSON, which has no {name}"
    raise ValueError(msg)


def _check_part(part: object, where: str) -> dict[str, Any]:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        msg = (
            f"{where}: expected an object such as {{'type': 'text', 'text': '…'}}, found "
            f"{_describe(part)}"
        )
        raise PromptError(msg)
    if part["type"] != "text":
        msg = (
            f"{where}: expected the type 'text', found {part['type']!r}; the model reads text "
            "alone, so leave it out"
        )
        raise PromptError(msg)
    if not isinstance(part.get("text"), str):
        refuse(
            where, f"expected a string for 'text', found {_describe_key(part, 'text')}", PromptError
        )
    return dict(part)


def _describe_key(values: Mapping[Any, Any], key: str) -> str:
    return _describe(values[key]) if key in values else "no such key"


def _describe(value: object) -> str:
    """Return the type and the beginning of a value in one line, for error messages."""
    return "None" if value is None else f"{type(value).__name__} {_shorten(repr(value))}"


def _shorten(text: str) -> str:
    """Return the beginning of a text in one line."""
    return f"{' '.join(text.split()):.40}"


def thinking_options(effort: str | None, enabled: bool | None = None) -> dict[str, Any]:
    """Return variables of chat templates that switch thinking on or off and set its effort.

    Templates read ``enable_thinking`` (Qwen3, SmolLM3), ``thinking`` (DeepSeek, Granite) or
    ``reasoning_effort`` (gpt-oss).
    """
    if enabled is None and effort is not None:
        enabled = effort != "none"
    switch = {} if enabled is None else {"enable_thinking": enabled, "thinking": enabled}
    return switch | ({} if effort in (None, "none") else {"reasoning_effort": effort})


_PRIVATE = range(0xF0000, 0xFFFFE)  # supplementary private use area A, which texts rarely contain


def disguise(
    messages: Sequence[Mapping[str, Any]], names: Collection[str]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Replace names of special tokens in messages (also tools), against prompt injection.

    A tokenizer reads ``<|im_end|>`` in a message as the special token, so a user could end the
    message and write a system message. Therefore a character of Unicode's private use area replaces
    each such name before the template is rendered, and the name is put back and encoded with
    ordinary tokens afterwards (:func:`reveal`). Two texts that the template joins could still form
    a name, for example ``<|im_`` and ``end|>``. Therefore each text that ends with the beginning of
    a name gets a further private character at its end, which is removed afterwards.

    The result is the messages, and the name that each private character stands for (the empty text
    for the character at the ends of texts). These characters do not occur in the given messages;
    too many private characters in them raise a PromptError.
    """
    if not names:
        return _map_texts(messages, str, str), {}
    name_pattern, prefixes, longest = _patterns(frozenset(names))
    texts = list[str]()
    _map_texts(messages, texts.append, texts.append)
    used_names = sorted({name for text in texts for name in name_pattern.findall(text)})
    taken = {character for text in texts for character in text if ord(character) in _PRIVATE}
    free = (chr(code) for code in _PRIVATE if chr(code) not in taken)
    characters = dict(zip(["", *used_names], free, strict=False))
    if len(characters) <= len(used_names):
        msg = (
            f"messages: expected some private characters that are not in them, found {len(taken)} "
            "that are; use fewer"
        )
        raise PromptError(msg)

    def hide_names(text: str) -> str:
        return name_pattern.sub(lambda match: characters[match[0]], text)

    def hide(text: str) -> str:
        text = hide_names(text)
        stripped = text.rstrip()  # the template may strip white space from the end
        if not any(stripped[-length:] in prefixes for length in range(1, longest + 1)):
            return text
        return f"{stripped}{characters['']}{text[len(stripped) :]}"

    def hide_key(text: str) -> str:
        """Replace names in a key.

        An identifier gets no character at its end, as templates may look it up.
        """
        return hide_names(text) if text.isidentifier() else hide(text)

    return _map_texts(messages, hide, hide_key), {
        character: name for name, character in characters.items()
    }


def reveal(text: str, names: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a rendered text, each with True if it is a name that a private character hid."""
    for part in re.split(f"([{''.join(names)}])", text) if names else [text]:
        if shown := names.get(part, part):  # not shown: the private character at the ends of texts
            yield shown, part in names


def plain_ids(
    name: str, encode: Callable[[str], list[int]], special: AbstractSet[int]
) -> list[int]:
    """Return ordinary tokens that spell ``name``: of its halves, or else of its characters.

    Or ``[]``.
    """
    middle = len(name) // 2
    for parts in ((name[:middle], name[middle:]), tuple(name)):
        ids = [token for part in parts for token in encode(part)]
        if not special & set(ids):
            return ids
    return []


@lru_cache(8)
def _patterns(names: frozenset[str]) -> tuple[re.Pattern[str], frozenset[str], int]:
    """Return a pattern for any of the names, their proper prefixes, and the longest prefix's length."""
    # Longest names first: one name may begin with another.
    alternatives = "|".join(map(re.escape, sorted(names, key=lambda name: (-len(name), name))))
    prefixes = frozenset(name[:stop] for name in names for stop in range(1, len(name)))
    return re.compile(alternatives), prefixes, max(map(len, names)) - 1


def _map_texts(
    value: Any, change: Callable[[str], object], change_key: Callable[[str], object]
) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            change_key(key) if isinstance(key, str) else key: _map_texts(item, change, change_key)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_map_texts(item, change, change_key) for item in value]
    return value
