"""The bytes of each token of a tokenizer, which make two vocabularies comparable.

Byte-level tokenizers write the byte 0x20 as ``Ġ``. SentencePiece tokenizers write a space as ``▁``,
and bytes without a character of their own as ``<0x0A>``. The decoder in ``tokenizer.json`` tells
the two kinds apart. A space that the tokenizer adds before a text is not part of the bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pronk.text.guarded import load_backend
from pronk.text.tokenizer import Tokenizer

Prefix = Literal["never", "first", "always"]

# Keys under which a component of the type Sequence in ``tokenizer.json`` has its parts.
_LISTS = ("normalizers", "pretokenizers", "decoders")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
_REPLACE_SPACE = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}


@dataclass(frozen=True)
class Spelling:
    """Bytes of a tokenizer's tokens, and its rule for spaces before a text.

    Attributes:
        texts: bytes by token id, without special tokens; empty if the decoder is neither byte-level
            nor SentencePiece's. Of tokens with equal bytes, the one that the tokenizer's encoding
            produces comes first.
        prefix: where encoding adds a space: before a text (``"first"``), before a text and after
            special tokens (``"always"``), or ``"never"``.
    """

    texts: Mapping[int, bytes]
    prefix: Prefix


def spell(tokenizer: Tokenizer) -> Spelling:
    """Return the bytes of the tokens of ``tokenizer``, and its rule for spaces before a text."""
    raw = json.loads(tokenizer.backend.to_str())
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    special_ids = tokenizer.special_ids
    tokens = {i: token for token, i in vocabulary.items() if i not in special_ids}
    decoders = _components(raw["decoder"])
    types = {component["type"] for component in decoders}
    replaces_space = any(each.items() >= _REPLACE_SPACE.items() for each in decoders)
    texts: dict[int, bytes] = {}
    if "ByteLevel" in types:
        texts = _byte_level_texts(tokens)
    elif "Metaspace" in types or replaces_space:
        texts = _sentencepiece_texts(tokens, has_byte_tokens="ByteFallback" in types)
    prefix = _prefix(_components(raw["normalizer"]) + _components(raw["pre_tokenizer"]))
    return Spelling(texts, prefix)


def _byte_level_texts(tokens: Mapping[int, str]) -> dict[int, bytes]:
    """Return the bytes of the tokens of a byte-level vocabulary.

    A token with a character that stands for no byte has the bytes of its UTF-8.
    """
    alphabet = _byte_alphabet()
    texts = dict[int, bytes]()
    for i, token in sorted(tokens.items()):
        is_spelled = alphabet.keys() >= {*token}
        texts[i] = bytes(alphabet[c] for c in token) if is_spelled else token.encode()
    return texts


def _sentencepiece_texts(tokens: Mapping[int, str], *, has_byte_tokens: bool) -> dict[int, bytes]:
    """Return the bytes of the tokens of a SentencePiece vocabulary, by id.

    Tokens of one byte (``<0x0A>``) come last, because encoding uses them only for characters
    without a token. ``has_byte_tokens``: whether ``<0x0A>`` stands for a byte, not for its own
    characters.
    """
    byte_tokens = dict[int, bytes]()
    texts = dict[int, bytes]()
    for i, token in sorted(tokens.items()):
        match = _BYTE.fullmatch(token) if has_byte_tokens else None
        if match is None:
            texts[i] = token.replace(_SPACE, " ").encode()
        else:
            byte_tokens[i] = bytes([int(match[1], 16)])
    return texts | byte_tokens


def without_prefix(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy of a tokenizer that encodes a text without any additions.

    The copy adds no space before a text, and encodes names of special tokens as ordinary text.
    """
    raw = json.loads(tokenizer.backend.to_str())
    raw |= {key: _remove_prefix(raw[key]) for key in ("normalizer", "pre_tokenizer")}
    backend = load_backend(json.dumps(raw))
    backend.encode_special_tokens = True
    return Tokenizer(backend)


def _components(component: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the parts of a component of ``tokenizer.json``, nested ones too.

    A component that is no Sequence is its only part, and an absent component has none.
    """
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    parts = list[dict[str, Any]]()
    for key in _LISTS:
        for member in component.get(key, ()):
            parts += _components(member)
    return parts


def _remove_prefix(component: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a component of ``tokenizer.json`` without its rule for a space before a text.

    A Prepend, which has no other effect, becomes ``None``.
    """
    if component is None or component["type"] == "Prepend":
        return None
    if component["type"] == "Metaspace":
        return component | {"prepend_scheme": "never"}
    if component["type"] == "ByteLevel":
        return component | {"add_prefix_space": False}
    changed = dict(component)
    for key in _LISTS:
        if key in component:
            members = map(_remove_prefix, component[key])
            changed[key] = [member for member in members if member]
    return changed


def _prefix(components: list[dict[str, Any]]) -> Prefix:
    """Return where the components of a normalizer and a pre-tokenizer add a space to a text.

    The values are those of :attr:`Spelling.prefix`.
    """
    for component in components:
        if component["type"] == "Metaspace":
            return component["prepend_scheme"]
        if component["type"] == "Prepend":
            return "always"
        if component["type"] == "ByteLevel" and component["add_prefix_space"]:
            return "always"
    return "never"


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character with which GPT-2's vocabulary writes bytes.

    A printable character of Latin-1 stands for its own byte; U+0100, U+0101, … stand for the other
    bytes, in ascending order.
    """
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printed))
    alphabet = {chr(byte): byte for byte in printed}
    for i, byte in enumerate(others):
        alphabet[chr(0x100 + i)] = byte
    return alphabet
