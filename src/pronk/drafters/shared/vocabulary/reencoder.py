"""Re-encodes a request's text from the target's tokens into the draft model's, incrementally.

The bytes of the target's tokens are encoded with the draft's tokenizer. Tokens before a *mark* are not encoded again. A
mark is a position where tokens of both begin, and where encoding the rest of the text gives the same tokens as encoding
all of it ::

    target    the| quick| br|own| fox      tokens of both begin at the bytes 0, 3, 9 and 15;
    draft     the| qui|ck| brown| fox      a mark at 9: the first 2 target tokens are the first 3 of the draft
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

# A mark is set when more than _MARK_INTERVAL target tokens lie behind the last one. The last _NUM_OPEN tokens stay
# open: more than the last word, which further text may change. The last _MAX_TRIES positions are tried. If no position
# leaves the tokens unchanged, a mark is set nevertheless beyond _MAX_INTERVAL target tokens.
_MARK_INTERVAL, _NUM_OPEN, _MAX_INTERVAL, _MAX_TRIES = 64, 32, 256, 8

_BLOCK = 256  # tokens compared at once

# Bytes that are not valid UTF-8, as Python's surrogate escapes.
_INVALID_UTF8 = re.compile("([\udc80-\udcff]+)")

# Kinds of edges at which a piece begins: within a text, after a special token, or at the start of everything.
_MIDDLE, _AFTER_SPECIAL, _START = range(3)


@dataclass(frozen=True)
class Recoding:
    """Constants of a pair of tokenizers; the same for all requests.

    Attributes:
        texts: bytes of the target's tokens.
        special_ids: the target's special tokens, each with the draft's counterpart or ``None``.
        bos: the target's token that begins a text.
        target_prefix: when the target's tokens begin with a space that is not in the text.
        draft_texts: bytes of the draft's tokens.
        draft_prefix: when the draft's tokens begin with a space that is not in the text.
        bos_ids: special tokens that the draft's tokenizer puts before a text.
        encoder: the draft's tokenizer without the prefix space, for a piece from the middle of a text.
        byte_tokens: the draft's token for each single byte.
    """

    texts: Mapping[int, bytes]
    special_ids: Mapping[int, int | None]
    bos: int | None
    target_prefix: Prefix
    draft_texts: Mapping[int, bytes]
    draft_prefix: Prefix
    bos_ids: tuple[int, ...]
    encoder: Tokenizer
    byte_tokens: Mapping[int, int]

    def target_bytes(self, tokens: Sequence[int], edge: int) -> tuple[bytes, list[int]]:
        """Return the bytes of target tokens, and the offset at which each token ends."""
        pieces = [self.texts.get(token, b"") for token in tokens]
        data = b"".join(pieces)
        extra = int(_has_prefix_space(self.target_prefix, edge) and data.startswith(b" "))
        return data[extra:], [end - extra for end in accumulate(map(len, pieces))]

    def encode_bytes(self, data: bytes, edge: int) -> tuple[list[int], bool]:
        """Return the draft's tokens for a text, one per invalid byte, and whether its end could be encoded."""
        text = " " * self.prefix_length(data, edge) + data.decode("utf-8", "surrogateescape")
        ids: list[int] = []
        complete = True
        for part in filter(None, _INVALID_UTF8.split(text)):
            if _INVALID_UTF8.match(part):
                found = [self.byte_tokens.get(ord(c) - 0xDC00) for c in part]
                complete = None not in found
                ids += [token for token in found if token is not None]
                continue
            try:
                ids += self.encoder.encode(part, add_special_tokens=False)
                complete = True
            except PromptError:  # no token for this character, not even "unknown"
                complete = False
        return ids, complete

    def prefix_length(self, data: bytes, edge: int) -> int:
        """Return the number of bytes that the draft's tokens have beyond the text."""
        return int(_has_prefix_space(self.draft_prefix, edge) and len(data) > 0)


@dataclass(frozen=True)
class _Mark:
    """The first ``target`` target tokens are the first ``draft`` draft tokens; then comes an ``edge``."""

    target: int
    draft: int
    edge: int


