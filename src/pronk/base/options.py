"""Declarations of options: name, type, default, range and help text in one place.

The Python API, the command line, the server and the documentation use the same declaration, a
field of a dataclass that is annotated with an :class:`Option`::

    @documented
    @dataclass(frozen=True, kw_only=True)
    class OvenOptions:
        degrees: Annotated[int, Option("Temperature in Celsius.", low=50, high=300)] = 220

Call :func:`check_options` to check an instance, for example in ``__post_init__``. Options of a
drafter are checked without such a call (:class:`~pronk.drafting.proposer.Drafter`).
:func:`declared_options` returns the declarations for the command line (:mod:`pronk.cli.declared`)
and for the ranges of the server's requests.

A module that declares options need not import ``annotations`` from ``__future__``; if it does, the
names in its annotations must be names of the module. A type that would be slow to import is written
as a text: ``Annotated["Drafter", …]``.
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
        text: help text: one or more sentences that are true in Python and on the command line.
        low: smallest number. ``None`` if the option is no number, or if other code checks it.
        high: largest number; ``None``: no limit.
        exclusive_min: whether ``low`` itself is refused.
        choices: allowed texts; empty for a ``Literal`` type, or if the texts depend on the machine.
        absent: meaning of ``None`` as the value, for example "that of the model".
        details: further sentences, for the documentation of the Python API only.
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
        """The range in words: ``0..100``, ``at least 1``, ``above 0 to 1``; "" without a range."""
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

        The range "at least 0" is left out: it is obvious for counts.
        """
        range_text = self.range
        if range_text in ("", "at least 0"):
            return self.text
        return f"{self.text} {range_text[0].upper()}{range_text[1:]}."


def _number_text(number: float) -> str:
    """Return a limit as text; ``2^63-1`` for the number 2**63 - 1."""
    if isinstance(number, int) and number >= 2**31 and (number & (number + 1)) == 0:
        return f"2^{number.bit_length()}-1"
    return f"{number:g}".replace("e+0", "e")


@dataclass(frozen=True)
class DeclaredOption:
    """An option with name, type and default, as the command line and the server need it.

    Attributes:
        name: name of the option's field in the dataclass.
        kind: type of the value without ``None``: a class, a ``Literal``, a union, or a text.
        optional: whether ``None`` is allowed as the value.
        default: the default value; ``None`` if the field has none.
        option: description of the option.
        owner: the dataclass that declares the option.
    """

    name: str
    kind: Any
    optional: bool
    default: Any
    option: Option
    owner: type

    def check(self, value: object, prefix: str = "") -> None:
        """Raise ``OptionError`` if a value is not of the type, in the range or among the choices.

        Only integers, numbers, flags and choices are checked; a value of another type is accepted.
        The message begins with ``prefix`` and the option's name.
        """
        option = self.option
        name = f"{prefix}{self.name}"
        if value is None and self.optional:
            return
        if self.kind is int:
            assert isinstance(option.low, int), f"{self.name}: expected a low integer, found none"
            assert option.high is None or isinstance(option.high, int)
            check_integer(name, value, option.low, option.high)
        elif self.kind is float:
            low = -inf if option.low is None else option.low
            high = inf if option.high is None else option.high
            check_number(name, value, low, high, exclusive_min=option.exclusive_min)
        elif self.kind is bool:
            check_flag(name, value)
        elif choices := self.choices:
            check_choice(name, value, choices)

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed texts; empty if any value is allowed."""
        if get_origin(self.kind) is Literal:
            return get_args(self.kind)
        return self.option.choices


@cache
def declared_options(owner: type) -> dict[str, DeclaredOption]:
    """Return the options that a dataclass and its base classes declare, in the order of fields."""
    found: dict[str, DeclaredOption] = {}
    for each in fields(owner):
        declaring = next(
            base for base in owner.__mro__ if each.name in inspect.get_annotations(base)
        )
        annotation = _annotation(declaring, each.name)
        if get_origin(annotation) is not Annotated:
            continue
        annotated_type, *notes = get_args(annotation)
        options = [note for note in notes if isinstance(note, Option)]
        if not options:
            continue
        default = None if each.default is MISSING else each.default
        kind, optional = _without_none(annotated_type)
        found[each.name] = DeclaredOption(each.name, kind, optional, default, options[0], declaring)
    return found


def _annotation(declaring: type, name: str) -> Any:
    """Return the annotation of a field.

    ``from __future__ import annotations`` makes it a text. The text is evaluated if it declares an
    option, so that the option is checked there, too.
    """
    annotation = inspect.get_annotations(declaring)[name]
    if isinstance(annotation, str) and "Annotated[" in annotation:
        return inspect.get_annotations(declaring, eval_str=True)[name]
    return annotation


def _without_none(kind: Any) -> tuple[Any, bool]:
    """Return a type without ``None``, and whether the type included ``None``.

    A forward reference is returned as its text.
    """
    if isinstance(kind, ForwardRef):
        return kind.__forward_arg__, False
    if get_origin(kind) not in (Union, UnionType):
        return kind, False
    kinds = [each for each in get_args(kind) if each is not NoneType]
    return reduce(or_, kinds), len(kinds) < len(get_args(kind))


def check_options(values: Any, prefix: str = "") -> None:
    """Check the values of a dataclass instance against the types and ranges of its options.

    Raises ``OptionError`` for the first value that is out of range or of another type; the message
    begins with ``prefix`` and the option's name.
    """
    owner: Any = type(values)
    for name, declared in declared_options(owner).items():
        declared.check(getattr(values, name), prefix)


def describe_options(owner: type) -> str:
    """Return the description of a dataclass's options for a docstring: lines ``name: text``."""
    entries = []
    for name, declared in declared_options(owner).items():
        option = declared.option
        entry = f"{name}: {option.help}"
        if declared.optional and option.absent:
            entry += f" ``None``: {option.absent}."
        if option.details:
            entry += f" {option.details}"
        entries.append(_PARAGRAPH.fill(entry))
    return indent("\n".join(entries), "    ")


def documented(cls: Class) -> Class:
    """Add the options of a dataclass to its docstring, in a section ``Attributes``."""
    cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\nAttributes:\n{describe_options(cls)}\n"
    return cls


def takes(
    options: Callable[Keywords, Options],
) -> Callable[[Callable[[Owner, Options], None]], Callable[Concatenate[Owner, Keywords], None]]:
    """Give a constructor the fields of a dataclass as keyword arguments.

    The decorated constructor receives an instance of the dataclass. Its docstring gets a section
    ``Args`` with the options, after the first paragraph::

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
    """Return a parameter with its plain type as the annotation, without the ``Option``."""
    annotation = parameter.annotation
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if isinstance(annotation, ForwardRef):
        annotation = annotation.__forward_arg__
    return parameter.replace(annotation=annotation)
