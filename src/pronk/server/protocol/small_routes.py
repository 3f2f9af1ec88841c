"""Bodies of ``/tokenize``, ``/detokenize`` and ``/v1/moderations``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pronk.server.protocol.chat import ChatMessage
from pronk.server.protocol.request import Ids, RequestBody, Text, Texts

__all__ = ["DetokenizeRequest", "ModerationRequest", "TokenizeRequest", "moderation"]


class TokenizeRequest(RequestBody):
    """Body of ``/tokenize``: either ``prompt`` or ``messages``."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(None, description="Add the tokenizer's special tokens to a prompt.")
    add_generation_prompt: bool | None = Field(None, description="End a conversation with the header of an answer.")


class DetokenizeRequest(RequestBody):
    """Body of ``/detokenize``."""

    model: Text | None = None
    tokens: Ids


class ModerationRequest(RequestBody):
    """Body of ``/v1/moderations``; the OpenAI API lacks ``kind``."""

    model: Text | None = None
    input: Text | Texts
    kind: Literal["prompt", "answer"] | None = Field(None, description="Role of the texts; default: prompt.")

    @property
    def texts(self) -> list[str]:
        """All texts of ``input``, which may be a single text."""
        return [self.input] if isinstance(self.input, str) else self.input


def moderation(reply_id: str, model: str, results: list[dict[str, float]], flagged: list[bool]) -> dict[str, Any]:
    """Return the reply of ``/v1/moderations``.

    Args:
        reply_id: id of the reply.
        model: name of the model.
        results: for each text, category to probability, without the category "acceptable".
        flagged: for each text, whether a category is more likely than "acceptable".
    """
    return {
        "id": reply_id,
        "model": model,
        "results": [
            {
                "flagged": flag,
                "categories": {name: flag and value == max(scores.values()) for name, value in scores.items()},
                "category_scores": scores,
            }
            for scores, flag in zip(results, flagged, strict=True)
        ],
    }
