"""Conversion of option values without pydantic.

typer 0.29 converts all values of a command, defaults included, with pydantic. The import of pydantic and a schema for
each option take 0.2 s, a quarter of the time to the first token. Numbers and texts that need no judgement are converted
here; typer converts all other values and reports mistakes.
"""

import re
from typing import Any, get_args, get_origin

from typer.core import TyperCommand, TyperGroup

# Texts that are converted here; typer also accepts 1_000, 1e3 or nan.
_NUMBERS = {int: re.compile(r"-?[0-9]{1,18}"), float: re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?")}


class _PlainParams:
    """Mixin of a command that converts plain values of its options itself."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, each with a converter unless typer has already made one."""
        parameters: list[Any] = [*super().get_params(ctx)]  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "_runtime_param", parameter) is None:
                parameter._runtime_param = _Converter(parameter.type_descriptor.annotation)  # noqa: SLF001
            if parameter.name == "help":
                parameter.metavar = ""  # typer shows <bool>
        return parameters


class PlainCommand(_PlainParams, TyperCommand):
    """A command that converts plain values of its options itself."""


class PlainGroup(_PlainParams, TyperGroup):
    """A group of commands that converts plain values of its options itself."""


class _Converter:
    """Converter of one parameter to the type ``kind``, in place of typer's ``RuntimeParam``."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the value as the parameter's type; the errors are typer's."""
        if value is None and get_origin(self.kind) is not list:
            return None
        if isinstance(value, (list, tuple)) and get_origin(self.kind) is list:
            (item_kind,) = get_args(self.kind)
            plain = [_convert(item_kind, item, param.min, param.max) for item in value]
        else:
            plain = [_convert(self.kind, value, param.min, param.max)]
        if None not in plain:
            return plain if get_origin(self.kind) is list else plain[0]
        param._runtime_param = None  # noqa: SLF001 - typer makes its own converter
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def _convert(kind: Any, value: Any, low: float | None, high: float | None) -> Any:
    """Return a number or text in its range as ``kind``; ``None`` if typer has to judge the value."""
    pattern = _NUMBERS.get(kind)
    if pattern is None:
        return value if kind is str and isinstance(value, str) else None
    if isinstance(value, str) and pattern.fullmatch(value):
        value = kind(value)
    plain = type(value) is kind and (low is None or low <= value) and (high is None or value <= high)
    return value if plain else None
