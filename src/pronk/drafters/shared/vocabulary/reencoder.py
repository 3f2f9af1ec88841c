"""Re-encodes a request's text from the target's tokens into the draft model's, incrementally.

The bytes of the target's tokens are encoded with the draft's tokenizer. As the text grows, only the part behind the
last *mark* is encoded again. A mark is a position where tokens of both tokenizers begin, and from which the rest of the
text alone encodes to the same tokens as within the whole text. For example::

    target    the| quick| br|own| fox      tokens of both tokenizers begin at the bytes 0, 3, 9 and 15;
    draft     the| qui|ck| brown| fox      the mark at byte 9 lies behind 2 target tokens and 3 draft tokens
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pronk.errors import PromptError
from pronk.tokenization.spelling import Prefix
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["Recoding", "Reencoder"]

_MARK_INTERVAL = 64  # target tokens behind the last mark before a new mark is tried
_NUM_OPEN = 32  # last target tokens, among which no mark is set: further text may change how the last word is encoded
_MAX_TRIES = 8  # positions tried for a mark, the last ones first
_MAX_INTERVAL = 256  # target tokens behind the last mark before a mark is set even if that changes draft tokens

_BLOCK = 256  # tokens compared at once

# Bytes that are not valid UTF-8, as Python's surrogate escapes.
_INVALID_UTF8 = re.compile("([\udc80-\udcff]+)")

# Where a piece of text begins: within running text, after a special token, or at the start of the whole text. Some
# tokenizers add a space before the latter two (``Prefix``).
_MIDDLE, _AFTER_SPECIAL, _START = range(3)


@dataclass(frozen=True)
class Recoding:
    """Conversion from the target's tokenizer to the draft's, the same for all requests."""

    texts: Mapping[int, bytes]  # bytes of each target token, by id; special tokens are missing
    special_ids: Mapping[int, int | None]  # the draft's id for each special token of the target; ``None`` without one
    bos: int | None  # id of the target's token that begins a text, if any
    target_prefix: Prefix  # where the target's tokenizer adds a space that is not in the text
    draft_texts: Mapping[int, bytes]  # bytes of each draft token, by id; special tokens are missing
    draft_prefix: Prefix  # where the draft's tokenizer adds a space that is not in the text
    bos_ids: tuple[int, ...]  # ids of the special tokens that the draft's tokenizer puts before a text
    encoder: Tokenizer  # the draft's tokenizer, changed to add no space before a text
    byte_tokens: Mapping[int, int]  # the draft's token id for each single byte that has one

    def target_bytes(self, tokens: Sequence[int], edge: int) -> tuple[bytes, list[int]]:
        """Return the bytes of target tokens, and the byte offset at which each token ends.

        ``edge`` is where the piece begins: ``_MIDDLE``, ``_AFTER_SPECIAL`` or ``_START``.
        """
        pieces = [self.texts.get(token, b"") for token in tokens]
        data = b"".join(pieces)
        prefix = int(_has_prefix_space(self.target_prefix, edge) and data.startswith(b" "))
        return data[prefix:], [end - prefix for end in accumulate(map(len, pieces))]

    def encode_bytes(self, data: bytes, edge: int) -> tuple[list[int], bool]:
        """Return the draft's token ids of a piece of text, and whether the end of the piece could be encoded.

        Each byte of invalid UTF-8, as of a character whose last bytes are still to come, is one token.
        """
        text = " " * self.prefix_length(data, edge) + data.decode("utf-8", "surrogateescape")
        ids: list[int] = []
        complete = True
        for part in filter(None, _INVALID_UTF8.split(text)):
            if _INVALID_UTF8.match(part):
                byte_ids = [self.byte_tokens.get(ord(c) - 0xDC00) for c in part]
                complete = None not in byte_ids
                ids += [token for token in byte_ids if token is not None]
                continue
            try:
                ids += self.encoder.encode(part, add_special_tokens=False)
                complete = True
            except PromptError:  # no token for this character, not even "unknown"
                complete = False
        return ids, complete

    def prefix_length(self, data: bytes, edge: int) -> int:
        """Return the number of bytes, 0 or 1, that the draft's tokenizer adds before a text: a space."""
        return int(_has_prefix_space(self.draft_prefix, edge) and len(data) > 0)


@dataclass(frozen=True)
class _Mark:
    """A mark: numbers of target and of draft tokens before it, and what precedes it (``_MIDDLE``, …)."""

    target: int
    draft: int
    edge: int


