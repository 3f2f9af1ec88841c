"""Everything pronk raises on purpose.

::

    PronkError
    ├── CheckpointError      a folder, of a model or a datastore, that cannot be loaded or written
    │   ├── ConfigError      config.json is missing, contradictory or not supported
    │   └── TokenizerError   tokenizer files are missing or do not match the model
    ├── OptionError          an option out of its range, or one that a method cannot honour (also a ValueError)
    │   └── GuideError       a guide that is damaged, that no text fits, or that takes too much work to follow
    ├── PromptError          a prompt that cannot be decoded: empty, too long, ids outside the vocabulary
    ├── CacheFullError       the KV cache has no free blocks left
    ├── DeadlineError        a request was not done in time (also a TimeoutError)
    ├── OverloadedError      more requests than are let in; later there may be room
    ├── ResumeError          a text whose replica has ended, and with which no other one can go on
    └── ClosedError          the model is being closed, or has been

Each message is one line: what was expected, what was found, what to do.
"""

from __future__ import annotations

__all__ = [
    "CacheFullError",
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "DeadlineError",
    "GuideError",
    "OptionError",
    "OverloadedError",
    "PromptError",
    "PronkError",
    "ResumeError",
    "TokenizerError",
]


class PronkError(Exception):
    """Base of every error that pronk raises on purpose."""


class CheckpointError(PronkError):
    """A folder, of a model or a datastore, that cannot be loaded or written."""


class ConfigError(CheckpointError):
    """``config.json`` is missing, contradictory or asks for something that is not supported."""


class TokenizerError(CheckpointError):
    """Tokenizer files are missing or do not match the model."""


class OptionError(PronkError, ValueError):
    """An option out of its range, or one that a method cannot honour."""


class GuideError(OptionError):
    """A guide that is damaged, that no text fits, or that takes too much work to follow."""


class PromptError(PronkError, ValueError):
    """A prompt that cannot be decoded: empty, too long, or with ids outside the vocabulary."""


class ContextError(PromptError):
    """A prompt that is longer than the model's context."""


class CacheFullError(PronkError):
    """The KV cache has no free blocks left."""


class DeadlineError(PronkError, TimeoutError):
    """A request was not done in time."""


class OverloadedError(PronkError):
    """More requests than are let in; later there may be room."""


class ResumeError(PronkError):
    """A text whose replica has ended, and with which no other one can go on."""


class ClosedError(PronkError):
    """The model is being closed, or has been: nothing is let in any more."""
