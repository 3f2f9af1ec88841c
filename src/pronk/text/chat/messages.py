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
TemplateOptions = Mapping[str, object]  # further variables of a chat template: JSON values by name

ROLES = ("system", "developer", "user", "assistant", "tool")
# Role names of other APIs, each with the role of OpenAI's API that an error message suggests.
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

    A malformed message, or a conversation without messages, raises a PromptError.
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
    """Return a message with its content parts joined by line breaks.

    Some templates expect a string as content, not a list of parts.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    texts = [part["text"] for part in content]
    return {**message, "content": "\n".join(texts)}


def write_calls(
    message: Mapping[str, Any], begin: str, separator: str, end: str, *, keywords: bool = False
) -> dict[str, Any]:
    """Return a message with its calls as text of its content, for templates that write no calls.

    Args:
        message: message of the assistant, which may have calls.
        begin: text before the calls.
        separator: text between two calls.
        end: text after the calls.
        keywords: whether a call has Python's syntax; otherwise, it is a JSON object.
    """
    calls = message.get("tool_calls")
    content = message.get("content") or ""
    if not isinstance(calls, list) or not calls:
        return dict(message)
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)]
    written = list[str]()
    for function in functions:
        if not isinstance(function, Mapping):
            continue
        if keywords:
            call = write_call(str(function.get("name")), function.get("arguments") or {})
        else:
            fields = {key: function[key] for key in ("name", "arguments") if key in function}
            call = json.dumps(fields, ensure_ascii=False)
        written.append(call)
    text = f"{begin}{separator.join(written)}{end}"
    changed = {key: value for key, value in message.items() if key != "tool_calls"}
    if isinstance(content, list):
        changed["content"] = [*content, {"type": "text", "text": text}]
    else:
        changed["content"] = f"{content}{text}"
    return changed


def shorten_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with the id of each call cut to its last nine letters and digits.

    Mistral's templates refuse longer ids.
    """
    changed = _shorten_id(message, "tool_call_id")
    calls = message.get("tool_calls")
    if isinstance(calls, (list, tuple)):
        changed["tool_calls"] = [
            _shorten_id(call, "id") if isinstance(call, Mapping) else call for call in calls
        ]
    return changed


