"""Symbols: text in which one character stands for each special token.

A decoded text lacks special tokens, and their names may also be written with ordinary tokens. Therefore parsers of
answers read *symbols*: decoded text in which a lone surrogate, which no decoded text contains, stands for a special
token. The markers of formats, such as ``[TOOL_CALLS]``, are converted in the same way: to a lone surrogate if the
tokenizer has the marker as a special token, otherwise to their own text.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from itertools import groupby
from typing import Any

from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["OTHER_SYMBOL", "TokenSymbols", "plain_text", "ranges"]

# Markers of all formats that may be special tokens. The position of a marker in this list determines its symbol.
_MARKERS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>",
    "[THINK]", "[/THINK]", "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>",
    "[CALL_ID]", "<|tool_call|>", "<|/tool_call|>", "<|tool_call_start|>", "<|tool_call_end|>",
)  # fmt: skip
_FIRST = 0xD800  # first lone surrogate
OTHER_SYMBOL = "\udfff"  # symbol of every special token that is not in _MARKERS
_SURROGATES = re.compile("[\ud800-\udfff]")


class TokenSymbols:
    """Symbols of one tokenizer's tokens and of the markers of formats."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.backend.get_added_tokens_decoder()
        special = {token.content: token_id for token_id, token in added.items() if token.special}
        self._names = {name: chr(_FIRST + number) for number, name in enumerate(_MARKERS) if name in special}
        self._symbols = {special[name]: symbol for name, symbol in self._names.items()}
        self._id_only = {token.content: token_id for token_id, token in added.items() if _is_id_only(token)}

    def of_token(self, token: int) -> str:
        """Return the symbols of a token; those of a part of a character are not defined."""
        return self.of_special(token) or self._tokenizer.token_text(token) or ""

    def of_special(self, token: int | None) -> str:
        """Return the symbol of a special token; ``""`` for another token."""
        if token in self._symbols:
            return self._symbols[token]
        return OTHER_SYMBOL if token in self._tokenizer.special_ids else ""

    def of_text(self, text: str) -> str:
        """Return the symbols of a text with markers, such as ``[TOOL_CALLS]add[ARGS]``."""
        for name, symbol in self._names.items():
            text = text.replace(name, symbol)
        return text

    def ids(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text with markers."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def is_id_only(self, text: str) -> bool:
        """Return whether grammars match the marker ``text`` by the id of an added token."""
        return text in self._id_only

    def is_special(self, text: str) -> bool:
        """Return whether the marker ``text`` is a special token, which decoded texts lack."""
        return text in self._names

    def grammar(self, text: str) -> str:
        """Return the Lark expression of a text with markers: ``"a" <[7]> "b"``; ``""`` for an empty text."""
        if not text:
            return ""
        names = [re.escape(name) for name in _MARKERS if name in self._id_only]
        parts = re.split(f"({'|'.join(names)})", text) if names else [text]
        return " ".join(self._part(part) for part in parts if part)

    def other_ids(self, *markers: str) -> frozenset[int]:
        """Return the ids of id-only tokens without those of ``markers`` and of the end of text."""
        named = {self._id_only[marker] for marker in markers if marker in self._id_only}
        return self._free_ids - named

    @cached_property
    def _free_ids(self) -> frozenset[int]:
        return frozenset(self._id_only.values()) - {*self._tokenizer.eos_ids}

    def _part(self, text: str) -> str:
        return f"<[{self._id_only[text]}]>" if text in self._id_only else json.dumps(text, ensure_ascii=False)


def plain_text(symbols: str) -> str:
    """Return symbols without those of special tokens."""
    return _SURROGATES.sub("", symbols)


def ranges(ids: frozenset[int]) -> str:
    """Return token ids in the syntax of grammars: ``<[3,7-9]>`` for 3, 7, 8 and 9."""
    spans = []
    for _, group in groupby(enumerate(sorted(ids)), lambda pair: pair[1] - pair[0]):
        run = [token for _, token in group]
        spans.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
    return f"<[{','.join(spans)}]>" if spans else ""


def _is_id_only(token: Any) -> bool:
    """Return whether llguidance matches an added token by its id only, not by its text."""
    return bool(token.special) or (token.content.startswith("<") and token.content.endswith(">"))
