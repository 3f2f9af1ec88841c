"""Incremental re-encoding of a request's text from the target's tokens into the draft model's.

The bytes of the target's tokens are encoded with the draft's tokenizer. As the text grows, only the
text after the last *mark* is encoded again. A mark is a position where tokens of both tokenizers
begin, and from which the rest of the text encodes to the same tokens alone as within the whole
text. For example::

    target    the| quick| br|own| fox      tokens of both begin at the bytes 0, 3, 9 and 15;
    draft     the| qui|ck| brown| fox      before the mark at byte 9: 2 target and 3 draft tokens
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pronk.base.errors import PromptError
from pronk.drafting.shared.common_prefix import common_prefix_length
from pronk.text.spelling import Prefix
from pronk.text.tokenizer import Tokenizer

_MARK_INTERVAL = 64  # try to set a mark if more target tokens than this follow the last mark
# set no mark among the last 32 target tokens, as further text may change how the last word is
# encoded
_NUM_OPEN = 32
# Maximum number of positions that are examined as places of a new mark, the last ones first.
_MAX_TRIES = 8
# if more target tokens than this follow the last mark, set one even if that changes draft tokens
_MAX_INTERVAL = 256

# Bytes that are not valid UTF-8; the error handler ``surrogateescape`` decodes byte 0xFF to
# "\udcff".
_INVALID_UTF8 = re.compile("([\udc80-\udcff]+)")

# An *edge* is the kind of place in the text where bytes to encode begin: between ordinary tokens,
# after a special token, or at the start of the text. Some tokenizers add a space at the start, or
# at the start and after special tokens (``Prefix``).
_MIDDLE, _AFTER_SPECIAL, _START = range(3)


@dataclass(frozen=True)
class Recoding:
    """Conversion of tokens from the target's tokenizer to the draft's; used by all requests.

    Attributes:
        texts: bytes of each target token, by id; special tokens are missing.
        special_ids: maps the target's special ids to the draft's; ``None`` if the draft has no such
            token.
        bos: id of the target's beginning-of-sequence token, if any.
        target_prefix: where the target's tokenizer adds a space that is not in the text.
        draft_texts: bytes of each draft token, by id; special tokens are missing.
        draft_prefix: where the draft's tokenizer adds a space that is not in the text.
        bos_ids: ids of the special tokens that the draft's tokenizer puts before a text.
        encoder: the draft's tokenizer, changed to add no space before a text.
        byte_tokens: maps bytes to the draft's ids of one-byte tokens.
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
        """Return the bytes of target tokens, and the byte offset at which each token ends.

        ``edge`` is the kind of place before the first token: ``_MIDDLE``, ``_AFTER_SPECIAL`` or
        ``_START``.
        """
        pieces = [self.texts.get(token, b"") for token in tokens]
        data = b"".join(pieces)
        prefix = int(_has_prefix_space(self.target_prefix, edge) and data.startswith(b" "))
        return data[prefix:], [end - prefix for end in accumulate(map(len, pieces))]

    def encode_bytes(self, data: bytes, edge: int) -> tuple[list[int], bool]:
        """Return the draft's token ids of ``data``, and whether its last character is encoded.

        ``edge`` is the kind of place before ``data``, as in :meth:`target_bytes`. Each byte of
        invalid UTF-8 becomes one byte token, for example if the end of the last character is
        missing.
        """
        text = " " * self.prefix_length(data, edge) + data.decode("utf-8", "surrogateescape")
        ids: list[int] = []
        complete = True
        for section in filter(None, _INVALID_UTF8.split(text)):
            if _INVALID_UTF8.match(section):
                byte_ids = [self.byte_tokens.get(ord(character) - 0xDC00) for character in section]
                complete = None not in byte_ids
                ids += [token for token in byte_ids if token is not None]
                continue
            try:
                ids += self.encoder.encode(section, add_special_tokens=False)
                complete = True
            # the draft has no token for a character, not even one for unknown text
            except PromptError:
                complete = False
        return ids, complete

    def prefix_length(self, data: bytes, edge: int) -> int:
        """Return the number of spaces, 0 or 1, that the draft's tokenizer adds before ``data``.

        ``edge`` is the kind of place before ``data``, as in :meth:`target_bytes`.
        """
        return int(_has_prefix_space(self.draft_prefix, edge) and len(data) > 0)


@dataclass(frozen=True)
class _Mark:
    """A place where the text is cut, so that only the text after it is encoded again.

    The docstring of the module defines marks.
    """

    num_target: int  # number of target tokens before the mark
    num_draft: int  # number of draft tokens before the mark
    edge: int  # kind of place at the mark: ``_MIDDLE``, ``_AFTER_SPECIAL`` or ``_START``