def _shorten_id(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return ``values`` with the id under ``key`` cut to its last nine letters and digits."""
    ident = values.get(key)
    letters = "".join(re.findall("[0-9a-zA-Z]", str(ident)))
    if isinstance(ident, str) and len(letters) > _ID_LENGTH:
        return {**values, key: letters[-_ID_LENGTH:]}
    return dict(values)


def number_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation in which the ids of calls are those of Kimi K2.

    The model names the calls of a conversation ``functions.f:0``, ``functions.g:1``, …, and its
    template writes the id of a call in place of the tool's name. Results of calls get the new ids.
    """
    numbered = list[dict[str, Any]]()
    idents = dict[str, str]()  # new ids by the ids in the conversation
    num_calls = 0
    for message in messages:
        changed = dict(message)
        calls = message.get("tool_calls")
        if isinstance(calls, (list, tuple)):
            changed["tool_calls"] = [*calls]
            for position, call in enumerate(calls):
                function = call.get("function") if isinstance(call, Mapping) else None
                if not isinstance(function, Mapping):
                    continue
                ident = f"functions.{function.get('name')}:{num_calls}"
                num_calls += 1
                idents[str(call.get("id"))] = ident
                changed["tool_calls"][position] = {**call, "id": ident}
        if "tool_call_id" in message:
            given = message["tool_call_id"]
            changed["tool_call_id"] = idents.get(str(given), given)
        numbered.append(changed)
    return numbered


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
    if content is None and role == "assistant":
        if message.get("tool_calls"):
            return message
        if message.get("reasoning_content"):
            return {**message, "content": ""}  # some templates would write the text "None"
    if isinstance(content, str):
        return message
    if not isinstance(content, (list, tuple)):
        msg = (
            f"{where}: expected a string or a list of parts for 'content', found "
            f"{_describe_key(message, 'content')}"
        )
        raise PromptError(msg)
    parts = [_check_part(part, f"{where}, part {index}") for index, part in enumerate(content)]
    return {**message, "content": parts}


def _check_role(message: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return ``{"role": …}`` with the role that templates get: ``system`` for ``developer``.

    An unknown role raises a PromptError, and so does a field that belongs to another role.
    """
    role = message["role"]
    if role not in ROLES:
        close = get_close_matches(role.lower(), ROLES, 1)
        near = _OTHER_NAMES.get(role.lower()) or (close[0] if close else None)
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
    """Return ``{"tool_calls": …}`` with the arguments of all calls parsed; ``{}`` without calls."""
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

    An empty text, as a call that was cut off has, gives ``{}``. ``where`` is the place of the call
    in error messages.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant) if text.strip() else {}
    except (ValueError, RecursionError):
        # The text is no JSON, has a number of too many digits, or is nested too deeply; it is
        # refused below.
        value = None
    if not isinstance(value, dict):
        refuse(
            where,
            f"expected arguments that are a JSON object, found {_describe(text)}",
            PromptError,
        )
    return value


def _refuse_constant(name: str) -> NoReturn:
    """Refuse ``NaN`` and ``Infinity``, which Python's ``json`` reads but JSON lacks."""
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
    """Return the beginning of a text, on one line, for error messages."""
    return f"{' '.join(text.split()):.40}"


def thinking_options(effort: str | None, enabled: bool | None = None) -> dict[str, Any]:
    """Return variables of chat templates that switch thinking on or off and set its effort.

    Templates read ``enable_thinking`` (Qwen3, SmolLM3), ``thinking`` (DeepSeek, Granite) or
    ``reasoning_effort`` (gpt-oss).

    Args:
        effort: effort of thinking in OpenAI's terms, such as ``low``; ``None`` if not given.
        enabled: whether the model thinks; ``None`` if not given.
    """
    if enabled is None and effort is not None:
        enabled = effort != "none"
    options = dict[str, Any]()
    if enabled is not None:
        options |= {"enable_thinking": enabled, "thinking": enabled}
    if effort not in (None, "none"):
        options["reasoning_effort"] = effort
    return options


# Unicode's supplementary private use area A, whose characters texts rarely contain
_PRIVATE = range(0xF0000, 0xFFFFE)


def disguise(
    messages: Sequence[Mapping[str, Any]], names: Collection[str]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Replace names of special tokens in messages (also tools), against prompt injection.

    A tokenizer reads ``<|im_end|>`` in a message as the special token, so a user could end the
    message and write a system message. Therefore a character of Unicode's private use area replaces
    each such name before the template is rendered, and :func:`reveal` puts the name back, to be
    encoded with ordinary tokens. Two texts that the template joins could still form a name, for
    example ``<|im_`` and ``end|>``. Therefore each text that ends with the beginning of a name gets
    a further private character at its end, which :func:`reveal` removes.

    Returns:
        The changed messages, and the name that each private character stands for: the empty text
        for the character at the ends of texts. None of these characters occurs in ``messages``.

    Raises:
        PromptError: the messages contain nearly all private characters.
    """
    if not names:
        return _map_texts(messages, str, str), {}
    name_pattern, prefixes, longest = _patterns(frozenset(names))
    texts = list[str]()
    _map_texts(messages, texts.append, texts.append)
    used = set[str]()  # names of special tokens that occur in the messages
    taken = set[str]()  # private characters that occur in the messages, and are not used
    for text in texts:
        used.update(name_pattern.findall(text))
        taken.update(character for character in text if ord(character) in _PRIVATE)
    used_names = sorted(used)
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
        stripped = text.rstrip()  # the template may strip white space from the end of a text
        if not any(stripped[-length:] in prefixes for length in range(1, longest + 1)):
            return text
        return f"{stripped}{characters['']}{text[len(stripped) :]}"

    def hide_key(text: str) -> str:
        """Replace names of special tokens in a key of a mapping.

        Templates may look up a key that is an identifier, so such a key gets no character at its
        end.
        """
        return hide_names(text) if text.isidentifier() else hide(text)

    names_by_character = {character: name for name, character in characters.items()}
    return _map_texts(messages, hide, hide_key), names_by_character


def reveal(text: str, names: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a rendered prompt, with the hidden names of special tokens put back.

    :func:`disguise` has replaced these names by private characters before the template ran.

    Args:
        text: the rendered prompt.
        names: the name that each private character stands for.

    Yields:
        A part of the text, and whether it is such a name, which must not become a special token.
    """
    parts = re.split(f"([{''.join(names)}])", text) if names else [text]
    for part in parts:
        shown = names.get(part, part)
        if shown:  # the private character at the ends of texts stands for no name
            yield shown, part in names


def plain_ids(
    name: str, encode: Callable[[str], list[int]], special: AbstractSet[int]
) -> list[int]:
    """Return ordinary tokens that spell the name of a special token.

    The two halves of the name are encoded separately. If that gives a special token, the characters
    are. If that does, too, the result is empty.

    Args:
        name: name of a special token, such as ``<|im_end|>``.
        encode: function that returns the token ids of a text.
        special: ids of all special tokens.
    """
    middle = len(name) // 2
    for parts in ((name[:middle], name[middle:]), tuple(name)):
        ids = [token for part in parts for token in encode(part)]
        if not special & set(ids):
            return ids
    return []


@lru_cache(8)
def _patterns(names: frozenset[str]) -> tuple[re.Pattern[str], frozenset[str], int]:
    """Return patterns by which :func:`disguise` finds the names of special tokens in a text.

    Returns:
        A pattern for any of the names; all proper prefixes of the names; the length of the longest
        prefix.
    """
    # longest first, because a name may begin with another one
    longest_first = sorted(names, key=lambda name: (-len(name), name))
    alternatives = "|".join(map(re.escape, longest_first))
    prefixes = frozenset(name[:stop] for name in names for stop in range(1, len(name)))
    return re.compile(alternatives), prefixes, max(map(len, names)) - 1


def _map_texts(
    value: Any, change: Callable[[str], object], change_key: Callable[[str], object]
) -> Any:
    """Return a JSON value in which functions replace each text and each key of a mapping.

    ``change`` gets each text, and ``change_key`` each key.
    """
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
