"""Chat templates: Jinja from a checkpoint, rendered in the immutable sandbox.

A template comes with the model and is not trusted: it sees the messages and the names of the special tokens, as plain
data, and a handful of functions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pronk.errors import PromptError, TokenizerError

__all__ = ["ChatTemplate"]


class ChatTemplate:
    """A compiled template.

    Args:
        source: the template's text.
        special_tokens: ``bos_token``, ``eos_token`` and the like, by the names that templates use.

    Raises:
        TokenizerError: the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals = {
            "range": environment.globals["range"],
            "dict": _make_dict,
            "namespace": _PublicNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except (TemplateError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
            msg = f"chat template: expected valid Jinja, found an error: {_first_line(error)}"
            raise TokenizerError(msg) from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation.

        Args:
            messages: each with a ``role`` and a ``content``, both strings.
            add_generation_prompt: end with what comes before the assistant's answer.

        Raises:
            PromptError: malformed messages, or a conversation that the template refuses.
        """
        plain = [_check_message(message, index) for index, message in enumerate(messages)]
        if not plain:
            msg = "messages: expected at least one message with 'role' and 'content', found none"
            raise PromptError(msg)
        try:
            return self._template.render(
                messages=plain,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program: anything can go wrong in it
            msg = f"the model's chat template refuses these messages: {_first_line(error)}"
            raise PromptError(msg) from error


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's words for training; here its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PublicNamespace(Namespace):
    """A namespace without private names, through which a template could reach Python's internals."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _check_public(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        msg = f"a namespace cannot have an attribute {name!r}"
        raise SecurityError(msg)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _check_message(message: object, index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        msg = f"messages[{index}]: expected an object with 'role' and 'content', found {type(message).__name__}"
        raise PromptError(msg)
    for key in ("role", "content"):
        value = message.get(key)
        if not isinstance(value, str):
            found = type(value).__name__ if key in message else "no such key"
            msg = f"messages[{index}]: expected a string for {key!r}, found {found}"
            raise PromptError(msg)
    return dict(message)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
