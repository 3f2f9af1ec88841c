"""Conversion of option values without pydantic.

typer 0.29 converts all values of a command, defaults included, with pydantic. The import of
pydantic and a schema for each option take 0.2 s, a quarter of the time to the first token.
Therefore this module converts *plain* values: ordinary numbers within their range, and texts. typer
converts all other values and reports mistakes.
"""

import re
from collections.abc import Sequence
from typing import Any, get_args, get_origin

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

# Patterns of the numbers that this module converts. Other numbers, such as 1_000, 1e3 and nan, are
# left to typer.
_NUMBERS = {int: re.compile(r"-?[0-9]{1,18}"), float: re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?")}


class _PlainParameter:
    """Mixin of an option or argument that converts ordinary numbers and texts without pydantic."""

    def __init__(self, parameter: Any) -> None:
        """Copy all attributes of ``parameter``."""
        vars(self).update(vars(parameter))

    def process_value(self, ctx: Any, value: Any) -> Any:
        """Return the value as the parameter's type.

        Ordinary numbers and texts are converted here, and typer converts other values.
        """
        parameter: Any = self
        converted = self._convert(value)
        if converted is None and (value is not None or parameter.required):
            return super().process_value(ctx, value)  # type: ignore[misc]
        if parameter.callback is None:
            return converted
        return parameter.callback(ctx, self, converted)

    def _convert(self, value: Any) -> Any:
        """Convert the value of a parameter to the parameter's type, without pydantic.

        Ordinary numbers and texts, and lists of these, are converted. The result is ``None`` if
        ``value`` is ``None``, and for any other value, which typer must convert instead.
        """
        parameter: Any = self
        kind = parameter.type_descriptor.annotation
        if get_origin(kind) is not list:
            return _convert(kind, value, parameter.min, parameter.max)
        (item_kind,) = get_args(kind)
        items = [_convert(item_kind, item, parameter.min, parameter.max) for item in value or ()]
        return None if None in items else items


class _PlainOption(_PlainParameter, TyperOption):
    """An option that converts ordinary numbers and texts without pydantic."""


class _PlainArgument(_PlainParameter, TyperArgument):
    """An argument that converts ordinary numbers and texts without pydantic."""


def _plain(parameter: Any) -> Any:
    """Return an option or argument that converts ordinary numbers and texts without pydantic."""
    if isinstance(parameter, TyperOption):
        return _PlainOption(parameter)
    if isinstance(parameter, TyperArgument):
        return _PlainArgument(parameter)
    return parameter


class _PlainParams:
    """Mixin of a command whose options convert ordinary numbers and texts without pydantic."""

    def __init__(
        self, *arguments: Any, params: Sequence[Any] | None = None, **settings: Any
    ) -> None:
        super().__init__(*arguments, params=[*map(_plain, params or ())], **settings)  # type: ignore[call-arg]
        self._help: Any = None

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option ``--help``, the same object at each call."""
        if self._help is None:
            self._help = _plain(super().get_help_option(ctx))  # type: ignore[misc]
            self._help.metavar = ""  # otherwise, the help would show the type <bool>
        return self._help


class PlainCommand(_PlainParams, TyperCommand):
    """A command whose options convert ordinary numbers and texts without pydantic."""


class PlainGroup(_PlainParams, TyperGroup):
    """A group of commands whose own options convert ordinary numbers and texts without pydantic."""


def _convert(kind: Any, value: Any, low: float | None, high: float | None) -> Any:
    """Return a text, or a number in ``low..high``, as ``kind``; ``None`` for other values."""
    pattern = _NUMBERS.get(kind)
    if pattern is None:
        return value if kind is str and isinstance(value, str) else None
    if isinstance(value, str) and pattern.fullmatch(value):
        value = kind(value)
    if type(value) is not kind:
        return None
    is_in_range = (low is None or low <= value) and (high is None or value <= high)
    return value if is_in_range else None
