"""Symbols in which parsers read answers: decoded text with a lone surrogate for a special token."""

from __future__ import annotations

import json
import re
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pronk.text.tokenizer import Tokenizer

# Markers of all formats that may be special tokens. The symbol of marker number i, counted from 0,
# is the lone surrogate U+D800 + i.
_MARKERS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>",
    "</think>", "[THINK]", "[/THINK]", "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>",
    "<|end|>", "[CALL_ID]", "<|tool_call|>", "<|/tool_call|>", "<|tool_call_start|>",
    "<|tool_call_end|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call>",
    "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>",
    "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
)  # fmt: skip
_FIRST = 0xD800  # code of the first lone surrogate
OTHER_SYMBOL = "\udfff"  # symbol of each special token that is no marker in _MARKERS
_SURROGATES = re.compile("[\ud800-\udfff]")


class TokenSymbols:
    """Symbols of one tokenizer's tokens and of the markers of formats.

    A decoded text lacks special tokens, and a model may write their names with ordinary tokens.
    Therefore parsers of answers read *symbols*: decoded text in which a lone surrogate, which no
    decoded text contains, stands for each special token. A marker of a format, such as
    ``[TOOL_CALLS]``, becomes a lone surrogate as well if it is a special token of the tokenizer;
    otherwise, the marker stays text.

    Attributes:
        of_marker: symbol of each marker that is a special token.
        id_only: ids of the added tokens that llguidance matches by their ids alone, by their names.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.backend.get_added_tokens_decoder()
        special = {token.content: token_id for token_id, token in added.items() if token.special}
        self.of_marker = {
            name: chr(_FIRST + number) for number, name in enumerate(_MARKERS) if name in special
        }
        self._symbols = {special[name]: symbol for name, symbol in self.of_marker.items()}
        self.id_only = {
            token.content: token_id
            for token_id, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }

    def of_token(self, token: int) -> str:
        """Return the text of a token; a lone surrogate for a special token.

        For a token that is only a part of a character, the result is unspecified.
        """
        return self.of_special(token) or self._tokenizer.token_text(token) or ""

    def of_special(self, token: int | None) -> str:
        """Return the lone surrogate that stands for a special token; ``""`` for another token."""
        if token in self._symbols:
            return self._symbols[token]
        return OTHER_SYMBOL if token in self._tokenizer.special_ids else ""

    def of_text(self, text: str) -> str:
        """Return a text with a lone surrogate for each marker that is a special token.

        Examples of markers are ``[TOOL_CALLS]`` and ``[ARGS]`` in ``[TOOL_CALLS]add[ARGS]``.
        """
        for name, symbol in self.of_marker.items():
            text = text.replace(name, symbol)
        return text

    def grammar(self, text: str) -> str:
        """Return a Lark expression that matches a text with markers, such as ``"a" <[7]> "b"``.

        The expression of an empty text is empty.
        """
        if not text:
            return ""
        names = [re.escape(name) for name in _MARKERS if name in self.id_only]
        parts = re.split(f"({'|'.join(names)})", text) if names else [text]
        terms = list[str]()
        for part in filter(None, parts):
            if part in self.id_only:
                terms.append(f"<[{self.id_only[part]}]>")
            else:
                terms.append(json.dumps(part, ensure_ascii=False))
        return " ".join(terms)

    def other_ids(self, *markers: str) -> str:
        """Return a Lark expression for the tokens of ``id_only``, such as ``<[3,7-9]>``.

        The tokens ``markers`` and the end of text are left out. Without tokens, the expression is
        empty.
        """
        ids = {token_id for text, token_id in self.id_only.items() if text not in markers}
        ids -= {*self._tokenizer.eos_ids}
        spans = []
        for _, group in groupby(enumerate(sorted(ids)), lambda pair: pair[1] - pair[0]):
            run = [token for _, token in group]
            spans.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
        return f"<[{','.join(spans)}]>" if spans else ""


def plain_text(symbols: str) -> str:
    """Return a text of symbols without those of special tokens, which are lone surrogates."""
    return _SURROGATES.sub("", symbols)
