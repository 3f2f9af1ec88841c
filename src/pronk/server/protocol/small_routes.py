"""Bodies of ``/tokenize``, ``/detokenize``, ``/v1/embeddings`` and ``/v1/moderations``."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import Field

from pronk.base.arrays import Array
from pronk.server.protocol.chat import ChatMessage, ChatRequest
from pronk.server.protocol.request import (
    Ids,
    Prompts,
    RequestBody,
    Text,
    Texts,
    list_prompts,
    refuse,
)
from pronk.server.settings import RequestLimits


class TokenizeRequest(ChatRequest):
    """Body of ``/tokenize``: either ``prompt``, or a conversation as in ``/v1/chat/completions``."""

    places: ClassVar[Sequence[str]] = ("text", "chat", "tokenize")
    meaningful: ClassVar = {**ChatRequest.meaningful, "prompt": ""}

    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field([])
    add_special_tokens: bool | None = Field(
        None, description="Add the tokenizer's special tokens to a prompt."
    )

    def check(self, limits: RequestLimits) -> None:
        if (self.prompt is None) == (not self.messages):
            raise refuse(
                "prompt", "expected either prompt or messages, found both or none; send one of them"
            )
        if self.messages:
            super().check(limits)

    def check_beginning(self) -> None:
        """Raise ``ApiError`` if the request continues an answer that the conversation does not end with."""
        if self.continues_answer and self.messages[-1].role != "assistant":
            super().check_beginning()


class DetokenizeRequest(RequestBody):
    """Body of ``/detokenize``."""

    model: Text | None = None
    tokens: Ids


class EmbeddingRequest(RequestBody):
    """Body of ``/v1/embeddings``; the OpenAI API lacks ``pooling`` and ``normalize``."""

    places: ClassVar[Sequence[str]] = ("embeddings",)

    model: Text | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=2**31)
    pooling: Literal["mean", "last"] | None = Field(
        None, description="Tokens to pool; default: mean."
    )
    normalize: bool | None = Field(
        None, description="Whether vectors have length 1; default: true."
    )

    def check(self, limits: RequestLimits, hidden_size: int) -> None:
        """Raise ``ApiError`` if the input is empty or beyond the limits, or the model has fewer dimensions."""
        prompts = list_prompts(self.input)
        if not 1 <= len(prompts) <= limits.embeddings:
            raise refuse("input", f"expected 1..{limits.embeddings} texts, found {len(prompts)}")
        if not all(prompts):
            raise refuse(
                "input", "expected texts of at least one token, found an empty one; leave it out"
            )
        if self.dimensions is not None and self.dimensions > hidden_size:
            raise refuse("dimensions", f"expected at most {hidden_size}, found {self.dimensions}")

    def reply(self, model: str, vectors: Sequence[Array], num_tokens: int) -> dict[str, Any]:
        """Return the reply; in base64, a vector is its little-endian float32 numbers."""
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": self._encode(vector)}
                for index, vector in enumerate(vectors)
            ],
            "model": model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    def _encode(self, vector: Array) -> str | list[float]:
        if self.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
        numbers: list[float] = vector.tolist()
        return numbers


class ModerationRequest(RequestBody):
    """Body of ``/v1/moderations``; the OpenAI API lacks ``kind``."""

    places: ClassVar[Sequence[str]] = ("moderations",)

    model: Text | None = None
    input: Text | Texts
    kind: Literal["prompt", "answer"] | None = Field(
        None, description="Role of the texts; default: prompt."
    )


def moderation(model: str, results: Sequence[tuple[dict[str, float], bool]]) -> dict[str, Any]:
    """Return the reply of ``/v1/moderations`` for the :meth:`ModerationPrompt.scores` of each text."""
    return {
        "id": f"modr-{uuid4().hex}",
        "model": model,
        "results": [
            {
                "flagged": flag,
                "categories": {
                    name: flag and value == max(scores.values()) for name, value in scores.items()
                },
                "category_scores": scores,
            }
            for scores, flag in results
        ],
    }