class Reencoder:
    """One request's text, encoded with the draft's tokenizer.

    Without ``recoding``, a token has the same id in both vocabularies: the ids are copied, except
    the ``missing_ids`` and those of at least ``limit``, which the draft lacks.

    Attributes:
        tokens: the draft's token ids for the text of the last :meth:`update`; read-only.
        is_complete: whether ``tokens`` include the last target token. If not, the draft must not
            propose.
    """

    def __init__(
        self, recoding: Recoding | None, missing_ids: frozenset[int] = frozenset(), limit: int = 0
    ) -> None:
        self.tokens: list[int] = [] if recoding is None else list(recoding.bos_ids)
        self.is_complete = False
        self._recoding = recoding
        self._missing_ids = missing_ids
        self._limit = limit
        self._target_tokens: list[int] = []
        # positions of the target's tokens that the draft lacks
        self._missing_positions: list[int] = []
        self._marks = [_Mark(0, len(self.tokens), _START)]

    def update(self, tokens: Sequence[int], num_known: int = 0) -> int:
        """Encode a new text, given as target tokens.

        Return how many leading draft tokens are unchanged.

        The first ``num_known`` target tokens are known to be those of the last call.
        """
        num_same = common_prefix_length(self._target_tokens, tokens, num_known)
        if self._recoding is None:
            num_unchanged = self._copy_ids(tokens, num_same)
        else:
            num_unchanged = self._reencode(self._recoding, tokens, num_same)
        self._target_tokens[num_same:] = tokens[num_same:]
        return num_unchanged

    def _copy_ids(self, tokens: Sequence[int], num_same: int) -> int:
        """Copy the target's ids after the first ``num_same``, which are unchanged.

        Return how many leading draft tokens are unchanged.
        """
        while self._missing_positions and self._missing_positions[-1] >= num_same:
            self._missing_positions.pop()
        num_unchanged = num_same - len(self._missing_positions)
        del self.tokens[num_unchanged:]
        for position in range(num_same, len(tokens)):
            if tokens[position] in self._missing_ids or tokens[position] >= self._limit:
                self._missing_positions.append(position)
            else:
                self.tokens.append(tokens[position])
        self.is_complete = len(tokens) > 0 and self._missing_positions[-1:] != [len(tokens) - 1]
        return num_unchanged

    def _reencode(self, recoding: Recoding, tokens: Sequence[int], num_same: int) -> int:
        """Encode the text again from the last mark within its first ``num_same`` tokens.

        Those tokens are unchanged. Return how many leading draft tokens are unchanged.
        """
        while self._marks[-1].num_target > num_same:
            self._marks.pop()
        start = self._marks[-1]
        old_tokens = self.tokens[start.num_draft :]
        del self.tokens[start.num_draft :]
        for position in range(start.num_target, len(tokens)):
            if tokens[position] in recoding.special_ids:
                self._append_special(recoding, tokens, position)
        open_tokens = tokens[self._marks[-1].num_target :]
        data, _ = recoding.target_bytes(open_tokens, self._marks[-1].edge)
        ids, complete = recoding.encode_bytes(data, self._marks[-1].edge)
        self.tokens += ids
        if open_tokens:
            self.is_complete = complete and open_tokens[-1] in recoding.texts
        if len(open_tokens) > _MARK_INTERVAL:
            self._set_mark(recoding, open_tokens)
        return start.num_draft + common_prefix_length(old_tokens, self.tokens[start.num_draft :], 0)

    def _append_special(self, recoding: Recoding, tokens: Sequence[int], position: int) -> None:
        """Encode the text from the last mark to a special token, and set a mark after it.

        ``position`` is that of the special token.
        """
        mark = self._marks[-1]
        special = tokens[position]
        data, _ = recoding.target_bytes(tokens[mark.num_target : position], mark.edge)
        self.tokens += recoding.encode_bytes(data, mark.edge)[0]
        draft_token = recoding.special_ids[special]
        is_bos = position == 0 and (special == recoding.bos or draft_token in recoding.bos_ids)
        already_written = is_bos and len(recoding.bos_ids) > 0
        if draft_token is not None and not already_written:
            self.tokens.append(draft_token)
        self.is_complete = already_written or draft_token is not None
        self._marks.append(
            _Mark(position + 1, len(self.tokens), _START if is_bos else _AFTER_SPECIAL)
        )

    def _set_mark(self, recoding: Recoding, open_tokens: Sequence[int]) -> None:
        """Set a mark within ``open_tokens``, the target tokens after the last mark, if possible."""
        mark = self._marks[-1]
        ids = self.tokens[mark.num_draft :]
        data, ends = recoding.target_bytes(open_tokens, mark.edge)
        # Maps a byte offset to the number of target tokens before it, if a target token and a
        # character begin there.
        num_target = {
            end: count
            for count, end in enumerate(ends[: len(open_tokens) - _NUM_OPEN], 1)
            # a byte 10xxxxxx continues a UTF-8 character
            if 0 < end < len(data) and data[end] & 0xC0 != 0x80
        }
        # ``(offset, number of draft tokens before it)`` for offsets of ``num_target`` where a draft
        # token begins, too.
        candidates: list[tuple[int, int]] = []
        offset = -recoding.prefix_length(data, mark.edge)
        for num_draft, token in enumerate(ids):
            if offset in num_target:
                candidates.append((offset, num_draft))
            offset += len(recoding.draft_texts.get(token, b""))
        covers_text = offset == len(data)  # False if the draft's tokenizer has normalized the text
        for cut, num_draft in reversed(candidates[-_MAX_TRIES:] if covers_text else []):
            if recoding.encode_bytes(data[cut:], _MIDDLE)[0] == ids[num_draft:]:
                self._marks.append(
                    _Mark(mark.num_target + num_target[cut], mark.num_draft + num_draft, _MIDDLE)
                )
                return
        if len(open_tokens) > _MAX_INTERVAL and num_target:
            cut = max(num_target)
            first = recoding.encode_bytes(data[:cut], mark.edge)[0]
            rest = recoding.encode_bytes(data[cut:], _MIDDLE)[0]
            self.tokens[mark.num_draft :] = first + rest
            self._marks.append(
                _Mark(mark.num_target + num_target[cut], mark.num_draft + len(first), _MIDDLE)
            )


def _has_prefix_space(prefix: Prefix, edge: int) -> bool:
    """Return whether a tokenizer adds a space at a place of the kind ``edge``."""
    return (prefix == "always" and edge != _MIDDLE) or (prefix == "first" and edge == _START)
