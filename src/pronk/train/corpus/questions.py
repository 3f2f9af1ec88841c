"""Questions to a chat model, made from documents: real questions, and instructions about excerpts.

The drafter of a chat model learns from the model's own answers. These answers should be as varied
as those in later use, so the questions come from several pools:

========  ==========================================================================================
``math``  questions of documents that begin with ``Question:``
``chat``  first messages of dialogues (``User:``), and their real second messages
``shop``  first messages of customers (``Customer:``)
``topic`` an open question about the heading of a document, or an everyday topic
``fact``  a question about a person, a place, an event, a work or a thing of general knowledge
``text``  an instruction about an excerpt of a document: summarize, answer, rewrite, translate, ...
``code``  a task for a programmer, or an instruction about an excerpt of a Python file
========  ==========================================================================================
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from pronk import OptionError
from pronk.base import refuse
from pronk.train.corpus.collection import Exclusion
from pronk.train.corpus.encoder import user_turns
from pronk.train.corpus.sources import SourceSpec, read_source

# Number of dialogues of each pool in 100. The share of a pool without documents goes to the others.
WEIGHTS = {"math": 15, "chat": 18, "shop": 4, "topic": 22, "text": 22, "code": 7, "fact": 12}
# Pools that need no documents: for each, the key of its topics in questions.json.
_OWN_POOLS = {"code": "tasks", "fact": "subjects"}
_SECOND_TURN = 0.35  # fraction of dialogues in which the user asks a second question
# Range of an excerpt's length in words; the logarithm of the length is uniformly distributed.
MIN_WORDS = 30
_MAX_WORDS = 450
_MIN_DOCUMENT = 120  # minimum number of words of a document that serves for excerpts
# Fraction of everyday topics in the pool ``topic``; the other topics are headings of documents.
_EVERYDAY_SHARE = 0.5
_MAX_QUESTION = 600  # maximum number of words of a real question; longer ones are not asked
_HEADING = re.compile(r"^(?:#{1,3} |Title: )([A-Z][^\n{}<>|`0-9:]{6,60}[a-z])$", re.MULTILINE)

_PHRASES: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("questions.json").read_text(encoding="utf-8")
)


class Questions:
    """Numbered questions: question ``i`` depends on the documents, the seed and ``i`` only.

    A document is used again only after all others of its pool. Raises OptionError if the sources
    have no usable document.
    """

    def __init__(
        self, sources: Sequence[SourceSpec], exclude: Iterable[Path] = (), seed: int = 0
    ) -> None:
        self._seed = seed
        self._excludes = Exclusion.from_files(exclude)
        # Dictionaries serve as sets: they drop copies, and keep the order of the documents.
        pools: dict[str, dict[str, None]] = {name: {} for name in WEIGHTS}
        for source in sources:
            for document in read_source(source):
                _sort_in(document.text, pools, is_code=source.kind == "python")
        if not any(pools.values()):
            refuse(
                "data",
                "expected documents to ask questions about, found none; give other files",
                OptionError,
            )
        for name, phrases in _OWN_POOLS.items():
            pools[name] = dict.fromkeys(_PHRASES[phrases]) | pools[name]
        self._pools = {name: list(pool) for name, pool in pools.items() if pool}
        # Name of the pool of each dialogue, in turn; the list is repeated endlessly.
        self._order = [name for name in self._pools for _ in range(WEIGHTS[name])]
        random.Random(f"{seed}/order").shuffle(self._order)  # noqa: S311 - not for secrets
        for name, pool in self._pools.items():
            random.Random(f"{seed}/{name}").shuffle(pool)  # noqa: S311 - not for secrets

    def ask(self, number: int) -> list[str]:
        """Return the user's one or two turns of dialogue ``number``.

        The list is empty if a turn overlaps with an excluded text, so that the dialogue is skipped.
        """
        draw = random.Random(f"{self._seed}/{number}")  # noqa: S311 - not for secrets
        rounds, place = divmod(number, len(self._order))
        name = self._order[place]
        pool = self._pools[name]
        earlier = rounds * WEIGHTS[name] + self._order[:place].count(name)
        turns = _ask(name, pool[earlier % len(pool)], draw)
        if len(turns) == 1 and draw.random() < _SECOND_TURN:
            turns.append(draw.choice(_PHRASES["follow_ups"]))
        return [] if any(self._excludes(turn) for turn in turns) else turns


def _sort_in(text: str, pools: dict[str, dict[str, None]], *, is_code: bool) -> None:
    """Add a document to all pools for which it is suitable.

    ``is_code`` says whether the document is a Python file.
    """
    if not text.strip():  # a Python file that had nothing but a licence notice
        return
    if is_code:
        pools["code"][text] = None
        return
    labels = {"Question: ": "math", "User: ": "chat", "Customer: ": "shop"}
    label = next((label for label in labels if text.startswith(label)), None)
    if label is not None:
        pools[labels[label]][text] = None
        return
    pools["topic"].update(dict.fromkeys(heading.strip() for heading in _HEADING.findall(text)))
    if len(text.split()) >= _MIN_DOCUMENT:
        pools["text"][text] = None


def _ask(pool: str, document: str, draw: random.Random) -> list[str]:
    """Return the user's turns of a dialogue about ``document``, which is from the pool ``pool``.

    ``draw`` chooses the instruction and the excerpt.
    """
    if pool == "topic":
        is_everyday = draw.random() < _EVERYDAY_SHARE
        topic = draw.choice(_PHRASES["everyday"]) if is_everyday else document
        return [draw.choice(_PHRASES["topic"]).format(topic)]
    if pool == "fact":
        return [draw.choice(_PHRASES["fact"]).format(document)]
    if document in _PHRASES["tasks"]:
        phrase = draw.choice(_PHRASES["program"])
        language = draw.choice(_PHRASES["languages"])
        return [phrase.format(document, language)]
    if pool in ("text", "code"):
        phrase = draw.choice(_PHRASES[pool])
        return [phrase.format(excerpt(document, draw))]
    turns = user_turns(document)
    short = [turn for turn in turns if turn and len(turn.split()) <= _MAX_QUESTION]
    return short[: 2 if draw.random() < _SECOND_TURN else 1]


def excerpt(text: str, draw: random.Random) -> str:
    """Return an excerpt of whole lines, from a random line on.

    The logarithm of its number of words is uniformly distributed.
    """
    words = round(MIN_WORDS * (_MAX_WORDS / MIN_WORDS) ** draw.random())
    lines = text.splitlines()
    start = draw.randrange(len(lines)) if draw.random() < 0.7 else 0
    if sum(len(line.split()) for line in lines[start:]) < min(words, MIN_WORDS):
        start = 0
    taken: list[str] = []
    for line in lines[start:]:
        # A line may be a paragraph with more words than the excerpt may still have; cut it between
        # words.
        parts = line.split(" ")
        taken.append(" ".join(parts[:words]))
        words -= len(line.split())
        if words <= 0:
            break
    return "\n".join(taken).strip()
