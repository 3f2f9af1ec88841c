"""Options that several commands share: those of the model and those of a request.

They are made from the declarations of :class:`~pronk.engine.options.LLMOptions` and
:class:`~pronk.sampling.params.SamplingParams` (:mod:`pronk.cli.declared`).

A *builder* is a function whose keyword parameters are options and which builds an object from their
values. The decorator :func:`shares` adds a builder's options to a command. The command receives the
builder as a function with the user's values already bound.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from pronk.cli.declared import CommandLineOptions
from pronk.cli.panels import panel
from pronk.cli.values import read_guide
from pronk.engine.options import BatchOptions, LLMOptions
from pronk.sampling.params import SamplingParams

if TYPE_CHECKING:
    from pronk.engine.request_factory import RequestFactory
    from pronk.llm import LLM
    from pronk.text.guide import Guide

Function = TypeVar("Function", bound=Callable[..., Any])
Progress = Callable[[int, int], None]


def given_options(context: typer.Context) -> list[str]:
    """Return the names of all options on the command line, even of those given with their default value."""
    sources = ((name, context.get_parameter_source(name)) for name in context.params)
    return [name for name, source in sources if source is not None and source.name == "COMMANDLINE"]


def shares(
    without: Iterable[str] = (), **builders: Callable[..., Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the keyword options of each builder to a command, except those in ``without``.

    The command's parameter with a builder's name receives that builder with the user's values
    filled in::

        def bread(*, flour: str = "rye", grams: int = 500) -> Bread: ...
        def oven(*, degrees: int = 220) -> Oven: ...


        @shares(dough=bread, heat=oven, without=("grams",))
        def bake(loaves: int, dough: Callable[[], Bread], heat: Callable[[], Oven], *, degrees: int = 250) -> None:
            heat().bake(dough() for _ in range(loaves))

    has the signature ``bake(loaves: int, *, flour: str = "rye", degrees: int = 250)``. Options of
    the same name in the command and in builders are one option, whose value the command and these
    builders receive. The first definition gives the type, default and help, and the last one the
    position; the command comes before the builders.

    Args:
        without: names of options that no builder receives; the command may define an option of that
            name itself.
        builders: functions that build a value, by the name of the command's parameter that receives
            it.
    """
    groups = {
        key: [p for p in inspect.signature(build).parameters.values() if p.kind is p.KEYWORD_ONLY]
        for key, build in builders.items()
    }
    received = {
        key: [p.name for p in group if p.name not in without] for key, group in groups.items()
    }

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        command_parameters = {
            name: p for name, p in signature.parameters.items() if name not in builders
        }
        shown: dict[str, inspect.Parameter] = {}
        for parameter in chain(command_parameters.values(), *groups.values()):
            if parameter.name in command_parameters or parameter.name not in without:
                shown[parameter.name] = shown.pop(parameter.name, parameter)

        @functools.wraps(command)
        def call(**values: Any) -> None:
            built = {
                key: functools.partial(build, **{name: values[name] for name in received[key]})
                for key, build in builders.items()
            }
            with ExitStack() as stack:
                if "load" in built:  # model_options, which only returns the arguments of LLM
                    load = built["load"]
                    built["load"] = functools.partial(_load, stack, load.func, **load.keywords)
                command(**{name: values[name] for name in command_parameters}, **built)

        call.__signature__ = signature.replace(parameters=list(shown.values()))  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in shown.values()}
        return call

    return decorate


def _load(
    stack: ExitStack,
    options: Callable[..., dict[str, Any]],
    /,
    progress: Progress | None,
    *,
    check: Callable[["RequestFactory"], None] | None = None,
    **changed: Any,
) -> "LLM":
    """Load the model; ``stack`` saves its acceptance statistics when the command ends or fails."""
    from pronk.engine.workers import check_launched
    from pronk.llm import LLM

    llm_options = options(**changed)
    check_launched(llm_options["workers"])
    llm = LLM(**llm_options, progress=progress, check=check)
    stack.callback(llm.calibration.save)
    return llm


def _with_parameters(parameters: Iterable[inspect.Parameter]) -> Callable[[Function], Function]:
    """Give a builder with ``**given`` these parameters, which :func:`shares` reads."""

    def decorate(builder: Function) -> Function:
        builder.__signature__ = inspect.Signature([*parameters])  # type: ignore[attr-defined]
        return builder

    return decorate


# Options of pronk.LLM that are on no command line, with the reason.
NOT_ON_THE_COMMAND_LINE = {
    "prefill_chunk": "its value matters only for models with a sliding window, in experiments",
    "progress": "a function; commands show the progress",
    "check": "a function; commands check their requests",
}
# Options of pronk.LLM that only commands for many requests have, with the defaults of these.
_FOR_MANY_REQUESTS: dict[str, Any] = {
    "max_batch": 32,
    "max_wait": BatchOptions.max_wait,
    "prefix_cache": True,
}

_MODEL = CommandLineOptions(LLMOptions, {*NOT_ON_THE_COMMAND_LINE, *_FOR_MANY_REQUESTS}, {})
_SERVING = CommandLineOptions(LLMOptions, NOT_ON_THE_COMMAND_LINE, _FOR_MANY_REQUESTS)
_REQUEST = CommandLineOptions(SamplingParams, {"guide"}, {})


@_with_parameters(_MODEL.parameters)
def model_options(**given: Any) -> dict[str, Any]:
    """Return the keyword arguments of :class:`pronk.LLM`.

    A command's parameter ``load`` receives ``load(progress)``, which loads the model. The callback
    ``progress`` gets the bytes read so far and in all; ``check=`` is that of ``LLM``, and other
    keywords replace the user's values.
    """
    return _MODEL.parse(given)


@_with_parameters(_SERVING.parameters)
def serving_options(**given: Any) -> dict[str, Any]:
    """Return the keyword arguments of :class:`pronk.LLM`, for a command with many requests at a time.

    The user sets the size of the batch and the cache of prefixes, too; see :func:`model_options`.
    """
    return _SERVING.parse(given)


_guide = panel("Guide")


def _guide_options(
    *,
    json_schema: Annotated[
        str | None,
        _guide(
            "The text is JSON that fits the schema in this file; object: any JSON object.",
            metavar="FILE",
        ),
    ] = None,
    regex: Annotated[
        str | None, _guide("The whole text matches this regular expression.", metavar="REGEX")
    ] = None,
    choice: Annotated[
        list[str], _guide("The text is one of the choices; repeatable.", metavar="TEXT")
    ] = [],  # noqa: B006 - typer requires a list; never modified
    grammar: Annotated[
        str | None, _guide("The text fits the Lark grammar in this file.", metavar="FILE")
    ] = None,
) -> "Guide | None":
    """Return the guide of a request, the one option that needs several on the command line."""
    return read_guide(json_schema, regex, choice, grammar)


_GUIDE = inspect.signature(_guide_options).parameters


def _request_parameters() -> Iterator[inspect.Parameter]:
    """Yield the parameters of a request, those of the guide before its mode."""
    for parameter in _REQUEST.parameters:
        if parameter.name == "guide_mode":
            yield from _GUIDE.values()
        yield parameter


@_with_parameters(_request_parameters())
def sampling_params(**given: Any) -> SamplingParams:
    """Build the sampling parameters.

    Raise OptionError for a value out of its range or an unreadable file.
    """
    of_guide = {name: given.pop(name) for name in _GUIDE if name in given}
    return SamplingParams(**_REQUEST.parse(given), guide=_guide_options(**of_guide))
