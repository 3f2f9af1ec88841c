"""Names of models, adapters and drafters in requests, and the models that ``--model`` names."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pronk import LLM, Drafter, OptionError
from pronk.checkpoint import gguf_models, model_label, resolve_model
from pronk.drafting import make_drafter
from pronk.server.errors import unknown_model
from pronk.server.protocol.request import refuse
from pronk.server.replicas.dispatcher import ModelReader
from pronk.server.settings import model_key

# Value NAME=MODEL of the option --model.
_NAMED = re.compile(r"(?P<name>[\w][\w.:/-]*)=(?P<model>.+)")
# Options of drafters that name a file; without them, the drafter reads a default file.
_DEFAULT_FILE_OPTIONS = ("model", "datastore")
# Options of drafters that name a file; without them, the drafter reads none.
_OPTIONAL_FILE_OPTIONS = ("store", "table", "draft_text")
# Maximum number of drafters in one request, counting a combined drafter and each drafter in it.
_MAX_DRAFTERS = 8


class AdapterNames:
    """Names in the field ``model`` of requests for one model and its adapters.

    Names are compared in small letters, without the ending ``.gguf``.

    Attributes:
        model: name of the model.
        all: names of the model and of its adapters.
    """

    def __init__(self, model: str, adapters: Collection[str]) -> None:
        """Collect the names.

        Raises:
            OptionError: two names are the same.
        """
        self.model = model
        self.all = (model, *adapters)
        self._adapters: dict[str, str | None] = {model_key(model): None}
        for name in adapters:
            self._adapters[model_key(name)] = name
        if len(self._adapters) < len(self.all):
            msg = (
                "adapter: expected names other than the model's and each other's, found "
                f"{', '.join(self.all)}"
            )
            raise OptionError(msg)

    def __contains__(self, name: str) -> bool:
        return model_key(name) in self._adapters

    def adapter(self, name: str | None) -> str | None:
        """Return the adapter that a request names, or ``None`` for the model itself.

        Raises:
            ApiError: neither the model nor an adapter has the name.
        """
        if name is None:
            return None
        if name not in self:
            raise unknown_model(name, *self.all)
        return self._adapters[model_key(name)]

    def shown_as(self, name: str | None) -> str:
        """Return the name of a model or adapter as the server's operator wrote it.

        Raises the error of :meth:`adapter` for an unknown name.
        """
        return self.adapter(name) or self.model


def drafter_selector(llm: LLM | ModelReader, allowed: Collection[str]) -> Callable[[str], Drafter]:
    """Return a function that makes the drafter named in the field ``drafter`` of a request.

    The function raises ``ApiError`` for drafters that read files, because a request must not choose
    which files the server reads. The model's default drafter and the ``allowed`` ones are accepted.
    """
    # Load the allowed drafters now: an error then ends the start of the server, not a request, and
    # their draft models stay in memory.
    proposers: dict[Drafter, Any] = {make_drafter(spec): llm.get_proposer(spec) for spec in allowed}

    @lru_cache(256)
    def select(spec: str) -> Drafter:
        try:
            drafter = make_drafter(spec)
        except OptionError as error:
            raise refuse("drafter", str(error)) from error
        if drafter == llm.drafter:
            return drafter
        # A drafter that learns from texts has one proposer for each adapter, which the engine
        # finds by the request's adapter. Any other drafter has the one proposer loaded above.
        if drafter in proposers:
            proposer: Drafter = proposers[drafter]
            return proposer if drafter.for_adapter() is None else drafter
        drafters = _with_inner_drafters(drafter)
        if len(drafters) > _MAX_DRAFTERS:
            message = f"expected at most {_MAX_DRAFTERS} drafters in one, found {len(drafters)}"
            raise refuse("drafter", message)
        if not any(map(_reads_files, drafters)):
            return drafter
        message = (
            "expected a drafter without files, or one that the server allows with --also, "
            f"found {spec!r}"
        )
        raise refuse("drafter", message, "drafter_not_allowed")

    return select


def _with_inner_drafters(drafter: Drafter) -> list[Drafter]:
    """Return a drafter and, if it combines others (``parts``), all drafters in it."""
    drafters = [drafter]
    for part in getattr(drafter, "parts", ()):
        drafters += _with_inner_drafters(part)
    return drafters


def _reads_files(drafter: Drafter) -> bool:
    if not is_dataclass(drafter):
        return False
    for option in fields(drafter):
        if option.name in _DEFAULT_FILE_OPTIONS:
            return True
        if option.name in _OPTIONAL_FILE_OPTIONS and getattr(drafter, option.name) is not None:
            return True
    return False


def find_models(
    values: Sequence[str], *, progress: Callable[[int, int], None] | None = None
) -> list[tuple[str, Path]]:
    """Return the name and path of each model to serve; download models that are not on the disk.

    Args:
        values: each a model as for :func:`pronk.models.resolve.resolve_model`, ``NAME=MODEL``, or a
            folder of models. A folder of models has no ``config.json``; all its GGUF files, and its
            folders with a ``config.json``, are served. No values mean the default model.
        progress: called with the number of bytes downloaded so far and the total.

    Raises:
        CheckpointError: there is no such model, or the download fails.
        OptionError: two models have the same name.
    """
    found: dict[str, tuple[str, Path]] = {}
    for given_name, model in _expand(values) if values else [(None, None)]:
        path = resolve_model(model, progress=progress)
        name = given_name or model_label(path)
        key = model_key(name)
        if key in found:
            other_name, other_path = found[key]
            msg = (
                f"model: expected distinct names, found {other_name} for {other_path} and {path}; "
                f"use --model NAME={path}"
            )
            raise OptionError(msg)
        found[key] = (name, path)
    return [*found.values()]


def _expand(values: Sequence[str]) -> Iterator[tuple[str | None, str | Path]]:
    """Yield the given name (or ``None``) and the model of each value of ``--model``.

    A folder of models yields each of its models, without a name.
    """
    for value in values:
        named = _NAMED.fullmatch(value)
        if models := _models_in(value):
            yield from ((None, path) for path in models)
        elif named is not None and not Path(value).exists():
            yield named["name"], named["model"]
        else:
            yield None, value


def _models_in(name: str) -> list[Path]:
    """Return the models in a folder, sorted by name; none if ``name`` is no folder of models."""
    # Raised for a name that cannot be a path; resolve_model() checks the name later.
    with suppress(OSError, RuntimeError):
        folder = Path(name).expanduser()
        if folder.is_dir() and not (folder / "config.json").is_file():
            files = gguf_models(sorted(path.name for path in folder.iterdir()))
            checkpoints = (path.parent for path in folder.glob("*/config.json"))
            return sorted([*(folder / file for file in files), *checkpoints])
    return []
