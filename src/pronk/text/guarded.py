"""Tokenizers of the tokenizers package, in this process or in a child process with limits.

The components of a ``tokenizer.json`` run on every text, and a hostile file may contain components
that take years or exhaust the memory. If all components are known to be harmless
(:mod:`pronk.text.known`), as in nearly all language models, the tokenizer runs in this process.
Every other tokenizer encodes its texts in a child process, which is killed at a limit of processor
time or memory. A trial at loading could not replace the limits: a regular expression may be fast
for all texts but one.

The texts of one request share a limit of time (:func:`shared_time`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from pronk.base.errors import PromptError, TokenizerError, describe_error
from pronk.text.known import decodes_as_known, is_known
from pronk.text.limited_process import LimitedProcess

# Limits of processor time in seconds: for loading a tokenizer or converting all texts of a request,
# and in addition for each text and for each character. An ordinary tokenizer takes at most a
# microsecond per character.
SECONDS = 4.0
_SECONDS_PER_TEXT = 2.0**-10
_SECONDS_PER_CHARACTER = 2.0**-19
# Maximum size of the address space of a child process in bytes: a part for the interpreter and a
# text of a million tokens (which needs 0.5 GiB), and a part for each byte of the file. A Unigram
# model takes up to 90 bytes per byte of its file while it is loaded.
MEMORY = 2**30
_MEMORY_PER_BYTE = 96
_SLOW = "expected one that needs little time and memory, found one that exceeds a limit"


class GuardedEncoding(NamedTuple):
    """Token ids of a text, with the fields of :class:`tokenizers.Encoding` that pronk uses.

    Attributes:
        ids: token ids.
        offsets: begin and end of each token in the text, in characters; may be empty.
        special_tokens_mask: 1 for tokens that the tokenizer has added, else 0; may be empty.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]
    special_tokens_mask: list[int]


@dataclass
class TimeLimit:
    """Processor time in seconds that a request has left for its texts in a child process.

    Each text and each of its characters increase the limit a little, so that many ordinary texts
    stay below it.

    Attributes:
        left: seconds that are left; at or below 0, the next text is refused.
    """

    left: float = field(default_factory=lambda: SECONDS)


_time_limit: ContextVar[TimeLimit | None] = ContextVar("time_limit", default=None)


@contextmanager
def shared_time(limit: TimeLimit | None = None) -> Iterator[None]:
    """Let all texts and tokens that this thread converts within the block share one time limit.

    ``limit`` is for a request whose texts are converted in several blocks: each block continues the
    same limit. By default, the limit is that of an enclosing block, or a new one.
    """
    if limit is None and _time_limit.get() is not None:
        yield
        return
    token = _time_limit.set(limit or TimeLimit())
    try:
        yield
    finally:
        _time_limit.reset(token)


class GuardedTokenizer:
    """A tokenizer that converts texts in a child process, with limits of time and memory.

    The methods are those of :class:`tokenizers.Tokenizer`. Two kinds of methods run in this
    process: decoding, if the decoder is a known one, and methods that read no text, which are those
    of ``backend``. Encoding a text beyond the limits raises a PromptError; decoding tokens beyond
    the limits raises a TokenizerError.
    """

    def __init__(self, text: str, *, decodes_here: bool) -> None:
        """Load the text of a ``tokenizer.json``, first in the child process.

        Raises:
            TokenizerError: the child process does not load it within the limits.
            Exception: the tokenizers package refuses it.
        """
        self.encode_special_tokens = False
        self._text = text
        self._decodes_here = decodes_here
        # Two processes, because all requests wait for decoding: it must not wait for an encoding.
        self._encoder = _new_process(text)
        self._decoder = _new_process(text)
        # an empty request, which starts the process and loads the tokenizer
        _ask(self._encoder, {}, 0)
        self.backend = load_here(text)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of ``backend``, which has the same tokenizer in this process.

        This serves methods that convert no text, such as ``token_to_id``.
        """
        if name == "backend":  # an unpickled copy has no attributes yet
            raise AttributeError(name)
        return getattr(self.backend, name)

    def stop(self) -> None:
        """End the child processes at once; conversions in progress fail with a ClosedError."""
        self._encoder.stop()
        self._decoder.stop()

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> GuardedEncoding:
        """Return the tokens of a text, with their offsets and the mask of special tokens."""
        return self._encode(sequence, add_special_tokens, has_offsets=True)

    def encode_batch(
        self, sequences: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[GuardedEncoding]:
        """Return the tokens of each text, with their offsets and the masks of special tokens.

        The texts share one time limit.
        """
        with shared_time():
            return [
                self._encode(sequence, add_special_tokens, has_offsets=True)
                for sequence in sequences
            ]

    def encode_batch_fast(
        self, sequences: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[GuardedEncoding]:
        """Return the tokens of each text, without offsets and masks, which need more time.

        The texts share one time limit.
        """
        with shared_time():
            return [
                self._encode(sequence, add_special_tokens, has_offsets=False)
                for sequence in sequences
            ]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids.

        Raises:
            TokenizerError: the model's tokenizer fails, or needs more than its time limit.
        """
        if self._decodes_here:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        request = {"decode": list(ids), "skip": skip_special_tokens}
        try:
            reply = _ask(self._decoder, request, len(ids))
        except RuntimeError as error:
            msg = (
                "the model's tokenizer: expected one that decodes all tokens, "
                f"found that it fails ({error})"
            )
            raise TokenizerError(msg) from error
        if reply is None:
            msg = f"the model's tokenizer: {_SLOW} as it decodes tokens; use a model that you trust"
            raise TokenizerError(msg)
        return reply["text"]

    def decode_batch(
        self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> list[str]:
        """Return the text of each list of token ids; the lists share one time limit.

        Errors are those of :meth:`decode`.
        """
        with shared_time():
            return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]

    def _encode(self, text: str, add_special_tokens: bool, *, has_offsets: bool) -> GuardedEncoding:
        """Return a text's tokens from the child process; raise a PromptError at a limit."""
        request = {
            "encode": text,
            "special": add_special_tokens,
            "plain": self.encode_special_tokens,
            "offsets": has_offsets,
        }
        try:
            reply = _ask(self._encoder, request, len(text))
        except RuntimeError as error:
            raise encoding_error(text, error) from error
        if reply is None:
            msg = (
                f"the model's tokenizer: {_SLOW} with this prompt; use a shorter prompt, or a "
                "model that you trust"
            )
            raise PromptError(msg)
        offsets = [(begin, end) for begin, end in reply["offsets"]]
        return GuardedEncoding(reply["ids"], offsets, reply["mask"])


