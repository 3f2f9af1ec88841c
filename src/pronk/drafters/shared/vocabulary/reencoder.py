"""The text of a target's tokens in the tokens of a draft model, kept up as the text grows or takes another turn.

A draft model that was trained on its own tokens knows its text in these alone, so the bytes of the target's tokens are
encoded again. Not all of them in every step: everything before a *mark* stays as it is, and a mark is a place where a
token of both begins and where encoding what follows gives what encoding it all gave ::

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

# A mark is set when more target tokens than _OPEN lie behind the last one, and leaves _KEEP of them open, which is more
# than the words at the end that further text may still change. Beyond _LIMIT it is set where it changes the tokens.
_OPEN, _KEEP, _LIMIT, _TRIES = 64, 32, 256, 8

_BLOCK = 256
_BROKEN = re.compile("([\udc80-\udcff]+)")

# Where a text begins: in the middle of another, after a special token, or where nothing comes before it.
_MIDDLE, _AFTER_SPECIAL, _START = range(3)


@dataclass(frozen=True)
class Recoding:
    """What re-encoding knows of both tokenizers; the same for all requests.

    Attributes:
        texts: bytes of the target's tokens.
        carried: the target's special tokens, and which of the draft's each becomes, if any.
        bos: the target's token that begins a text.
        target_prefix: whether the target's tokens begin with a space that is not in the text.
        draft_texts: bytes of the draft's tokens.
        draft_prefix: whether the draft's should.
        front: what the draft's tokenizer puts before a text.
        encoder: the draft's tokenizer, for a piece from the middle of a text.
        bytes_only: tokens of the draft for single bytes.
    """

    texts: Mapping[int, bytes]
    carried: Mapping[int, int | None]
    bos: int | None
    target_prefix: Prefix
    draft_texts: Mapping[int, bytes]
    draft_prefix: Prefix
    front: tuple[int, ...]
    encoder: Tokenizer
    bytes_only: Mapping[int, int]

    def read(self, tokens: Sequence[int], edge: int) -> tuple[bytes, list[int]]:
        """The text of target tokens, and where in it each of them ends."""
        pieces = [self.texts.get(token, b"") for token in tokens]
        data = b"".join(pieces)
        extra = int(_adds(self.target_prefix, edge) and data.startswith(b" "))
        return data[extra:], [end - extra for end in accumulate(map(len, pieces))]

    def write(self, data: bytes, edge: int) -> tuple[list[int], bool]:
        """The draft's tokens for a text, and whether they say all of its end; bytes that are no text go one by one."""
        text = " " * self.prefix_length(data, edge) + data.decode("utf-8", "surrogateescape")
        ids: list[int] = []
        whole = True
        for part in filter(None, _BROKEN.split(text)):
            if _BROKEN.match(part):
                found = [self.bytes_only.get(ord(c) - 0xDC00) for c in part]
                whole = None not in found
                ids += [token for token in found if token is not None]
                continue
            try:
                ids += self.encoder.encode(part, add_special_tokens=False)
                whole = True
            except PromptError:  # a character for which the vocabulary has nothing, not even "unknown"
                whole = False
        return ids, whole

    def prefix_length(self, data: bytes, edge: int) -> int:
        """How many bytes the draft's tokens have more than the text that they stand for."""
        return int(_adds(self.draft_prefix, edge) and len(data) > 0)


@dataclass(frozen=True)
class _Mark:
    """Where the first ``target`` tokens are the first ``draft`` tokens, whatever follows; ``edge`` is what does."""

    target: int
    draft: int
    edge: int


