"""Every way to guess tokens, by name.

A drafter is given as an object (``PromptLookup(num_tokens=8)``), as a name (``"prompt_lookup"``), or as a name with
options (``"prompt_lookup(num_tokens=8, max_ngram=3)"``).
"""

from __future__ import annotations

import ast
import inspect
from typing import Any

from pronk.drafters.autoregressive import Autoregressive
from pronk.drafters.base import DraftContext, Drafter, Needs, Outcome, Target
from pronk.drafters.prompt_lookup import PromptLookup
from pronk.errors import OptionError

__all__ = [
    "REGISTRY",
    "Autoregressive",
    "DraftContext",
    "Drafter",
    "Needs",
    "Outcome",
    "PromptLookup",
    "Target",
    "make_drafter",
]

REGISTRY: dict[str, type[Drafter[Any]]] = {
    cls.name: cls
    for cls in (
        Autoregressive,
        PromptLookup,
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
    name, options = _parse(spec)
    if name not in REGISTRY:
        msg = f"unknown drafter {name!r}; expected one of {', '.join(REGISTRY)}"
        raise OptionError(msg)
    known = list(inspect.signature(REGISTRY[name]).parameters)
    for option in options:
        if option not in known:
            msg = f"{name}: unknown option {option!r}; it has {', '.join(known) or 'no options'}"
            raise OptionError(msg)
    return REGISTRY[name](**options)


def _parse(spec: str) -> tuple[str, dict[str, Any]]:
    """``"name(option=value, …)"`` as name and options; values are Python literals."""
    wanted = 'expected "name" or "name(option=value, …)"'
    try:
        node = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        msg = f"drafter {spec!r} cannot be read; {wanted}"
        raise OptionError(msg) from error
    if isinstance(node, ast.Name):
        return node.id, {}
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        msg = f"drafter {spec!r} cannot be read; {wanted}"
        raise OptionError(msg)
    options: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg in options:
            msg = f"drafter {spec!r}: expected {keyword.arg} once, found it twice"
            raise OptionError(msg)
        try:
            options[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError) as error:
            msg = f"drafter {spec!r}: the value of {keyword.arg} is not a number, a text or a truth value"
            raise OptionError(msg) from error
    return node.func.id, options
