"""Sources of training text: JSONL files, plain text, and the installed Python code.

On the command line, a source is ``WHAT=WEIGHT``, where the weight is its share of the text relative
to the other sources. Examples, with what is read::

    prose.jsonl.gz=0.25        one JSON object a line: text, and optionally source and license
    notes/=0.1                 every .txt, .md, .rst and .py file below a folder (or one such file)
    python=0.6                 the interpreter's standard library and the installed packages
    python:extra/packages=0.6  the same, and the packages in one more folder
    own.answers=1              a file of the target's own dialogues, from pronk train texts; only
                               for drafters, and without other sources

A Python package is read only if its metadata declares a permissive licence for all of its files.
Tests, generated files, vendored copies and tables of data are left out.
"""

from __future__ import annotations

import platform
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from pronk import OptionError
from pronk.base import read_json_lines, read_text, refuse

# Pattern of permissive licences given as SPDX identifiers.
_SPDX = re.compile(
    r"(mit|mit-0|mit-cmu|bsd|bsd-[23]-clause|0bsd|apache-2\.0|apache 2\.0"
    r"|psf-2\.0|python-2\.0(\.1)?|isc|cc0-1\.0|zlib)"
)
# Pattern of permissive licences given by other usual names, such as "New BSD License (BSD)".
_FREE_FORM = re.compile(
    r"(the )?(mit|isc|(new |modified |simplified |[23]-clause )?bsd( [23]-clause)?"
    r"|apache( software)?( license)?,?( version)? 2(\.0)?|psf|python software foundation)"
    r"( license)?( \((mit|bsd|isc)\))?"
)
# Pattern of permissive licences given as trove classifiers.
_CLASSIFIER = re.compile(
    r"License :: OSI Approved :: (MIT|BSD|Apache Software|ISC|Python Software Foundation)\b.*"
)

# Names of folders whose Python files are left out: tests, vendored copies, tables of data.
_SKIP_PARTS = frozenset(
    "test tests testing _testing test_utils idle_test _vendor vendor vendored _vendored "
    "_vendored_packages third_party thirdparty extern externals _extern _bundled _distutils "
    "site-packages dist-packages turtledemo pydoc_data encodings benchmarks __pycache__ "
    "migrations locale lib2to3".split()
)
# Phrases at the beginning of generated files, which are left out.
_GENERATED = re.compile(
    r"auto-?generated|generated (by|from|automatically)|do not edit|@generated", re.IGNORECASE
)
# Traces of code benchmarks (HumanEval, MBPP), by which their problems are left out.
_EVAL_STYLE = re.compile(r"humaneval|\bmbpp\b|METADATA = \{\s*'author'", re.IGNORECASE)
# Pattern of the comment with a copyright notice at the top of a file, which is removed.
_NOTICE = re.compile(
    r"\A(#!.*\n)?(#.*\n|\s*\n)*?#.*(copyright|licen[sc]e).*\n(#.*\n)*\s*", re.IGNORECASE
)
# Range of a Python file's size in bytes; smaller and larger files are left out.
_MIN_BYTES = 200
_MAX_BYTES = 120_000
_MAX_LINE = 300  # maximum characters of a line; a file with a longer line is left out
_JSON_LINES = (".jsonl", ".jsonl.gz")
_TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
_ANSWERS = ".answers"


class SourceText(NamedTuple):
    """One text of a source, with its origin and licence for the model card."""

    text: str
    origin: str
    license: str


def read_python(extra: Path | None) -> Iterator[SourceText]:
    """Yield the Python files of the standard library, then those of all installed packages.

    ``extra`` is a folder of further packages with their ``.dist-info``, as made by ``pip install
    --target``.
    """
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(library.rglob("*.py"))
    yield from _read_files(library, files, f"CPython {platform.python_version()}", "PSF-2.0")
    folders = [Path(sysconfig.get_path("purelib"))]
    if extra is not None:
        folders.append(extra)
    yield from read_packages(folders)