def load_backend(text: str) -> tokenizers.Tokenizer | GuardedTokenizer:
    """Load the text of a ``tokenizer.json``.

    The tokenizer runs in this process if all its components are known, else in a child process.

    Raises:
        TokenizerError: the child process does not load it within the limits.
        Exception: the tokenizers package refuses it.
    """
    try:
        file = json.loads(text)
    except (ValueError, RecursionError):
        file = None
    if not isinstance(file, dict):
        file = {}  # the tokenizers package raises the error below
    if is_known(file):
        return load_here(text)
    return GuardedTokenizer(text, decodes_here=decodes_as_known(file))


def load_here(text: str) -> tokenizers.Tokenizer:
    """Load the text of a ``tokenizer.json`` in this process."""
    with rust_panics_as_errors():
        backend = tokenizers.Tokenizer.from_str(text)
    if getattr(backend.model, "dropout", None):
        # Drop the setting ``dropout``, which is meant for training: it leaves out merges at random.
        backend.model.dropout = None
    return backend


def encoding_error(text: str, error: Exception) -> PromptError:
    """Return the PromptError for a text that a tokenizer cannot encode."""
    reason = describe_error(error)
    return PromptError(
        f"expected text that the tokenizer can encode, found {text[:40]!r} ({reason})"
    )


@contextmanager
def rust_panics_as_errors() -> Iterator[None]:
    """Turn a panic of the tokenizers package within the block into a RuntimeError.

    The package raises panics of its Rust code as a BaseException.
    """
    try:
        yield
    except BaseException as error:
        # the package does not export the class of its panics
        if type(error).__name__ == "PanicException":
            msg = f"the tokenizers package failed: {error}"
            raise RuntimeError(msg) from error
        raise


def _new_process(text: str) -> LimitedProcess:
    """Return a process that loads the text of a ``tokenizer.json`` when it starts."""
    setup = json.dumps({"load": text}).encode()
    return LimitedProcess(
        Path(__file__).with_name("_child.py"),
        purpose="tokenizer",
        needs="tokenizers",
        seconds=SECONDS,
        memory=MEMORY + _MEMORY_PER_BYTE * len(setup),
        setup=setup,
    )


def _ask(process: LimitedProcess, request: dict[str, Any], size: int) -> dict[str, Any] | None:
    """Return the child process's reply to a request.

    ``size`` is the number of characters or tokens in the request, which increases its time limit.
    The result is ``None`` if the request exceeds the limits of time or memory. An error of the
    tokenizers package raises a RuntimeError.
    """
    line = json.dumps(request).encode()
    with shared_time():
        limit = _time_limit.get()
        assert limit is not None
        limit.left += _SECONDS_PER_TEXT + _SECONDS_PER_CHARACTER * size
        reply = process.ask(line, limit.left) if limit.left > 0 else None
        limit.left -= limit.left if reply is None else reply.seconds
    if reply is None:
        return None
    answer = json.loads(reply.line)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer
