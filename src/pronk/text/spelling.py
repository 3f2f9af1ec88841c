"""The bytes of each token of a tokenizer, which make two vocabularies comparable.

Byte-level tokenizers write the byte 0x20 as ``Ġ``. SentencePiece tokenizers write a space as ``▁``,
and a byte without a token of its own as ``<0x0A>``. The decoder in ``tokenizer.json`` tells the two
apart. A space that the tokenizer adds before a text is not part of the bytes.
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

# a Sequence has its components under one of these keys
_LISTS = ("normalizers", "pretokenizers", "decoders")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
_REPLACE_SPACE = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}


@dataclass(frozen=True)
class Spelling:
    """Bytes of a tokenizer's tokens, and its rule for spaces before a text."""

    # Bytes by token id, without special tokens; empty if the decoder is neither byte-level nor
    # SentencePiece-like. Iteration order matters: of tokens with equal bytes, the one that the
    # tokenizer's encoding produces comes first.
    texts: Mapping[int, bytes]
    # encoding adds a space before a text ("first"), also after special tokens ("always"), or
    # "never"
    prefix: Prefix


def spell(tokenizer: Tokenizer) -> Spelling:
    """Return the bytes of the tokens of ``tokenizer``."""
    raw = json.loads(tokenizer.backend.to_str())
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    tokens = {i: token for token, i in vocabulary.items() if i not in tokenizer.special_ids}
    decoders = _components(raw["decoder"])
    types = {component["type"] for component in decoders}
    texts: dict[int, bytes] = {}
    if "ByteLevel" in types:
        alphabet = _byte_alphabet()
        # UTF-8 for a token with characters that the alphabet lacks
        for i, token in sorted(tokens.items()):
            texts[i] = (
                bytes(alphabet[c] for c in token) if alphabet.keys() >= {*token} else token.encode()
            )
    elif "Metaspace" in types or any(
        component.items() >= _REPLACE_SPACE.items() for component in decoders
    ):
        byte_tokens = {
            i: int(match[1], 16) for i, token in tokens.items() if (match := _BYTE.fullmatch(token))
        }
        byte_tokens = byte_tokens if "ByteFallback" in types else {}
        texts = {
            i: tokens[i].replace(_SPACE, " ").encode()
            for i in sorted(tokens)
            if i not in byte_tokens
        }
        texts |= {i: bytes([byte]) for i, byte in byte_tokens.items()}
    return Spelling(
        texts, _prefix(_components(raw["normalizer"]) + _components(raw["pre_tokenizer"]))
    )


def without_prefix(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy of a tokenizer that adds no space and encodes names of special tokens as plain text."""
    raw = json.loads(tokenizer.backend.to_str())
    raw |= {key: _remove_prefix(raw[key]) for key in ("normalizer", "pre_tokenizer")}
    backend = load_backend(json.dumps(raw))
    backend.encode_special_tokens = True
    return Tokenizer(backend)


def _components(component: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return a component of ``tokenizer.json`` as a list: the parts of a Sequence, nested ones too."""
    if component is None or component["type"] != "Sequence":
        return [] if component is None else [component]
    return [
        inner
        for key in _LISTS
        for member in component.get(key, ())
        for inner in _components(member)
    ]


def _remove_prefix(component: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a component of ``tokenizer.json`` that adds no space before a text.

    ``None`` for a Prepend.
    """
    if component is None or component["type"] == "Prepend":
        return None
    if component["type"] == "Metaspace":
        return component | {"prepend_scheme": "never"}
    if component["type"] == "ByteLevel":
        return component | {"add_prefix_space": False}
    lists = {
        key: [_remove_prefix(member) for member in component[key]]
        for key in _LISTS
        if key in component
    }
    return component | {
        key: [member for member in members if member] for key, members in lists.items()
    }


def _prefix(components: list[dict[str, Any]]) -> Prefix:
    for component in components:
        if component["type"] == "Metaspace":
            return component["prepend_scheme"]
        if component["type"] == "Prepend" or (
            component["type"] == "ByteLevel" and component["add_prefix_space"]
        ):
            return "always"
    return "never"


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's characters with their bytes: printable Latin-1, and U+0100, … for the other bytes."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printed))
    return {chr(byte): byte for byte in printed} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }
