"""What each token of a tokenizer stands for, in bytes: the language that two vocabularies have in common.

Byte-level tokenizers write the byte 0x20 as ``Ġ``; those of SentencePiece write a space as ``▁`` and a byte that is in
no other token as ``<0x0A>``. The decoder in ``tokenizer.json`` says which of the two a tokenizer does. What it puts
before a text of its own accord, mostly a space, is told apart from the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import tokenizers

from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["Prefix", "Spelling", "spell", "without_prefix"]

Prefix = Literal["never", "first", "always"]

_LISTS = ("normalizers", "pretokenizers", "decoders")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


@dataclass(frozen=True)
class Spelling:
    """How a tokenizer spells.

    Attributes:
        texts: the bytes of every token that is text; where tokens have the same bytes, the one that the tokenizer would
            use comes first. Empty if its decoder is none of those described above.
        prefix: whether it puts a space before the text that comes first, before each text after a special token too, or
            never.
    """

    texts: Mapping[int, bytes]
    prefix: Prefix


def spell(tokenizer: Tokenizer) -> Spelling:
    """The spelling of ``tokenizer``."""
    raw = json.loads(tokenizer.backend.to_str())
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    tokens = {i: token for token, i in vocabulary.items() if i not in tokenizer.special_ids}
    decoders = _parts(raw["decoder"])
    kinds = {part["type"] for part in decoders}
    texts: dict[int, bytes] = {}
    if "ByteLevel" in kinds:
        alphabet = _byte_alphabet()
        texts = {i: _from_alphabet(tokens[i], alphabet) for i in sorted(tokens)}
    elif "Metaspace" in kinds or any(_replaces_space(part) for part in decoders):
        single = {i: int(found[1], 16) for i, token in tokens.items() if (found := _BYTE.fullmatch(token))}
        single = single if "ByteFallback" in kinds else {}
        texts = {i: tokens[i].replace(_SPACE, " ").encode() for i in sorted(tokens) if i not in single}
        texts |= {i: bytes([byte]) for i, byte in single.items()}
    return Spelling(texts, _prefix(_parts(raw["normalizer"]) + _parts(raw["pre_tokenizer"])))


def without_prefix(tokenizer: Tokenizer) -> Tokenizer:
    """A copy that takes a piece from the middle of a text as it is: no space before it, no special tokens in it."""
    raw = json.loads(tokenizer.backend.to_str())
    raw |= {key: _strip(raw[key]) for key in ("normalizer", "pre_tokenizer")}
    backend = tokenizers.Tokenizer.from_str(json.dumps(raw))
    backend.encode_special_tokens = True
    return Tokenizer(backend)


def _parts(component: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A component of ``tokenizer.json``, sequences laid flat."""
    if component is None:
        return []
    inner = [part for key in _LISTS for part in component.get(key, ())]
    return [part for each in inner for part in _parts(each)] if component["type"] == "Sequence" else [component]


def _strip(component: dict[str, Any] | None) -> dict[str, Any] | None:
    """The component without what puts a space before a text."""
    if component is None or component["type"] == "Prepend":
        return None
    if component["type"] == "Metaspace":
        return component | {"prepend_scheme": "never"}
    if component["type"] == "ByteLevel":
        return component | {"add_prefix_space": False}
    lists = {key: [part for each in component[key] if (part := _strip(each))] for key in _LISTS if key in component}
    return component | lists


def _prefix(parts: list[dict[str, Any]]) -> Prefix:
    for part in parts:
        if part["type"] == "Metaspace":
            scheme: Prefix = part["prepend_scheme"]
            return scheme
        if part["type"] == "Prepend" or (part["type"] == "ByteLevel" and part["add_prefix_space"]):
            return "always"
    return "never"


def _replaces_space(part: dict[str, Any]) -> bool:
    return part["type"] == "Replace" and part["pattern"] == {"String": _SPACE} and part["content"] == " "


def _from_alphabet(token: str, alphabet: Mapping[str, int]) -> bytes:
    """Added tokens may be written in plain letters, which is how the decoder takes them too."""
    return bytes(alphabet[c] for c in token) if all(c in alphabet for c in token) else token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: a byte that prints in Latin-1 is its character, the others are the characters from 256 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printed))
    return {chr(byte): byte for byte in printed} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
