"""Drafters that requests may select: a request must not choose which files the server reads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, is_dataclass
from functools import lru_cache

from pronk.drafters.registry import make_drafter
from pronk.errors import OptionError
from pronk.llm import LLM
from pronk.replicas.dispatcher import ModelReader
from pronk.server.protocol.request import refuse
from pronk.speculation.proposer import Drafter

# Options of drafters that name files.
_DEFAULT_FILE_OPTIONS = ("model", "datastore")  # if the option is not set, the drafter reads a default file
_OPTIONAL_FILE_OPTIONS = ("store", "table")  # if the option is not set, the drafter reads no file
_MAX_DRAFTERS = 8  # maximum number of drafters in one request, counting a combined drafter and each drafter in it


class DrafterRules:
    """Selects drafters of requests: those without files, the model's default, those of the settings."""

    def __init__(self, llm: LLM | ModelReader, allowed: Collection[str]) -> None:
        """Bind the allowed drafters now, so that errors show at once and loaded draft models stay in memory."""
        self._llm = llm
        self._allowed = {make_drafter(spec): llm.get_proposer(spec) for spec in allowed}
        self.select = lru_cache(256)(self._select)

    def _select(self, spec: str) -> Drafter:
        """Return the drafter of a request; raise ``ApiError`` if it is invalid or not allowed."""
        try:
            drafter = make_drafter(spec)
        except OptionError as error:
            raise refuse("drafter", str(error)) from error
        if drafter == self._llm.drafter:
            return drafter
        if drafter in self._allowed:  # a drafter that keeps texts has a proposer per adapter
            proposer: Drafter = self._allowed[drafter]
            return proposer if drafter.for_adapter() is None else drafter
        drafters = _with_inner_drafters(drafter)
        if len(drafters) > _MAX_DRAFTERS:
            raise refuse("drafter", f"expected at most {_MAX_DRAFTERS} drafters in one, found {len(drafters)}")
        if not any(map(_reads_files, drafters)):
            return drafter
        message = f"expected a drafter without files, or one that the server allows with --also, found {spec!r}"
        raise refuse("drafter", message, "drafter_not_allowed")


def _with_inner_drafters(drafter: Drafter) -> list[Drafter]:
    """Return a drafter and, if it combines others (``parts``), all drafters in it."""
    return [drafter, *(inner for part in getattr(drafter, "parts", ()) for inner in _with_inner_drafters(part))]


def _reads_files(drafter: Drafter) -> bool:
    options: list[str] = [option.name for option in fields(drafter)] if is_dataclass(drafter) else []
    return any(
        option in _DEFAULT_FILE_OPTIONS or (option in _OPTIONAL_FILE_OPTIONS and getattr(drafter, option) is not None)
        for option in options
    )