class Reencoder:
    """One request's text in the draft's tokens.

    Attributes:
        tokens: the draft's tokens for the text of the last :meth:`update`; read-only.
        is_complete: whether ``tokens`` cover the last target token. They do not at an incomplete UTF-8 character, for a
            vocabulary without byte tokens, or at a special token that only the target has. The draft must not propose
            then.

    Args:
        recoding: the tokenizers; ``None`` if ids are the same, and are copied.
        missing_ids: ids that the draft lacks; used if ids are the same.
        limit: number of the draft's ids; used if ids are the same.
    """

    def __init__(self, recoding: Recoding | None, missing_ids: frozenset[int] = frozenset(), limit: int = 0) -> None:
        self.tokens: list[int] = [] if recoding is None else list(recoding.bos_ids)
        self.is_complete = False
        self._recoding, self._missing_ids, self._limit = recoding, missing_ids, limit
        self._seen: list[int] = []
        self._dropped: list[int] = []
        self._marks = [_Mark(0, len(self.tokens), _START)]

    def update(self, tokens: Sequence[int], known: int = 0) -> int:
        """Follow the target's text, of which the last tokens may differ from the previous call.

        Returns the number of leading draft tokens that are unchanged; ``known`` leading target tokens are known to be.
        """
        same = min(known, len(self._seen), len(tokens))
        same += _count_same(self._seen, tokens, same)
        unchanged = (
            self._copy_ids(tokens, same) if self._recoding is None else self._reencode(self._recoding, tokens, same)
        )
        self._seen[same:] = tokens[same:]
        return unchanged

    def _copy_ids(self, tokens: Sequence[int], same: int) -> int:
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
        while self._marks[-1].target > same:
            self._marks.pop()
        start = self._marks[-1]
        before = self.tokens[start.draft :]
        del self.tokens[start.draft :]
        for position in range(start.target, len(tokens)):
            if tokens[position] in recoding.special_ids:
                self._append_special(recoding, tokens, position)
        run = tokens[self._marks[-1].target :]
        data, _ = recoding.target_bytes(run, self._marks[-1].edge)
        ids, complete = recoding.encode_bytes(data, self._marks[-1].edge)
        self.tokens += ids
        if run:
            self.is_complete = complete and run[-1] in recoding.texts
        if len(run) > _MARK_INTERVAL:
            self._set_mark(recoding, run)
        return start.draft + _count_same(before, self.tokens[start.draft :], 0)

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

    def _set_mark(self, recoding: Recoding, run: Sequence[int]) -> None:
        """Set a mark within the text behind the last mark."""
        mark = self._marks[-1]
        ids = self.tokens[mark.draft :]
        data, ends = recoding.target_bytes(run, mark.edge)
        counts = {
            end: count for count, end in enumerate(ends[: len(run) - _NUM_OPEN], 1) if _begins_character(data, end)
        }
        at = -recoding.prefix_length(data, mark.edge)
        positions: list[tuple[int, int]] = []
        for index, token in enumerate(ids):
            if at in counts:
                positions.append((at, index))
            at += len(recoding.draft_texts.get(token, b""))
        for cut, index in reversed(positions[-_MAX_TRIES:] if at == len(data) else []):
            if recoding.encode_bytes(data[cut:], _MIDDLE)[0] == ids[index:]:
                self._marks.append(_Mark(mark.target + counts[cut], mark.draft + index, _MIDDLE))
                return
        if len(run) > _MAX_INTERVAL and counts:
            cut = max(counts)
            first, rest = recoding.encode_bytes(data[:cut], mark.edge)[0], recoding.encode_bytes(data[cut:], _MIDDLE)[0]
            self.tokens[mark.draft :] = first + rest
            self._marks.append(_Mark(mark.target + counts[cut], mark.draft + len(first), _MIDDLE))


def _has_prefix_space(prefix: Prefix, edge: int) -> bool:
    return (prefix == "always" and edge != _MIDDLE) or (prefix == "first" and edge == _START)


def _begins_character(data: bytes, at: int) -> bool:
    return 0 < at < len(data) and data[at] & 0xC0 != 0x80


def _count_same(old: Sequence[int], new: Sequence[int], start: int) -> int:
    """Return the number of equal tokens from ``start`` on; comparing blocks is ten times as fast."""
    stop, at = min(len(old), len(new)), start
    while at + _BLOCK <= stop and old[at : at + _BLOCK] == new[at : at + _BLOCK]:
        at += _BLOCK
    while at < stop and old[at] == new[at]:
        at += 1
    return at - start
