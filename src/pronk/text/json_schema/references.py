"""Targets of ``$ref`` within one schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

# keys and indices from the root, for example ("properties", "a", "anyOf", "0")
Path = tuple[str, ...]

# Keywords whose value maps names to schemas.
MAPS_OF_SCHEMAS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
_VALUES = frozenset({"const", "enum", "default", "example", "examples"})  # contain no schemas


@dataclass(frozen=True)
class SchemaPart:
    """Schema at a path; ``base`` is the URI that relative references within it start from."""

    schema: Any
    path: Path
    base: str


def base_within(schema: Any, base: str) -> str:
    """Return the base of the references in a schema, which its ``$id`` may change."""
    ident = schema.get("$id") if isinstance(schema, Mapping) else None
    return urldefrag(_join(base, ident))[0] if isinstance(ident, str) else base


class References:
    """Index of the ``$id`` and ``$anchor`` keywords of a schema, which resolves references."""

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
        """Return the target of a reference; ``None`` if it is not within the schema."""
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
    """Return the target at a key or an index."""
    found = target.schema
    if isinstance(found, Mapping) and key in found:
        inner = found[key]
    elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
        inner = found[int(key)]
    else:
        return None
    return SchemaPart(inner, (*target.path, key), base_within(inner, target.base))


def _targets(target: SchemaPart) -> Iterator[SchemaPart]:
    """Yield all schemas within a schema, and the schema itself, if they are objects."""
    pending = [target]
    while pending:
        target = pending.pop()
        schema = target.schema
        if isinstance(schema, list):
            pending += [
                inner
                for key in range(len(schema))
                if (inner := _inner(target, str(key))) is not None
            ]
        if not isinstance(schema, Mapping):
            continue
        yield target
        for key in schema:
            inner = None if key in _VALUES else _inner(target, str(key))
            if inner is None:
                continue
            if key in MAPS_OF_SCHEMAS and isinstance(inner.schema, Mapping):
                names = SchemaPart(inner.schema, inner.path, target.base)
                pending += [
                    each for name in inner.schema if (each := _inner(names, str(name))) is not None
                ]
            else:
                pending.append(inner)
