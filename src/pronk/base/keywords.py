"""Class decorator that checks the keywords of calls, and suggests the correct spelling."""

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
    """Let a class check the keywords of calls of its constructor and of its public methods.

    Only methods with keyword-only options are checked. A call raises ``UnknownOptionError`` if it
    has a keyword that the method lacks, or gives an argument by position and by keyword.
    """
    for name, function in list(vars(cls).items()):
        if not inspect.isfunction(function):
            continue
        parameters = inspect.signature(function).parameters.values()
        kinds = [parameter.kind for parameter in parameters]
        has_options = inspect.Parameter.KEYWORD_ONLY in kinds and not name.startswith("_")
        if name == "__init__":
            setattr(cls, name, _checked(function, cls.__name__))
        elif has_options:
            setattr(cls, name, _checked(function, f"{cls.__name__}.{name}"))
    return cls


def _checked(function: Callable[..., Any], shown: str) -> Callable[..., Any]:
    """Return a method that checks the keywords of each call, and then calls ``function``.

    ``shown`` is the method's name in error messages.
    """
    _, *parameters = inspect.signature(function).parameters.values()  # without self
    by_position = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
    keywords = [
        parameter.name
        for parameter in parameters
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    takes_all = len(keywords) < len(parameters)  # the method has a parameter ``**options``

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
    """Raise ``UnknownOptionError`` if a call has an unknown keyword.

    Args:
        given: the keywords of the call.
        shown: name of the function in the message.
        keywords: the keywords that the function has.
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
