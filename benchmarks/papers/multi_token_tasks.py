"""Synthetic tasks of *Multi-token Prediction* (Gloeckle et al. 2024, sections 4.1 and 4.2).

A task generates endless text by code, and measures a model on a fixed test set.

``Stories`` differs from the paper's data: the stories come from a grammar of twelve short sentences
instead of a language model, and a name always has two tokens. A token in seven is the second token
of a known name. In training, a fraction ``new_names`` of the stories has names that are random
pairs of tokens; in the other stories the first token of a name determines the second one, so that a
bigram suffices. All stories of the test set have random pairs. The paper's test names have tokens
that the training lacks.

``Polynomials`` is arithmetic in F7[X]/(X^terms) with negation, addition, multiplication and
composition. The paper has five terms and 26 billion tokens of training text; with two terms, and
one or two operations per expression, a small model learns from less than a million tokens.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pronk.train.attention import dense_logits
from pronk.train.losses import autocast
from pronk.train.modules.decoder import DecoderModule

__all__ = ["IGNORED", "Polynomials", "Stories", "Task", "Text"]

IGNORED = -100  # target without a loss, as in torch
TEST_SEED = "test"  # differs from the seeds of training texts, which end in a number


@dataclass(frozen=True)
class Text:
    """One text of a task."""

    ids: list[int]  # token ids
    marks: list[int]  # positions of the tokens to measure
    group: int = 0  # row of the table


class Task(ABC):
    """Endless training texts and a test set, with the interface of ``pronk.train.batches.Batches``.

    Attributes:
        length: maximum number of tokens of a training text.
        seed: seed of the training texts.
        whole: whether a test text counts as correct only if all its marked tokens are correct.
        marked_only: whether only marked tokens have a loss.
    """

    length: int
    seed: int
    whole: bool
    marked_only: bool

    @property
    @abstractmethod
    def words(self) -> list[str]:
        """The vocabulary; a token id is an index in this list."""

    @abstractmethod
    def make(self, generator: random.Random, *, test: bool, group: int | None = None) -> Text:
        """Return a random text of the training or test set, for the row ``group`` of the table."""

    @property
    @abstractmethod
    def groups(self) -> range:
        """Numbers of the rows of the table."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Values that determine the training text."""

    def batch(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of ``count`` texts from number ``start`` on.

        Both are int64 ``[count, length]``. Targets without a loss are ``IGNORED``: those after the
        end of the text and, with ``marked_only``, all that are not marked.
        """
        rows = torch.zeros(count, self.length + 1, dtype=torch.int64)
        targets = torch.full((count, self.length), IGNORED)
        for row, number in enumerate(range(start, start + count)):
            text = self.make(random.Random(f"{self.seed}/{number}"), test=False)
            ids = torch.tensor(text.ids[: self.length + 1])
            rows[row, : len(ids)] = ids
            places = torch.tensor(text.marks) if self.marked_only else torch.arange(1, len(ids))
            places = places[places < len(ids)]
            targets[row, places - 1] = ids[places]
        return rows[:, :-1], targets

    def test_texts(self, count: int) -> Iterator[Text]:
        """Yield ``count`` test texts of each group, which are equal for all models."""
        for group in self.groups:
            generator = random.Random(f"{TEST_SEED}/{group}")
            for _ in range(count):
                yield self.make(generator, test=True, group=group)

    @torch.no_grad()
    def measure(self, decoder: DecoderModule, count: int, rows: int = 64) -> dict[int, float]:
        """Return the accuracy in each group, from ``count`` test texts per group.

        The input are the tokens of the text itself. Greedy decoding would therefore write all
        marked tokens exactly if the most likely token is right at every mark.
        """
        right: dict[int, list[float]] = {group: [] for group in self.groups}
        texts = list(self.test_texts(count))
        for first in range(0, len(texts), rows):
            part = texts[first : first + rows]
            width = max(len(text.ids) for text in part)
            padded = [text.ids + [0] * (width - len(text.ids)) for text in part]
            ids = torch.tensor(padded, device=decoder.embedding.device)
            with autocast(ids.device):
                likeliest = dense_logits(decoder, ids[:, :-1]).argmax(-1).view(len(part), -1)
            hits = (likeliest == ids[:, 1:]).cpu()
            for text, row in zip(part, hits, strict=True):
                found = [bool(row[mark - 1]) for mark in text.marks]
                if self.whole:
                    found = [all(found)]
                right[text.group] += map(float, found)
        return {group: sum(found) / len(found) for group, found in right.items() if found}


_FIRST = [f"{a}{b}" for a in "BDKLMNPR" for b in "ae"]
_SECOND = [f"{a}{b}" for a in "bdklmnpr" for b in ("by", "co")]
# One animal for each first token of a name.
_ANIMALS = "cat dog bear fox hare mouse frog duck goat wolf lamb pig hen owl crow mole".split()
_NOUNS = "ball boat kite cake tree flower book hat box star shell stone drum fish bell cup".split()
_PLACES = "park garden house forest beach school kitchen river hill market farm barn".split()
_ADJECTIVES = "big small red blue green old new shiny soft funny lost little happy warm".split()
_FEELINGS = "happy sad tired glad proud scared excited sorry".split()
# Sentences with slots: two characters P and Q, the animal E of the character before it, a noun N, a
# place L, an adjective A and a feeling F.
_TEMPLATES = (
    "P E saw Q .",
    "P helped Q E .",
    "P E was F .",
    "Q E ran to P .",
    "P and Q E played .",
    "then P E found a A N .",
    "P asked Q for the N .",
    "P E and Q went to the L .",
    "P gave Q the N .",
    '" thank you , Q E , " said P .',
    "the A N was for Q .",
    "in the L P met Q E .",
)
_SENTENCES = [line.split() for line in _TEMPLATES]


@dataclass(frozen=True)
class Stories(Task):
    """Children's stories with characters whose names have two tokens (see the module docstring)."""

    length: int = 56
    seed: int = 0
    new_names: float = 0.1
    sentences: int = 6
    characters: int = 3

    whole = False
    marked_only = False

    @cached_property
    def words(self) -> list[str]:
        """End of text, first tokens of names, second tokens of names, and all other words."""
        slots = {"P", "Q", "E", "N", "L", "A", "F"}
        rest = {word for line in _SENTENCES for word in line if word not in slots}
        rest.update(_ANIMALS, _NOUNS, _PLACES, _ADJECTIVES, _FEELINGS)
        return ["<end>", *_FIRST, *_SECOND, *sorted(rest)]

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    @property
    def groups(self) -> range:
        """The only row of the table."""
        return range(1)

    @property
    def identity(self) -> dict[str, Any]:
        """Values that determine the training text."""
        return {"task": "stories", "data": [self.length, self.seed, self.new_names, self.sentences]}

    def make(self, generator: random.Random, *, test: bool, group: int | None = None) -> Text:  # noqa: ARG002
        """Return a story; the second token of a name is marked, except at its first mention."""
        first = generator.sample(range(len(_FIRST)), self.characters)
        second = first
        if test or generator.random() < self.new_names:
            second = [generator.randrange(len(_SECOND)) for _ in first]
        names = [(_FIRST[a], _SECOND[b]) for a, b in zip(first, second, strict=True)]
        fills = {
            "N": generator.sample(_NOUNS, 2),
            "L": generator.sample(_PLACES, 2),
            "A": _ADJECTIVES,
            "F": _FEELINGS,
        }
        ids = list[int]()
        marks = list[int]()
        seen = set[tuple[str, str]]()
        for line in generator.choices(_SENTENCES, k=self.sentences):
            roles = dict(zip("PQ", generator.sample(names, 2), strict=True))
            for word in line:
                if word in roles:
                    name = roles[word]
                    ids += [self._ids[part] for part in name]
                    if name in seen:
                        marks.append(len(ids) - 1)
                    seen.add(name)
                    continue
                written = word
                if word == "E":
                    written = _ANIMALS[_FIRST.index(name[0])]
                elif word in fills:
                    written = generator.choice(fills[word])
                ids.append(self._ids[written])
        return Text([*ids, 0], marks)


Polynomial = tuple[int, ...]


@dataclass(frozen=True)
class Polynomials(Task):
    """Expressions over polynomials modulo 7 and X^terms, with the result as answer.

    A text is ``( 1 2 * ( - 3 4 ) ) = 4 2``, with coefficients from X^0 on.
    """

    seed: int = 0
    terms: int = 2
    in_domain: int = 2  # maximum number of operations of a training text
    out_of_domain: int = 6  # maximum number of operations of a test text
    pauses: int = 0  # number of pause tokens before the equals sign (figure S15)

    whole = True
    marked_only = True
    modulus = 7

    @property
    def length(self) -> int:  # type: ignore[override] - a value of the task, as in the base class
        """Number of input tokens of the longest training text."""
        # Each operation adds an operand and three words.
        question = self.terms + self.in_domain * (self.terms + 3) + self.pauses + 1
        return question + self.terms

    @property
    def words(self) -> list[str]:
        """End of text, digits, parentheses, operators (``o``: composition), equals sign, pause."""
        digits = map(str, range(self.modulus))
        return ["<end>", *digits, "(", ")", "-", "+", "*", "o", "=", "<pause>"]

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    @property
    def groups(self) -> range:
        """Numbers of operations, each a row of the table."""
        return range(1, self.out_of_domain + 1)

    @property
    def identity(self) -> dict[str, Any]:
        """Values that determine the training text."""
        data = [self.length, self.seed, self.terms, self.in_domain, self.pauses]
        return {"task": "polynomials", "data": data}

    def make(self, generator: random.Random, *, test: bool, group: int | None = None) -> Text:  # noqa: ARG002
        """Return a text with ``group`` operations, by default a random number of them.

        The tokens of the answer are marked.
        """
        count = generator.randint(1, self.in_domain) if group is None else group
        words, value = self.expression(generator, count)
        question = [*words, *["<pause>"] * self.pauses, "="]
        line = [*question, *map(str, value), "<end>"]
        marks = range(len(question), len(question) + self.terms)
        return Text([self._ids[word] for word in line], list(marks), count)

    def expression(self, generator: random.Random, operations: int) -> tuple[list[str], Polynomial]:
        """Return the words and the value of a random expression."""
        if not operations:
            operand = tuple(generator.randrange(self.modulus) for _ in range(self.terms))
            return [str(value) for value in operand], operand
        operator = generator.choice("-+*o")
        if operator == "-":
            words, value = self.expression(generator, operations - 1)
            return ["(", "-", *words, ")"], tuple(-each % self.modulus for each in value)
        left = generator.randrange(operations)
        first, f = self.expression(generator, left)
        second, g = self.expression(generator, operations - 1 - left)
        return ["(", *first, operator, *second, ")"], self.apply(operator, f, g)

    def apply(self, operator: str, f: Polynomial, g: Polynomial) -> Polynomial:
        """Return ``f + g``, ``f * g``, or ``f(g)`` for the operator ``o``, modulo 7 and X^terms."""
        if operator == "+":
            return tuple((a + b) % self.modulus for a, b in zip(f, g, strict=True))
        if operator == "*":
            product = [0] * self.terms
            for i, a in enumerate(f):
                for j, b in enumerate(g[: self.terms - i]):
                    product[i + j] += a * b
            return tuple(value % self.modulus for value in product)
        value: Polynomial = (0,) * self.terms
        for coefficient in reversed(f):  # Horner's rule
            value = self.apply("*", value, g)
            value = ((value[0] + coefficient) % self.modulus, *value[1:])
        return value
