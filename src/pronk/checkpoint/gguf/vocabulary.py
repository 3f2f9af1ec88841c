"""Vocabulary of a GGUF file: text and kind of each token, and ids of special tokens such as BOS."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NoReturn

from pronk.base.checks import check_flag
from pronk.base.errors import TokenizerError, refuse
from pronk.checkpoint.end_tokens import find_end_tokens, stated_token
from pronk.checkpoint.gguf.reader import GgufFile

_KEY_PREFIX = "tokenizer.ggml."  # prefix of the metadata keys about the tokenizer
# Special tokens: the metadata key ``tokenizer.ggml.NAME_token_id`` holds the id of the token NAME.
# those of tokens that end a generation
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_SPECIAL_NAMES = ("bos", *_END_KEYS, "unknown", "padding")
# default ids if ``tokenizer.ggml.model`` is ``llama``
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
# Longer tokens, which only damaged files have, are refused: computing their merges tries every
# split.
MAX_TOKEN_CHARACTERS = 1024


class TokenKind(IntEnum):
    """Kind of a token (``tokenizer.ggml.token_type``)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Kinds of tokens that the tokenizer finds in a text before it splits the text, and whether decoding
# skips them.
ADDED_KINDS = {TokenKind.CONTROL: True, TokenKind.UNKNOWN: True, TokenKind.USER_DEFINED: False}


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a file; the id of a token is its index."""

    # text of each token as stored (``Ġthe`` or ``▁the``); ``None`` for an unused id
    tokens: Sequence[str | None]
    kinds: Sequence[int]  # ``TokenKind`` of each token
    # {name in ``_SPECIAL_NAMES``: token id}, without tokens that do not exist
    special_ids: dict[str, int]

    @classmethod
    def read(cls, file: GgufFile) -> Vocabulary:
        """Read the vocabulary, empty if the file has none.

        Raise a TokenizerError if it is inconsistent.
        """
        texts = read_array(file, "tokens", str)
        kinds = read_array(file, "token_type", int, len(texts)) or [int(TokenKind.NORMAL)] * len(
            texts
        )
        tokens: list[str | None] = list(texts)
        # llama.cpp's converter made up tokens for ids that the model does not use.
        for i in [
            i
            for i, text in enumerate(texts)
            if not text or (text[0] == "[" and text == f"[PAD{i}]")
        ]:
            if not texts[i] or kinds[i] in (TokenKind.UNUSED, TokenKind.USER_DEFINED):
                tokens[i] = None
        _check_tokens(file, [token for token in tokens if token is not None])
        defaults = _SENTENCEPIECE_IDS if file.get(f"{_KEY_PREFIX}model") == "llama" else {}
        special_ids = {}
        for name in _SPECIAL_NAMES if texts else ():
            key = f"{_KEY_PREFIX}{name}_token_id"
            stated = stated_token(f"{file.path}: {key}", file.get(key), len(texts))
            token = defaults.get(name) if stated is None else stated
            if token is not None and token < len(texts):
                special_ids[name] = token
        return cls(tokens, kinds, special_ids)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a generation: those that the file states, then tokens with well-known names."""
        stated = [self.special_ids[name] for name in _END_KEYS if name in self.special_ids]
        added = {i: self.tokens[i] for i, kind in enumerate(self.kinds) if kind in ADDED_KINDS}
        return find_end_tokens({i: name for i, name in added.items() if name is not None}, stated)

    @property
    def ids_by_text(self) -> dict[str, int]:
        """Id of each token, by its text; unused ids are left out."""
        return {token: i for i, token in enumerate(self.tokens) if token is not None}

    def special_text(self, name: str) -> str | None:
        """Return the text of the special token ``name``, such as ``bos``.

        ``None`` if it does not exist.
        """
        return self.tokens[self.special_ids[name]] if name in self.special_ids else None


def refuse_tokens(file: GgufFile, problem: str) -> NoReturn:
    """Raise a TokenizerError about a file."""
    refuse(file.path, problem, TokenizerError)


def read_flag(file: GgufFile, name: str, *, default: bool) -> bool:
    """Return the boolean ``tokenizer.ggml.NAME``; raise a TokenizerError if it has another type."""
    value = file.get(_KEY_PREFIX + name)
    return (
        default
        if value is None
        else check_flag(f"{file.path}: {_KEY_PREFIX}{name}", value, error=TokenizerError)
    )


def read_array(file: GgufFile, name: str, kind: type, count: int | None = None) -> list[Any]:
    """Return the array ``tokenizer.ggml.NAME`` of elements of type ``kind``; empty if absent.

    Other types, or a number of elements other than ``count`` (``None`` allows any), raise a
    TokenizerError.
    """
    values = file.get(_KEY_PREFIX + name)
    if values is None:
        return []
    if not isinstance(values, list) or (values and type(values[0]) is not kind):
        refuse_tokens(
            file, f"{_KEY_PREFIX}{name}: expected an array of {kind.__name__}, found another type"
        )
    if count is not None and len(values) != count:
        refuse_tokens(
            file,
            f"{_KEY_PREFIX}{name}: expected one for each of {count} tokens, found {len(values)}",
        )
    return values


def _check_tokens(file: GgufFile, tokens: Sequence[str]) -> None:
    longest = max(map(len, tokens), default=0)
    if longest > MAX_TOKEN_CHARACTERS:
        refuse_tokens(
            file,
            f"expected tokens of at most {MAX_TOKEN_CHARACTERS} characters, found one of {longest}",
        )
    if len(set(tokens)) < len(tokens):
        ((token, _),) = Counter(tokens).most_common(1)
        refuse_tokens(
            file, f"expected every token once, found {token[:40]!r} twice; convert the model again"
        )
