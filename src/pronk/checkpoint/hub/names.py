"""Names of models on the Hub, and the table of short names.

A name has one of these forms:

``smollm2``
    A short name: a row of ``known_models.json``.
``owner/repository``
    A repository in the Hugging Face layout, or with a single GGUF model. If the repository has
    several GGUF models and the cache has only one of them, the name means this one.
``owner/repository:Q4_K_M``
    The GGUF model of this quantization, in one file or in several parts.
``owner/repository/folder/x.gguf``
    A GGUF file; the first one, if the model has several parts.
``https://huggingface.co/owner/…``, ``hf.co/owner/…``, ``hf://owner/…``
    The address of a repository or of a file on the Hub, as browsers and other programs write it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import unquote

from pronk.base.checks import close_choices
from pronk.base.errors import CheckpointError, refuse

# Names of GGUF files that have only the MTP head of a model, for the drafter ``mtp``.
MTP_FILES = "mtp-*.gguf"
# Config of the module ``Pooling`` in models that sentence-transformers has saved.
POOLING_FILE = "1_Pooling/config.json"
_NAME = re.compile(
    r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(?::(?P<quantization>[\w.-]+)|/(?P<file>[^\\:]+\.gguf))?",
    re.IGNORECASE,
)
# Pattern of the beginning of an address on the Hub, as a browser or another program writes it.
_URL = re.compile(
    r"((https?://)?(www\.)?(huggingface\.co|hf\.co)(/|(?=[?#]|$))|hf://)(models/)?", re.IGNORECASE
)
# Pattern of the path of a page on the Hub: a list of a repository's files, a file, or the download
# of a file.
_PAGE = re.compile(
    r"(?P<repo>[^/]+/[^/]+)/(tree|blob|resolve|raw)/(?P<revision>[^/]+)(/(?P<file>.+))?"
)
# Pattern of the end of a part's file name, without its suffix: ``-00001-of-00003``.
_PART = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})$")
_SHOWN = 12  # maximum number of files in an error message


@dataclass(frozen=True)
class HubModel:
    """A model in a repository of the Hub.

    If ``file`` and ``quantization`` are empty, the model is the whole repository.

    Attributes:
        repo: ``owner/name``.
        file: path of a GGUF file in the repository.
        quantization: a quantization in the name of a GGUF file, such as ``Q4_K_M``; the case of the
            letters does not count.
        revision: branch, tag or commit; ``None``: the branch main.
    """

    repo: str
    file: str = ""
    quantization: str = ""
    revision: str | None = None

    def __str__(self) -> str:
        """Return the model's name in a form that :func:`parse_name` reads, without the revision."""
        if self.file:
            return f"{self.repo}/{self.file}"
        if self.quantization:
            return f"{self.repo}:{self.quantization}"
        return self.repo

    def choose_files(self, files: Iterable[str]) -> list[str]:
        """Return the files of this model, the GGUF file to open first.

        The MTP heads in the folder of a GGUF model (:data:`MTP_FILES`) are among them, or only
        those of the model's quantization if there are any.

        Args:
            files: paths of all files of the repository.

        Raises:
            CheckpointError: the repository lacks the file or the quantization, has several models
                of the quantization, or has no weights.
        """
        files = sorted(files)
        heads = [name for name in files if _is_head(name)]
        models = gguf_models(files) or {name: [name] for name in heads}
        if self.file:
            if self.file in models:
                return self._add_heads(models[self.file], heads)
            if self.file in heads:
                return [self.file]
            found = "a later part of a model" if self.file in files else _shown(models)
            refuse(self.repo, f"expected the GGUF file {self.file}, found {found}")
        if self.quantization:
            first = self._choose_quantization(models)
            return self._add_heads(models[first], heads)
        if is_weights(files):
            return [name for name in files if _is_layout_file(name)]
        if len(models) == 1:
            return self._add_heads(next(iter(models.values())), heads)
        msg = f"{self.repo}: expected *.safetensors or a GGUF model, found {_shown(models)}"
        if models:
            msg += f"; name one: {self.repo}/{next(iter(models))}"
        raise CheckpointError(msg)

    def _add_heads(self, parts: Sequence[str], heads: Iterable[str]) -> list[str]:
        """Return the files ``parts`` of a GGUF model, and those of ``heads`` that belong to it."""
        folder = PurePosixPath(parts[0]).parent
        beside = [name for name in heads if PurePosixPath(name).parent == folder]
        quantization = self.quantization
        alike = [name for name in beside if quantization and _has_quantization(name, quantization)]
        return list(dict.fromkeys([*parts, *(alike or beside)]))

    def _choose_quantization(self, models: Mapping[str, Sequence[str]]) -> str:
        """Return the first file of the model with this object's quantization.

        ``models`` are the files of each GGUF model of the repository, by its first file. A
        repository may have a model twice, in one file and in parts; then the one file is chosen.
        """
        matches = [first for first in models if _has_quantization(first, self.quantization)]
        in_one_file = [first for first in matches if len(models[first]) == 1]
        if len(matches) == 1:
            return matches[0]
        if len(in_one_file) == 1:
            return in_one_file[0]
        found = _shown(matches or models)
        msg = f"{self.repo}: expected a GGUF model in {self.quantization}, found {found}"
        if matches:
            msg += f"; name one file: {self.repo}/{matches[0]}"
        raise CheckpointError(msg)


