"""Parts of a message's content.

A model reads text alone. A part that has a text is read whatever its type. Images and files are refused in messages,
since an answer without them would be wrong; in the results of tools, which no client can leave out, a note replaces
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from pronk.server.protocol.request import Record, Skipped, Text


class TextPart(Record):
    """Part of a message that has a text; ``refusal`` is an earlier answer of another server."""

    type: Text
    text: Text

    @classmethod
    def adapt(cls, value: dict[str, Any]) -> dict[str, Any]:
        if isinstance(value.get("text"), str):
            return value
        if value.get("type") == "refusal":
            return {**value, "text": value.get("refusal")}
        if value.get("type") in ("text", "input_text", "output_text"):
            return value
        msg = f"expected a part with a text, found the type {value.get('type')!r:.40}; the model reads text alone"
        raise ValueError(msg)


# Types of parts that repeat what other parts or servers have: thoughts are in ``reasoning_content``.
_SKIPPED_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning", "encrypted_content", "tool_reference"})


def _part_kind(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "skipped" if kind in _SKIPPED_PARTS else "text"


AnyPart = Annotated[Annotated[TextPart, Tag("text")] | Annotated[Skipped, Tag("skipped")], Discriminator(_part_kind)]
Parts = Annotated[list[AnyPart], Field(fail_fast=True)]


def texts_of(parts: str | Sequence[TextPart | Skipped]) -> list[str]:
    """Return the texts of a content."""
    return [parts] if isinstance(parts, str) else [part.text for part in parts if isinstance(part, TextPart)]


class UnseenPart(Skipped):
    """Part of a tool's result that the model cannot read, such as an image; a note replaces it."""

    @property
    def note(self) -> str:
        """Text that the model reads instead."""
        return f"[{self.type}: not shown, because the model reads text alone]"


def _result_kind(part: Any) -> str:
    if isinstance(part, dict):
        has_text = isinstance(part.get("text"), str) or part.get("type") == "refusal"
        return "text" if has_text else "skipped" if part.get("type") in _SKIPPED_PARTS else "unseen"
    return "text" if isinstance(part, TextPart) else "unseen" if isinstance(part, UnseenPart) else "skipped"


AnyResultPart = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[UnseenPart, Tag("unseen")] | Annotated[Skipped, Tag("skipped")],
    Discriminator(_result_kind),
]
ResultParts = Annotated[list[AnyResultPart], Field(fail_fast=True)]


def result_texts(parts: str | Sequence[TextPart | Skipped]) -> list[str]:
    """Return the texts of a tool's result, with a note for each part that the model cannot read."""
    if isinstance(parts, str):
        return [parts]
    notes = [part.note if isinstance(part, UnseenPart) else part for part in parts]
    return [each if isinstance(each, str) else each.text for each in notes if isinstance(each, (str, TextPart))]
