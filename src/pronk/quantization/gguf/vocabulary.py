"""Tokens of a GGUF file: their texts, kinds and special ids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from pronk.checks import check_flag, check_integer
from pronk.errors import TokenizerError
from pronk.quantization.gguf.reader import GgufFile

__all__ = ["TokenKind", "Vocabulary", "flag", "scores", "texts"]

_PREFIX = "tokenizer.ggml."
_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}  # default ids of tokenizer.ggml.model = llama
# Limit in characters. Real tokens are far shorter, and merges are searched at every split of a token.
_LONGEST = 1024
# Control tokens that also end a generation (mostly a chat turn) if the file names another end token. Source:
# `llama-vocab.cpp`, without tokens of unsupported architectures.
_END_TOKENS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> [EOT] [EOS] "
    "<|end_of_text|> <\uff5cend\u2581of\u2581sentence\uff5c>".split()
)


class TokenKind(IntEnum):
    """Kind of a token (``tokenizer.ggml.token_type``)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a file, by id.

    Attributes:
        tokens: texts of the tokens in the tokenizer's own encoding; ``None`` for padding of the vocabulary.
        kinds: :class:`TokenKind` of each token.
        ids: ids of the named tokens ``bos``, ``eos``, ``eot``, ``eom``, ``unknown`` and ``padding``, if any.
    """

    tokens: Sequence[str | None]
    kinds: Sequence[int]
    ids: dict[str, int]

    @classmethod
    def read(cls, file: GgufFile) -> Vocabulary:
        """Read the tokens of a file, none without a tokenizer; refuse inconsistent tokens."""
        texts = _array(file, "tokens", str)
        kinds = _array(file, "token_type", int, len(texts)) or [int(TokenKind.NORMAL)] * len(texts)
        entries = zip(range(len(texts)), texts, kinds, strict=True)
        tokens = [None if _is_padding(*entry) else entry[1] for entry in entries]
        _check(file, [token for token in tokens if token is not None])
        ids = {}
        default = _SENTENCEPIECE_IDS if file.get(f"{_PREFIX}model") == "llama" else {}
        for name in _IDS:
            value = file.get(f"{_PREFIX}{name}_token_id")
            value = default.get(name) if value is None else value
            if value is not None and texts:
                where = f"{file.path}: {_PREFIX}{name}_token_id"
                ids[name] = check_integer(where, value, 0, len(texts) - 1, error=TokenizerError)
        return cls(tokens, kinds, ids)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a text: the named tokens of the file, then control tokens with well-known texts."""
        named = [self.ids[name] for name in ("eos", "eot", "eom") if name in self.ids]
        control = [i for i, kind in enumerate(self.kinds) if kind == TokenKind.CONTROL]
        return tuple(dict.fromkeys([*named, *(i for i in control if self.tokens[i] in _END_TOKENS)]))

    @property
    def vocab(self) -> dict[str, int]:
        """Ids by text."""
        return {token: i for i, token in enumerate(self.tokens) if token is not None}

    def text(self, name: str) -> str | None:
        """Return the text of a named token, or ``None``."""
        return self.tokens[self.ids[name]] if name in self.ids else None


def flag(file: GgufFile, name: str, *, default: bool) -> bool:
    """Return a boolean setting of the tokenizer; refuse another value."""
    value = file.get(_PREFIX + name)
    return default if value is None else check_flag(f"{file.path}: {_PREFIX}{name}", value, error=TokenizerError)


def texts(file: GgufFile, name: str) -> list[str]:
    """Return an array of strings, empty if absent; refuse another value."""
    return _array(file, name, str)


def scores(file: GgufFile, count: int) -> list[float]:
    """Return the scores of ``count`` tokens; tokens with higher scores are merged first."""
    found = _array(file, "scores", float, count)
    if len(found) != count or not all(map(math.isfinite, found)):
        msg = f"{file.path}: {_PREFIX}scores: expected a finite number for each of {count} tokens, found others"
        raise TokenizerError(msg)
    return found


def _array(file: GgufFile, name: str, kind: type, count: int | None = None) -> list[Any]:
    found = file.get(_PREFIX + name)
    if found is None:
        return []
    if not isinstance(found, list) or (found and type(found[0]) is not kind):
        msg = f"{file.path}: {_PREFIX}{name}: expected an array of {kind.__name__}, found another type"
        raise TokenizerError(msg)
    if count is not None and len(found) != count:
        msg = f"{file.path}: {_PREFIX}{name}: expected one for each of {count} tokens, found {len(found)}"
        raise TokenizerError(msg)
    return found


def _is_padding(token_id: int, text: str, kind: int) -> bool:
    """Return whether the converter added a token for an id that has none in the original tokenizer."""
    return not text or (text == f"[PAD{token_id}]" and kind in (TokenKind.UNUSED, TokenKind.USER_DEFINED))


def _check(file: GgufFile, tokens: Sequence[str]) -> None:
    seen: set[str] = set()
    for token in tokens:
        if len(token) > _LONGEST:
            msg = f"{file.path}: expected tokens of at most {_LONGEST} characters, found one of {len(token)}"
            raise TokenizerError(msg)
        if token in seen:
            msg = f"{file.path}: expected every token once, found {token[:40]!r} twice; convert the model again"
            raise TokenizerError(msg)
        seen.add(token)
