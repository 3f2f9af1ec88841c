"""Vocabulary of a GGUF file: text and kind of each token, and ids of special tokens such as BOS."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NoReturn

from pronk.checks import check_flag, check_integer
from pronk.errors import TokenizerError, refuse
from pronk.quantization.gguf.reader import GgufFile

_KEY_PREFIX = "tokenizer.ggml."  # prefix of the metadata keys about the tokenizer
# Special tokens: the metadata key ``tokenizer.ggml.NAME_token_id`` holds the id of the token NAME.
_SPECIAL_NAMES = ("bos", "eos", "eot", "eom", "unknown", "padding")
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}  # default ids if ``tokenizer.ggml.model`` is ``llama``
# Longer tokens, which only damaged files have, are refused: computing their merges tries every split.
_MAX_TOKEN_CHARACTERS = 1024
# Control tokens that end a generation (mostly a chat turn) besides the EOS, EOT and EOM ids of the file. Source:
# `llama-vocab.cpp`, without tokens of unsupported architectures.
_END_TOKENS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> [EOT] [EOS] "
    "<|end_of_text|> <\uff5cend\u2581of\u2581sentence\uff5c>".split()
)
# The same for the harmony format of gpt-oss, in which ``<|end|>`` ends a message and not the generation.
_HARMONY_END_TOKENS = frozenset("<|return|> <|call|> <|endoftext|>".split())


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
    """Tokens of a file; the id of a token is its index."""

    tokens: Sequence[str | None]  # text of each token as stored (``Ġthe`` or ``▁the``); ``None`` for an unused id
    kinds: Sequence[int]  # ``TokenKind`` of each token
    special_ids: dict[str, int]  # {name in ``_SPECIAL_NAMES``: token id}, without tokens that do not exist

    @classmethod
    def read(cls, file: GgufFile) -> Vocabulary:
        """Read the vocabulary, empty if the file has none; raise a TokenizerError if it is inconsistent."""
        texts = read_array(file, "tokens", str)
        kinds = read_array(file, "token_type", int, len(texts)) or [int(TokenKind.NORMAL)] * len(texts)
        tokens: list[str | None] = list(texts)
        # llama.cpp's converter made up tokens for ids that the model does not use.
        for i in [i for i, text in enumerate(texts) if not text or (text[0] == "[" and text == f"[PAD{i}]")]:
            if not texts[i] or kinds[i] in (TokenKind.UNUSED, TokenKind.USER_DEFINED):
                tokens[i] = None
        _check_tokens(file, [token for token in tokens if token is not None])
        special_ids = {}
        defaults = _SENTENCEPIECE_IDS if file.get(f"{_KEY_PREFIX}model") == "llama" else {}
        for name in _SPECIAL_NAMES:
            value = file.get(f"{_KEY_PREFIX}{name}_token_id")
            value = defaults.get(name) if value is None else value
            if value is not None and texts:
                where = f"{file.path}: {_KEY_PREFIX}{name}_token_id"
                special_ids[name] = check_integer(where, value, 0, len(texts) - 1, error=TokenizerError)
        return cls(tokens, kinds, special_ids)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a generation: EOS, EOT and EOM of the file, then control tokens in ``_END_TOKENS``."""
        file_ids = [self.special_ids[name] for name in ("eos", "eot", "eom") if name in self.special_ids]
        control = {i: self.tokens[i] for i, kind in enumerate(self.kinds) if kind == TokenKind.CONTROL}
        is_harmony = {"<|return|>", "<|call|>"} <= {*control.values()}
        ends = _HARMONY_END_TOKENS if is_harmony else _END_TOKENS
        found = dict.fromkeys([*file_ids, *(i for i, text in control.items() if text in ends)])
        return tuple(i for i in found if not is_harmony or control.get(i) != "<|end|>")

    @property
    def ids_by_text(self) -> dict[str, int]:
        """Id of each token, by its text; unused ids are left out."""
        return {token: i for i, token in enumerate(self.tokens) if token is not None}

    def special_text(self, name: str) -> str | None:
        """Return the text of the special token ``name``, such as ``bos``; ``None`` if it does not exist."""
        return self.tokens[self.special_ids[name]] if name in self.special_ids else None


def refuse_tokens(file: GgufFile, problem: str) -> NoReturn:
    """Raise a TokenizerError about a file."""
    refuse(file.path, problem, TokenizerError)


def read_flag(file: GgufFile, name: str, *, default: bool) -> bool:
    """Return the boolean ``tokenizer.ggml.NAME``; raise a TokenizerError if it has another type."""
    value = file.get(_KEY_PREFIX + name)
    return default if value is None else check_flag(f"{file.path}: {_KEY_PREFIX}{name}", value, error=TokenizerError)


def read_array(file: GgufFile, name: str, kind: type, count: int | None = None) -> list[Any]:
    """Return the array ``tokenizer.ggml.NAME`` of elements of type ``kind``; empty if absent.

    Other types, or a number of elements other than ``count`` (``None`` allows any), raise a TokenizerError.
    """
    values = file.get(_KEY_PREFIX + name)
    if values is None:
        return []
    if not isinstance(values, list) or (values and type(values[0]) is not kind):
        refuse_tokens(file, f"{_KEY_PREFIX}{name}: expected an array of {kind.__name__}, found another type")
    if count is not None and len(values) != count:
        refuse_tokens(file, f"{_KEY_PREFIX}{name}: expected one for each of {count} tokens, found {len(values)}")
    return values


def _check_tokens(file: GgufFile, tokens: Sequence[str]) -> None:
    longest = max(map(len, tokens), default=0)
    if longest > _MAX_TOKEN_CHARACTERS:
        refuse_tokens(file, f"expected tokens of at most {_MAX_TOKEN_CHARACTERS} characters, found one of {longest}")
    if len(set(tokens)) < len(tokens):
        ((token, _),) = Counter(tokens).most_common(1)
        refuse_tokens(file, f"expected every token once, found {token[:40]!r} twice; convert the model again")
