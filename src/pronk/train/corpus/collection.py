"""Documents of several sources: without copies, some of them held out, and as token ids."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pronk import OptionError
from pronk.base import read_json_lines, refuse
from pronk.train.corpus.encoder import Encoder, parse_dialogue, token_dtype
from pronk.train.corpus.sources import SourceSpec, read_source

# A document is excluded if it shares this number of successive words with an excluded text.
RUN = 13
# Number of words in a group. Any 13 successive words contain a whole group of 7 that starts at a
# multiple of 7 in the document. Looking up only these groups is therefore enough, at a seventh of
# the cost.
_GROUP = (RUN + 1) // 2
_WORD = re.compile(r"\w+")
_HOLD_OUT = 100  # one document in 100 is held out for validation
# Minimum number of characters that are held out of the longest document if no whole document is
# held out; but at most 1/4 of the document.
_HELD_OUT_CHARACTERS = 4000
_CHUNK = 64  # number of documents that are tokenized together


class Exclusion:
    """Filter for documents that share 13 successive words with one of ``texts``.

    It keeps prompts of benchmarks out of the training text. Case and punctuation do not count.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._groups: set[str] = set()
        self._runs: set[str] = set()
        for text in texts:
            words = _WORD.findall(text.lower())
            self._groups.update(_join(words, i, _GROUP) for i in range(len(words) - _GROUP + 1))
            self._runs.update(_join(words, i, RUN) for i in range(len(words) - RUN + 1))

    @classmethod
    def from_files(cls, files: Iterable[Path]) -> Exclusion:
        """Return a filter for all strings in JSONL files: prompts of benchmarks, solutions, …."""
        rows = (row for file in files for _, row in read_json_lines(file))
        return cls(text for row in rows for text in _strings(row))

    def __call__(self, text: str) -> bool:
        """Return whether ``text`` shares 13 successive words with an excluded text."""
        if not self._runs:
            return False
        words = _WORD.findall(text.lower())
        for i in range(0, len(words) - _GROUP + 1, _GROUP):
            if _join(words, i, _GROUP) in self._groups:
                first = max(0, i - (RUN - _GROUP))
                last = min(i, len(words) - RUN)
                if any(_join(words, j, RUN) in self._runs for j in range(first, last + 1)):
                    return True
        return False


def _join(words: list[str], start: int, count: int) -> str:
    return " ".join(words[start : start + count])


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, without the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


@dataclass
class OriginRecord:
    """Amount of text from one origin, and its licence, for the model card."""

    source: str  # name of the source that the user gave
    origin: str
    license: str
    documents: int = 0  # number of documents
    bytes: int = 0  # their size in UTF-8


@dataclass
class Pool:
    """Documents of one source; or the dialogues of all sources, which have a share of their own."""

    name: str
    weight: float  # fraction of the training text, 0..1
    documents: list[str] = field(default_factory=list)  # documents for training
    # documents for validation, which are not trained on
    held_out: list[str] = field(default_factory=list)


@dataclass
class Collection:
    """Documents of all sources, and the numbers about them in the model card."""

    pools: list[Pool]
    origins: list[OriginRecord]
    duplicates: int = 0  # number of documents left out as exact copies of others
    excluded: int = 0  # number of documents left out because they share text with excluded prompts


def collect(
    sources: Sequence[SourceSpec], *, dialogues: float = 0.0, exclude: Iterable[Path] = ()
) -> Collection:
    """Read all sources, without exact copies and excluded documents.

    One document in 100 is held out. If no document of a source is held out, the end of its longest
    document is.

    Args:
        sources: sources of text, with their weights.
        dialogues: fraction of the text that the dialogues of all sources make up, from 0 to below
            1. With 0, dialogues stay with the other documents of their source.
        exclude: JSONL files of texts; documents that share 13 successive words with one of these
            are left out.

    Raises OptionError if a source cannot be read, or leaves no text.
    """
    total = sum(spec.weight for spec in sources)
    pools = [Pool(spec.name, (1 - dialogues) * spec.weight / total) for spec in sources]
    dialogue_pool = Pool("dialogues", dialogues)
    result = Collection([*pools, dialogue_pool], [])
    unwanted = Exclusion.from_files(exclude)
    seen: set[bytes] = set()
    for spec, pool in zip(sources, pools, strict=True):
        _fill(result, spec, pool, dialogue_pool, unwanted, seen)
        _hold_some_out(pool)
        if not pool.documents and not (dialogues and dialogue_pool.documents):
            refuse(f"source {spec.name!r}", "expected text to train on, found none", OptionError)
    result.pools = [pool for pool in result.pools if pool.documents and pool.weight]
    return result


def _fill(
    result: Collection,
    spec: SourceSpec,
    pool: Pool,
    dialogues: Pool,
    unwanted: Callable[[str], bool],
    seen: set[bytes],
) -> None:
    """Read a source; add its dialogues to ``dialogues``, and its other documents to ``pool``.

    Args:
        result: collection whose numbers are updated.
        spec: the source.
        pool: documents of this source.
        dialogues: dialogues of all sources.
        unwanted: returns whether a document is left out.
        seen: hashes of the documents so far; a document whose hash is among them is a copy.
    """
    origins: dict[tuple[str, str], OriginRecord] = {}
    for document in read_source(spec):
        digest = hashlib.blake2b(document.text.encode(), digest_size=16).digest()
        if digest in seen:
            result.duplicates += 1
            continue
        seen.add(digest)
        if not document.text.strip() or unwanted(document.text):
            result.excluded += 1
            continue
        key = (document.origin, document.license)
        record = origins.setdefault(key, OriginRecord(spec.name, *key))
        record.documents += 1
        record.bytes += len(document.text.encode())
        target = dialogues if dialogues.weight and parse_dialogue(document.text) else pool
        is_held_out = int.from_bytes(digest[:4], "big") % _HOLD_OUT == 0
        documents = target.held_out if is_held_out else target.documents
        documents.append(document.text)
    result.origins += sorted(origins.values(), key=lambda record: -record.bytes)


def _hold_some_out(pool: Pool) -> None:
    """Ensure that a pool has training text and held-out text, even if its documents are few."""
    documents = pool.documents
    held_out = pool.held_out
    if not documents:
        documents += held_out
        held_out.clear()
    if documents and not held_out:
        longest = max(range(len(documents)), key=lambda i: len(documents[i]))
        text = documents[longest]
        size = min(max(len(text) // _HOLD_OUT, _HELD_OUT_CHARACTERS), len(text) // 4)
        documents[longest] = text[: len(text) - size]
        rest = text[len(text) - size :]
        if rest.strip():
            held_out.append(rest)


def pack(
    encoder: Encoder,
    texts: Iterator[str],
    tokens: int,
    enough: Callable[[int], bool] = lambda _: False,
) -> np.ndarray[tuple[int], np.dtype[np.integer[Any]]]:
    """Return the token ids of ``texts``, with an end-of-text token after each text.

    The result ends after ``tokens`` ids, or when ``enough`` returns True, which is called with the
    number of ids so far.
    """
    packed = np.empty(tokens, dtype=token_dtype(encoder.vocab_size))
    size = 0
    while size < tokens and not enough(size):
        chunk = [text for text, _ in zip(texts, range(_CHUNK), strict=False)]
        if not chunk:
            break
        for ids in encoder.encode(chunk):
            document = [*ids, encoder.end_id][: tokens - size]
            packed[size : size + len(document)] = document
            size += len(document)
    return packed[:size]
