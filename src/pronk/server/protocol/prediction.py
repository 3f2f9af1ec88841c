"""The field ``prediction`` of a request: the text that the client expects as the answer.

Draft tokens are taken from it, so that it never changes the answer. OpenAI's API refuses it beside
``n`` above 1, log-probabilities, penalties and tools; here it goes with all of them. In a request
with several samples or prompts it is the prediction of each.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from pronk import SamplingParams
from pronk.server.protocol.parts import Content, texts_of
from pronk.server.protocol.request import Record, TextRequest


class PredictedContent(Record):
    """Field ``prediction``, as in OpenAI's API."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        """The expected text: the texts of all parts."""
        return "".join(texts_of(self.content))


class PredictedRequest(TextRequest):
    """Base of requests that may have a prediction of the answer."""

    prediction: PredictedContent | None = Field(
        None, description="Expected text, such as a file to change; it only speeds up the answer."
    )

    def params(self, max_tokens: int, **options: Any) -> SamplingParams:
        prediction = None if self.prediction is None else self.prediction.text
        return super().params(max_tokens, prediction=prediction, **options)
