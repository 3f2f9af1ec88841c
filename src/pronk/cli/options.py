"""Options that several commands share: those of the model and those of a request.

:mod:`pronk.cli.declared` makes them from the declarations of
:class:`~pronk.engine.options.LLMOptions` and :class:`~pronk.sampling.params.SamplingParams`.

A *builder* is a function whose keyword parameters are options, and which builds an object from
their values. The decorator :func:`shares` adds a builder's options to a command. The command
receives the builder as a function with the user's values already bound.
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
    """Return the names of the options that the user has typed, also those with a default value."""
    names = list[str]()
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            names.append(name)
    return names


def shares(
    without: Iterable[str] = (), **builders: Callable[..., Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the keyword options of each builder to a command, except those in ``without``.

    The command's parameter with a builder's name receives that builder with the user's values
    filled in::

        def bread(*, flour: str = "rye", grams: int = 500) -> Bread: ...
        def oven(*, degrees: int = 220) -> Oven: ...


        @shares(dough=bread, heat=oven, without=("grams",))
        def bake(
            loaves: int,
            dough: Callable[[], Bread],
            heat: Callable[[], Oven],
            *,
            degrees: int = 250,
        ) -> None:
            heat().bake(dough() for _ in range(loaves))

    has the signature ``bake(loaves: int, *, flour: str = "rye", degrees: int = 250)``. Options of
    the same name in the command and in builders are one option, whose value the command and these
    builders receive. The first definition gives the type, default and help, and the last definition
    gives the position; the command comes before the builders.

    Args:
        without: names of options that no builder receives; the command may define an option of that
            name itself.
        builders: functions that build a value, by the name of the command's parameter that receives
            it.
    """
    groups = {key: _keyword_parameters(build) for key, build in builders.items()}
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
            built = dict[str, functools.partial[Any]]()
            for key, build in builders.items():
                arguments = {name: values[name] for name in received[key]}
                built[key] = functools.partial(build, **arguments)
            with ExitStack() as stack:
                # The builder "load" only returns the arguments of LLM, which _load() creates.
                if "load" in built:
                    load = built["load"]
                    built["load"] = functools.partial(_load, stack, load.func, **load.keywords)
                command(**{name: values[name] for name in command_parameters}, **built)

        call.__signature__ = signature.replace(parameters=list(shown.values()))  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in shown.values()}
        return call

    return decorate


def _keyword_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the keyword-only parameters of a function."""
    parameters = inspect.signature(function).parameters.values()
    return [each for each in parameters if each.kind is each.KEYWORD_ONLY]


def _load(
    stack: ExitStack,
    options: Callable[..., dict[str, Any]],
    /,
    progress: Progress | None,
    *,
    check: Callable[["RequestFactory"], None] | None = None,
    **changed: Any,
) -> "LLM":
    """Load the model of a command.

    Args:
        stack: saves the model's acceptance statistics when the command ends or fails.
        options: function that returns the arguments of :class:`pronk.LLM`.
        progress: update function of a progress bar; it takes the bytes read so far and in all.
        check: function that checks the command's requests before the weights are loaded.
        changed: options that replace the user's values.
    """
    from pronk.engine.workers import check_launched
    from pronk.llm import LLM

    llm_options = options(**changed)
    check_launched(llm_options["workers"])
    llm = LLM(**llm_options, progress=progress, check=check)
    stack.callback(llm.calibration.save)
    return llm


def _with_parameters(parameters: Iterable[inspect.Parameter]) -> Callable[[Function], Function]:
    """Return a decorator that gives a builder with ``**given`` the signature of ``parameters``.

    :func:`shares` reads a builder's options from its signature.
    """

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
# Options of pronk.LLM that only commands for many requests have, with their defaults there.
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
    """Return the keyword arguments of :class:`pronk.LLM` for the user's options.

    With the decorator ``shares(load=model_options)``, a command's parameter ``load`` is a function
    ``load(progress)`` that loads the model. The callback ``progress`` takes the bytes read so far
    and in all. ``check=`` is that of ``LLM``, and other keywords replace the user's values.
    """
    return _MODEL.parse(given)


@_with_parameters(_SERVING.parameters)
def serving_options(**given: Any) -> dict[str, Any]:
    """Return the keyword arguments of :class:`pronk.LLM` for a command with many requests.

    In addition to the options of :func:`model_options`, the user sets the batch size and the prefix
    cache.
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
    """Return the guide that these command-line options give; ``None`` if none of them is set."""
    return read_guide(json_schema, regex, choice, grammar)


_GUIDE = inspect.signature(_guide_options).parameters


def _request_parameters() -> Iterator[inspect.Parameter]:
    """Yield the parameters of a request; the options of the guide precede ``guide_mode``."""
    for parameter in _REQUEST.parameters:
        if parameter.name == "guide_mode":
            yield from _GUIDE.values()
        yield parameter


@_with_parameters(_request_parameters())
def sampling_params(**given: Any) -> SamplingParams:
    """Return the sampling parameters for the user's options.

    A value out of its range, or a file that cannot be read, raises an OptionError.
    """
    of_guide = {name: given.pop(name) for name in _GUIDE if name in given}
    return SamplingParams(**_REQUEST.parse(given), guide=_guide_options(**of_guide))