class PackageFile(NamedTuple):
    """A model's file in a wheel of the Python package index, in case that the Hub fails.

    Attributes:
        requirement: ``name==version`` of the package.
        file: path of the file in the wheel.
    """

    requirement: str
    file: str


class KnownModel(NamedTuple):
    """A row of the table of short names.

    Attributes:
        name: the short name.
        model: the model on the Hub.
        parameters: number of parameters as a text, such as "135M".
        license: the model's license.
        num_bytes: size of the download as the Hub's pages state it, often in three digits; 0 if
            unknown.
        sha256: hash that the model's file must have; "" if it is the one that the Hub states.
        package: a wheel that contains the same file; ``None`` if there is none.
        names: names of the model in its own files, in any quantization.
        sampling: options of ``SamplingParams`` that are recommended for the model; empty if no
            recommendation is published.
    """

    name: str
    model: HubModel
    parameters: str
    license: str
    num_bytes: int = 0
    sha256: str = ""
    package: PackageFile | None = None
    names: tuple[str, ...] = ()
    sampling: Mapping[str, float] = MappingProxyType({})


@cache
def known_models() -> Mapping[str, KnownModel]:
    """Return the models with a short name, by short name, in the order of ``known_models.json``."""
    rows = json.loads((Path(__file__).parent / "known_models.json").read_bytes())
    return MappingProxyType({name: _known(name, row) for name, row in rows.items()})


def _known(name: str, row: dict[str, Any]) -> KnownModel:
    """Return the model with the short name ``name``, given its row of ``known_models.json``."""
    match = _NAME.fullmatch(row["source"])
    assert match is not None, row
    model = _matched_model(match, row.get("revision"))
    package = PackageFile(**row["package"]) if "package" in row else None
    recommended = row.get("sampling", {})
    sampling = {option: value for option, value in recommended.items() if option != "source"}
    return KnownModel(
        name,
        model,
        row["parameters"],
        row["license"],
        num_bytes=row.get("bytes", 0),
        sha256=row.get("sha256", ""),
        package=package,
        names=tuple(row["names"]),
        sampling=MappingProxyType(sampling),
    )


def _matched_model(match: re.Match[str], revision: str | None) -> HubModel:
    """Return the model that a name means, given the match of the pattern ``_NAME``."""
    return HubModel(match["repo"], match["file"] or "", match["quantization"] or "", revision)


def parse_name(name: str, revision: str | None = None) -> HubModel | None:
    """Return the model on the Hub that a name means.

    Args:
        name: a name in one of the forms at the top of this module.
        revision: branch, tag or commit; by default that of the address or of the short name.

    Returns:
        The model; ``None`` if the name has another form.

    Raises:
        CheckpointError: the name is an address, but not of a model's repository on the Hub.
    """
    if name in known_models():
        known = known_models()[name].model
        return known if revision is None else replace(known, revision=revision)
    url = _URL.match(name)
    if url is None and "://" in name:
        found = f"the address of another place, {name}"
        refuse("model", f"expected a model of huggingface.co, found {found}; download it yourself")
    plain = name
    if url is not None:
        plain, page_revision = _read_page(name[url.end() :])
        revision = revision or page_revision
    match = _NAME.fullmatch(plain)
    if match is not None and not {".", ".."}.intersection(plain.split("/")):
        return _matched_model(match, revision or None)
    if url is not None:
        expected = "the address of a model or a GGUF file"
        found = f"that of another page, {name}" if plain else f"no repository in {name}"
        refuse("model", f"expected {expected}, found {found}; write owner/name")
    return None


