"""Sources of training text: JSONL files, plain text, and the installed Python code.

On the command line, a source is ``WHAT=WEIGHT``::

    prose.jsonl.gz=0.25        one JSON object a line: text, and optionally source and license
    notes/=0.1                 every .txt, .md, .rst and .py file below a folder (or one such file)
    python=0.6                 the interpreter's standard library and the installed packages
    python:extra/packages=0.6  the same, with the packages of one more folder
    own.answers=1              for drafters, and alone: the target's own dialogues, from pronk train texts
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pronk.corpus.python_source import read_python
from pronk.errors import OptionError
from pronk.files.json_lines import read_json_lines

__all__ = ["SourceSpec", "SourceText", "json_lines_name", "parse_source", "read_source", "spec_of"]

_JSON_LINES = (".jsonl", ".jsonl.gz")
_TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
_ANSWERS = ".answers"


@dataclass(frozen=True)
class SourceText:
    """One text, with its origin and licence for the model card."""

    text: str
    origin: str
    license: str


@dataclass(frozen=True)
class SourceSpec:
    """One ``WHAT=WEIGHT``.

    ``kind`` is ``jsonl``, ``text``, ``answers``, or ``python``, whose path may be ``None``.
    """

    name: str
    kind: str
    path: Path | None
    weight: float


def parse_source(text: str) -> SourceSpec:
    """Parse ``WHAT=WEIGHT``.

    Raises:
        OptionError: no weight, a weight that is not a positive number, or a path that does not exist.
    """
    what, separator, weight = text.rpartition("=")
    try:
        value = float(weight)
    except ValueError:
        value = 0.0
    if not separator or not what or not 0 < value < float("inf"):
        msg = f"expected a source as WHAT=WEIGHT with a positive weight, as in python=0.6; found {text!r}"
        raise OptionError(msg)
    if what == "python":
        return SourceSpec("python", "python", None, value)
    if what.startswith("python:"):
        return SourceSpec("python", "python", _existing(what.removeprefix("python:"), text), value)
    path = _existing(what, text)
    if path.name.endswith(_JSON_LINES):
        return SourceSpec(json_lines_name(path), "jsonl", path, value)
    if path.suffix == _ANSWERS:
        return SourceSpec(path.stem, "answers", path, value)
    if path.is_file() and path.suffix not in _TEXT_SUFFIXES:
        endings = ", ".join((*_JSON_LINES, *_TEXT_SUFFIXES))
        msg = f"source {text!r}: expected a folder or a file ending in {endings} or {_ANSWERS}"
        raise OptionError(msg)
    return SourceSpec(path.stem, "text", path, value)


def spec_of(path: Path, option: str) -> SourceSpec:
    """Return a source of weight 1 for ``path``: JSON Lines, a text file or a folder of text files.

    Raises:
        OptionError: the path does not exist; the message begins with ``option``, the name of the option with the path.
    """
    if not path.exists():
        msg = f"{option}: expected text files, folders or JSON lines, found no {path}"
        raise OptionError(msg)
    return SourceSpec(path.name, "jsonl" if path.name.endswith(_JSON_LINES) else "text", path, 1.0)


def json_lines_name(file: Path) -> str:
    """Return the file name without ``.jsonl`` or ``.jsonl.gz``."""
    return file.name.removesuffix(".gz").removesuffix(".jsonl")


def _existing(path: str, text: str) -> Path:
    existing = Path(path)
    if not existing.exists():
        msg = f"source {text!r}: expected a file or folder at {path}, found nothing"
        raise OptionError(msg)
    return existing


def read_source(spec: SourceSpec) -> Iterator[SourceText]:
    """Yield all documents of a source, in a fixed order.

    Raises:
        OptionError: the source is a file of answers, which has tokens and no text.
    """
    if spec.kind == "answers":
        msg = f"{spec.path}: expected text, found answers of a model, which only drafters learn, without other sources"
        raise OptionError(msg)
    if spec.kind == "python":
        for text, origin, license_name in read_python(spec.path):
            yield SourceText(text, origin, license_name)
    elif spec.kind == "jsonl" and spec.path is not None:
        for _, row in read_json_lines(spec.path):
            yield _document(row, spec.path)
    elif spec.path is not None:
        yield from _read_text(spec.path, spec.name)


def _document(row: dict[str, Any], path: Path) -> SourceText:
    text = row.get("text")
    if not isinstance(text, str):
        msg = f"{path}: expected a string under 'text', found {type(text).__name__}"
        raise OptionError(msg)
    # The model card lists origins: the repository of a source 'owner/name@commit:path', without the path in it.
    origin = str(row.get("source", path.name)).split(":", 1)[0]
    return SourceText(text, origin, str(row.get("license", "not stated")))


def _read_text(path: Path, name: str) -> Iterator[SourceText]:
    files = sorted(f for f in path.rglob("*") if f.suffix in _TEXT_SUFFIXES) if path.is_dir() else [path]
    for file in files:
        try:
            yield SourceText(file.read_text(encoding="utf-8"), name, "not stated")
        except OSError as error:
            msg = f"{file}: expected a file that can be read, found {error.strerror}"
            raise OptionError(msg) from error
        except UnicodeDecodeError as error:
            msg = f"{file}: expected UTF-8 text, found {error}"
            raise OptionError(msg) from error
