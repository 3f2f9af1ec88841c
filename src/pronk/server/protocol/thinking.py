"""Fields that ask for thinking: switches, efforts and budgets of several APIs, joined to one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from pronk.server.protocol.request import Record, Text, refuse
from pronk.text import AnswerFormat, thinking_options

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_ON = ("on", "enabled", "adaptive", "auto", "true", "yes")
_OFF = ("off", "disabled", "false", "no")
_SWITCHES = {**dict.fromkeys(_ON, True), **dict.fromkeys(_OFF, False)}


def _read_number(value: Any) -> Any:
    """Return ``False`` for 0, ``True`` for 1, and any other number as a text, such as ``"2.5"``.

    The server ignores and reports such a text, because it is no known effort.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return bool(value) if value in (0, 1) else f"{value:g}"


# A switch or an effort of thinking: true, "off", "high". Any word and any number is accepted,
# because the field is a hint.
ThinkingHint = Annotated[
    bool | Annotated[Text, Field(max_length=64)], BeforeValidator(_read_number)
]
# Maximum number of tokens of thoughts; -1 is the same as no maximum.
ThinkingBudget = Annotated[
    Annotated[int, Field(ge=0, le=2**31)] | None,
    BeforeValidator(lambda value: None if value == -1 else value),
]


@dataclass(frozen=True)
class Thinking:
    """Switch, effort and budget of thinking that a field of a request asks for.

    ``None`` leaves the choice to the model's chat template.
    """

    effort: str | None = None  # one of ``EFFORTS``, or an unknown word, which is ignored
    enabled: bool | None = None  # whether the model writes thoughts before its answer
    budget: int | None = None  # maximum number of tokens of thoughts
    # Name of the request's field, for errors and for the report of ignored fields.
    field: str = "thinking"

    @classmethod
    def of_hint(cls, field: str, hint: bool | str | None) -> Thinking:
        """Return the thinking options of a field whose value is a switch or an effort.

        A switch is a boolean or a word such as ``"off"``; any other word is an effort, such as
        ``"high"``. ``None`` sets nothing.
        """
        if hint is None or isinstance(hint, bool):
            return cls(enabled=hint, field=field)
        word = hint.strip().lower()
        if word in _SWITCHES:
            return cls(enabled=_SWITCHES[word], field=field)
        return cls(effort=word or None, enabled=False if word == "none" else None, field=field)

    @property
    def asks(self) -> bool:
        """Whether the field sets a switch, an effort or a budget."""
        return self.effort is not None or self.enabled is not None or self.budget is not None

    @property
    def values(self) -> tuple[str | None, bool | None, int | None]:
        """Effort, switch and budget, for the comparison with another field.

        The effort is ``None`` if it is "none", which is a switch, or an unknown word.
        """
        is_switch = self.effort == "none"
        has_effort = self.effort in EFFORTS and not is_switch
        return self.effort if has_effort else None, self.enabled, self.budget

    @property
    def _is_switched_off(self) -> bool:
        """Whether a switch, not the effort "none", turns thinking off, so that no effort counts."""
        return self.enabled is False and self.effort != "none"

    def template_options(self) -> dict[str, Any]:
        """Return the variables of chat templates for the effort and the switch."""
        return thinking_options(self.effort if self.effort in EFFORTS else None, self.enabled)

    def report(self, answers: AnswerFormat) -> Iterator[str]:
        """Yield the name of the field if the model cannot follow the field.

        If the model follows another effort, its name comes after the field's: ``think (as high)``.
        """
        if self.effort is None:
            if self.enabled and answers.reasoning is None:
                yield self.field
        elif self.effort not in EFFORTS or answers.reasoning is None or self._is_switched_off:
            yield self.field
        elif (nearest := answers.nearest_effort(self.effort)) != self.effort:
            yield f"{self.field} (as {nearest})"


def join_wishes(wishes: Sequence[Thinking]) -> Thinking:
    """Join the thinking options that several fields of a request set.

    An effort contradicts no switch, because clients send the effort of their settings even if
    thinking is off.

    Raises:
        ApiError: two fields contradict each other.
    """
    asking = [wish for wish in wishes if wish.asks]
    for first, second in combinations(asking, 2):
        for value, other in zip(first.values, second.values, strict=True):
            if None not in (value, other) and value != other:
                expected = f"expected the same wish about thinking as {first.field}"
                advice = f"leave {first.field} or {second.field} out"
                raise refuse(second.field, f"{expected}, found another one; {advice}")
    efforts = [wish for wish in asking if wish.effort is not None]
    named = [*efforts, *asking]  # the report of ignored fields then names the field with the effort
    return Thinking(
        effort=efforts[0].effort if efforts else None,
        enabled=next((wish.enabled for wish in asking if wish.enabled is not None), None),
        budget=next((wish.budget for wish in asking if wish.budget is not None), None),
        field=named[0].field if named else "thinking",
    )


class ThinkingConfig(Record):
    """Field ``thinking`` of Anthropic's API: off, or on with or without a budget in tokens."""

    # A word of ``_OFF`` turns thinking off, any other word on.
    type: Text = Field("enabled", max_length=64)
    budget_tokens: ThinkingBudget = None

    def wishes(self) -> list[Thinking]:
        """Return the thinking options that the fields of the object set, one item per field."""
        return [
            Thinking(enabled=self.type not in _OFF, field="thinking"),
            Thinking(budget=self.budget_tokens, field="thinking.budget_tokens"),
        ]


class ReasoningOptions(Record):
    """Field ``reasoning`` of ``/v1/responses``, and of chats in OpenRouter's API.

    Thoughts are returned as the model writes them: ``summary`` and ``exclude`` are ignored.
    """

    effort: ThinkingHint | None = None
    enabled: bool | None = None
    max_tokens: ThinkingBudget = None

    def wishes(self) -> list[Thinking]:
        """Return the thinking options that the fields of the object set, one item per field."""
        return [
            Thinking.of_hint("reasoning.effort", self.effort),
            Thinking(enabled=self.enabled, field="reasoning.enabled"),
            Thinking(budget=self.max_tokens, field="reasoning.max_tokens"),
        ]


def wishes_of(
    field: str, value: ThinkingConfig | ReasoningOptions | bool | str | None
) -> list[Thinking]:
    """Return the thinking options that a field sets.

    Its value is an object with options, a switch (true, ``"off"``) or an effort (``"high"``).
    """
    if isinstance(value, (ThinkingConfig, ReasoningOptions)):
        return value.wishes()
    return [Thinking.of_hint(field, value)]
