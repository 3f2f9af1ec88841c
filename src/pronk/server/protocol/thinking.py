"""Fields that ask for thinking: switches, efforts and budgets of several APIs, read as one value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from pronk.server.protocol.request import Record, Text
from pronk.tokenization.chat.answers import AnswerFormat
from pronk.tokenization.chat.messages import thinking_options

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SWITCHES = {"on": True, "enabled": True, "adaptive": True, "auto": True, "off": False, "disabled": False}


@dataclass(frozen=True)
class Thinking:
    """Switch, effort and budget of thinking that a request asks for.

    ``None`` leaves the choice to the model's chat template.

    ``effort`` is one of ``EFFORTS`` or an unknown word, which is ignored. ``field`` names the field that asks.
    """

    effort: str | None = None
    enabled: bool | None = None
    budget: int | None = None  # maximum number of tokens of thoughts
    field: str = "thinking"

    @classmethod
    def of_value(cls, field: str, value: bool | str | None, enabled: bool | None = None) -> Thinking:
        """Return what a switch or an effort asks, for example ``True``, ``"off"``, ``"high"``.

        ``enabled`` is a switch beside an effort.
        """
        if value is None or isinstance(value, bool):
            return cls(enabled=enabled if value is None else value, field=field)
        word = value.strip().lower()
        if word in _SWITCHES:
            return cls(enabled=_SWITCHES[word] if enabled is None else enabled, field=field)
        return cls(word, enabled, field=field)

    @property
    def asks(self) -> bool:
        """Whether the request asks for anything."""
        return self.effort is not None or self.enabled is not None or self.budget is not None

    def template_options(self) -> dict[str, Any]:
        """Return variables of the chat template."""
        return thinking_options(self.effort if self.effort in EFFORTS else None, self.enabled)

    def report(self, answers: AnswerFormat) -> Iterator[str]:
        """Yield the name of the field if the model cannot follow it, with the effort that it follows instead."""
        if self.effort is None:
            if self.enabled and answers.reasoning is None:
                yield self.field
        elif self.effort not in EFFORTS or answers.reasoning is None:
            yield self.field
        elif (nearest := answers.nearest_effort(self.effort)) != self.effort:
            yield f"{self.field} (as {nearest})"


class ThinkingConfig(Record):
    """``thinking`` of Anthropic's API: off, or on with or without a budget in tokens."""

    type: Text = Field(max_length=64)  # "disabled", or a kind of thinking
    budget_tokens: int | None = Field(None, ge=0, le=2**31)

    def wish(self) -> Thinking:
        """Return what the field asks."""
        return Thinking(enabled=self.type != "disabled", budget=self.budget_tokens)


class ReasoningOptions(Record):
    """``reasoning`` of ``/v1/responses``, and of OpenRouter's chats.

    Thoughts are returned as they are: a summary is not made, and an exclusion is ignored.
    """

    effort: Text | None = Field(None, max_length=64)
    enabled: bool | None = None
    max_tokens: int | None = Field(None, ge=0, le=2**31)

    def wish(self) -> Thinking:
        """Return what the field asks."""
        wish = Thinking.of_value("reasoning.effort", self.effort, self.enabled)
        return replace(wish, budget=self.max_tokens)
