"""Fields for the form of the answer: ``response_format``, vLLM's ``guided_*``, ``structured_outputs``."""

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
# Empty forms are not the same as none: the schema allows any value, and no text has one of the
# others, so the request is refused.
_EMPTY_FORMS: Mapping[str, Any] = {"json": {}, "regex": "", "choice": [], "grammar": ""}


class SchemaFormat(Record):
    """Named JSON schema. The answer follows the schema whether ``strict`` is set or not."""

    meaningful: ClassVar = {"schema": {}}

    name: Text | None = Field(None, max_length=256)
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestBody):
    """``response_format`` of chats and completions; the field ``schema`` is llama.cpp's form."""

    meaningful: ClassVar = {"schema": {}}

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    def guide_arguments(self) -> dict[str, Mapping[str, Any]]:
        """Implement :meth:`TextRequest.guide_arguments` for this field."""
        named = None if self.json_schema is None else self.json_schema.schema_
        schemas = [schema for schema in (named, self.schema_) if schema is not None]
        if (self.type == "json_schema") != (self.json_schema is not None) and self.schema_ is None:
            raise refuse(
                "response_format",
                "expected json_schema with the type 'json_schema', and with no other",
            )
        if (len(schemas) > 1 and named != self.schema_) or (schemas and self.type == "text"):
            raise refuse(
                "response_format",
                "expected one schema, and none with the type 'text'; leave one out",
            )
        schema = schemas[0] if schemas else None
        return (
            {}
            if self.type == "text"
            else {"response_format": {"json": _ANY_OBJECT if schema is None else schema}}
        )


class TextFormat(SchemaFormat):
    """``text.format`` of ``/v1/responses``."""

    type: Literal["text", "json_object", "json_schema"]

    def guide_arguments(self) -> dict[str, Mapping[str, Any]]:
        """Implement :meth:`TextRequest.guide_arguments` for this field."""
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise refuse(
                "text.format.schema",
                "expected a schema with the type 'json_schema', and with no other",
            )
        schema = {"json_object": _ANY_OBJECT, "json_schema": self.schema_}.get(self.type)
        return {} if schema is None else {"text.format": {"json": schema}}


class StructuredOutputs(RequestBody):
    """``structured_outputs`` of vLLM: one of five forms."""

    places: ClassVar[Sequence[str]] = ("structured_outputs",)
    meaningful: ClassVar = _EMPTY_FORMS

    json_: dict[str, Any] | Text | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Texts | None = None
    grammar: Text | None = None
    json_object: bool | None = None

    def guide_arguments(self) -> dict[str, Mapping[str, Any]]:
        """Implement :meth:`TextRequest.guide_arguments` for this field."""
        given = {
            "json": self.json_,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
        }
        return _by_field("structured_outputs.", given) | (
            {"structured_outputs.json_object": {"json": _ANY_OBJECT}} if self.json_object else {}
        )


class GuidedRequest(TextRequest):
    """Request with a form of the answer, in OpenAI's or vLLM's fields.

    ``format`` is Ollama's field, ``json_schema`` that of llama.cpp.
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
        guided = {name: getattr(self, f"guided_{name}") for name in GUIDE_KINDS}
        form = {} if self.response_format is None else self.response_format.guide_arguments()
        structured = (
            {} if self.structured_outputs is None else self.structured_outputs.guide_arguments()
        )
        schemas = {
            "format": _ANY_OBJECT if self.format == "json" else self.format,
            "json_schema": self.json_schema,
        }
        others = {name: {"json": schema} for name, schema in schemas.items() if schema is not None}
        return {**form, **structured, **_by_field("guided_", guided), **others}


def _by_field(prefix: str, given: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return ``{"guided_regex": {"regex": "a+"}}`` for ``guided_`` and ``{"regex": "a+", "json": None}``."""
    return {f"{prefix}{kind}": {kind: value} for kind, value in given.items() if value is not None}
