"""Unions of pydantic classes for a field of a request; its JSON value selects one class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True)
class OneOf:
    """Annotation of a union of classes: ``Annotated[A | B, OneOf(choose)]``.

    ``choose`` returns the class of a JSON object, so that an error is about the fields of this
    class alone. Values that are no objects are validated as the first class, whose error says that
    it expects an object.
    """

    choose: Callable[[Mapping[str, Any]], type]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        classes = get_args(source)

        def tag_of(value: Any) -> str:
            if isinstance(value, dict):
                return _tag(self.choose(value))
            return _tag(type(value) if isinstance(value, classes) else classes[0])

        choices = {_tag(each): handler.generate_schema(each) for each in classes}
        return core_schema.tagged_union_schema(choices, tag_of)


def type_of(value: Mapping[str, Any]) -> str | None:
    """Return the field ``type`` of an object; ``None`` if it is missing, empty or no text."""
    found = value.get("type")
    return found if isinstance(found, str) and found else None


def as_typed(value: Any) -> Any:
    """Return ``{"type": "json_object"}`` for ``"json_object"``, and other values unchanged."""
    return {"type": value} if isinstance(value, str) else value


def _tag(chosen: type) -> str:
    """Return the tag of a class, ``<NAME>``, which pydantic writes into the location of an error.

    The brackets tell tags from the names of a request's fields.
    """
    return f"<{chosen.__name__}>"
