"""Options that are declared once: type, default, range and help text of a value that users set.

A declaration is a field of a dataclass, annotated with an :class:`Option`::

    @documented
    @dataclass(frozen=True, kw_only=True)
    class OvenOptions:
        degrees: Annotated[int, Option("Temperature in Celsius.", low=50, high=300)] = 220

A class calls :func:`check_options` in ``__post_init__``, or with the values of all its parts.
Options of the command line (:mod:`pronk.cli.declared`) and ranges of the server's requests are made
from :func:`declared_options`.

A module that declares options does not import ``annotations`` from ``__future__``, so that the
annotations are objects; a type that would be slow to import is a text, ``Annotated["Drafter", …]``.
"""

import inspect
from collections.abc import Callable
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from functools import cache, reduce, wraps
from math import inf
from operator import or_
from textwrap import TextWrapper, indent
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Concatenate,
    ForwardRef,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from pronk.base.checks import check_choice, check_flag, check_integer, check_number

Class = TypeVar("Class", bound=type)
Owner = TypeVar("Owner")
Options = TypeVar("Options")
Keywords = ParamSpec("Keywords")

_PARAGRAPH = TextWrapper(
    92, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
)


@dataclass(frozen=True)
class Option:
    """Description of an option; name, type and default are those of its field.

    Attributes:
        text: help text: one or more sentences that hold for Python and the command line.
        low: smallest number; ``None``: no limit, which only numbers with an own check have.
        high: largest number; ``None``: no limit.
        exclusive_min: whether ``low`` itself is refused.
        choices: allowed texts; empty if the type says them, or if they depend on the machine.
        absent: meaning of ``None`` as the value, for example "that of the model".
        details: further sentences, for the documentation of the Python API.
    """

    text: str
    _: KW_ONLY
    low: float | None = None
    high: float | None = None
    exclusive_min: bool = False
    choices: tuple[str, ...] = ()
    absent: str = ""
    details: str = ""

    @property
    def range(self) -> str:
        """The range in words: ``0..100``, ``at least 1``, ``above 0 to 1``; empty without one."""
        if self.low is None:
            return ""
        low = _number_text(self.low)
        if self.high is None:
            return f"above {low}" if self.exclusive_min else f"at least {low}"
        high = _number_text(self.high)
        return f"above {low} to {high}" if self.exclusive_min else f"{low}..{high}"

    @property
    def help(self) -> str:
        """The help text with the range as its last sentence.

        A number of things is at least 0 in any case.
        """
        range_text = self.range
        if range_text in ("", "at least 0"):
            return self.text
        return f"{self.text} {range_text[0].upper()}{range_text[1:]}."


def _number_text(number: float) -> str:
    """Return a bound as text; 2**63 - 1 is ``2^63-1``."""
    is_mask = isinstance(number, int) and number >= 2**31 and (number & (number + 1)) == 0
    return f"2^{int(number).bit_length()}-1" if is_mask else f"{number:g}".replace("e+0", "e")


@dataclass(frozen=True)
class DeclaredOption:
    """An option as the command line and the server see it.

    Attributes:
        name: name of the field.
        kind: its type without ``None``: a class, a ``Literal``, a union, or a text.
        optional: whether ``None`` is a value.
        default: its default.
        option: its description.
        owner: class that declares it.
    """

    name: str
    kind: Any
    optional: bool
    default: Any
    option: Option
    owner: type

    def check(self, value: object) -> None:
        """Raise ``OptionError`` if a value is not of the type, in the range or among the choices.

        Only integers, numbers, flags and choices are checked; for other types, it does nothing.
        """
        option = self.option
        if value is None and self.optional:
            return
        if self.kind is int:
            assert isinstance(option.low, int), f"{self.name}: expected a low integer, found none"
            assert option.high is None or isinstance(option.high, int)
            check_integer(self.name, value, option.low, option.high)
        elif self.kind is float:
            low = -inf if option.low is None else option.low
            high = inf if option.high is None else option.high
            check_number(self.name, value, low, high, exclusive_min=option.exclusive_min)
        elif self.kind is bool:
            check_flag(self.name, value)
        elif choices := self.choices:
            check_choice(self.name, value, choices)

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed texts; empty if the option takes others, too."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else self.option.choices


