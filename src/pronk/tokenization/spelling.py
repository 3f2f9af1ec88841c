"""The bytes of each token of a tokenizer, which make two vocabularies comparable.

Byte-level tokenizers write the byte 0x20 as ``Ġ``. SentencePiece tokenizers write a space as ``▁``, and a byte without
a token of its own as ``<0x0A>``. The decoder in ``tokenizer.json`` tells the two apart. A space that the tokenizer adds
before a text is not part of the bytes.
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
    """Bytes of a tokenizer's tokens, and its rule for spaces before a text."""

    # Bytes by token id, without special tokens. Of tokens with equal bytes, the one that encoding a text gives comes
    # first. Empty if the decoder is neither byte-level nor SentencePiece-like.
    texts: Mapping[int, bytes]
    prefix: Prefix  # a space is added before a text ("first"), also after each special token ("always"), or "never"


def spell(tokenizer: Tokenizer) -> Spelling:
    """Return the bytes of the tokens of ``tokenizer``."""
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
    """Return a copy of a tokenizer that adds no space and encodes special tokens as plain text."""
    raw = json.loads(tokenizer.backend.to_str())
    raw |= {key: _strip(raw[key]) for key in ("normalizer", "pre_tokenizer")}
    backend = tokenizers.Tokenizer.from_str(json.dumps(raw))
    backend.encode_special_tokens = True
    return Tokenizer(backend)


def _parts(component: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return a component of ``tokenizer.json`` as a flat list; nested sequences are expanded."""
    if component is None:
        return []
    inner = [part for key in _LISTS for part in component.get(key, ())]
    return [part for each in inner for part in _parts(each)] if component["type"] == "Sequence" else [component]


def _strip(component: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a component of ``tokenizer.json``, changed so that it adds no space before a text."""
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
    """Return the bytes of a byte-level token; an added token may be written without the alphabet."""
    return bytes(alphabet[c] for c in token) if all(c in alphabet for c in token) else token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet, character to byte: Latin-1 for printable bytes, the rest from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printed))
    return {chr(byte): byte for byte in printed} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
