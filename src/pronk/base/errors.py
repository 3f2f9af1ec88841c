"""Exceptions of pronk.

Each message is one line: ``expected …, found …; do …``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

# The names that ``pronk`` exports. The other exceptions concern servers and several processes.
__all__ = [
    "CacheFullError",
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "ContextError",
    "DeadlineError",
    "GuideError",
    "OptionError",
    "OverloadedError",
    "PromptError",
    "PronkError",
    "TokenizerError",
]


_MAX_REASON = 300  # maximum number of characters of describe_error()
# Maximum number of characters of a message of pronk. Usual messages are far shorter; names in
# hostile files are not.
_MAX_MESSAGE = 1500
_MAX_QUOTE = 16  # maximum number of characters of a JSON text that a message quotes
# Error numbers in messages of the operating system and of libraries: they do not help users.
_ERROR_NUMBER = re.compile(r"\[(Errno|WinError) -?\d+\] ?| ?\(os error \d+\)")


class PronkError(Exception):
    """Base of every error that pronk raises on purpose.

    The message may quote names and values of untrusted files. ``str(error)`` is therefore one
    printable line of limited length.
    """

    def __str__(self) -> str:
        return printable_line(super().__str__())


class CheckpointError(PronkError):
    """A model, drafter or datastore cannot be loaded or written."""


class ConfigError(CheckpointError):
    """``config.json`` is missing, contradictory or unsupported."""


class TokenizerError(CheckpointError):
    """Tokenizer files are missing or do not match the model."""


class OptionError(PronkError, ValueError):
    """An option is out of range or unsupported."""


class UnknownOptionError(OptionError, TypeError):
    """A call has a keyword that the function lacks, or has an argument twice.

    The class is also a subclass of ``TypeError``, which Python itself raises for such a call.
    """


class GuideError(OptionError):
    """A guide, such as a JSON schema or a grammar, is malformed, or matches no text.

    The error is also raised for a guide that takes too long to compile or to apply.
    """


class PromptError(PronkError, ValueError):
    """A prompt is empty, too long, or has token ids outside the vocabulary."""


class ContextError(PromptError):
    """A prompt is longer than the model's context."""


class ConnectionLostError(PronkError):
    """Another process that computes a part of the model has ended, or does not answer in time."""


class CacheFullError(PronkError):
    """The KV cache has too few blocks for a request."""


class DeadlineError(PronkError, TimeoutError):
    """A request missed its deadline."""


class OverloadedError(PronkError):
    """The limit of concurrent requests is reached; retry later."""


class ResumeError(PronkError):
    """A replica ended and no other replica can continue its text."""


class ClosedError(PronkError):
    """The model is closing or closed and accepts no requests."""


def printable_line(text: str) -> str:
    """Return a text as one printable line of about 1500 characters at most.

    Unprintable characters are escaped, and the middle of a longer text is left out.
    """
    if len(text) > _MAX_MESSAGE:
        half = _MAX_MESSAGE // 2
        text = f"{text[:half]} … {text[-half:]}"
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def refuse(
    source: object,
    problem: str,
    error: type[PronkError] = CheckpointError,
    cause: Exception | None = None,
) -> NoReturn:
    """Raise ``error`` with the message ``SOURCE: PROBLEM``.

    Args:
        source: the path or option that is wrong.
        problem: ``expected …, found …; do …``.
        error: class of the error.
        cause: the exception that becomes the error's ``__cause__``.
    """
    msg = f"{source}: {problem}"
    if cause is None:
        raise error(msg)  # without ``from``: an error that is being handled is shown as the context
    raise error(msg) from cause


@contextmanager
def locate_error(
    source: object,
    caught: type[Exception],
    error: type[PronkError] = CheckpointError,
    *,
    remedy: str = "",
) -> Iterator[None]:
    """Convert exceptions of type ``caught`` in the block to ``error``.

    The message of the new error is ``SOURCE: MESSAGE``, followed by ``remedy``.
    """
    try:
        yield
    except caught as problem:
        refuse(source, f"{describe_error(problem)}{remedy}", error, problem)


def describe_error(error: BaseException) -> str:
    """Return the reason of an exception as one line of at most 300 characters, which is not empty.

    An exception without a message is described by its cause, or else by its class.
    """
    if isinstance(error, OSError) and error.strerror:
        reason = describe_reason(error)
        return f"{reason}: {error.filename}" if error.filename else reason
    if isinstance(error, MemoryError):
        return "not enough memory"
    if isinstance(error, RecursionError):
        return "too deep nesting"
    message = _ERROR_NUMBER.sub("", " ".join(str(error).split()))
    if message:
        return message[:_MAX_REASON]
    cause = error.__cause__ or error.__context__
    if cause is not None:
        return describe_error(cause)
    return f"{type(error).__name__} without a message"


def describe_reason(error: BaseException) -> str:
    """Return the reason of an exception without a file name, for messages that name the file.

    For exceptions other than ``OSError``, the text is that of :func:`describe_error`.
    """
    if isinstance(error, OSError) and error.strerror:
        # A library may repeat the number in the text: "[Errno 111] Connection refused".
        return _ERROR_NUMBER.sub("", error.strerror)
    return describe_error(error)


def describe_json_error(error: Exception, line: int | None = None) -> str:
    """Return a description of a mistake in a JSON text: kind, position, and the text found there.

    Args:
        error: an exception of :func:`json.loads`, or of the decoding of the text.
        line: number of the line in its file, from 1, if the file has one JSON text per line.
    """
    if isinstance(error, json.JSONDecodeError):
        number = error.lineno if line is None else line
        rest = error.doc[error.pos : error.pos + _MAX_QUOTE]
        found = repr(rest) if rest else "the end"
        return f"a mistake at line {number}, column {error.colno} ({error.msg}, found {found})"
    if isinstance(error, UnicodeDecodeError):
        return f"a byte at position {error.start} that is not UTF-8"
    if isinstance(error, RecursionError):
        return "too many nested brackets"
    if isinstance(error, ValueError) and "set_int_max_str_digits" in str(error):
        return f"an integer of more than {sys.get_int_max_str_digits()} digits"
    return describe_error(error)
