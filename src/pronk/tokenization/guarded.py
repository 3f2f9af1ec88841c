"""Tokenizers of the tokenizers package, in this process or in a child process with limits.

The components of a ``tokenizer.json`` run on every text, and a file may be hostile or odd. Where all components are
known to be harmless (:mod:`pronk.tokenization.known`), as in nearly all language models, the tokenizer runs in this
process. Every other tokenizer encodes its texts in a child process, which is killed at a limit of time or memory. No
trial could replace that: an expression may be fast for all texts but one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from pronk.errors import PromptError, TokenizerError, describe_error
from pronk.tokenization.known import decodes_as_known, is_known
from pronk.tokenization.limited_process import LimitedProcess

SECONDS = 4.0  # limit of loading or of one text: a known tokenizer reads a million tokens in a second
MEMORY = 2**30  # maximum size of the address space of a child process in bytes
_SLOW = "expected one that needs little time and memory, found one that exceeds a limit"


class GuardedEncoding(NamedTuple):
    """The fields of :class:`tokenizers.Encoding` that pronk uses."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    special_tokens_mask: list[int]


class GuardedTokenizer:
    """A tokenizer that encodes texts in a child process, and decodes there unless its decoder is known.

    Its methods are those of :class:`tokenizers.Tokenizer`; the ones that read no text are those of ``backend``. A
    text that exceeds the limits of time or memory raises a ``PromptError``, tokens that do so a ``TokenizerError``.
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
        # Texts are encoded before a request begins, and decoded while all requests wait.
        self._encoder = _new_process()
        self._decoder = _new_process()
        self._load(self._encoder)
        self.backend = load_here(text)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the tokenizer in this process."""
        return getattr(self.backend, name)

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> GuardedEncoding:
        """Return the tokens of a text."""
        request = {"encode": sequence, "special": add_special_tokens, "plain": self.encode_special_tokens}
        try:
            reply = self._ask(self._encoder, request)
        except RuntimeError as error:
            raise encoding_error(sequence, error) from error
        if reply is None:
            msg = f"the model's tokenizer: {_SLOW} with this prompt; use a shorter prompt, or a model that you trust"
            raise PromptError(msg)
        offsets = [(begin, end) for begin, end in reply["offsets"]]
        return GuardedEncoding(reply["ids"], offsets, reply["mask"])

    def encode_batch(self, sequences: Sequence[str], *, add_special_tokens: bool = True) -> list[GuardedEncoding]:
        """Return the tokens of each text."""
        return [self.encode(sequence, add_special_tokens=add_special_tokens) for sequence in sequences]

    def encode_batch_fast(self, sequences: Sequence[str], *, add_special_tokens: bool = True) -> list[GuardedEncoding]:
        """Return the tokens of each text."""
        return self.encode_batch(sequences, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        if self._decodes_here:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        try:
            reply = self._ask(self._decoder, {"decode": list(ids), "skip": skip_special_tokens})
        except RuntimeError as error:
            msg = f"the model's tokenizer: expected one that decodes all tokens, found that it fails ({error})"
            raise TokenizerError(msg) from error
        if reply is None:
            msg = f"the model's tokenizer: {_SLOW} as it decodes tokens; use a model that you trust"
            raise TokenizerError(msg)
        return reply["text"]

    def decode_batch(self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Return the text of each list of token ids."""
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]

    def _ask(self, process: LimitedProcess, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the reply to a request, ``None`` beyond a limit."""
        reply = _reply(process, request)
        if reply == {"unloaded": True}:  # the process is new
            self._load(process)
            reply = _reply(process, request)
        return reply

    def _load(self, process: LimitedProcess) -> None:
        if _reply(process, {"load": self._text}) is None:
            msg = f"tokenizer: {_SLOW} as it is loaded"
            raise TokenizerError(msg)


def load_backend(text: str) -> tokenizers.Tokenizer | GuardedTokenizer:
    """Load the text of a ``tokenizer.json``; in this process only if all of its components are known.

    Raises:
        TokenizerError: the child process does not load it within the limits.
        Exception: the tokenizers package refuses it.
    """
    try:
        file = json.loads(text)
    except (ValueError, RecursionError):
        file = None
    if not isinstance(file, dict):
        file = {}  # the tokenizers package refuses it
    if is_known(file):
        return load_here(text)
    return GuardedTokenizer(text, decodes_here=decodes_as_known(file))


def load_here(text: str) -> tokenizers.Tokenizer:
    """Load the text of a ``tokenizer.json`` in this process."""
    with rust_panics_as_errors():
        backend = tokenizers.Tokenizer.from_str(text)
    if getattr(backend.model, "dropout", None):
        backend.model.dropout = None  # for training: it would draw the tokens of a text at random
    return backend


def encoding_error(text: str, error: Exception) -> PromptError:
    """Return the error for a text that a tokenizer cannot encode."""
    reason = describe_error(error)
    return PromptError(f"expected text that the tokenizer can encode, found {text[:40]!r} ({reason})")


@contextmanager
def rust_panics_as_errors() -> Iterator[None]:
    """Turn a panic of the tokenizers package, which is a BaseException, into a RuntimeError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # the package exports no such class
            msg = f"the tokenizers package failed: {error}"
            raise RuntimeError(msg) from error
        raise


def _new_process() -> LimitedProcess:
    program = Path(__file__).with_name("_child.py")
    return LimitedProcess(program, purpose="tokenizer", needs="tokenizers", seconds=SECONDS, memory=MEMORY)


def _reply(process: LimitedProcess, request: dict[str, Any]) -> dict[str, Any] | None:
    """Return the reply to a request, ``None`` beyond a limit.

    An error of the tokenizers package raises a RuntimeError.
    """
    line = json.dumps(request).encode()
    reply = process.ask(line)
    if not reply:
        return None
    answer = json.loads(reply)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer
