"""Keep names of special tokens in untrusted messages as text, against prompt injection.

A tokenizer reads ``<|im_end|>`` in a message as the special token, so a user could end the message and write a system
message. Therefore a character of Unicode's private use area replaces each such name before the template is rendered,
and the name is put back and encoded with ordinary tokens afterwards. Two texts that the template joins could still form
a name, for example ``<|im_`` and ``end|>``. Therefore each text that ends with the beginning of a name gets a further
private character at its end, which is removed afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any

from pronk.errors import PromptError

__all__ = ["disguise", "plain_ids", "reveal"]

_PRIVATE = range(0xF0000, 0xFFFFE)  # supplementary private use area A, which texts rarely contain


def disguise(
    messages: Sequence[Mapping[str, Any]], names: Collection[str]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Replace the names of special tokens by private characters.

    Args:
        messages: see :mod:`pronk.tokenization.chat.messages`; also tools, whose keys are untrusted, too.
        names: names of the special tokens.

    Returns:
        The messages without names of special tokens, and the name that each private character stands for (the empty
        text for the character at the ends of texts). These characters do not occur in the given messages.

    Raises:
        PromptError: the messages use so many private characters that too few are left.
    """
    if not names:
        return _map_texts(messages, str, str), {}
    name_pattern, prefixes, longest = _patterns(frozenset(names))
    used_names = sorted({name for text in _texts(messages) for name in name_pattern.findall(text)})
    taken = {character for text in _texts(messages) for character in text if ord(character) in _PRIVATE}
    free = (chr(code) for code in _PRIVATE if chr(code) not in taken)
    characters = dict(zip(["", *used_names], free, strict=False))
    if len(characters) <= len(used_names):
        msg = f"messages: expected some private characters that are not in them, found {len(taken)} that are; use fewer"
        raise PromptError(msg)

    def hide_names(text: str) -> str:
        return name_pattern.sub(lambda match: characters[match[0]], text)

    def hide(text: str) -> str:
        text = hide_names(text)
        stripped = text.rstrip()  # the template may strip white space from the end
        if not any(stripped[-length:] in prefixes for length in range(1, longest + 1)):
            return text
        return f"{stripped}{characters['']}{text[len(stripped) :]}"

    def hide_key(text: str) -> str:
        """Replace names in a key; an identifier gets no character at its end, as templates may look it up."""
        return hide_names(text) if text.isidentifier() else hide(text)

    return _map_texts(messages, hide, hide_key), {character: name for name, character in characters.items()}


def reveal(text: str, names: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a rendered text, each with True if it is a name that a private character hid."""
    for part in re.split(f"([{''.join(names)}])", text) if names else [text]:
        if shown := names.get(part, part):  # not shown: the private character at the ends of texts
            yield shown, part in names


def plain_ids(name: str, encode: Callable[[str], list[int]], special: AbstractSet[int]) -> list[int]:
    """Return ordinary tokens that spell ``name``: of its halves, or else of its characters; or ``[]``."""
    middle = len(name) // 2
    for parts in ((name[:middle], name[middle:]), tuple(name)):
        ids = [token for part in parts for token in encode(part)]
        if not special & set(ids):
            return ids
    return []


@lru_cache(8)
def _patterns(names: frozenset[str]) -> tuple[re.Pattern[str], frozenset[str], int]:
    """Return a pattern for any of the names, their proper prefixes, and the longest prefix's length."""
    # Longest names first: one name may begin with another.
    alternatives = "|".join(map(re.escape, sorted(names, key=lambda name: (-len(name), name))))
    prefixes = frozenset(name[:stop] for name in names for stop in range(1, len(name)))
    return re.compile(alternatives), prefixes, max(map(len, names)) - 1


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _map_texts(value: Any, change: Callable[[str], str], change_key: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            change_key(key) if isinstance(key, str) else key: _map_texts(item, change, change_key)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_map_texts(item, change, change_key) for item in value]
    return value
