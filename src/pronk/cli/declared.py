"""Options of dataclasses as options of the command line.

Type, default and help of an option come from its declaration (:mod:`pronk.base.options`). The table
``_FORMS`` has the options that are written in another way on the command line.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_origin

import typer

from pronk.base.errors import OptionError, refuse
from pronk.base.options import DeclaredOption, declared_options
from pronk.cache.options import CacheOptions
from pronk.cli.panels import panel
from pronk.cli.values import parse_adapters, parse_bias, parse_switch, read_prediction
from pronk.engine.options import BatchOptions, DraftingOptions
from pronk.models.options import ModelOptions
from pronk.sampling.params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class _Form:
    """Form of an option on the command line, as far as it differs from the declaration.

    Attributes:
        kind: type for typer; ``None`` for the declared type.
        parse: function that converts a value of the command line to a value of the option.
        default: default on the command line, before ``parse``.
        name: name on the command line, with underscores; empty for the declared name.
        metavar: name of the value in the help.
        note: sentence that is added to the help.
        panel: panel of the help; empty for the panel of the dataclass.
        flags: names on the command line, such as ``--ignore-eos``; by default, typer makes
            ``--name`` and ``--no-name`` of the name of a flag.
    """

    kind: Any = None
    parse: Callable[[Any], Any] | None = None
    default: Any = None
    name: str = ""
    metavar: str | None = None
    note: str = ""
    panel: str = ""
    flags: tuple[str, ...] = ()


def _repeatable(
    kind: type, metavar: str, parse: Callable[[Any], Any] = tuple, **more: Any
) -> _Form:
    """Return the form of an option that may be given several times.

    ``kind`` is the type of each value, ``parse`` takes the list of values, and ``more`` are further
    attributes of the form.
    """
    return _Form(kind=list[kind], parse=parse, metavar=metavar, **{"note": "Repeatable."} | more)  # type: ignore[valid-type]


def one_model(values: list[str], remedy: str = "give one") -> str | None:
    """Return the only value of ``--model``, or ``None`` without a value.

    Several values raise an OptionError, whose message ends with ``remedy``.
    """
    if len(values) > 1:
        refuse("model", f"expected one, found {' and '.join(values)}; {remedy}", OptionError)
    return values[0] if values else None


_FORMS = {
    # A list, so that a second model is refused instead of replacing the first one.
    "model": _Form(kind=list[str], parse=one_model),
    "drafter": _Form(kind=str),
    "adapters": _repeatable(
        str,
        "NAME=FOLDER",
        parse_adapters,
        name="adapter",
        note="For example --adapter sql=./sql-lora.",
    ),
    "weight_cache": _Form(kind=str, parse=parse_switch, default="off", metavar="on|off|FOLDER"),
    "weight_cache_size": _Form(kind=str, metavar="SIZE"),
    "kv_memory": _Form(kind=str),
    "prompt_cache": _Form(kind=str, metavar="FOLDER"),
    "prompt_cache_size": _Form(kind=str, metavar="SIZE"),
    "calibration": _Form(
        kind=str,
        parse=parse_switch,
        default="on",
        metavar="on|off|FILE",
        note="The file is written at the end.",
    ),
    "logit_bias": _repeatable(str, "ID=VALUE", parse_bias),
    "bad_words": _repeatable(str, "TEXT"),
    "stop": _repeatable(str, "TEXT"),
    "stop_token_ids": _repeatable(int, "ID"),
    "prediction": _Form(kind=str, parse=read_prediction, metavar="FILE"),
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


def _parameter(declared: DeclaredOption, default: Any) -> inspect.Parameter:
    """Return the function parameter from which typer makes the command-line option."""
    form = _FORMS.get(declared.name, _Form())
    option_kind = form.kind or declared.kind
    help_text = declared.option.help
    if get_origin(option_kind) is Literal:
        option_kind = str  # check_options() refuses other texts and names the closest choice
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
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _checked(declared: DeclaredOption) -> Callable[[Any], Any]:
    """Return a function that returns a valid value of an option, and refuses an invalid value.

    The error is typer's BadParameter, so that the message names the command-line option.
    """

    def check(value: Any) -> Any:
        try:
            declared.check(value)
        except OptionError as error:
            raise typer.BadParameter(str(error)) from error
        return value

    return check


class CommandLineOptions:
    """Options of a dataclass on the command line.

    Args:
        owner: the dataclass.
        without: names of options that are not on the command line.
        defaults: defaults on the command line that differ from the declared ones.

    Attributes:
        parameters: function parameters from which typer makes the command-line options.
    """

    def __init__(self, owner: type, without: Collection[str], defaults: Mapping[str, Any]) -> None:
        options = [each for each in declared_options(owner).values() if each.name not in without]
        self._forms = dict[str, _Form]()
        self.parameters = list[inspect.Parameter]()
        for each in options:
            default = defaults.get(each.name, each.default)
            self._forms[each.name] = _FORMS.get(each.name, _Form())
            self.parameters.append(_parameter(each, default))

    def parse(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of all options: the parsed given values, or else the defaults.

        ``given`` are the values that typer passes to the command, by name. Values of other names
        are returned unchanged.
        """
        values = {each.name: each.default for each in self.parameters} | {**given}
        for name, form in self._forms.items():
            value = values.pop(form.name or name)
            values[name] = value if form.parse is None else form.parse(value)
        return values
