"""The drafters by name, and the parser of drafter specifications.

A specification is a string such as ``"merged(suffix, recycling(top_k=8))"``. The engine's own
drafters are in :data:`DRAFTERS`; those of guests have entry points of the group ``pronk.drafters``
(:mod:`pronk.base.guests`). Both are found by ``pronk.__all__``, the command line, verification and
the tests. This module does not import NumPy, so that ``import pronk`` and ``pronk --help`` stay
fast.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from pronk.base.checks import check_choice, close_choices
from pronk.base.errors import OptionError
from pronk.base.guests import guests, load_guest

if TYPE_CHECKING:
    from pronk.drafting.proposer import Drafter

# Maps names of the engine's drafters to "module:class"; module names omit the leading "pronk.".
DRAFTERS: dict[str, str] = {
    "autoregressive": "drafting.autoregressive:Autoregressive",
    "prompt_lookup": "drafting.from_text.prompt_lookup:PromptLookup",
    "suffix": "drafting.from_text.suffix:Suffix",
    "prediction": "drafting.from_text.prediction:Prediction",
    "recycling": "drafting.from_outputs.recycling:Recycling",
    "draft_model": "drafting.from_draft.draft_model:DraftModel",
    "eagle3": "drafting.from_target.eagle3:Eagle3",
    "mtp": "drafting.from_target.eagle3:Mtp",
    "gemma4_assistant": "drafting.from_target.gemma4_assistant:Gemma4Assistant",
    "threshold": "drafting.from_draft.threshold:Threshold",
    "first_of": "drafting.combined.merged:FirstOf",
    "merged": "drafting.combined.merged:Merged",
    "auto": "drafting.combined.auto:Auto",
    "grammar": "drafting.combined.grammar:Grammar",
}

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def drafter_classes() -> dict[str, str]:
    """Return a dict from the class names of all drafters to their names.

    Drafters of guests, that is, of other packages, come last.
    """
    return _own_classes() | {entry.attr: name for name, entry in guests("pronk.drafters").items()}


def find_class(class_name: str) -> type[Drafter] | None:
    """Return the class of a drafter by the name of the class; ``None`` if there is none.

    Raises ``OptionError`` if the class is that of a guest whose package is missing.
    """
    # The engine's own drafters are tried first: they need no search for installed packages.
    name = _own_classes().get(class_name) or drafter_classes().get(class_name)
    return None if name is None else REGISTRY[name]


def _own_classes() -> dict[str, str]:
    return {home.partition(":")[2]: name for name, home in DRAFTERS.items()}


def _check_entry_point(name: str, found: object) -> type[Drafter]:
    """Return what an entry point ``name`` registers, if it is a drafter with this name.

    Messages and statistics have the drafter's name, and specifications that of the entry point.
    """
    from pronk.drafting.proposer import Drafter  # noqa: PLC0415 - imports NumPy

    if not (isinstance(found, type) and issubclass(found, Drafter)):
        shown = found.__name__ if isinstance(found, type) else repr(found)
        msg = (
            f"drafter: {name}: expected its entry point to name a subclass of pronk.Drafter, "
            f"found {shown:.60}; correct it in pyproject.toml and install the package again"
        )
        raise OptionError(msg)
    if found.name != name:
        msg = (
            f"drafter: {name}: expected {found.__name__}.name to equal its entry point, found "
            f"{found.name!r}; write name = {name!r} in the class"
        )
        raise OptionError(msg)
    return found


class _LazyClasses(Mapping[str, "type[Drafter]"]):
    """Map of drafter names to classes, each imported at its first use."""

    def __getitem__(self, name: str) -> type[Drafter]:
        """Return the class of a drafter.

        Raise an OptionError if the package of a guest is missing, or its entry point is wrong.
        """
        if name in DRAFTERS:
            return resolve_name(f"pronk.{DRAFTERS[name]}")
        if name not in guests("pronk.drafters"):
            raise KeyError(name)
        return _check_entry_point(name, load_guest("pronk.drafters", name, f"drafter: {name}"))

    def __iter__(self) -> Iterator[str]:
        yield from DRAFTERS
        yield from guests("pronk.drafters")

    def __len__(self) -> int:
        return len(DRAFTERS) + len(guests("pronk.drafters"))


REGISTRY: Mapping[str, type[Drafter]] = _LazyClasses()


def make_drafter(spec: str | Drafter) -> Drafter:
    """Build a drafter from a specification such as ``"suffix(num_nodes=7)"``.

    Return a drafter unchanged.

    Raises:
        OptionError: the specification cannot be parsed, the drafter or an option is unknown, or a
            value is invalid.
    """
    from pronk.drafting.proposer import Drafter  # noqa: PLC0415 - imports NumPy

    if isinstance(spec, Drafter):
        return spec
    if not isinstance(spec, str):
        found = (
            f"the class {spec.__name__}"
            if isinstance(spec, type)
            else " ".join(repr(spec).split())[:60]
        )
        msg = (
            f"drafter: expected a name or a drafter, found {found}; "
            'write for example "suffix" or Suffix()'
        )
        raise OptionError(msg)
    try:
        node = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _syntax_error(spec) from error
    return _build(node, spec)


def _build(node: ast.expr, spec: str) -> Drafter:
    """Build the drafter of ``name`` or ``name(drafter, …, option=value, …)``.

    This expression is a part of ``spec``.
    """
    # a name without parentheses is a call without options
    call = node if isinstance(node, ast.Call) else ast.Call(node, args=[], keywords=[])
    if not isinstance(call.func, ast.Name):
        raise _syntax_error(spec)
    name = check_choice("drafter", call.func.id, REGISTRY)
    parameters = inspect.signature(REGISTRY[name]).parameters
    valid_options = [parameter for parameter in parameters if parameter != "parts"]
    options = _read_options(call, spec)
    for option in options:
        if option not in valid_options:
            near = close_choices(option, valid_options)
            suggestion = f"; did you mean {near}?" if near else ""
            expected = f"one of {', '.join(valid_options)}" if valid_options else "no options"
            msg = f"drafter: {name}: expected {expected}, found {option!r}{suggestion}"
            raise OptionError(msg)
    if call.args:
        if "parts" not in parameters:
            raise _syntax_error(spec)
        options["parts"] = tuple(_build(part, spec) for part in call.args)
    for option, parameter in parameters.items():
        is_required = parameter.default is parameter.empty and parameter.kind in _BY_NAME
        if is_required and option not in options:
            value = "another drafter" if option == "parts" else f"{option}=…"
            msg = f"drafter: {name}: expected {value}, found none; write {name}({value})"
            raise OptionError(msg)
    return REGISTRY[name](**options)


def _read_options(call: ast.Call, spec: str) -> dict[str, Any]:
    """Return the options of a drafter specification such as ``suffix(num_nodes=8)`` as a dict.

    The values must be Python literals.
    """
    options: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:  # **
            raise _syntax_error(spec)
        if keyword.arg in options:
            msg = f"drafter {spec!r}: expected {keyword.arg} once, found it twice"
            raise OptionError(msg)
        try:
            options[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError) as error:
            msg = (
                f"drafter {spec!r}: expected a number, a string, True or False for {keyword.arg}, "
                "found an expression"
            )
            raise OptionError(msg) from error
    return options


def _syntax_error(spec: str) -> OptionError:
    near = close_choices(spec, REGISTRY)
    suggestion = f"; did you mean {near}?" if near else ""
    found = f"{spec!r:.80}, which cannot be read"
    return OptionError(
        f'drafter: expected "name" or "name(option=value, …)", found {found}{suggestion}'
    )
