"""Messages of mistakes on the command line: what was expected, what was found, what to do."""

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

# Patterns of the parser's messages, and the messages that are shown instead.
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
    """Return the message of an error of the parser, with a hint at ``--help``.

    The message is empty if the parser has printed the help instead.
    """
    message = error.format_message()
    context = getattr(error, "ctx", None)
    if not message:
        return ""
    explained = _explain_value(error) or _explain_message(message, context)
    if context is None:
        return explained
    return f"{explained} (try '{context.command_path} --help')"


def _explain_value(error: typer.TyperException) -> str:
    """Return the message for a value of the wrong kind or out of range; empty for other errors."""
    parameter = getattr(error, "param", None)
    if parameter is None:
        return ""
    name = max(parameter.opts, key=len)
    # The message of a declared option begins with the option's name in Python.
    if isinstance(error.__cause__, OptionError):
        _, _, problem = str(error.__cause__).partition(":")
        return f"{name}:{problem}"
    # An error of pydantic has a list of problems, each with the rejected value.
    problems: list[Any] = getattr(error.__cause__, "errors", list)()
    if not problems:
        return ""
    return f"{name}: expected {_expected(parameter)}, found {problems[0]['input']!r:.80}"


def _expected(parameter: Any) -> str:
    """Return the type and range of an option's values: ``an integer of at least 1``."""
    kind = parameter.type_descriptor.annotation
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
    noun = _KINDS.get(kind, "another value")
    low = parameter.min
    high = parameter.max
    if low is not None and high is not None:
        return f"{noun} in {low}..{high}"
    if low is not None:
        return f"{noun} of at least {low}"
    return noun if high is None else f"{noun} of at most {high}"


def _explain_message(message: str, context: Any) -> str:
    """Return the message that is shown instead of a parser's message."""
    for pattern, form in _MESSAGES:
        found = re.match(pattern, message)
        if found is not None:
            name = found["name"]
            near = close_choices(name, _known_names(context, name))
            hint = f"; did you mean {near}?" if near else ""
            return form.format(name=name) + hint
    return message


def _known_names(context: Any, name: str) -> Sequence[str]:
    """Return the names among which the user may have meant ``name``.

    These are the options of the command if ``name`` begins with ``-``, and else its subcommands.
    """
    if context is None:
        return []
    command = context.command
    if not name.startswith("-"):
        return list(getattr(command, "commands", ()))
    options = list[str]()
    for parameter in command.get_params(context):
        options += [*parameter.opts, *parameter.secondary_opts]
    return options
