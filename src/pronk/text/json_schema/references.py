"""Resolution of the references (``$ref``) of a JSON schema to parts of the same schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

# Keys and indices from the root to a part, for example ("properties", "a", "anyOf", "0").
Path = tuple[str, ...]

# Keywords whose value maps names to schemas.
MAPS_OF_SCHEMAS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
# Keywords whose values are examples or constants, so that they contain no schemas.
_VALUES = frozenset({"const", "enum", "default", "example", "examples"})


@dataclass(frozen=True)
class SchemaPart:
    """A part of a JSON schema, with its place in the whole schema.

    Attributes:
        schema: the part itself; any JSON value if the schema is invalid there.
        path: keys and indices from the root of the whole schema.
        base: URI against which relative references within the part are resolved.
    """

    schema: Any
    path: Path
    base: str


def base_within(schema: Any, base: str) -> str:
    """Return the base URI of references in a schema: ``base``, or its ``$id`` if it has one."""
    ident = schema.get("$id") if isinstance(schema, Mapping) else None
    return urldefrag(_join(base, ident))[0] if isinstance(ident, str) else base


class References:
    """Index of the keywords ``$id`` and ``$anchor`` of a schema, for resolving its references."""

    def __init__(self, root: Any) -> None:
        self.root = SchemaPart(root, (), base_within(root, ""))
        self._resources = {"": self.root}
        self._anchors = dict[tuple[str, str], SchemaPart]()
        for target in _targets(self.root):
            if target.base not in self._resources:
                self._resources[target.base] = target
            for keyword in ("$anchor", "$dynamicAnchor"):
                anchor = target.schema.get(keyword)
                if isinstance(anchor, str):
                    self._anchors[target.base, anchor] = target

    def resolve(self, reference: str, base: str) -> SchemaPart | None:
        """Return the part of the schema that a reference means; ``None`` if it is elsewhere.

        ``base`` is the base URI of the schema that contains the reference.
        """
        try:
            uri, fragment = urldefrag(reference)
            uri = base if not uri else urldefrag(_join(base, uri))[0]
        except ValueError:
            return None
        if fragment and not fragment.startswith("/"):
            return self._anchors.get((uri, unquote(fragment)))
        target = self._resources.get(uri)
        for key in fragment.split("/")[1:]:
            target = None if target is None else _inner(target, _unescaped(key))
        return target


def _join(base: str, uri: str) -> str:
    try:
        return urljoin(base, uri) if base else uri
    except ValueError:
        return uri


def _unescaped(key: str) -> str:
    return unquote(key).replace("~1", "/").replace("~0", "~")


def _inner(target: SchemaPart, key: str) -> SchemaPart | None:
    """Return the part of a mapping at a key, or of a list at an index; ``None`` if missing."""
    found = target.schema
    if isinstance(found, Mapping) and key in found:
        inner = found[key]
    elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
        inner = found[int(key)]
    else:
        return None
    return SchemaPart(inner, (*target.path, key), base_within(inner, target.base))


def _targets(target: SchemaPart) -> Iterator[SchemaPart]:
    """Yield a schema and all schemas within it, without those that are ``true`` or ``false``."""
    pending = [target]
    while pending:
        target = pending.pop()
        schema = target.schema
        if isinstance(schema, list):
            pending += _inner_parts(target, range(len(schema)))
        if not isinstance(schema, Mapping):
            continue
        yield target
        for key in schema:
            inner = None if key in _VALUES else _inner(target, str(key))
            if inner is None:
                continue
            if key in MAPS_OF_SCHEMAS and isinstance(inner.schema, Mapping):
                names = SchemaPart(inner.schema, inner.path, target.base)
                pending += _inner_parts(names, inner.schema)
            else:
                pending.append(inner)


def _inner_parts(target: SchemaPart, keys: Iterable[object]) -> list[SchemaPart]:
    """Return the parts of a mapping or a list at the given keys or indices."""
    parts = [_inner(target, str(key)) for key in keys]
    return [part for part in parts if part is not None]
