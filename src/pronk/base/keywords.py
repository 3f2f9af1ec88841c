"""Class decorator: a misspelt keyword of a call gets an error that names the closest one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pronk.base.checks import close_choices
from pronk.base.errors import UnknownOptionError

Class = TypeVar("Class", bound=type)

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def known_keywords(cls: Class) -> Class:
    """Let the constructor of a class check the keywords of a call.

    So do its public methods with keyword-only options. A keyword that a method lacks, or one that
    is given by position, too, raises an ``UnknownOptionError``.
    """
    for name, function in [*vars(cls).items()]:
        if not inspect.isfunction(function):
            continue
        kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
        has_options = inspect.Parameter.KEYWORD_ONLY in kinds and not name.startswith("_")
        if name == "__init__" or has_options:
            shown = cls.__name__ if name == "__init__" else f"{cls.__name__}.{name}"
            setattr(cls, name, _checked(function, shown))
    return cls


def _checked(function: Callable[..., Any], shown: str) -> Callable[..., Any]:
    """Return a method that checks its keywords; ``shown`` is its name in messages."""
    _, *parameters = inspect.signature(function).parameters.values()  # without self
    by_position = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
    keywords = [
        parameter.name
        for parameter in parameters
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    takes_all = len(keywords) < len(parameters)

    def check(args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        for name in options:
            if name in by_position[: len(args)]:
                msg = f"{name}: expected it once, found it by position and by name; leave one out"
                raise UnknownOptionError(msg)
        if not takes_all:
            check_keywords(options, shown, keywords)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(self: Any, /, *args: Any, **options: Any) -> Any:
            check(args, options)
            return await function(self, *args, **options)

        return call_async

    @functools.wraps(function)
    def call(self: Any, /, *args: Any, **options: Any) -> Any:
        check(args, options)
        return function(self, *args, **options)

    return call


def check_keywords(given: Iterable[str], shown: str, keywords: Sequence[str]) -> None:
    """Raise an ``UnknownOptionError`` for a name that is not among ``keywords``.

    ``shown`` is the name of their function in the message.
    """
    for name in given:
        if name in keywords:
            continue
        near = close_choices(name, keywords)
        if near:
            remedy = f"did you mean {near}?"
        elif "params" in keywords:
            remedy = f"options of SamplingParams are given as params=SamplingParams({name}=…)"
        else:
            remedy = f"its options are {', '.join(keywords) or 'none'}"
        msg = f"{name}: expected an option of {shown}, found an unknown one; {remedy}"
        raise UnknownOptionError(msg)