@cache
def declared_options(owner: type) -> dict[str, DeclaredOption]:
    """Return the options that a dataclass and its base classes declare, in the order of fields."""
    found: dict[str, DeclaredOption] = {}
    for each in fields(owner):
        kind, *notes = get_args(each.type) if get_origin(each.type) is Annotated else [each.type]
        option = next((note for note in notes if isinstance(note, Option)), None)
        if option is None:
            continue
        default = None if each.default is MISSING else each.default
        declaring = next(
            base for base in owner.__mro__ if each.name in inspect.get_annotations(base)
        )
        kind, optional = _without_none(kind)
        found[each.name] = DeclaredOption(each.name, kind, optional, default, option, declaring)
    return found


def _without_none(kind: Any) -> tuple[Any, bool]:
    """Return a type without ``None``, and whether it had it; a forward reference as its text."""
    if isinstance(kind, ForwardRef):
        return kind.__forward_arg__, False
    if get_origin(kind) not in (Union, UnionType):
        return kind, False
    kinds = [each for each in get_args(kind) if each is not NoneType]
    return reduce(or_, kinds), len(kinds) < len(get_args(kind))


def check_options(values: Any) -> None:
    """Check the options of an instance of a declaring dataclass.

    Raise ``OptionError`` for a wrong one.
    """
    owner: Any = type(values)
    for name, declared in declared_options(owner).items():
        declared.check(getattr(values, name))


def describe_options(owner: type) -> str:
    """Return the section of a docstring that describes the options: ``name: text``, indented."""
    entries = []
    for name, declared in declared_options(owner).items():
        option = declared.option
        none = f" ``None``: {option.absent}." if declared.optional and option.absent else ""
        details = f" {option.details}" if option.details else ""
        entry = f"{name}: {option.help}{none}{details}"
        entries.append(_PARAGRAPH.fill(entry))
    return indent("\n".join(entries), "    ")


def documented(cls: Class) -> Class:
    """Add the options of a declaring dataclass to its docstring, as ``Attributes``."""
    cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\nAttributes:\n{describe_options(cls)}\n"
    return cls


def takes(
    options: Callable[Keywords, Options],
) -> Callable[[Callable[[Owner, Options], None]], Callable[Concatenate[Owner, Keywords], None]]:
    """Give a constructor the arguments of the dataclass ``options``; it receives an instance of it.

    The options are added to the constructor's docstring, as ``Args`` after the first paragraph::

        class Oven:
            @takes(OvenOptions)
            def __init__(self, options: OvenOptions) -> None: ...


        Oven(degrees=200)
    """
    assert isinstance(options, type), "expected a class that declares options"

    def decorate(
        initialize: Callable[[Owner, Options], None],
    ) -> Callable[Concatenate[Owner, Keywords], None]:
        @wraps(initialize)
        def call(self: Owner, /, *args: Keywords.args, **keywords: Keywords.kwargs) -> None:
            initialize(self, options(*args, **keywords))

        first, _, rest = inspect.cleandoc(initialize.__doc__ or "").partition("\n\n")
        call.__doc__ = f"{first}\n\nArgs:\n{describe_options(options)}\n\n{rest}"
        self_parameter = next(iter(inspect.signature(initialize).parameters.values()))
        parameters = [_plain(each) for each in inspect.signature(options).parameters.values()]
        signature = inspect.Signature([self_parameter, *parameters], return_annotation=None)
        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


def _plain(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter without the description in its annotation, as documentation shows it."""
    annotation = parameter.annotation
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if isinstance(annotation, ForwardRef):
        annotation = annotation.__forward_arg__
    return parameter.replace(annotation=annotation)
