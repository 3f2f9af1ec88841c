"""Exceptions of pronk.

Each message is one line: ``expected …, found …; do …``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

__all__ = [  # the names in ``pronk``; the other exceptions concern servers and several processes
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


class PronkError(Exception):
    """Base of every error that pronk raises on purpose."""


class CheckpointError(PronkError):
    """A model, drafter or datastore cannot be loaded or written."""


class ConfigError(CheckpointError):
    """``config.json`` is missing, contradictory or unsupported."""


class TokenizerError(CheckpointError):
    """Tokenizer files are missing or do not match the model."""


class OptionError(PronkError, ValueError):
    """An option is out of range or unsupported."""


class GuideError(OptionError):
    """A guide (schema, grammar) is malformed, matches no text, or takes too long to compile or apply."""


class PromptError(PronkError, ValueError):
    """A prompt is empty, too long, or has token ids outside the vocabulary."""


class ContextError(PromptError):
    """A prompt is longer than the model's context."""


class ConnectionLostError(PronkError):
    """Another process of the model has ended, or does not answer in time."""


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


def refuse(
    source: object, problem: str, error: type[PronkError] = CheckpointError, cause: Exception | None = None
) -> NoReturn:
    """Raise ``error`` with the message ``SOURCE: PROBLEM``; the source is a path or an option."""
    msg = f"{source}: {problem}"
    if cause is None:
        raise error(msg)  # an error that is being handled stays its context
    raise error(msg) from cause


@contextmanager
def locate_error(
    source: object, caught: type[Exception], error: type[PronkError] = CheckpointError, *, remedy: str = ""
) -> Iterator[None]:
    """Convert errors of type ``caught`` to ``error``, with the message ``SOURCE: MESSAGE`` and ``remedy``."""
    try:
        yield
    except caught as problem:
        refuse(source, f"{problem}{remedy}", error, problem)


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message; without a message, the name of its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
