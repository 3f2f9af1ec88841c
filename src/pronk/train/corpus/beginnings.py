"""Beginnings of documents, which a model without a chat format continues."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from pronk import OptionError
from pronk.base import refuse
from pronk.train.corpus.collection import Exclusion
from pronk.train.corpus.questions import MIN_WORDS, excerpt
from pronk.train.corpus.sources import SourceSpec, read_source


class Beginnings:
    """Numbered beginnings: beginning ``i`` depends on the documents, the seed and ``i`` only.

    All sources are equally frequent, and a document is used again only after all others of its
    source. Raises OptionError if a source has no document of at least ``MIN_WORDS`` words.
    """

    def __init__(
        self, sources: Sequence[SourceSpec], exclude: Iterable[Path] = (), seed: int = 0
    ) -> None:
        self._seed = seed
        self._excludes = Exclusion.from_files(exclude)
        self._pools: list[list[str]] = []
        for source in sources:
            texts = (document.text for document in read_source(source))
            # A dictionary serves as a set: it drops copies, and keeps the order of the documents.
            pool = list(dict.fromkeys(text for text in texts if len(text.split()) >= MIN_WORDS))
            if not pool:
                refuse(
                    f"data {source.name!r}",
                    f"expected documents of at least {MIN_WORDS} words, found none; give others",
                    OptionError,
                )
            random.Random(f"{seed}/{source.name}").shuffle(pool)  # noqa: S311 - not for secrets
            self._pools.append(pool)

    def ask(self, number: int) -> list[str]:
        """Return beginning ``number``, as the only item of a list.

        The list is empty if the beginning is to be skipped: if it overlaps with an excluded text,
        or the document has none.
        """
        draw = random.Random(f"{self._seed}/{number}")  # noqa: S311 - not for secrets
        pool = draw.choice(self._pools)
        document = pool[number % len(pool)]
        # The model continues the text, so the end of the document stays unread.
        parts = document[: 2 * len(document) // 3].rsplit(maxsplit=1)
        if len(parts) < 2:  # a single word fills that part
            return []
        beginning = excerpt(parts[0], draw)
        return [] if self._excludes(beginning) else [beginning]
