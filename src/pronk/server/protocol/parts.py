"""Parts of a message's content.

A model reads text alone, so that a part with a text is read whatever its type. Images and files in
messages are refused, because an answer without them would be wrong. In the results of tools, which
no client can leave out, a note replaces images and files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from pronk.server.protocol.request import Record, Skipped, Text
from pronk.server.protocol.unions import OneOf, type_of


class TextPart(Record):
    """Part of a message's content that is a text.

    A part of the type ``refusal``, in which another server declined to answer, is read as a text.
    """

    type: Text = "text"
    text: Text

    @classmethod
    def adapt(cls, value: dict[str, Any]) -> dict[str, Any]:
        if isinstance(value.get("text"), str):
            return value
        if value.get("type") == "refusal":
            return {**value, "text": value.get("refusal")}
        if value.get("type") in (None, "text", "input_text", "output_text"):
            return value
        msg = (
            f"expected a part with a text, found the type {value.get('type')!r:.40}; the model "
            "reads text alone"
        )
        raise ValueError(msg)


# Parts that are left out: thoughts, which a model reads in ``reasoning_content`` alone, and names
# of tools, which the model reads in the list of tools.
_SKIPPED_PARTS = frozenset(
    {"thinking", "redacted_thinking", "reasoning", "encrypted_content", "tool_reference"}
)


def _part_class(part: Mapping[str, Any]) -> type[Record]:
    return Skipped if type_of(part) in _SKIPPED_PARTS else TextPart


def as_parts(content: Any) -> Any:
    """Return a content as a text or a list of parts.

    A single part may stand without a list, and a text in a list stands for a part with this text.
    """
    if isinstance(content, dict):
        return [content] if content else []
    if not isinstance(content, list):
        return content
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]


AnyPart = Annotated[TextPart | Skipped, OneOf(_part_class)]
Parts = Annotated[list[AnyPart], Field(fail_fast=True)]
# Content of a message: a text or parts.
Content = Annotated[Text | Parts, BeforeValidator(as_parts)]


def texts_of(parts: str | Sequence[TextPart | Skipped]) -> list[str]:
    """Return the texts in the content of a message."""
    if isinstance(parts, str):
        return [parts]
    return [part.text for part in parts if isinstance(part, TextPart)]


class UnseenPart(Skipped):
    """Part of a tool's result that the model cannot read, such as an image; a note replaces it."""

    @property
    def note(self) -> str:
        """Text for the model in place of the part."""
        return f"[{self.type}: not shown, because the model reads text alone]"


def _result_class(part: Mapping[str, Any]) -> type[Record]:
    if isinstance(part.get("text"), str) or type_of(part) == "refusal":
        return TextPart
    return Skipped if type_of(part) in _SKIPPED_PARTS else UnseenPart


def _is_part(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, dict) and ("type" in part or "text" in part))


def as_result(content: Any) -> Any:
    """Return a tool's result as a text or a list of parts; any other JSON value becomes a text."""
    parts = as_parts(content)
    if isinstance(parts, str) or (isinstance(parts, list) and all(map(_is_part, parts))):
        return parts
    return json.dumps(content, ensure_ascii=False)


AnyResultPart = Annotated[TextPart | UnseenPart | Skipped, OneOf(_result_class)]
ResultParts = Annotated[list[AnyResultPart], Field(fail_fast=True)]
# Result of a tool: a text or parts.
ResultContent = Annotated[Text | ResultParts, BeforeValidator(as_result)]


def result_texts(parts: str | Sequence[TextPart | Skipped]) -> list[str]:
    """Return the texts of a tool's result, with a note for each part that the model cannot read."""
    if isinstance(parts, str):
        return [parts]
    texts = list[str]()
    for part in parts:
        if isinstance(part, UnseenPart):
            texts.append(part.note)
        elif isinstance(part, TextPart):
            texts.append(part.text)
    return texts
