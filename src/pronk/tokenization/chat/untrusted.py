"""Conversations of people who are not to write in the model's own voice.

A special token's name, written in a message, is read as that token: with ``<|im_end|>`` in it a message ends where its
writer likes, and a system may speak next. Here such names stay text. While the template does its work a private
character stands for each, so that the template may trim and join what it likes; then they are put back, spelled with
ordinary tokens. Another one, which stands for nothing, follows each text that ends like the beginning of such a name,
so that no name comes of texts that the template joins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any

from pronk.errors import PromptError

__all__ = ["disguise", "plain_ids", "reveal"]

_PRIVATE = range(0xF0000, 0xFFFFE)


def disguise(
    messages: Sequence[Mapping[str, Any]], names: Collection[str]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Put characters in the place of special tokens' names.

    Args:
        messages: see :mod:`pronk.tokenization.chat.messages`; tools likewise, whose keys are written by people, too.
        names: of the special tokens.

    Returns:
        The messages without such names, and which name each character stands for; an empty one where texts end. No
        character among them is in the messages.

    Raises:
        PromptError: the messages have nearly all private characters themselves.
    """
    if not names:
        return _mapped(messages, str, str), {}
    whole, begun, longest = _patterns(frozenset(names))
    found = sorted({name for text in _texts(messages) for name in whole.findall(text)})
    taken = {character for text in _texts(messages) for character in text if ord(character) in _PRIVATE}
    free = (chr(code) for code in _PRIVATE if chr(code) not in taken)
    characters = dict(zip(["", *found], free, strict=False))
    if len(characters) <= len(found):
        msg = f"messages: expected some private characters that are not in them, found {len(taken)} that are; use fewer"
        raise PromptError(msg)

    def hide_names(text: str) -> str:
        return whole.sub(lambda match: characters[match[0]], text)

    def hide(text: str) -> str:
        text = hide_names(text)
        kept = text.rstrip()  # a template may do so, too
        if not any(kept[-length:] in begun for length in range(1, longest + 1)):
            return text
        return f"{kept}{characters['']}{text[len(kept) :]}"

    def hide_key(text: str) -> str:
        """Templates look words up, and write nothing of a name right behind them."""
        return hide_names(text) if text.isidentifier() else hide(text)

    return _mapped(messages, hide, hide_key), {character: name for name, character in characters.items()}


def reveal(text: str, names: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Cut a text at the characters that :func:`disguise` put in; of each piece, whether it is a name."""
    for piece in re.split(f"([{''.join(names)}])", text) if names else [text]:
        if name := names.get(piece, piece):
            yield name, piece in names


def plain_ids(name: str, encode: Callable[[str], list[int]], special: AbstractSet[int]) -> list[int]:
    """Token ids that read as ``name`` and are not the token of that name; none if it cannot be spelled otherwise."""
    middle = len(name) // 2
    for pieces in ((name[:middle], name[middle:]), tuple(name)):
        ids = [token for piece in pieces for token in encode(piece)]
        if not special & set(ids):
            return ids
    return []


@lru_cache(8)
def _patterns(names: frozenset[str]) -> tuple[re.Pattern[str], frozenset[str], int]:
    """What finds names, their beginnings, and the length of the longest of those."""
    # The longest first, so that no name is taken for the beginning of another.
    whole = "|".join(map(re.escape, sorted(names, key=lambda name: (-len(name), name))))
    begun = frozenset(name[:stop] for name in names for stop in range(1, len(name)))
    return re.compile(whole), begun, max(map(len, names)) - 1


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _texts(name)
            yield from _texts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each)


def _mapped(value: Any, change: Callable[[str], str], change_key: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            change_key(name) if isinstance(name, str) else name: _mapped(each, change, change_key)
            for name, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_mapped(each, change, change_key) for each in value]
    return value