def read_packages(folders: Sequence[Path]) -> Iterator[SourceText]:
    """Yield the Python files of all packages in ``folders`` with a permissive licence.

    If several folders have the same package, only its files in the last of them are read.
    """
    packages: dict[str, Distribution] = {}
    for folder in folders:
        for package in distributions(path=[str(folder)]):
            packages[package.metadata["Name"].lower()] = package
    for name in sorted(packages):
        package = packages[name]
        license_name = _license_of(package)
        if license_name is not None:
            files = sorted(str(file) for file in package.files or () if file.suffix == ".py")
            root = Path(str(package.locate_file("")))
            origin = f"{package.metadata['Name']} {package.version}"
            yield from _read_files(root, [root / file for file in files], origin, license_name)


def _read_files(
    root: Path, files: list[Path], origin: str, license_name: str
) -> Iterator[SourceText]:
    """Yield those of ``files`` that are ordinary code, without their copyright notices.

    Args:
        root: folder of the package, below which the files are.
        files: Python files.
        origin: name and version of the package.
        license_name: licence of the package.
    """
    for file in files:
        is_wanted = _wanted_path(file.relative_to(root)) and file.is_file()
        if not is_wanted or not _MIN_BYTES <= file.stat().st_size <= _MAX_BYTES:
            continue
        try:
            text = _read_text(file)
        except OptionError:  # not UTF-8: such files are test data in these packages
            continue
        if wanted_code(text):
            # Remove the copyright notice, because the model would learn to recite notices. The
            # model card names the licence instead.
            yield SourceText(_NOTICE.sub("", text, count=1), origin, license_name)


def _wanted_path(path: PurePath) -> bool:
    """Return whether a path is that of ordinary code: no test, vendored copy or table of data."""
    if ".." in path.parts or _SKIP_PARTS.intersection(part.lower() for part in path.parts[:-1]):
        return False
    is_test = path.name.startswith("test_") or path.name.endswith("_test.py")
    return not is_test and path.name not in ("conftest.py", "_version.py")


def wanted_code(text: str) -> bool:
    """Return whether a text is ordinary code: not generated or minified, and no table of data."""
    if _GENERATED.search(text[:1500]) or _EVAL_STYLE.search(text):
        return False
    lines = text.splitlines()
    if max(map(len, lines), default=0) > _MAX_LINE:
        return False
    # Tables of data have many digits, or many characters outside ASCII.
    digits = sum(text.count(digit) for digit in "0123456789")
    return digits < 0.12 * len(text) and len(text.encode()) < 1.05 * len(text)


def _license_of(distribution: Distribution) -> str | None:
    """Return the licence that a package declares if it is permissive, else ``None``."""
    metadata = distribution.metadata
    expressions = metadata.get_all("License-Expression") or []
    all_classifiers = metadata.get_all("Classifier") or []
    classifiers = [c for c in all_classifiers if c.startswith("License ::")]
    if classifiers and not expressions:
        names = ", ".join(c.rsplit(" :: ", 1)[-1] for c in classifiers)
        return names if all(_CLASSIFIER.fullmatch(c) for c in classifiers) else None
    text = " ".join(expressions or metadata.get_all("License") or []).strip()
    return text if is_permissive(text) else None


def is_permissive(expression: str) -> bool:
    """Return whether permissive licences alone satisfy an expression: ``MIT OR (A AND B)``, …."""
    if _FREE_FORM.fullmatch(expression.strip().lower()):
        return True
    flat = expression.replace("(", " ").replace(")", " ").lower()
    if "(" in expression and " or " in flat and " and " in flat:
        # Nested expressions are rare and are not parsed: all licences in them must be permissive.
        flat = flat.replace(" or ", " and ")
    for alternative in flat.split(" or "):
        terms = [term.strip() for term in alternative.split(" and ")]
        if all(_SPDX.fullmatch(term) for term in terms):
            return True
    return False


