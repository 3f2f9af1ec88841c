"""Findings of the translation of a JSON schema: faults, and what the grammar needs besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pronk.text.json_schema.references import Path, SchemaPart


@dataclass(frozen=True)
class Fault:
    """Keyword or schema that the translation leaves out.

    Attributes:
        path: path of the keyword or of the schema.
        expected: what the keyword should be for the translation to keep it, for an error message.
        found: value of the keyword; empty if the translation keeps no value of the keyword.
        is_annotation: whether the standard lets a validator ignore the keyword, as it does
            ``format``.
    """

    path: Path
    expected: str
    found: str = ""
    is_annotation: bool = False


@dataclass
class Findings:
    """Findings about all parts of a schema that have been translated so far.

    Attributes:
        multiple: least common multiple of the digits of all ``multipleOf`` values (25 for 0.25).
        faults: keywords and schemas that are left out, as the keys of a dictionary: an ordered set.
        is_risky: whether llguidance may refuse the translation, so that a trial compilation is
            needed.
        has_open_names: whether an object has both named and additional properties.
        has_intersections: whether a value must match several schemas of objects at once.
    """

    multiple: int = 1
    faults: dict[Fault, None] = field(default_factory=dict)
    is_risky: bool = False
    has_open_names: bool = False
    has_intersections: bool = False

    def add_fault(
        self, path: Path, expected: str, *found: object, is_annotation: bool = False
    ) -> None:
        """Record a keyword or schema that is left out.

        ``found`` is the value of the keyword, unless no value of it is supported. The other
        arguments are the fields of :class:`Fault`.
        """
        shown = "".join(f"{value!r:.60}" for value in found)
        self.faults[Fault(path, expected, shown, is_annotation)] = None


@dataclass(frozen=True)
class Keywords:
    """The keywords of one schema, with its place in the whole schema.

    Attributes:
        schema: all keywords with their values.
        given: the keywords that are translated; those to leave out are missing.
        path: keys and indices from the root of the whole schema.
        base: URI against which relative references within the schema are resolved.
        findings: takes the faults of the keywords.
    """

    schema: Mapping[str, Any]
    given: Mapping[str, Any]
    path: Path
    base: str
    findings: Findings

    def part(self, keyword: str, *names: str) -> SchemaPart:
        """Return the value of a keyword as a part of the schema, or a value within the value."""
        value = self.given[keyword]
        for name in names:
            value = value[name]
        return SchemaPart(value, (*self.path, keyword, *names), self.base)

    def add_fault(
        self, keyword: str, expected: str, *found: object, is_annotation: bool = False
    ) -> None:
        """Record that a keyword is left out; the arguments are those of ``Findings.add_fault``."""
        path = (*self.path, keyword)
        self.findings.add_fault(path, expected, *found, is_annotation=is_annotation)

    def is_left_out(self, keyword: str) -> bool:
        """Return whether the schema has ``keyword``, and the translation leaves it out."""
        return keyword in self.schema and keyword not in self.given
