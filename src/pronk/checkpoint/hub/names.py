"""Names of models on the Hub, and the table of short names.

====================================  =====================================================================
``smollm2``                           short name: a row of ``known_models.json``
``owner/repository``                  a repository in the Hugging Face layout, or one with a single GGUF model; if a
                                      single one of its GGUF models is in the cache, that one
``owner/repository:Q4_K_M``           the GGUF model of this quantization, of one file or several parts
``owner/repository/folder/x.gguf``    this GGUF file; of a model in several parts, the first
``https://huggingface.co/owner/…``    address of a repository or a file on the Hub, as a browser shows it
``hf.co/owner/…``, ``hf://owner/…``   the same, as other programs write it
====================================  =====================================================================
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import unquote

from pronk.base.checks import close_choices
from pronk.base.errors import CheckpointError, refuse

_NAME = re.compile(
    r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(?::(?P<quantization>[\w.-]+)|/(?P<file>[^\\:]+\.gguf))?",
    re.IGNORECASE,
)
# Beginning of an address on the Hub.
_URL = re.compile(
    r"((https?://)?(www\.)?(huggingface\.co|hf\.co)(/|(?=[?#]|$))|hf://)(models/)?", re.IGNORECASE
)
# Path of a page of a repository: its files, a file, or the download of a file.
_PAGE = re.compile(
    r"(?P<repo>[^/]+/[^/]+)/(tree|blob|resolve|raw)/(?P<revision>[^/]+)(/(?P<file>.+))?"
)
# at the end of the stem of a part's file name
_PART = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})$")
_SHOWN = 12  # number of files in an error message


@dataclass(frozen=True)
class HubModel:
    """A model in a repository of the Hub.

    Without ``file`` and ``quantization``, the whole repository.
    """

    repo: str  # owner/name
    file: str = ""  # path of a GGUF file in the repository
    quantization: str = ""  # as in the name of a GGUF file, in any case
    revision: str | None = None  # branch, tag or commit; None is the branch main

    def __str__(self) -> str:
        """Return the name that :func:`parse_name` reads; the revision is not a part of it."""
        return self.repo + (
            f"/{self.file}" if self.file else f":{self.quantization}" if self.quantization else ""
        )

    def choose_files(self, files: Iterable[str]) -> list[str]:
        """Return the files of a repository that this model needs, the GGUF file to open first.

        Raises:
            CheckpointError: the repository has no such file, several models of the quantization, or
                no weights.
        """
        files = sorted(files)
        models = gguf_models(files)
        if self.file:
            if self.file in models:
                return models[self.file]
            found = (
                f"found {_shown(models)}"
                if self.file not in files
                else "found a later part of a model"
            )
            refuse(self.repo, f"expected the GGUF file {self.file}, {found}")
        if self.quantization:
            matches = [first for first in models if _has_quantization(first, self.quantization)]
            # some models are there twice
            whole = [first for first in matches if len(models[first]) == 1]
            if len(matches) == 1 or len(whole) == 1:
                return models[(whole or matches)[0]]
            msg = (
                f"{self.repo}: expected a GGUF model in {self.quantization}, found "
                f"{_shown(matches or models)}"
            )
            raise CheckpointError(
                msg if not matches else f"{msg}; name one file: {self.repo}/{matches[0]}"
            )
        if is_weights(files):
            return [name for name in files if _is_layout_file(name)]
        if len(models) == 1:
            return next(iter(models.values()))
        msg = f"{self.repo}: expected *.safetensors or a GGUF model, found {_shown(models)}"
        raise CheckpointError(
            f"{msg}; name one: {self.repo}/{next(iter(models))}" if models else msg
        )


class PackageFile(NamedTuple):
    """A file in a wheel of the Python package index: the second source of a known model."""

    requirement: str  # name==version
    file: str  # path of the file in the wheel


class KnownModel(NamedTuple):
    """A row of the table of short names.

    ``sampling`` has the options of ``SamplingParams`` that are recommended for the model. In the
    file, they stand next to their ``source``.
    """

    name: str
    model: HubModel
    parameters: str  # number of parameters, as in "135M"
    license: str
    sha256: str = ""  # of the file; empty: the Hub's own hash is checked
    package: PackageFile | None = None
    names: tuple[str, ...] = ()  # names that files of the model give it, in any quantization
    sampling: Mapping[str, float] = MappingProxyType({})


@cache
def known_models() -> Mapping[str, KnownModel]:
    """Return the table of short names, in the order of the file."""
    rows = json.loads((Path(__file__).parent / "known_models.json").read_bytes())
    return MappingProxyType({name: _known(name, row) for name, row in rows.items()})


def _known(name: str, row: dict[str, Any]) -> KnownModel:
    match = _NAME.fullmatch(row["source"])
    assert match is not None, row
    model = HubModel(
        match["repo"], match["file"] or "", match["quantization"] or "", row.get("revision")
    )
    package = PackageFile(**row["package"]) if "package" in row else None
    sampling = {option: value for option, value in row["sampling"].items() if option != "source"}
    return KnownModel(
        name,
        model,
        row["parameters"],
        row["license"],
        sha256=row.get("sha256", ""),
        package=package,
        names=tuple(row["names"]),
        sampling=MappingProxyType(sampling),
    )


def parse_name(name: str, revision: str | None = None) -> HubModel | None:
    """Return the model on the Hub that ``name`` means, or ``None`` if it has none of the forms above.

    Raises CheckpointError for an address of another place than a model's repository on the Hub.
    """
    if name in known_models():
        known = known_models()[name].model
        return known if revision is None else replace(known, revision=revision)
    url = _URL.match(name)
    if url is None and "://" in name:
        remedy = "download it yourself"
        refuse(
            "model",
            f"expected a model of huggingface.co, found the address of another place, {name}; "
            f"{remedy}",
        )
    plain, page_revision = (name, None) if url is None else _read_page(name[url.end() :])
    match = _NAME.fullmatch(plain)
    if match is not None and not {".", ".."}.intersection(plain.split("/")):
        return HubModel(
            match["repo"],
            match["file"] or "",
            match["quantization"] or "",
            revision or page_revision,
        )
    if url is not None:
        found = f"that of another page, {name}" if plain else f"no repository in {name}"
        refuse(
            "model",
            f"expected the address of a model or a GGUF file, found {found}; write owner/name",
        )
    return None


def _read_page(path: str) -> tuple[str, str | None]:
    """Return the name of the model on a page of the Hub, and the revision of the page (``None``: main).

    ``owner/name/blob/v1/x.gguf`` gives ``owner/name/x.gguf`` and ``v1``; a page of another file
    gives ``owner/name``.
    """
    path = re.split(r"[?#]", path)[0].strip("/")
    page = _PAGE.fullmatch(path)
    if page is None:
        return unquote(path), None
    file = unquote(page["file"] or "")
    is_model = file.lower().endswith(".gguf")
    revision = unquote(page["revision"])
    return page["repo"] + (f"/{file}" if is_model else ""), None if revision == "main" else revision


def close_names(name: str, *others: str) -> str:
    """Return " (did you mean …?)" with the closest short names or ``others``; empty without one."""
    near = close_choices(name, [*known_models(), *others], cutoff=0.5)
    return f" (did you mean {near}?)" if near else ""


def is_weights(files: Iterable[str]) -> bool:
    """Return whether files of a repository's top folder include weights in the Hugging Face layout."""
    return any(name.endswith(".safetensors") and _is_layout_file(name) for name in files)