@dataclass(frozen=True)
class SourceSpec:
    """A source of training text, given as ``WHAT=WEIGHT`` on the command line.

    Attributes:
        name: name of the source in messages and the model card.
        kind: ``jsonl``, ``text``, ``answers`` or ``python``.
        path: file or folder; for ``python``, a folder of further packages or ``None``.
        weight: share in the mixture, relative to the weights of the other sources.
    """

    name: str
    kind: str
    path: Path | None
    weight: float


def parse_source(text: str) -> SourceSpec:
    """Return the source of a text ``WHAT=WEIGHT``.

    Raises OptionError if the weight is not positive, or the path does not exist.
    """
    what, separator, weight = text.rpartition("=")
    try:
        value = float(weight)
    except ValueError:
        value = 0.0
    if not separator or not what or not 0 < value < float("inf"):
        msg = (
            "expected a source as WHAT=WEIGHT with a positive weight, as in python=0.6; "
            f"found {text!r}"
        )
        raise OptionError(msg)
    python, colon, folder = what.partition(":")
    if python == "python":
        packages = _existing(folder, text) if colon else None
        return SourceSpec("python", "python", packages, value)
    path = _existing(what, text)
    if path.name.endswith(_JSON_LINES):
        return SourceSpec(json_lines_name(path), "jsonl", path, value)
    if path.suffix == _ANSWERS:
        return SourceSpec(path.stem, "answers", path, value)
    if path.is_file() and path.suffix not in _TEXT_SUFFIXES:
        endings = ", ".join((*_JSON_LINES, *_TEXT_SUFFIXES))
        refuse(
            f"source {text!r}",
            f"expected a folder or a file ending in {endings} or {_ANSWERS}",
            OptionError,
        )
    return SourceSpec(path.stem, "text", path, value)


def spec_of(path: Path, option: str) -> SourceSpec:
    """Return a source of weight 1 for ``path``: JSON Lines, a text file or a folder of text files.

    Raises OptionError if the path does not exist; the message names ``option``, the option with
    which the user gave the path.
    """
    if not path.exists():
        refuse(option, f"expected text files, folders or JSON lines, found no {path}", OptionError)
    kind = "jsonl" if path.name.endswith(_JSON_LINES) else "text"
    return SourceSpec(path.name, kind, path, 1.0)


def json_lines_name(file: Path) -> str:
    """Return the name of a JSON Lines file without ``.jsonl`` or ``.jsonl.gz``."""
    return file.name.removesuffix(".gz").removesuffix(".jsonl")


def _existing(path: str, text: str) -> Path:
    existing = Path(path)
    if not existing.exists():
        refuse(
            f"source {text!r}", f"expected a file or folder at {path}, found nothing", OptionError
        )
    return existing


def read_source(spec: SourceSpec) -> Iterator[SourceText]:
    """Yield all documents of a source, in a fixed order.

    Raises OptionError if a file cannot be read, or if the source is a file of answers.
    """
    if spec.kind == "answers":
        msg = (
            f"{spec.path}: expected text, found answers of a model, which only drafters learn, "
            "without other sources"
        )
        raise OptionError(msg)
    if spec.kind == "python":
        yield from read_python(spec.path)
    elif spec.kind == "jsonl" and spec.path is not None:
        for _, row in read_json_lines(spec.path):
            yield _document(row, spec.path)
    elif spec.path is not None:
        yield from _read_plain_texts(spec.path, spec.name)


def _document(row: dict[str, Any], path: Path) -> SourceText:
    text = row.get("text")
    if not isinstance(text, str):
        refuse(path, f"expected a string under 'text', found {type(text).__name__}", OptionError)
    # The model card lists origins. Of an origin 'owner/name@commit:path', only the repository is
    # listed, without the path.
    origin = str(row.get("source", path.name)).split(":", 1)[0]
    return SourceText(text, origin, str(row.get("license", "not stated")))


def _read_plain_texts(path: Path, name: str) -> Iterator[SourceText]:
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _TEXT_SUFFIXES)
    for file in files:
        yield SourceText(_read_text(file), name, "not stated")


def _read_text(file: Path) -> str:
    """Return the text of a file, with a line feed for each of its line breaks."""
    return read_text(file).replace("\r\n", "\n").replace("\r", "\n")
