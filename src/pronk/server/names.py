"""Names of models, adapters and drafters in requests, and of models in the values of ``--model``."""

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

_NAMED = re.compile(r"(?P<name>[\w][\w.:/-]*)=(?P<model>.+)")  # NAME=PATH
# Options of drafters that name files.
# if the option is not set, the drafter reads a default file
_DEFAULT_FILE_OPTIONS = ("model", "datastore")
_OPTIONAL_FILE_OPTIONS = ("store", "table")  # if the option is not set, the drafter reads no file
# maximum number of drafters in one request, counting a combined drafter and each drafter in it
_MAX_DRAFTERS = 8


class AdapterNames:
    """Names in the field ``model`` of requests for one model and its adapters.

    Names are compared in small letters, without the ending ``.gguf``.

    Attributes:
        model: name of the model.
        all: names of the model and of its adapters.
    """

    def __init__(self, model: str, adapters: Collection[str]) -> None:
        """Collect the names; raise an OptionError if two are the same."""
        self.model = model
        self.all = (model, *adapters)
        self._adapters = {model_key(model): None} | {model_key(name): name for name in adapters}
        if len(self._adapters) < len(self.all):
            msg = (
                "adapter: expected names other than the model's and each other's, found "
                f"{', '.join(self.all)}"
            )
            raise OptionError(msg)

    def __contains__(self, name: str) -> bool:
        return model_key(name) in self._adapters

    def adapter(self, name: str | None) -> str | None:
        """Return the adapter with a name, ``None`` for the model itself.

        Raise ``ApiError`` without one.
        """
        if name is None:
            return None
        if name not in self:
            raise unknown_model(name, *self.all)
        return self._adapters[model_key(name)]

    def shown_as(self, name: str | None) -> str:
        """Return the name of the model or adapter as the server's owner wrote it.

        Errors: :meth:`adapter`.
        """
        return self.adapter(name) or self.model


def drafter_selector(llm: LLM | ModelReader, allowed: Collection[str]) -> Callable[[str], Drafter]:
    """Return a function from the field ``drafter`` of a request to the drafter.

    The function raises ``ApiError`` for drafters that read files, except the model's default and
    ``allowed`` ones: a request must not choose which files the server reads.
    """
    # Bind the allowed drafters now, so that errors show at once and loaded draft models stay in
    # memory.
    proposers: dict[Drafter, Any] = {make_drafter(spec): llm.get_proposer(spec) for spec in allowed}

    @lru_cache(256)
    def select(spec: str) -> Drafter:
        try:
            drafter = make_drafter(spec)
        except OptionError as error:
            raise refuse("drafter", str(error)) from error
        if drafter == llm.drafter:
            return drafter
        if drafter in proposers:  # a drafter that keeps texts has a proposer per adapter
            proposer: Drafter = proposers[drafter]
            return proposer if drafter.for_adapter() is None else drafter
        drafters = _with_inner_drafters(drafter)
        if len(drafters) > _MAX_DRAFTERS:
            raise refuse(
                "drafter",
                f"expected at most {_MAX_DRAFTERS} drafters in one, found {len(drafters)}",
            )
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
    return [
        drafter,
        *(inner for part in getattr(drafter, "parts", ()) for inner in _with_inner_drafters(part)),
    ]


def _reads_files(drafter: Drafter) -> bool:
    options: list[str] = (
        [option.name for option in fields(drafter)] if is_dataclass(drafter) else []
    )
    return any(
        option in _DEFAULT_FILE_OPTIONS
        or (option in _OPTIONAL_FILE_OPTIONS and getattr(drafter, option) is not None)
        for option in options
    )


def find_models(
    values: Sequence[str], *, progress: Callable[[int, int], None] | None = None
) -> list[tuple[str, Path]]:
    """Return name and path of each model; download models that are not on this machine.

    Args:
        values: each a model as in :func:`pronk.models.resolve.resolve_model`, ``NAME=MODEL``, or a
            folder of models. A folder of models has no ``config.json``; all its GGUF files, and its
            folders with a ``config.json``, are served. Empty: the default model.
        progress: called with the number of bytes downloaded so far and the total.

    Raises:
        CheckpointError: there is no such model, or the download fails.
        OptionError: two models have one name.
    """
    found: dict[str, tuple[str, Path]] = {}
    for name, model in _expand(values) if values else [(None, None)]:
        path = resolve_model(model, progress=progress)
        named = (name or model_label(path), path)
        other = found.setdefault(model_key(named[0]), named)
        if other is not named:
            msg = (
                f"model: expected distinct names, found {other[0]} for {other[1]} and {path}; use "
                f"--model NAME={path}"
            )
            raise OptionError(msg)
    return [*found.values()]


def _expand(values: Sequence[str]) -> Iterator[tuple[str | None, str | Path]]:
    """Yield the name, if given, and the model of each value.

    Of a folder of models, those of its entries.
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
    """Return the models in a folder of models, sorted by name.

    Empty if ``name`` is anything else.
    """
    with suppress(OSError, RuntimeError):  # a name that is no path is checked by resolve_model()
        folder = Path(name).expanduser()
        if folder.is_dir() and not (folder / "config.json").is_file():
            files = gguf_models(sorted(path.name for path in folder.iterdir()))
            checkpoints = (path.parent for path in folder.glob("*/config.json"))
            return sorted([*(folder / file for file in files), *checkpoints])
    return []