class Reencoder:
    """Keeps one request's text in the draft's tokens.

    Attributes:
        tokens: the draft's token ids for the text of the last :meth:`update`; read-only.
        is_complete: whether ``tokens`` include the last target token. If not, the draft must not propose. Examples: the
            first byte of a UTF-8 character, if the draft has no byte tokens; a special token that only the target has.

    Args:
        recoding: conversion between the tokenizers. ``None`` if a token has the same id in both vocabularies: the ids
            are copied, except those that the draft lacks.
        missing_ids: without ``recoding``, the target's ids that the draft lacks.
        limit: without ``recoding``, the number of the draft's ids.
    """

    def __init__(self, recoding: Recoding | None, missing_ids: frozenset[int] = frozenset(), limit: int = 0) -> None:
        self.tokens: list[int] = [] if recoding is None else list(recoding.bos_ids)
        self.is_complete = False
        self._recoding, self._missing_ids, self._limit = recoding, missing_ids, limit
        self._target_tokens: list[int] = []
        self._dropped: list[int] = []  # positions in the target's text of tokens that were not copied
        self._marks = [_Mark(0, len(self.tokens), _START)]

    def update(self, tokens: Sequence[int], known: int = 0) -> int:
        """Set the target's text; return the number of leading draft tokens that have not changed.

        The first ``known`` target tokens are known to be unchanged.
        """
        same = min(known, len(self._target_tokens), len(tokens))
        same += _count_same(self._target_tokens, tokens, same)
        if self._recoding is None:
            unchanged = self._copy_ids(tokens, same)
        else:
            unchanged = self._reencode(self._recoding, tokens, same)
        self._target_tokens[same:] = tokens[same:]
        return unchanged

    def _copy_ids(self, tokens: Sequence[int], same: int) -> int:
        """Copy the target's ids from position ``same`` on; return the number of unchanged tokens."""
        while self._dropped and self._dropped[-1] >= same:
            self._dropped.pop()
        unchanged = same - len(self._dropped)
        del self.tokens[unchanged:]
        for position in range(same, len(tokens)):
            if tokens[position] in self._missing_ids or tokens[position] >= self._limit:
                self._dropped.append(position)
            else:
                self.tokens.append(tokens[position])
        self.is_complete = len(tokens) > 0 and self._dropped[-1:] != [len(tokens) - 1]
        return unchanged

    def _reencode(self, recoding: Recoding, tokens: Sequence[int], same: int) -> int:
        """Encode the text again behind the last usable mark; return the number of unchanged tokens."""
        while self._marks[-1].target > same:
            self._marks.pop()
        start = self._marks[-1]
        old_tokens = self.tokens[start.draft :]
        del self.tokens[start.draft :]
        for position in range(start.target, len(tokens)):
            if tokens[position] in recoding.special_ids:
                self._append_special(recoding, tokens, position)
        open_tokens = tokens[self._marks[-1].target :]
        data, _ = recoding.target_bytes(open_tokens, self._marks[-1].edge)
        ids, complete = recoding.encode_bytes(data, self._marks[-1].edge)
        self.tokens += ids
        if open_tokens:
            self.is_complete = complete and open_tokens[-1] in recoding.texts
        if len(open_tokens) > _MARK_INTERVAL:
            self._set_mark(recoding, open_tokens)
        return start.draft + _count_same(old_tokens, self.tokens[start.draft :], 0)

    def _append_special(self, recoding: Recoding, tokens: Sequence[int], position: int) -> None:
        """Encode the text before the special token at ``position``, append the token, and set a mark after it."""
        mark, special = self._marks[-1], tokens[position]
        data, _ = recoding.target_bytes(tokens[mark.target : position], mark.edge)
        self.tokens += recoding.encode_bytes(data, mark.edge)[0]
        draft_token = recoding.special_ids[special]
        is_bos = position == 0 and (special == recoding.bos or draft_token in recoding.bos_ids)
        already_written = is_bos and len(recoding.bos_ids) > 0
        if draft_token is not None and not already_written:
            self.tokens.append(draft_token)
        self.is_complete = already_written or draft_token is not None
        self._marks.append(_Mark(position + 1, len(self.tokens), _START if is_bos else _AFTER_SPECIAL))

    def _set_mark(self, recoding: Recoding, open_tokens: Sequence[int]) -> None:
        """Set a mark within ``open_tokens``, the target tokens behind the last mark, if possible."""
        mark = self._marks[-1]
        ids = self.tokens[mark.draft :]
        data, ends = recoding.target_bytes(open_tokens, mark.edge)
        # Number of target tokens before each byte offset at which a target token and a character begin.
        num_target = {
            end: count
            for count, end in enumerate(ends[: len(open_tokens) - _NUM_OPEN], 1)
            if _begins_character(data, end)
        }
        # Byte offsets of these at which a draft token begins too, with the number of draft tokens before.
        places: list[tuple[int, int]] = []
        offset = -recoding.prefix_length(data, mark.edge)
        for num_draft, token in enumerate(ids):
            if offset in num_target:
                places.append((offset, num_draft))
            offset += len(recoding.draft_texts.get(token, b""))
        covers_text = offset == len(data)
        for cut, num_draft in reversed(places[-_MAX_TRIES:] if covers_text else []):
            if recoding.encode_bytes(data[cut:], _MIDDLE)[0] == ids[num_draft:]:
                self._marks.append(_Mark(mark.target + num_target[cut], mark.draft + num_draft, _MIDDLE))
                return
        if len(open_tokens) > _MAX_INTERVAL and num_target:
            cut = max(num_target)
            first = recoding.encode_bytes(data[:cut], mark.edge)[0]
            rest = recoding.encode_bytes(data[cut:], _MIDDLE)[0]
            self.tokens[mark.draft :] = first + rest
            self._marks.append(_Mark(mark.target + num_target[cut], mark.draft + len(first), _MIDDLE))


def _has_prefix_space(prefix: Prefix, edge: int) -> bool:
    """Whether a tokenizer adds a space to a piece of text that begins at ``edge``."""
    return (prefix == "always" and edge != _MIDDLE) or (prefix == "first" and edge == _START)


def _begins_character(data: bytes, offset: int) -> bool:
    return 0 < offset < len(data) and data[offset] & 0xC0 != 0x80  # 10xxxxxx continues a UTF-8 character


def _count_same(old: Sequence[int], new: Sequence[int], start: int) -> int:
    """Return the number of equal tokens from ``start`` on; comparing blocks is ten times as fast."""
    stop, index = min(len(old), len(new)), start
    while index + _BLOCK <= stop and old[index : index + _BLOCK] == new[index : index + _BLOCK]:
        index += _BLOCK
    while index < stop and old[index] == new[index]:
        index += 1
    return index - start