class Reencoder:
    """One request's text in the draft's tokens.

    Attributes:
        tokens: the draft's tokens for the text of the last :meth:`update`; not to be changed.
        current: whether they say what the last target token says. If not, whatever would be guessed after them comes
            too early: bytes of a character without its end, for a vocabulary without byte tokens, or a special token
            that only the target has.

    Args:
        recoding: how; ``None`` if the ids are the same, and tokens go over one by one.
        lacking: ids that mean something to the target alone, where ids are the same otherwise.
        limit: ids from here on are not the draft's, where ids are the same otherwise.
    """

    def __init__(self, recoding: Recoding | None, lacking: frozenset[int] = frozenset(), limit: int = 0) -> None:
        self.tokens: list[int] = [] if recoding is None else list(recoding.front)
        self.current = False
        self._recoding, self._lacking, self._limit = recoding, lacking, limit
        self._seen: list[int] = []
        self._left_out: list[int] = []
        self._marks = [_Mark(0, len(self.tokens), _START)]

    def update(self, tokens: Sequence[int], known: int = 0) -> int:
        """Follow the target's text.

        Args:
            tokens: all of the target's tokens; those at the end may differ from what they were in the last call.
            known: how many of them are known to be the same as in the last call, and need not be compared.

        Returns:
            How many of the draft's tokens are what they were before this call, counted from the first.
        """
        same = min(known, len(self._seen), len(tokens))
        same += _count_same(self._seen, tokens, same)
        unchanged = (
            self._pass_on(tokens, same) if self._recoding is None else self._respell(self._recoding, tokens, same)
        )
        self._seen[same:] = tokens[same:]
        return unchanged

    def _pass_on(self, tokens: Sequence[int], same: int) -> int:
        """Ids as they are; those that the draft lacks are left out."""
        while self._left_out and self._left_out[-1] >= same:
            self._left_out.pop()
        unchanged = same - len(self._left_out)
        del self.tokens[unchanged:]
        for position in range(same, len(tokens)):
            if tokens[position] in self._lacking or tokens[position] >= self._limit:
                self._left_out.append(position)
            else:
                self.tokens.append(tokens[position])
        self.current = len(tokens) > 0 and self._left_out[-1:] != [len(tokens) - 1]
        return unchanged

    def _respell(self, recoding: Recoding, tokens: Sequence[int], same: int) -> int:
        while self._marks[-1].target > same:
            self._marks.pop()
        start = self._marks[-1]
        before = self.tokens[start.draft :]
        del self.tokens[start.draft :]
        for position in range(start.target, len(tokens)):
            if tokens[position] in recoding.carried:
                self._carry(recoding, tokens, position)
        run = tokens[self._marks[-1].target :]
        data, _ = recoding.read(run, self._marks[-1].edge)
        ids, whole = recoding.write(data, self._marks[-1].edge)
        self.tokens += ids
        if run:
            self.current = whole and run[-1] in recoding.texts
        if len(run) > _OPEN:
            self._settle(recoding, run)
        return start.draft + _count_same(before, self.tokens[start.draft :], 0)

    def _carry(self, recoding: Recoding, tokens: Sequence[int], position: int) -> None:
        """Finish the text before the special token at ``position``; the token itself, and a mark after it."""
        mark, special = self._marks[-1], tokens[position]
        data, _ = recoding.read(tokens[mark.target : position], mark.edge)
        self.tokens += recoding.write(data, mark.edge)[0]
        carried = recoding.carried[special]
        begins = position == 0 and (special == recoding.bos or carried in recoding.front)
        stands = begins and len(recoding.front) > 0
        if carried is not None and not stands:
            self.tokens.append(carried)
        self.current = stands or carried is not None
        self._marks.append(_Mark(position + 1, len(self.tokens), _START if begins else _AFTER_SPECIAL))

    def _settle(self, recoding: Recoding, run: Sequence[int]) -> None:
        """Set a mark within the text that is open."""
        mark = self._marks[-1]
        ids = self.tokens[mark.draft :]
        data, ends = recoding.read(run, mark.edge)
        counts = {end: count for count, end in enumerate(ends[: len(run) - _KEEP], 1) if _begins_character(data, end)}
        at = -recoding.prefix_length(data, mark.edge)
        places: list[tuple[int, int]] = []
        for index, token in enumerate(ids):
            if at in counts:
                places.append((at, index))
            at += len(recoding.draft_texts.get(token, b""))
        for cut, index in reversed(places[-_TRIES:] if at == len(data) else []):
            if recoding.write(data[cut:], _MIDDLE)[0] == ids[index:]:
                self._marks.append(_Mark(mark.target + counts[cut], mark.draft + index, _MIDDLE))
                return
        if len(run) > _LIMIT and counts:
            cut = max(counts)
            first, rest = recoding.write(data[:cut], mark.edge)[0], recoding.write(data[cut:], _MIDDLE)[0]
            self.tokens[mark.draft :] = first + rest
            self._marks.append(_Mark(mark.target + counts[cut], mark.draft + len(first), _MIDDLE))


def _adds(prefix: Prefix, edge: int) -> bool:
    return (prefix == "always" and edge != _MIDDLE) or (prefix == "first" and edge == _START)


def _begins_character(data: bytes, at: int) -> bool:
    return 0 < at < len(data) and data[at] & 0xC0 != 0x80


def _count_same(old: Sequence[int], new: Sequence[int], start: int) -> int:
    """How many tokens from ``start`` on are the same; a block at a time, which costs a tenth of one by one."""
    stop, at = min(len(old), len(new)), start
    while at + _BLOCK <= stop and old[at : at + _BLOCK] == new[at : at + _BLOCK]:
        at += _BLOCK
    while at < stop and old[at] == new[at]:
        at += 1
    return at - start
