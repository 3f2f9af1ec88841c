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
# Names of special tokens that end a generation. The metadata key ``tokenizer.ggml.NAME_token_id``
# has the id of the special token NAME.
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Tokens before the parts of a prompt for filling in the middle.
_INFILL_KEYS = ("fim_pre", "fim_suf", "fim_mid")
_SPECIAL_NAMES = ("bos", *_END_KEYS, *_INFILL_KEYS, "unknown", "padding")
# Ids of special tokens in files with the tokenizer model ``llama`` that do not state them.
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
# Tokens with more characters are refused. Only damaged files have them, and the search for a
# token's merges, which tries every split, would take long.
MAX_TOKEN_CHARACTERS = 1024
VISIBLE_SPACE = "\u2581"  # character that stands for a space in SentencePiece tokens


class TokenKind(IntEnum):
    """Kind of a token (``tokenizer.ggml.token_type``)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Kinds of added tokens, which the tokenizer finds in a text before it splits the text into words.
# The value is whether decoding leaves out tokens of the kind.
ADDED_KINDS = {TokenKind.CONTROL: True, TokenKind.UNKNOWN: True, TokenKind.USER_DEFINED: False}


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a GGUF file's tokenizer; the id of a token is its index.

    Attributes:
        tokens: text of each token as stored (``Ġthe`` or ``▁the``); ``None`` for an unused id.
        kinds: :class:`TokenKind` of each token.
        special_ids: ids of the special tokens that exist, by name, such as ``bos``.
    """

    tokens: Sequence[str | None]
    kinds: Sequence[int]
    special_ids: dict[str, int]

    @classmethod
    def read(cls, file: GgufFile) -> Vocabulary:
        """Read the vocabulary of a file; empty if the file has none.

        Raises:
            TokenizerError: the vocabulary is inconsistent.
        """
        texts = read_array(file, "tokens", str)
        kinds = read_array(file, "token_type", int, len(texts))
        if not kinds:
            kinds = [int(TokenKind.NORMAL)] * len(texts)
        tokens: list[str | None] = list(texts)
        # llama.cpp's converter makes up the token ``[PAD17]`` if the model does not use the id 17.
        for i, text in enumerate(texts):
            is_made_up = text.startswith("[") and text == f"[PAD{i}]"
            is_unused = is_made_up and kinds[i] in (TokenKind.UNUSED, TokenKind.USER_DEFINED)
            if not text or is_unused:
                tokens[i] = None
        if file.get(f"{_KEY_PREFIX}model") == "llama":
            _show_spaces(tokens, kinds)
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
        """Ids of the tokens that end a generation, stated by the file or with a well-known name."""
        stated = [self.special_ids[name] for name in _END_KEYS if name in self.special_ids]
        added = {}
        for i, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)):
            if token is not None and kind in ADDED_KINDS:
                added[i] = token
        return find_end_tokens(added, stated)

    @property
    def ids_by_text(self) -> dict[str, int]:
        """Id of each token, by its text; unused ids are left out."""
        return {token: i for i, token in enumerate(self.tokens) if token is not None}

    def special_text(self, name: str) -> str | None:
        """Return the text of a special token, such as ``bos``; ``None`` if it does not exist."""
        if name not in self.special_ids:
            return None
        return self.tokens[self.special_ids[name]]


def refuse_tokens(file: GgufFile, problem: str) -> NoReturn:
    """Raise a TokenizerError with the path of the file and the ``problem``."""
    refuse(file.path, problem, TokenizerError)


def read_flag(file: GgufFile, name: str, *, default: bool) -> bool:
    """Return the boolean metadata value ``tokenizer.ggml.NAME``; ``default`` if it is missing.

    Raises:
        TokenizerError: the value has another type.
    """
    key = _KEY_PREFIX + name
    value = file.get(key)
    if value is None:
        return default
    return check_flag(f"{file.path}: {key}", value, error=TokenizerError)


def read_array(file: GgufFile, name: str, kind: type, count: int | None = None) -> list[Any]:
    """Return the metadata array ``tokenizer.ggml.NAME``; an empty list if it is missing.

    Args:
        file: the file.
        name: end of the metadata key.
        kind: type of the elements.
        count: number of elements; ``None`` allows any.

    Raises:
        TokenizerError: the array has elements of another type, or another number of elements.
    """
    key = _KEY_PREFIX + name
    values = file.get(key)
    if values is None:
        return []
    if not isinstance(values, list) or (values and type(values[0]) is not kind):
        refuse_tokens(file, f"{key}: expected an array of {kind.__name__}, found another type")
    if count is not None and len(values) != count:
        expected = f"one for each of {count} tokens"
        refuse_tokens(file, f"{key}: expected {expected}, found {len(values)}")
    return values


def _show_spaces(tokens: list[str | None], kinds: Sequence[int]) -> None:
    """Restore the visible spaces of user-defined tokens that are runs of spaces.

    Gemma 3 has such tokens. The converter of llama.cpp writes them with spaces, but the original
    tokenizer has them with visible spaces, like all its tokens.
    """
    known = set(tokens)
    for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind == TokenKind.USER_DEFINED and token and not token.strip(" "):
            shown = token.replace(" ", VISIBLE_SPACE)
            if shown not in known:
                tokens[i] = shown


def _check_tokens(file: GgufFile, tokens: Sequence[str]) -> None:
    """Raise a TokenizerError if a token is too long, or occurs twice."""
    longest = max(map(len, tokens), default=0)
    if longest > MAX_TOKEN_CHARACTERS:
        expected = f"tokens of at most {MAX_TOKEN_CHARACTERS} characters"
        refuse_tokens(file, f"expected {expected}, found one of {longest}")
    if len(set(tokens)) < len(tokens):
        ((token, _),) = Counter(tokens).most_common(1)
        found = f"{token[:40]!r} twice"
        refuse_tokens(file, f"expected every token once, found {found}; convert the model again")
