"""Messages of mistakes on the command line, in the form of all messages: expected, found, do this."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import typer

from pronk.base.checks import close_choices
from pronk.base.errors import OptionError

_KINDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    Path: "a path",
}

# Messages of the parser, and what is shown instead of them.
_MESSAGES = (
    (r"No such command '(?P<name>.*?)'\.", "{name}: expected a command, found none of this name"),
    (
        r"No such option: (?P<name>\S+)",
        "{name}: expected an option of this command, found none of this name",
    ),
    (
        r"Option '(?P<name>.*?)' requires an argument\.",
        "{name}: expected a value after it, found none; add one",
    ),
    (
        r"Option '(?P<name>.*?)' does not take a value\.",
        "{name}: expected no value, found one; leave it out",
    ),
    (
        r"Missing (argument|option) '(?P<name>.*?)'\.",
        "{name}: expected a value, found none; add one",
    ),
    (
        r"Got unexpected extra argument\(s\) \((?P<name>.*)\)",
        "expected no further argument, found {name}; put quotes around a text with spaces",
    ),
)


def usage_message(error: typer.TyperException) -> str:
    """Return the message of a parser's error, with a hint at ``--help``.

    Empty if the help was printed.
    """
    message = error.format_message()
    context = getattr(error, "ctx", None)
    if not message:
        return ""
    explained = _explain_value(error) or _explain_message(message, context)
    return explained if context is None else f"{explained} (try '{context.command_path} --help')"


def _explain_value(error: typer.TyperException) -> str:
    """Return the message for a value of the wrong kind or out of range; empty for other errors."""
    parameter = getattr(error, "param", None)
    if parameter is None:
        return ""
    name = max(parameter.opts, key=len)
    # of a declared option: its name and what was expected
    if isinstance(error.__cause__, OptionError):
        return f"{name}:{str(error.__cause__).partition(':')[2]}"
    # pydantic's, with the rejected values
    problems: list[Any] = getattr(error.__cause__, "errors", list)()
    if not problems:
        return ""
    return f"{name}: expected {_expected(parameter)}, found {problems[0]['input']!r:.80}"


def _expected(parameter: Any) -> str:
    kind = parameter.type_descriptor.annotation
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
    noun = _KINDS.get(kind, "another value")
    low = parameter.min
    high = parameter.max
    if low is None:
        return noun if high is None else f"{noun} of at most {high}"
    return f"{noun} of at least {low}" if high is None else f"{noun} in {low}..{high}"


def _explain_message(message: str, context: Any) -> str:
    for pattern, form in _MESSAGES:
        found = re.match(pattern, message)
        if found is not None:
            name = found["name"]
            near = close_choices(name, _known_names(context, name))
            return form.format(name=name) + (f"; did you mean {near}?" if near else "")
    return message


def _known_names(context: Any, name: str) -> Sequence[str]:
    """Return the options of the command if ``name`` is that of an option, otherwise its commands."""
    if context is None:
        return []
    command = context.command
    if not name.startswith("-"):
        return list(getattr(command, "commands", ()))
    parameters = command.get_params(context)
    return [
        option
        for parameter in parameters
        for option in (*parameter.opts, *parameter.secondary_opts)
    ]
