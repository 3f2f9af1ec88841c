"""Every way to guess tokens, by name.

A drafter is given as an object (``PromptLookup(num_tokens=8)``), as a name (``"prompt_lookup"``), or as a name with
options (``"prompt_lookup(num_tokens=8, max_ngram=3)"``). Those that are made of others name them first
(``"first_of(prompt_lookup, recycling(num_nodes=7))"``).
"""

from __future__ import annotations

import ast
import inspect
from typing import Any

from pronk.drafters.autoregressive import Autoregressive
from pronk.drafters.base import DraftContext, Drafter, Needs, Outcome, Target
from pronk.drafters.beam import Beam
from pronk.drafters.cape import Cape
from pronk.drafters.draft_model import DraftModel
from pronk.drafters.first_of import FirstOf
from pronk.drafters.gauss_seidel import GaussSeidel
from pronk.drafters.glide import Glide, Vanilla
from pronk.drafters.jacobi import Jacobi
from pronk.drafters.kangaroo import Kangaroo
from pronk.drafters.lookahead import Lookahead
from pronk.drafters.medusa import Medusa
from pronk.drafters.merged import Merged
from pronk.drafters.multi_token import MultiToken
from pronk.drafters.prompt_lookup import PromptLookup
from pronk.drafters.recycling import Recycling
from pronk.drafters.retrieval import Retrieval
from pronk.drafters.staged import Staged
from pronk.drafters.suffix import Suffix
from pronk.drafters.threshold import Threshold
from pronk.errors import OptionError

__all__ = [
    "REGISTRY",
    "Autoregressive",
    "Beam",
    "Cape",
    "DraftContext",
    "DraftModel",
    "Drafter",
    "FirstOf",
    "GaussSeidel",
    "Glide",
    "Jacobi",
    "Kangaroo",
    "Lookahead",
    "Medusa",
    "Merged",
    "MultiToken",
    "Needs",
    "Outcome",
    "PromptLookup",
    "Recycling",
    "Retrieval",
    "Staged",
    "Suffix",
    "Target",
    "Threshold",
    "Vanilla",
    "make_drafter",
]

REGISTRY: dict[str, type[Drafter[Any]]] = {
    cls.name: cls
    for cls in (
        Autoregressive,
        Jacobi,
        GaussSeidel,
        Lookahead,
        PromptLookup,
        Suffix,
        Retrieval,
        Recycling,
        DraftModel,
        Kangaroo,
        Medusa,
        MultiToken,
        Threshold,
        Staged,
        Cape,
        Beam,
        Glide,
        Vanilla,
        FirstOf,
        Merged,
    )
}


def make_drafter(spec: str | Drafter[Any]) -> Drafter[Any]:
    """A drafter from its name, with or without options, or the object itself.

    Raises:
        OptionError: unknown drafter or option, or a value out of its range; the message lists what there is.
    """
    if isinstance(spec, Drafter):
        return spec
    if not isinstance(spec, str):
        msg = f"drafter: expected a name or a drafter, found {spec!r}"
        raise OptionError(msg)
    try:
        node = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _unreadable(spec) from error
    return _build(node, spec)


def _build(node: ast.expr, spec: str) -> Drafter[Any]:
    """The drafter of ``name`` or ``name(drafter, …, option=value, …)``; values are Python literals."""
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name):
        raise _unreadable(spec)
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
            raise _unreadable(spec)
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
            msg = f"drafter {spec!r}: the value of {keyword.arg} is not a number, a text or a truth value"
            raise OptionError(msg) from error
    return options


def _unreadable(spec: str) -> OptionError:
    return OptionError(f'drafter {spec!r} cannot be read; expected "name" or "name(option=value, …)"')
