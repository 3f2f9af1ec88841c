"""Vocabulary of a GGUF file: text and kind of each token, and ids of special tokens such as BOS."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn

import numpy as np

from pronk.base.arrays import Array
from pronk.base.checks import check_flag
from pronk.base.errors import TokenizerError, refuse
from pronk.checkpoint.end_tokens import find_end_tokens, stated_token
from pronk.checkpoint.gguf.reader import GgufFile
from pronk.checkpoint.gguf.texts import Texts

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
        tokens: text of each token as stored (``Ġthe`` or ``▁the``); empty for an unused id.
        kinds: :class:`TokenKind` of each token, integers ``[tokens]``.
        special_ids: ids of the special tokens that exist, by name, such as ``bos``.
    """

    tokens: Texts
    kinds: Array
    special_ids: dict[str, int]

    @classmethod
    def read(cls, file: GgufFile) -> Vocabulary:
        """Read the vocabulary of a file; empty if the file has none.

        Raises:
            TokenizerError: the vocabulary is inconsistent.
        """
        texts = read_texts(file, "tokens")
        kinds = read_numbers(file, "token_type", int, len(texts))
        if not len(kinds):
            kinds = np.full(len(texts), int(TokenKind.NORMAL))
        # llama.cpp's converter makes up the token ``[PAD17]`` if the model does not use the id 17.
        unused = [
            number
            for number in texts.begin_with("[PAD").tolist()
            if texts[number] == f"[PAD{number}]"
            and kinds[number] in (TokenKind.UNUSED, TokenKind.USER_DEFINED)
        ]
        tokens = texts.without(np.array(unused, np.int64))
        if file.get(f"{_KEY_PREFIX}model") == "llama":
            tokens = _with_visible_spaces(tokens, kinds)
        _check_lengths(file, tokens)
        defaults = _SENTENCEPIECE_IDS if file.get(f"{_KEY_PREFIX}model") == "llama" else {}
        special_ids = {}
        for name in _SPECIAL_NAMES if len(texts) else ():
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
        return find_end_tokens(self.added, stated)

    @property
    def added(self) -> dict[int, str]:
        """Texts of the tokens of :data:`ADDED_KINDS`, by id; unused ids are left out."""
        is_added = np.isin(self.kinds, [int(kind) for kind in ADDED_KINDS])
        numbers = np.flatnonzero(is_added & (self.tokens.sizes > 0)).tolist()
        return {number: self.tokens[number] for number in numbers}

    @property
    def ids_by_text(self) -> dict[str, int]:
        """Id of each token, by its text; unused ids are left out."""
        return {token: i for i, token in enumerate(self.tokens) if token}

    @property
    def largest_id(self) -> int:
        """The largest id in use; -1 without tokens."""
        used = np.flatnonzero(self.tokens.sizes)
        return int(used[-1]) if len(used) else -1

    def special_text(self, name: str) -> str | None:
        """Return the text of a special token, such as ``bos``; ``None`` if it does not exist."""
        if name not in self.special_ids:
            return None
        return self.tokens[self.special_ids[name]] or None


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


def read_texts(file: GgufFile, name: str) -> Texts:
    """Return the metadata array ``tokenizer.ggml.NAME`` of strings; empty if it is missing.

    Raises:
        TokenizerError: the value is no array of strings.
    """
    key = _KEY_PREFIX + name
    texts = file.texts(key)
    if texts is None:
        _check_empty(file, key, str)
        return Texts.of([])
    return texts


def read_numbers(file: GgufFile, name: str, kind: type, count: int) -> Array:
    """Return the metadata array ``tokenizer.ggml.NAME`` of numbers; empty if it is missing.

    Args:
        file: the file.
        name: end of the metadata key.
        kind: ``int`` or ``float``.
        count: number of elements.

    Raises:
        TokenizerError: the value is no array of such numbers, or has another number of elements.
    """
    key = _KEY_PREFIX + name
    numbers = file.numbers(key)
    if numbers is None or numbers.dtype.kind not in {int: "iu", float: "f"}[kind]:
        _check_empty(file, key, kind)
        return np.empty(0, np.int64)
    if len(numbers) != count:
        expected = f"one for each of {count} tokens"
        refuse_tokens(file, f"{key}: expected {expected}, found {len(numbers)}")
    return numbers


def _check_empty(file: GgufFile, key: str, kind: type) -> None:
    """Refuse a metadata value, unless the file does not have it, or it is an empty array."""
    if file.get(key) not in (None, []):
        refuse_tokens(file, f"{key}: expected an array of {kind.__name__}, found another type")


def _with_visible_spaces(tokens: Texts, kinds: Array) -> Texts:
    """Restore the visible spaces of user-defined tokens that are runs of spaces.

    Gemma 3 has such tokens. The converter of llama.cpp writes them with spaces, but the original
    tokenizer has them with visible spaces, like all its tokens.
    """
    shown = dict[int, str]()
    for number in tokens.begin_with(" ").tolist():
        token = tokens[number]
        if kinds[number] == TokenKind.USER_DEFINED and not token.strip(" "):
            text = token.replace(" ", VISIBLE_SPACE)
            if tokens.find(text) is None:
                shown[number] = text
    return tokens.replaced(shown) if shown else tokens


def _check_lengths(file: GgufFile, tokens: Texts) -> None:
    """Raise a TokenizerError if a token is too long."""
    for number in np.flatnonzero(tokens.sizes > MAX_TOKEN_CHARACTERS).tolist():
        length = len(tokens[number])
        if length > MAX_TOKEN_CHARACTERS:
            expected = f"tokens of at most {MAX_TOKEN_CHARACTERS} characters"
            refuse_tokens(file, f"expected {expected}, found one of {length}")
