"""The table of drafters by name, and the parser of drafter specifications.

The table serves ``pronk.__all__`` and its lazy import, the command line, verification and the tests. A new drafter is
one module and one line here. This module does not import torch, so that names are available at once.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pronk.errors import OptionError

if TYPE_CHECKING:
    from pronk.speculation.proposer import Drafter

__all__ = ["DRAFTERS", "REGISTRY", "class_names", "make_drafter"]

DRAFTERS: dict[str, str] = {
    "autoregressive": "drafters.autoregressive:Autoregressive",
    "jacobi": "drafters.from_outputs.jacobi:Jacobi",
    "gauss_seidel": "drafters.from_outputs.gauss_seidel:GaussSeidel",
    "lookahead": "drafters.from_outputs.lookahead:Lookahead",
    "prompt_lookup": "drafters.from_text.prompt_lookup:PromptLookup",
    "suffix": "drafters.from_text.suffix:Suffix",
    "retrieval": "drafters.from_text.retrieval:Retrieval",
    "recycling": "drafters.from_outputs.recycling:Recycling",
    "draft_model": "drafters.from_draft.draft_model:DraftModel",
    "kangaroo": "drafters.from_target.kangaroo:Kangaroo",
    "medusa": "drafters.from_target.medusa:Medusa",
    "multi_token": "drafters.from_target.multi_token:MultiToken",
    "threshold": "drafters.from_draft.threshold:Threshold",
    "staged": "drafters.from_draft.staged:Staged",
    "cape": "drafters.from_draft.cape:Cape",
    "beam": "drafters.from_draft.beam:Beam",
    "glide": "drafters.from_target.glide:Glide",
    "vanilla": "drafters.from_target.glide:Vanilla",
    "first_of": "drafters.combined.first_of:FirstOf",
    "merged": "drafters.combined.merged:Merged",
    "auto": "speculation.auto:Auto",
    "grammar": "drafters.combined.grammar:Grammar",
}


def _module_and_class(name: str) -> tuple[str, str]:
    module, _, cls = DRAFTERS[name].partition(":")
    return f"pronk.{module}", cls


def class_names() -> dict[str, str]:
    """Return the module of each drafter class, by class name."""
    return {cls: module for module, cls in map(_module_and_class, DRAFTERS)}


class _Classes(Mapping[str, "type[Drafter]"]):
    """The classes of :data:`DRAFTERS`, each imported at its first use."""

    def __getitem__(self, name: str) -> type[Drafter]:
        module, cls = _module_and_class(name)
        found: type[Drafter] = getattr(import_module(module), cls)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(DRAFTERS)

    def __len__(self) -> int:
        return len(DRAFTERS)


REGISTRY: Mapping[str, type[Drafter]] = _Classes()


def make_drafter(spec: str | Drafter) -> Drafter:
    """Build a drafter from a specification such as ``"suffix(num_nodes=7)"``; return a drafter unchanged.

    Raises:
        OptionError: the drafter or option is unknown, or a value is out of range.
    """
    if not isinstance(spec, str):
        return _check_drafter(spec)
    try:
        node = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _syntax_error(spec) from error
    return _build(node, spec)


def _check_drafter(spec: Any) -> Drafter:
    from pronk.speculation.proposer import Drafter  # noqa: PLC0415 - imports torch

    if not isinstance(spec, Drafter):
        found = f"the class {spec.__name__}" if isinstance(spec, type) else " ".join(repr(spec).split())[:60]
        msg = f'drafter: expected a name or a drafter, found {found}; write for example "suffix" or Suffix()'
        raise OptionError(msg)
    return spec


def _build(node: ast.expr, spec: str) -> Drafter:
    """Build ``name`` or ``name(drafter, …, option=value, …)``; values are Python literals."""
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name):
        raise _syntax_error(spec)
    name = call.func.id
    if name not in REGISTRY:
        msg = f"unknown drafter {name!r}; expected one of {', '.join(REGISTRY)}"
        raise OptionError(msg)
    known = list(inspect.signature(REGISTRY[name]).parameters)
    options = _options(call, spec)
    for option in options:
        if option not in known or option == "parts":
            listed = ", ".join(each for each in known if each != "parts")
            msg = f"{name}: unknown option {option!r}; it has {listed or 'no options'}"
            raise OptionError(msg)
    if call.args:
        if "parts" not in known:
            raise _syntax_error(spec)
        options["parts"] = tuple(_build(part, spec) for part in call.args)
    return REGISTRY[name](**options)


def _options(call: ast.Call, spec: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg in options:
            msg = f"drafter {spec!r}: expected {keyword.arg} once, found it twice"
            raise OptionError(msg)
        try:
            options[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError) as error:
            msg = f"drafter {spec!r}: expected a number, a string, True or False for {keyword.arg}, found an expression"
            raise OptionError(msg) from error
    return options


def _syntax_error(spec: str) -> OptionError:
    return OptionError(f'drafter {spec!r} cannot be read; expected "name" or "name(option=value, …)"')
