"""Requests of ``/tokenize``, ``/detokenize``, and the routes that generate no text."""

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
    Record,
    RequestBody,
    Text,
    Texts,
    list_prompts,
    refuse,
)
from pronk.server.settings import RequestLimits


class TokenizeRequest(ChatRequest):
    """Body of ``/tokenize``: either ``prompt``, or a conversation as for chat completions."""

    places: ClassVar[Sequence[str]] = ("text", "chat", "tokenize")
    meaningful: ClassVar = {**ChatRequest.meaningful, "prompt": ""}

    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field([])
    add_special_tokens: bool | None = Field(
        None, description="Add the tokenizer's special tokens to a prompt."
    )

    def check(self, limits: RequestLimits) -> None:
        if (self.prompt is None) == (not self.messages):
            problem = "expected either prompt or messages, found both or none; send one of them"
            raise refuse("prompt", problem)
        if self.messages:
            super().check(limits)

    def check_beginning(self) -> None:
        """Raise ``ApiError`` if the request continues an answer and does not end with one.

        Unlike chats, ``/tokenize`` also accepts a prompt that does not begin an answer
        (``add_generation_prompt: false``).
        """
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
        None, description="Tokens to pool; default: as the model's files say, else mean."
    )
    normalize: bool | None = Field(
        None, description="Whether vectors have length 1; default: as for pooling, else true."
    )

    def check(self, limits: RequestLimits, hidden_size: int) -> None:
        """Check the request against the limits and the model's number of dimensions.

        ``hidden_size`` is the number of dimensions of the model's embeddings.

        Raises:
            ApiError: the input is empty or beyond the limits, or ``dimensions`` is too large.
        """
        prompts = list_prompts(self.input)
        if not 1 <= len(prompts) <= limits.embeddings:
            raise refuse("input", f"expected 1..{limits.embeddings} texts, found {len(prompts)}")
        if not all(prompts):
            problem = "expected texts of at least one token, found an empty one; leave it out"
            raise refuse("input", problem)
        if self.dimensions is not None and self.dimensions > hidden_size:
            raise refuse("dimensions", f"expected at most {hidden_size}, found {self.dimensions}")

    def reply(self, model: str, vectors: Sequence[Array], num_tokens: int) -> dict[str, Any]:
        """Return the reply with the embeddings of all texts.

        Args:
            model: name of the model.
            vectors: embedding of each text; in base64, its numbers are little-endian float32.
            num_tokens: number of tokens of all texts.
        """
        encoded = [self._encode(vector) for vector in vectors]
        data = [
            {"object": "embedding", "index": index, "embedding": each}
            for index, each in enumerate(encoded)
        ]
        return {
            "object": "list",
            "data": data,
            "model": model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    def _encode(self, vector: Array) -> str | list[float]:
        if self.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
        numbers: list[float] = vector.tolist()
        return numbers


class RerankDocument(Record):
    """Document of a request to rank, in the form of an object."""

    text: Text


class RerankRequest(RequestBody):
    """Body of ``/v1/rerank``, in the form of Jina and Cohere; both lack ``instruction``."""

    places: ClassVar[Sequence[str]] = ("rerank",)

    model: Text | None = None
    query: Text
    documents: Annotated[list[Text | RerankDocument], Field(fail_fast=True)]
    top_n: int | None = Field(None, ge=1, le=2**31)
    return_documents: bool | None = Field(
        None, description="Repeat the documents in the reply; default: false."
    )
    instruction: Text | None = Field(None, description="What relevance means.")

    @property
    def texts(self) -> list[str]:
        """Texts of the documents."""
        return [each if isinstance(each, str) else each.text for each in self.documents]

    def check(self, limits: RequestLimits) -> None:
        """Raise ``ApiError`` if there are no documents, or more than the limit."""
        most = limits.embeddings
        if not 1 <= len(self.documents) <= most:
            found = len(self.documents)
            raise refuse("documents", f"expected 1..{most} documents, found {found}")

    def reply(self, model: str, scores: Sequence[float], num_tokens: int) -> dict[str, Any]:
        """Return the reply: the most relevant documents first, at most ``top_n`` of them.

        Of equally relevant documents, that of the lower index comes first.

        Args:
            model: name of the model.
            scores: relevance of each document, from 0 to 1.
            num_tokens: number of tokens of all prompts.
        """
        texts = self.texts
        ranked = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        results = list[dict[str, Any]]()
        for index in ranked[: self.top_n]:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if self.return_documents:
                result["document"] = {"text": texts[index]}
            results.append(result)
        return {
            "id": f"rerank-{uuid4().hex}",
            "object": "list",
            "model": model,
            "results": results,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }


class ModerationRequest(RequestBody):
    """Body of ``/v1/moderations``; the OpenAI API lacks ``kind``."""

    places: ClassVar[Sequence[str]] = ("moderations",)

    model: Text | None = None
    input: Text | Texts
    kind: Literal["prompt", "answer"] | None = Field(
        None, description="Role of the texts; default: prompt."
    )


def moderation(model: str, results: Sequence[tuple[dict[str, float], bool]]) -> dict[str, Any]:
    """Return the reply of ``/v1/moderations``.

    The category of a flagged text is the one with the highest score.

    Args:
        model: name of the model.
        results: scores of each text, and whether it is flagged (:meth:`ModerationPrompt.scores`).
    """
    entries = list[dict[str, Any]]()
    for scores, flagged in results:
        highest = max(scores.values(), default=0.0)
        categories = {name: flagged and score == highest for name, score in scores.items()}
        entries.append({"flagged": flagged, "categories": categories, "category_scores": scores})
    return {"id": f"modr-{uuid4().hex}", "model": model, "results": entries}
