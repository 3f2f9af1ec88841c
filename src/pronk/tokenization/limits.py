"""Checks of a ``tokenizer.json`` before it is loaded: what the tokenizers package does not limit.

A file may be hostile. Its normalizers and decoders run on every text, some of them already while the file is loaded,
and each may make a text a hundred times longer, so that a few of them exhaust the memory, which ends the process. And
the table of a ``Precompiled`` normalizer is used without a check of its indices.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronk.errors import TokenizerError

MAX_EXPANSION = 64  # times that normalizers, or decoders, may make a text longer
_MAX_ADDED = 2**12  # characters that a component may add to a text, or to each of its parts
_MAX_PARTS = 256  # components of a sequence and of the sequences within it
_STAGES = ("normalizer", "decoder")
_LEAF = np.uint32(1 << 31)  # bit of a unit of the table that has a value


@contextmanager
def rust_panics_as_errors() -> Iterator[None]:
    """Turn a panic of the tokenizers package, which is a BaseException, into a RuntimeError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # the package exports no such class
            msg = f"the tokenizers package failed: {error}"
            raise RuntimeError(msg) from error
        raise


def check_tokenizer(text: str) -> None:
    """Check the text of a ``tokenizer.json``; leave it to the tokenizers package to refuse other texts.

    Raises:
        TokenizerError: a stage expands texts too much or has too many components, or a table is damaged.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return
    if not isinstance(value, dict):
        return
    for stage in _STAGES:
        expansion = prod(_expansion(stage, part) for part in _parts(stage, value.get(stage)))
        if expansion > MAX_EXPANSION:
            msg = f"{stage}: expected components that make a text at most {MAX_EXPANSION} times longer, found more"
            raise TokenizerError(msg)


def _parts(stage: str, component: object) -> Iterator[Mapping[str, Any]]:
    """Yield the components of a stage that are no sequences."""
    left = [component]
    count = 0
    while left:
        part = left.pop()
        if not isinstance(part, Mapping):
            continue  # the tokenizers package refuses it
        count += 1
        if count > _MAX_PARTS:
            msg = f"{stage}: expected at most {_MAX_PARTS} components, found more"
            raise TokenizerError(msg)
        inner = [part.get(name) for name in ("normalizers", "decoders")]
        lists = [each for each in inner if isinstance(each, list)]
        if lists:
            left += [each for group in lists for each in group]
        else:
            yield part


def _expansion(stage: str, part: Mapping[str, Any]) -> float:
    """Return how many times longer a component may make a text."""
    added = [part.get(name) for name in ("prepend", "prefix", "suffix", "replacement")]
    if any(isinstance(each, str) and len(each) > _MAX_ADDED for each in added):
        msg = f"{stage}: expected at most {_MAX_ADDED} characters to add, found more"
        raise TokenizerError(msg)
    charsmap = part.get("precompiled_charsmap")
    if isinstance(charsmap, str):
        return _check_charsmap(stage, charsmap)
    content, pattern = part.get("content"), part.get("pattern")
    if not isinstance(content, str) or not isinstance(pattern, Mapping):
        return 1.0
    literal, expression = pattern.get("String"), pattern.get("Regex")
    if isinstance(literal, str):
        return max(1.0, len(content) / len(literal)) if literal else 1.0 + len(content)
    return 1.0 + len(content) if _may_match_nothing(expression) else max(1.0, float(len(content)))


def _may_match_nothing(expression: object) -> bool:
    """Return whether an expression may match between two characters, as far as Python can tell."""
    try:
        return not isinstance(expression, str) or re.search(expression, "") is not None
    except (re.error, OverflowError, RecursionError):
        return True


def _check_charsmap(stage: str, encoded: str) -> float:
    """Check the table of a ``Precompiled`` normalizer; return how many times longer it may make a text.

    The table of SentencePiece is a trie as a double array (Aoe 1989), then the texts that replace others, each with a
    zero byte at its end. All indices that a text may lead to are within their arrays.
    """
    try:
        data = base64.b64decode(encoded, validate=True)
        size = int.from_bytes(data[:4], "little")
        texts = data[4 + size :]
        texts.decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise _damaged(stage) from error
    if len(data) < 8 or not 0 < size <= len(data) - 4 or size % 4 or not texts.endswith(b"\0"):
        raise _damaged(stage)
    values = _values(stage, np.frombuffer(data, "<u4", size // 4, offset=4))
    text_bytes = np.frombuffer(texts, np.uint8)
    if len(values) and (values.max() >= len(texts) or ((text_bytes[values] & 0xC0) == 0x80).any()):
        raise _damaged(stage)
    return max(1.0, float(max(map(len, texts.decode().split("\0")))))


def _values(stage: str, units: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the values in a double array; raise ``TokenizerError`` if an index is outside of it."""
    characters = np.arange(256, dtype=np.uint32)
    seen = np.zeros(len(units), np.bool_)
    found = list[NDArray[np.uint32]]()
    bases = _offsets(units[:1])
    while len(bases):
        nodes = bases[:, None] ^ characters
        if nodes.max() >= len(units):
            raise _damaged(stage)
        matches = (units[nodes] & (_LEAF | np.uint32(0xFF))) == characters
        matches[:, 0] = False  # texts have no zero byte
        nodes = np.unique(nodes[matches])
        nodes = nodes[~seen[nodes]]
        seen[nodes] = True
        bases = nodes ^ _offsets(units[nodes])
        ends = bases[(units[nodes] >> np.uint32(8)) & np.uint32(1) == 1]
        if len(ends) and ends.max() >= len(units):
            raise _damaged(stage)
        found.append(units[ends] & ~_LEAF)
    return np.concatenate(found) if found else np.zeros(0, np.uint32)


def _offsets(units: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the distances from units to the units of their next characters."""
    return (units >> np.uint32(10)) << ((units & np.uint32(1 << 9)) >> np.uint32(6))


def _damaged(stage: str) -> TokenizerError:
    return TokenizerError(f"{stage}: expected the table of a Precompiled normalizer, found a damaged one")
