"""What a GGUF file says of its tokens: their texts and kinds, and which ones begin and end a text."""

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
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}  # where the file does not say
# Far more than any token has; a text's pieces are looked for at every cut of a token.
_LONGEST = 1024
# Control tokens that end a text though the file names another one: an answer of a chat, most of the time. From
# `llama-vocab.cpp`, without those of architectures that are not read here.
_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> [EOT] [EOS] "
    "<|end_of_text|> <\uff5cend\u2581of\u2581sentence\uff5c>".split()
)


class TokenKind(IntEnum):
    """What a token is for."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file, by id.

    Attributes:
        tokens: their texts, as the model's kind of tokenizer writes them; ``None`` for what only pads the vocabulary.
        kinds: what they are for.
        ids: of the tokens with a name: ``bos``, ``eos``, ``eot``, ``eom``, ``unknown``, ``padding``.
    """

    tokens: Sequence[str | None]
    kinds: Sequence[int]
    ids: dict[str, int]

    @classmethod
    def read(cls, file: GgufFile) -> Vocabulary:
        """The tokens of a file; none where it has no tokenizer.

        Raises:
            TokenizerError: texts, kinds or ids that do not go together.
        """
        texts = _array(file, "tokens", str)
        kinds = _array(file, "token_type", int, len(texts)) or [int(TokenKind.NORMAL)] * len(texts)
        tokens = [None if _pads(*each) else each[1] for each in zip(range(len(texts)), texts, kinds, strict=True)]
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
        """The ids that end a text: those that the file names, then those known by their texts."""
        named = [self.ids[name] for name in ("eos", "eot", "eom") if name in self.ids]
        known = [i for i, token in enumerate(self.tokens) if token in _ENDS and self.kinds[i] == TokenKind.CONTROL]
        return tuple(dict.fromkeys(named + known))

    @property
    def vocab(self) -> dict[str, int]:
        """Texts to ids."""
        return {token: i for i, token in enumerate(self.tokens) if token is not None}

    def text(self, name: str) -> str | None:
        """The text of a token with a name."""
        return self.tokens[self.ids[name]] if name in self.ids else None


def flag(file: GgufFile, name: str, *, default: bool) -> bool:
    """A setting of the tokenizer.

    Raises:
        TokenizerError: it is neither true nor false.
    """
    value = file.get(_PREFIX + name)
    return default if value is None else check_flag(f"{file.path}: {_PREFIX}{name}", value, error=TokenizerError)


def texts(file: GgufFile, name: str) -> list[str]:
    """An array of texts; empty if there is none.

    Raises:
        TokenizerError: something else.
    """
    return _array(file, name, str)


def scores(file: GgufFile, count: int) -> list[float]:
    """A score for each of ``count`` tokens; the higher, the sooner a token is put together.

    Raises:
        TokenizerError: something else, or another number of them.
    """
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
        msg = f"{file.path}: {_PREFIX}{name}: expected an array of {kind.__name__}, found something else"
        raise TokenizerError(msg)
    if count is not None and len(found) != count:
        msg = f"{file.path}: {_PREFIX}{name}: expected one for each of {count} tokens, found {len(found)}"
        raise TokenizerError(msg)
    return found


def _pads(token_id: int, text: str, kind: int) -> bool:
    """Whether a token was made up by the converter, for an id of the model that has none."""
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
