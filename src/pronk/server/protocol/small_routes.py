"""The smaller routes: tokens and texts, and moderation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pronk.server.protocol.chat import ChatMessage
from pronk.server.protocol.request import Ids, RequestBody, Text, Texts

__all__ = ["DetokenizeRequest", "ModerationRequest", "TokenizeRequest", "moderation"]


class TokenizeRequest(RequestBody):
    """What ``/tokenize`` takes: a text, or a conversation."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(None, description="of a prompt: what the tokenizer puts around a text")
    add_generation_prompt: bool | None = Field(None, description="of a conversation: what comes before an answer")


class DetokenizeRequest(RequestBody):
    """What ``/detokenize`` takes."""

    model: Text | None = None
    tokens: Ids


class ModerationRequest(RequestBody):
    """What ``/v1/moderations`` takes; ``kind`` is not OpenAI's."""

    model: Text | None = None
    input: Text | Texts
    kind: Literal["prompt", "answer"] | None = Field(None, description="what the texts are; by default prompts")

    @property
    def texts(self) -> list[str]:
        """The texts, one or more."""
        return [self.input] if isinstance(self.input, str) else self.input


def moderation(ident: str, model: str, results: list[dict[str, float]], flagged: list[bool]) -> dict[str, Any]:
    """The reply of ``/v1/moderations``.

    Args:
        ident: of the reply.
        model: its name.
        results: of each text, the probability of every category; what is left is that of an acceptable text.
        flagged: whether each belongs to a category rather than to none.
    """
    return {
        "id": ident,
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
