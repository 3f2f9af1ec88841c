"""Options that several commands share: those of the model and those of a request.

They are made from the declarations of :class:`~pronk.engine.options.LLMOptions` and
:class:`~pronk.sampling.params.SamplingParams`; ``_FORMS`` has those that are written in another
way on the command line.

A *builder* is a function whose keyword parameters are options and which builds an object from their values.
The decorator :func:`shares` adds a builder's options to a command. The command receives the builder as a function with
the user's values already bound.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_origin

import typer

from pronk.base.errors import OptionError, refuse
from pronk.base.options import DeclaredOption, declared_options
from pronk.cache.options import CacheOptions
from pronk.cli.values import parse_adapters, parse_bias, parse_switch, read_guide
from pronk.engine.options import BatchOptions, DraftingOptions, LLMOptions
from pronk.models.options import ModelOptions
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


def panel(title: str | None, **common: Any) -> Callable[..., Any]:
    """Return ``option(text, *names, **settings)``, which makes a typer.Option in the help panel ``title``."""
    return lambda text, *names, **settings: typer.Option(*names, help=text, rich_help_panel=title, **common | settings)


option = panel(None)
_guide = panel("Guide")


def shares(
    without: Iterable[str] = (), **builders: Callable[..., Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the keyword options of each builder to a command, except those in ``without``.

    The command's parameter with a builder's name receives that builder with the user's values filled in::

        def bread(*, flour: str = "rye", grams: int = 500) -> Bread: ...
        def oven(*, degrees: int = 220) -> Oven: ...


        @shares(dough=bread, heat=oven, without=("grams",))
        def bake(loaves: int, dough: Callable[[], Bread], heat: Callable[[], Oven], *, degrees: int = 250) -> None:
            heat().bake(dough() for _ in range(loaves))

    has the signature ``bake(loaves: int, *, flour: str = "rye", degrees: int = 250)``. Options of the same name in the
    command and in builders are one option, whose value the command and these builders receive. The first definition
    gives the type, default and help, and the last one the position; the command comes before the builders.

    Args:
        without: names of options that no builder receives; the command may define an option of that name itself.
        builders: functions that build a value, by the name of the command's parameter that receives it.
    """
    groups = {
        key: [p for p in inspect.signature(build).parameters.values() if p.kind is p.KEYWORD_ONLY]
        for key, build in builders.items()
    }
    received = {key: [p.name for p in group if p.name not in without] for key, group in groups.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        command_parameters = {name: p for name, p in signature.parameters.items() if name not in builders}
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


@dataclass(frozen=True, kw_only=True)
class _Form:
    """Form of an option on the command line, as far as it differs from the declaration.

    Attributes:
        kind: type for typer; ``None``: the declared one.
        parse: converts the command line's value to the option's.
        default: default on the command line, before ``parse``.
        name: name on the command line.
        metavar: name of the value in the help.
        note: sentence that is added to the help.
        panel: panel of the help.
        flags: names on the command line, instead of the one that typer makes of ``name``.
    """

    kind: Any = None
    parse: Callable[[Any], Any] | None = None
    default: Any = None
    name: str = ""
    metavar: str | None = None
    note: str = ""
    panel: str = ""
    flags: tuple[str, ...] = ()


def _repeatable(kind: type, metavar: str, parse: Callable[[Any], Any] = tuple, **more: Any) -> _Form:
    """Return the form of an option that is given several times, with a value of type ``kind`` each."""
    return _Form(kind=list[kind], parse=parse, metavar=metavar, **{"note": "Repeatable."} | more)  # type: ignore[valid-type]


def one_model(values: list[str], remedy: str = "give one") -> str | None:
    """Return the only value of ``--model``, or ``None`` without one; raise OptionError if there are more."""
    if len(values) > 1:
        refuse("model", f"expected one, found {' and '.join(values)}; {remedy}", OptionError)
    return values[0] if values else None


_FORMS = {
    # A list, so that a second model is refused instead of replacing the first one.
    "model": _Form(kind=list[str], parse=one_model),
    "drafter": _Form(kind=str),
    "adapters": _repeatable(
        str, "NAME=FOLDER", parse_adapters, name="adapter", note="For example --adapter sql=./sql-lora."
    ),
    "weight_cache": _Form(kind=str, parse=parse_switch, default="off", metavar="on|off|FOLDER"),
    "kv_memory": _Form(kind=str),
    "prompt_cache": _Form(kind=str, metavar="FOLDER"),
    "prompt_cache_size": _Form(kind=str, metavar="SIZE"),
    "calibration": _Form(
        kind=str, parse=parse_switch, default="on", metavar="on|off|FILE", note="The file is written at the end."
    ),
    "logit_bias": _repeatable(str, "ID=VALUE", parse_bias),
    "bad_words": _repeatable(str, "TEXT"),
    "stop": _repeatable(str, "TEXT"),
    "stop_token_ids": _repeatable(int, "ID"),
    "ignore_eos": _Form(flags=("--ignore-eos",), metavar=""),
    "logprobs": _Form(note="They are in the output of --json."),
    "logprob_token_ids": _repeatable(int, "ID"),
    "guide_mode": _Form(panel="Guide"),
}
_PANELS = {
    ModelOptions: "Model",
    CacheOptions: "KV cache",
    BatchOptions: "Batch",
    DraftingOptions: "Drafting",
    SamplingParams: "Request",
}

# Options of pronk.LLM that are on no command line, with the reason.
NOT_ON_THE_COMMAND_LINE = {
    "prefill_chunk": "its value matters only for models with a sliding window, in experiments",
    "progress": "a function; commands show the progress",
    "check": "a function; commands check their requests",
}
# Options of pronk.LLM that only commands for many requests have, with the defaults of these.
_FOR_MANY_REQUESTS: dict[str, Any] = {"max_batch": 32, "max_wait": BatchOptions.max_wait, "prefix_cache": True}


def _parameter(declared: DeclaredOption, default: Any) -> inspect.Parameter:
    """Return the parameter that typer makes an option of."""
    form = _FORMS.get(declared.name, _Form())
    option_kind, help_text = form.kind or declared.kind, declared.option.help
    if get_origin(option_kind) is Literal:
        option_kind = str  # check_options() names the closest choice
    is_list = get_origin(option_kind) is list
    settings: dict[str, Any] = {"metavar": form.metavar}
    if form.parse is None:
        settings["callback"] = _checked(declared)
    if declared.optional and declared.option.absent:
        settings["show_default"] = declared.option.absent
    if form.default is not None:
        default = form.default
    elif is_list:
        default = []
    kind = option_kind | None if declared.optional and not is_list else option_kind
    make = panel(form.panel or _PANELS[declared.owner])
    info = make(f"{help_text} {form.note}".rstrip(), *form.flags, **settings)
    name = form.name or declared.name
    annotation = Annotated[kind, info]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _checked(declared: DeclaredOption) -> Callable[[Any], Any]:
    """Return a function that returns a valid value of an option, and raises a usage error for others."""

    def check(value: Any) -> Any:
        try:
            declared.check(value)
        except OptionError as error:
            raise typer.BadParameter(str(error)) from error
        return value

    return check


class _Declared:
    """Options that a dataclass declares, as parameters for typer and back.

    ``without`` are options that are not on the command line. ``defaults`` replace declared ones.
    """

    def __init__(self, owner: type, without: Collection[str], defaults: Mapping[str, Any]) -> None:
        options = [each for each in declared_options(owner).values() if each.name not in without]
        self._forms = {each.name: _FORMS.get(each.name, _Form()) for each in options}
        self.parameters = [_parameter(each, defaults.get(each.name, each.default)) for each in options]

    def parse(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of all options: those given, parsed, or the defaults.

        A name that is not on the command line keeps its value.
        """
        values = {each.name: each.default for each in self.parameters} | {**given}
        for name, form in self._forms.items():
            value = values.pop(form.name or name)
            values[name] = value if form.parse is None else form.parse(value)
        return values


def _with_parameters(parameters: Iterable[inspect.Parameter]) -> Callable[[Function], Function]:
    """Give a builder with ``**given`` these parameters, which :func:`shares` reads."""

    def decorate(builder: Function) -> Function:
        builder.__signature__ = inspect.Signature([*parameters])  # type: ignore[attr-defined]
        return builder

    return decorate


_MODEL = _Declared(LLMOptions, {*NOT_ON_THE_COMMAND_LINE, *_FOR_MANY_REQUESTS}, {})
_SERVING = _Declared(LLMOptions, NOT_ON_THE_COMMAND_LINE, _FOR_MANY_REQUESTS)
_REQUEST = _Declared(SamplingParams, {"guide"}, {})


@_with_parameters(_MODEL.parameters)
def model_options(**given: Any) -> dict[str, Any]:
    """Return the keyword arguments of :class:`pronk.LLM`.

    A command's parameter ``load`` receives ``load(progress)``, which loads the model. The callback ``progress`` gets
    the bytes read so far and in all; ``check=`` is that of ``LLM``, and other keywords replace the user's values.
    """
    return _MODEL.parse(given)


@_with_parameters(_SERVING.parameters)
def serving_options(**given: Any) -> dict[str, Any]:
    """Return the keyword arguments of :class:`pronk.LLM`, for a command with many requests at a time.

    The user sets the size of the batch and the cache of prefixes, too; see :func:`model_options`.
    """
    return _SERVING.parse(given)


def _guide_options(
    *,
    json_schema: Annotated[
        str | None,
        _guide("The text is JSON that fits the schema in this file; object: any JSON object.", metavar="FILE"),
    ] = None,
    regex: Annotated[str | None, _guide("The whole text matches this regular expression.", metavar="REGEX")] = None,
    choice: Annotated[list[str], _guide("The text is one of the choices; repeatable.", metavar="TEXT")] = [],  # noqa: B006 - typer requires a list; never modified
    grammar: Annotated[str | None, _guide("The text fits the Lark grammar in this file.", metavar="FILE")] = None,
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
    """Build the sampling parameters; raise OptionError for a value out of its range or an unreadable file."""
    of_guide = {name: given.pop(name) for name in _GUIDE if name in given}
    return SamplingParams(**_REQUEST.parse(given), guide=_guide_options(**of_guide))