def _is_layout_file(name: str) -> bool:
    """Return whether a file belongs to the Hugging Face layout.

    Executable code is not downloaded, nor ``consolidated*``, a second copy of the weights in
    Mistral's repositories.
    """
    if name.startswith("additional_chat_templates/"):
        return name.endswith(".jinja") and name.count("/") == 1
    wanted = name.endswith((".json", ".safetensors", ".txt", ".jinja")) or name == "tokenizer.model"
    return wanted and "/" not in name and not re.fullmatch(r"consolidated.*\.safetensors", name)


def gguf_models(files: list[str]) -> dict[str, list[str]]:
    """Return the files of each complete GGUF model by its first file, without image projectors."""
    models: dict[str, list[str]] = {}
    for name in files:
        path = PurePosixPath(name)
        if path.suffix.lower() != ".gguf" or "mmproj" in path.name.lower():
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
    """Return whether a file name has the word ``quantization``: ``m-Q4_K_M.gguf`` has ``q4_k_m``."""
    stem = _PART.sub("", PurePosixPath(file).stem)
    return (
        re.search(rf"(^|[-._]){re.escape(quantization)}($|[-.])", stem, re.IGNORECASE) is not None
    )


def _shown(models: Iterable[str]) -> str:
    shown = list(models)
    rest = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + rest or "no GGUF model"
