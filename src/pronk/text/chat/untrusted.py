"""Conversations of people who are not to write in the model's own voice.

A special token's name, written in a message, is read as that token: with ``<|im_end|>`` in it a message ends where its
writer likes, and a system may speak next. Here such names stay text. While the template does its work a private
character stands for each, so that the template may trim and join what it likes; then they are put back, spelled with
ordinary tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

__all__ = ["disguise", "plain_ids", "reveal"]

_PRIVATE = range(0xF0000, 0xFFFFE)


def disguise(
    messages: Sequence[Mapping[str, Any]], names: Collection[str]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Put characters in the place of special tokens' names.

    Args:
        messages: see :mod:`pronk.text.chat.messages`.
        names: of the special tokens.

    Returns:
        The messages without such names, and which name each character stands for. No character among them is in the
        messages.
    """
    # The longest first, so that no name is taken for the beginning of another.
    pattern = re.compile("|".join(map(re.escape, sorted(names, key=lambda name: (-len(name), name)))))
    texts = [text for text in _texts(messages) if names and pattern.search(text)]
    found = sorted({name for text in texts for name in pattern.findall(text)})
    taken = {character for text in _texts(messages) for character in text if ord(character) in _PRIVATE}
    free = (chr(code) for code in _PRIVATE if chr(code) not in taken)
    characters = dict(zip(found, free, strict=False))
    hidden = _mapped(messages, lambda text: pattern.sub(lambda match: characters[match[0]], text) if found else text)
    return hidden, {character: name for name, character in characters.items()}


def reveal(text: str, names: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Cut a text at the characters that :func:`disguise` put in; of each piece, whether it is a name."""
    for piece in re.split(f"([{''.join(names)}])", text) if names else [text]:
        if piece:
            yield names.get(piece, piece), piece in names


def plain_ids(name: str, encode: Callable[[str], list[int]], special: AbstractSet[int]) -> list[int]:
    """Token ids that read as ``name`` and are not the token of that name; none if it cannot be spelled otherwise."""
    middle = len(name) // 2
    for pieces in ((name[:middle], name[middle:]), tuple(name)):
        ids = [token for piece in pieces for token in encode(piece)]
        if not special & set(ids):
            return ids
    return []


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _mapped(each, change) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(each, change) for each in value]
    return value