def require_name(name: str, revision: str | None = None) -> HubModel:
    """Return the model of :func:`parse_name`; raise CheckpointError for a name of another form."""
    model = parse_name(name, revision)
    if model is None:
        expected = "expected a short name or owner/name[:QUANTIZATION] of a model on the Hub"
        remedy = "pronk list --known prints the short names"
        refuse("model", f"{expected}, found {name!r:.80}{close_names(name)}; {remedy}")
    return model


def _read_page(path: str) -> tuple[str, str | None]:
    """Return the name of the model on a page of the Hub, and the page's revision.

    For ``owner/name/blob/v1/x.gguf`` they are ``owner/name/x.gguf`` and ``v1``. The name of a page
    of another file is ``owner/name``. The revision is ``None`` for the branch main.
    """
    path = re.split(r"[?#]", path)[0].strip("/")
    page = _PAGE.fullmatch(path)
    if page is None:
        return unquote(path), None
    name = page["repo"]
    file = unquote(page["file"] or "")
    if file.lower().endswith(".gguf"):
        name += f"/{file}"
    revision = unquote(page["revision"])
    return name, None if revision == "main" else revision


def close_names(name: str, *others: str) -> str:
    """Return a hint with the names closest to ``name``, such as `` (did you mean smollm2?)``.

    Candidates are the short names and ``others``. The hint is empty if none is close.
    """
    near = close_choices(name, [*known_models(), *others], cutoff=0.5)
    return f" (did you mean {near}?)" if near else ""


def is_weights(files: Iterable[str]) -> bool:
    """Return whether a repository's top folder has weights in the Hugging Face layout.

    ``files`` are the paths of the repository's files.
    """
    return any(name.endswith(".safetensors") and _is_layout_file(name) for name in files)


def _is_layout_file(name: str) -> bool:
    """Return whether a file is a part of a model in the Hugging Face layout.

    Executable code is not. ``consolidated*`` is not either: in Mistral's repositories it is a
    second copy of the weights.
    """
    if name.startswith("additional_chat_templates/"):
        return name.endswith(".jinja") and name.count("/") == 1
    if name == POOLING_FILE:
        return True
    if "/" in name or re.fullmatch(r"consolidated.*\.safetensors", name):
        return False
    return name.endswith((".json", ".safetensors", ".txt", ".jinja")) or name == "tokenizer.model"


def weight_files(path: Path) -> list[Path]:
    """Return the files with the weights of a model on this machine, in the order of their names.

    Args:
        path: folder with ``*.safetensors``, or GGUF file; the first one, if the model has parts.
    """
    if path.is_dir():
        return sorted(path.glob("*.safetensors"))
    parts = gguf_models([file.name for file in path.parent.glob("*.gguf")])
    return [path.parent / name for name in parts.get(path.name, [path.name])]


def _is_head(name: str) -> bool:
    """Return whether a path of a repository is that of a file with an MTP head alone."""
    return fnmatchcase(PurePosixPath(name).name, MTP_FILES)


def gguf_models(files: list[str]) -> dict[str, list[str]]:
    """Return the complete GGUF models of a repository, without image projectors and MTP heads.

    Returns:
        The files of each model, by its first file.
    """
    models: dict[str, list[str]] = {}
    for name in files:
        path = PurePosixPath(name)
        if path.suffix.lower() != ".gguf" or "mmproj" in path.name.lower() or _is_head(name):
            continue
        part = _PART.search(path.stem)
        if part is None:
            models[name] = [name]
        elif int(part["number"]) == 1:
            stem = name[: -len(part.group() + path.suffix)]
            numbers = range(1, int(part["count"]) + 1)
            parts = [f"{stem}-{number:05}-of-{part['count']}{path.suffix}" for number in numbers]
            if set(parts) <= set(files):
                models[name] = parts
    return models


def _has_quantization(file: str, quantization: str) -> bool:
    """Return whether a file name contains a quantization as a whole word, in any case.

    ``m-Q4_K_M.gguf`` contains ``q4_k_m``, but not ``q4_k``.
    """
    stem = _PART.sub("", PurePosixPath(file).stem)
    pattern = rf"(^|[-._]){re.escape(quantization)}($|[-.])"
    return re.search(pattern, stem, re.IGNORECASE) is not None


def _shown(models: Iterable[str]) -> str:
    """Return the names of at most 12 models, and how many more there are, for an error message."""
    shown = list(models)
    rest = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + rest or "no GGUF model"
