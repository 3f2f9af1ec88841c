"""Datastores for tests, and a plain search in their documents."""

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from drafting.helpers import CHECKPOINTS
from pronk.lab.drafters.datastore.builder import write_datastore
from pronk.lab.drafters.datastore.reader import Datastore

VOCABULARY = "0123456789abcdef" * 2

Documents = Sequence[Sequence[int]]


def write(folder: Path, documents: Documents, *, vocab_size: int = 4096, **options: Any) -> Path:
    """Write a datastore of ``documents`` to a new folder."""
    folder.mkdir(parents=True)
    write_datastore(folder, documents, vocabulary=VOCABULARY, vocab_size=vocab_size, **options)
    return folder


def make(folder: Path, documents: Documents, **options: Any) -> Datastore:
    """Write a datastore and open it."""
    return Datastore.open(write(folder, documents, **options))


def random_documents(seed: int, count: int, longest: int, letters: int) -> list[list[int]]:
    """Return documents of few letters, which repeat much."""
    dice = random.Random(seed)
    return [
        [dice.randrange(letters) for _ in range(dice.randint(1, longest))] for _ in range(count)
    ]


def followers(documents: Documents, phrase: Sequence[int]) -> list[int]:
    """Return the token after each occurrence of a phrase, or -1 at the end of a document."""
    size = len(phrase)
    found = list[int]()
    for document in documents:
        for at in range(len(document) - size + 1):
            if list(document[at : at + size]) == list(phrase):
                found.append(document[at + size] if at + size < len(document) else -1)
    return found


@cache
def conformance_spec() -> str:
    """Return ``retrieval`` over random documents of 4 and of 131 tokens, as in the tests of all
    drafters.
    """
    documents = [*random_documents(0, 60, 60, 4), *random_documents(1, 60, 60, 131)]
    dice = random.Random(2)
    documents += [[dice.choice((3, 5)) for _ in range(60)] for _ in range(20)]
    folder = write(CHECKPOINTS / "store", documents)
    return f"retrieval(datastore={str(folder)!r}, min_match=1)"
