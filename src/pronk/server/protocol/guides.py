"""Fields for the form of the answer: ``response_format``, and vLLM's ``guided_*`` and others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from pronk.server.protocol.request import (
    GUIDE_KINDS,
    Record,
    RequestBody,
    Text,
    TextRequest,
    Texts,
    refuse,
)
from pronk.server.protocol.unions import as_typed
from pronk.text import TOOL_NAME

NAME_PATTERN = f"^{TOOL_NAME.pattern}$"
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
# An empty form is not the same as no form. The empty schema allows any value; the other empty forms
# allow no text, so that the request is refused.
_EMPTY_FORMS: Mapping[str, Any] = {"json": {}, "regex": "", "choice": [], "grammar": ""}


class SchemaFormat(Record):
    """A named JSON schema, which the answer follows whether ``strict`` is set or not."""

    meaningful: ClassVar = {"schema": {}}

    name: Text | None = Field(None, max_length=256)
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestBody):
    """Field ``response_format`` of chats and completions; ``schema`` in it is llama.cpp's form."""

    meaningful: ClassVar = {"schema": {}}

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    def guide_arguments(self) -> dict[str, Mapping[str, Any]]:
        """Return ``{"response_format": {"json": schema}}`` as argument of ``Guide``.

        Raises:
            ApiError: the schema is missing, is one too many, or does not fit the type.
        """
        named = None if self.json_schema is None else self.json_schema.schema_
        schemas = [schema for schema in (named, self.schema_) if schema is not None]
        needs_schema = self.type == "json_schema"
        if needs_schema != (self.json_schema is not None) and self.schema_ is None:
            problem = "expected json_schema with the type 'json_schema', and with no other"
            raise refuse("response_format", problem)
        if (len(schemas) > 1 and named != self.schema_) or (schemas and self.type == "text"):
            problem = "expected one schema, and none with the type 'text'; leave one out"
            raise refuse("response_format", problem)
        if self.type == "text":
            return {}
        schema = schemas[0] if schemas else _ANY_OBJECT
        return {"response_format": {"json": schema}}


class TextFormat(SchemaFormat):
    """Field ``text.format`` of ``/v1/responses``."""

    type: Literal["text", "json_object", "json_schema"]

    def guide_arguments(self) -> dict[str, Mapping[str, Any]]:
        """Return ``{"text.format": {"json": schema}}`` as argument of ``Guide``.

        Raises:
            ApiError: the schema is missing, or does not fit the type.
        """
        if (self.type == "json_schema") != (self.schema_ is not None):
            problem = "expected a schema with the type 'json_schema', and with no other"
            raise refuse("text.format.schema", problem)
        schema = {"json_object": _ANY_OBJECT, "json_schema": self.schema_}.get(self.type)
        return {} if schema is None else {"text.format": {"json": schema}}


class StructuredOutputs(RequestBody):
    """Field ``structured_outputs`` of vLLM: one of five forms of the answer."""

    places: ClassVar[Sequence[str]] = ("structured_outputs",)
    meaningful: ClassVar = _EMPTY_FORMS

    json_: dict[str, Any] | Text | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Texts | None = None
    grammar: Text | None = None
    json_object: bool | None = None

    def guide_arguments(self) -> dict[str, Mapping[str, Any]]:
        """Return arguments of ``Guide``, each under the path of the field that sets it.

        For example ``{"structured_outputs.regex": {"regex": "a+"}}``.
        """
        given = {
            "json": self.json_,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
        }
        arguments = _by_field("structured_outputs.", given)
        if self.json_object:
            arguments["structured_outputs.json_object"] = {"json": _ANY_OBJECT}
        return arguments


class GuidedRequest(TextRequest):
    """Base of requests with fields for the form of the answer.

    ``response_format`` is OpenAI's field, ``guided_*`` and ``structured_outputs`` are vLLM's,
    ``format`` is Ollama's and ``json_schema`` llama.cpp's.
    """

    meaningful: ClassVar = {f"guided_{name}": empty for name, empty in _EMPTY_FORMS.items()}

    response_format: Annotated[ResponseFormat, BeforeValidator(as_typed)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | Text | None = None
    guided_regex: Text | None = None
    guided_choice: Texts | None = None
    guided_grammar: Text | None = Field(
        None, description="Grammar in llguidance's dialect of Lark."
    )
    format: Literal["json"] | dict[str, Any] | None = Field(
        None, description="'json', or a JSON schema."
    )
    json_schema: dict[str, Any] | None = None

    def guide_arguments(self) -> dict[str, Mapping[str, Any]]:
        arguments = dict[str, Mapping[str, Any]]()
        if self.response_format is not None:
            arguments.update(self.response_format.guide_arguments())
        if self.structured_outputs is not None:
            arguments.update(self.structured_outputs.guide_arguments())
        guided = {name: getattr(self, f"guided_{name}") for name in GUIDE_KINDS}
        arguments.update(_by_field("guided_", guided))
        if self.format is not None:
            schema = _ANY_OBJECT if self.format == "json" else self.format
            arguments["format"] = {"json": schema}
        if self.json_schema is not None:
            arguments["json_schema"] = {"json": self.json_schema}
        return arguments


def _by_field(prefix: str, given: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return arguments of ``Guide``, each under the name of the field that sets it.

    Fields with the value ``None`` are left out. For example, the prefix ``guided_`` and
    ``{"regex": "a+", "json": None}`` give ``{"guided_regex": {"regex": "a+"}}``.
    """
    return {f"{prefix}{kind}": {kind: value} for kind, value in given.items() if value is not None}
