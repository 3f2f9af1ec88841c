"""Forms that an answer must have, by all the names that clients have for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from pronk.errors import GuideError, PronkError
from pronk.sampling.guide import Guide
from pronk.server.errors import ApiError
from pronk.server.protocol.request import RequestBody, Text, TextRequest, Texts, refuse
from pronk.server.settings import RequestLimits
from pronk.tokenization.chat.tools import TOOL_NAME

__all__ = ["NAME", "GuidedRequest", "ResponseFormat", "SchemaFormat", "TextFormat"]

NAME = f"^{TOOL_NAME.pattern}$"
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class SchemaFormat(RequestBody):
    """A schema with its name; it is followed, strict or not."""

    name: Text = Field(pattern=NAME)
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @property
    def wanted(self) -> Mapping[str, Any]:
        """The schema; any object, if there is none."""
        return _ANY_OBJECT if self.schema_ is None else self.schema_


class ResponseFormat(RequestBody):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class TextFormat(RequestBody):
    """The same as ``/v1/responses`` has it."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = Field(None, pattern=NAME)
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    def forms(self) -> dict[str, Mapping[str, Any]]:
        """See :meth:`GuidedRequest.forms`.

        Raises:
            ApiError: a schema is missing, or there where none belongs.
        """
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise refuse("text.format.schema", "expected a schema with the type 'json_schema', and with no other")
        schema = {"json_object": _ANY_OBJECT, "json_schema": self.schema_}.get(self.type)
        return {} if schema is None else {"text.format": {"json": schema}}


class StructuredOutputs(RequestBody):
    """vLLM's ``structured_outputs``: one of five. Of its options those are taken that say what is so here anyway."""

    idle: ClassVar = {
        "disable_additional_properties": [False],
        "disable_any_whitespace": [True],
        "disable_fallback": [True, False],
        "structural_tag": [],
        "whitespace_pattern": [],
    }

    json_: dict[str, Any] | Text | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Texts | None = None
    grammar: Text | None = None
    json_object: bool | None = None

    def forms(self) -> dict[str, Mapping[str, Any]]:
        """See :meth:`GuidedRequest.forms`."""
        given = {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        found = {f"structured_outputs.{name}": {name: each} for name, each in given.items() if each is not None}
        return found | ({"structured_outputs.json_object": {"json": _ANY_OBJECT}} if self.json_object else {})


class FormattedRequest(TextRequest):
    """A request whose answer may have to have a form."""

    def forms(self) -> dict[str, Mapping[str, Any]]:
        """The forms that are asked for, by the field that asks, as arguments of :class:`~pronk.sampling.guide.Guide`.

        Raises:
            ApiError: a field that is not as it may be.
        """
        return {}

    def check(self, limits: RequestLimits) -> None:
        """Hold the options to the server's limits; see :meth:`TextRequest.check`."""
        super().check(limits)
        fields = [*self.forms()]
        if len(fields) > 1:
            raise refuse(fields[1], f"expected one form of the answer, found {fields[0]} and {fields[1]}")

    def guide(self) -> Guide | None:
        """The form of the answer.

        Raises:
            ApiError: one that cannot be what it is for.
        """
        try:
            return next((Guide(**form) for form in self.forms().values()), None)
        except GuideError as error:
            raise self.named(error) or error from error

    def named(self, error: PronkError) -> ApiError | None:
        """What is wrong with the guide, by the name of the field that asks for it; ``None`` if it is something else."""
        field = next(iter(self.forms()), None)
        if not isinstance(error, GuideError) or field is None:
            return None
        rest = str(error).removeprefix("guide: ")
        kind, _, message = rest.partition(": ")
        return refuse(field, message if kind in ("json", "regex", "choice", "grammar") else rest)


class GuidedRequest(FormattedRequest):
    """OpenAI's field, and vLLM's older and newer ones."""

    idle: ClassVar = {**TextRequest.idle, "guided_whitespace_pattern": []}

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | Text | None = None
    guided_regex: Text | None = None
    guided_choice: Texts | None = None
    guided_grammar: Text | None = Field(None, description="in llguidance's dialect of Lark")

    def forms(self) -> dict[str, Mapping[str, Any]]:
        """See :meth:`FormattedRequest.forms`."""
        given = {name: getattr(self, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")}
        found = {f"guided_{name}": {name: each} for name, each in given.items() if each is not None}
        structured = {} if self.structured_outputs is None else self.structured_outputs.forms()
        return {**self._response_form(), **structured, **found}

    def _response_form(self) -> dict[str, Mapping[str, Any]]:
        asked = self.response_format
        if asked is None:
            return {}
        if (asked.type == "json_schema") != (asked.json_schema is not None):
            raise refuse("response_format", "expected json_schema with the type 'json_schema', and with no other")
        if asked.type == "text":
            return {}
        return {"response_format": {"json": asked.json_schema.wanted if asked.json_schema else _ANY_OBJECT}}
