"""Keep the names of special tokens in untrusted messages as text (prompt injection by control tokens).

A tokenizer reads ``<|im_end|>`` in a message as the special token, so a user could end the message and write one of the
system. Before the template is rendered, a character of Unicode's private use area replaces each such name, so that the
template can trim and join texts. After the rendering each name is put back and encoded with ordinary tokens. A further
private character, which stands for the empty text, follows each text that ends like the beginning of a name, so that
the template cannot join two texts to a name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any

from pronk.errors import PromptError

__all__ = ["disguise", "plain_ids", "reveal"]

_PRIVATE = range(0xF0000, 0xFFFFE)  # supplementary private use area A, which no text needs


def disguise(
    messages: Sequence[Mapping[str, Any]], names: Collection[str]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Replace the names of special tokens by private characters.

    Args:
        messages: see :mod:`pronk.tokenization.chat.messages`; or tools, whose keys are untrusted, too.
        names: the names of the special tokens.

    Returns:
        The messages without names of special tokens, and the name that each private character stands for (the empty
        text for the character at the ends of texts). The given messages contain none of these characters.

    Raises:
        PromptError: the messages use so many private characters that too few are left.
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
        kept = text.rstrip()  # the template may strip white space, too
        if not any(kept[-length:] in begun for length in range(1, longest + 1)):
            return text
        return f"{kept}{characters['']}{text[len(kept) :]}"

    def hide_key(text: str) -> str:
        """Replace names in a key; identifiers get no final character, so that the template finds them."""
        return hide_names(text) if text.isidentifier() else hide(text)

    return _mapped(messages, hide, hide_key), {character: name for name, character in characters.items()}


def reveal(text: str, names: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Split a text at the characters of :func:`disguise`; yield pieces, marked if special names."""
    for piece in re.split(f"([{''.join(names)}])", text) if names else [text]:
        if name := names.get(piece, piece):
            yield name, piece in names


def plain_ids(name: str, encode: Callable[[str], list[int]], special: AbstractSet[int]) -> list[int]:
    """Return ordinary token ids with the text ``name``, or no ids if only the special token has that text."""
    middle = len(name) // 2
    for pieces in ((name[:middle], name[middle:]), tuple(name)):
        ids = [token for piece in pieces for token in encode(piece)]
        if not special & set(ids):
            return ids
    return []


@lru_cache(8)
def _patterns(names: frozenset[str]) -> tuple[re.Pattern[str], frozenset[str], int]:
    """Return a pattern of the names, all their proper prefixes, and the length of the longest prefix."""
    # Longest names first: one name may begin with another.
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
