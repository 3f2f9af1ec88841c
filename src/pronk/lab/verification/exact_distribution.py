"""Exact probabilities of sampled strings of several tokens, computed without the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pronk import LLM, SamplingParams
from pronk.base.arrays import Array
from pronk.lab.verification.plain_decoding import rounding, score_next
from pronk.lab.verification.prompts import NamedPrompt

# Options with which the tested strings are sampled. With a small top_k, both acceptance and
# rejection are frequent.
DRAW = SamplingParams(temperature=1.0, top_k=4, ignore_eos=True)

NUM_TESTED_TOKENS = 3  # length of a string in tokens
# Number of letters at a position: the likeliest tokens, which cells tell apart. All other tokens
# are OTHER. There are 15 cells (see ExactDistribution): 1 + 2 + 4 end with OTHER, 8 have 3 letters.
LETTERS = 2
OTHER = -1  # last element of a cell: any token but the two likeliest, with any tokens after it

# Parts of the extended prompt … X abcd X efgh X ijkl X mnop X, see `choose_extended`.
_REPEATED = 12  # tokens in X, the end of the original prompt
_ROUNDS = 4  # number of continuations (abcd, efgh …), each followed by X
_CONTINUED = 3  # tokens in bcd: sampled after the first token a, which _extend chooses
# A prompt with a cell of at least this probability is skipped: nearly all strings would be equal.
_CERTAIN = 0.95

Cell = tuple[int, ...]


@dataclass(frozen=True)
class ExactDistribution:
    """Probabilities of the strings that :data:`DRAW` samples after a prompt.

    A cell is a set of strings: ``(a, b, c)``, ``(a, b, OTHER)``, ``(a, OTHER)`` or ``(OTHER,)``.
    Each letter is one of the two likeliest tokens after the tokens before it.
    """

    prompt: NamedPrompt
    cells: dict[Cell, float]  # probability of each cell, a set of strings
    # For each prefix of 0 to 2 letters: the tokens that DRAW can sample after it.
    possible: dict[Cell, frozenset[int]]
    # How well strings reveal a wrong temperature: the expected variance of the scaled logits,
    # summed over positions. This is the Fisher information about the inverse temperature, 0 for a
    # certain or a uniform distribution.
    information: float = 0.0

    @classmethod
    def after(cls, llm: LLM, prompt: NamedPrompt) -> ExactDistribution:
        """Compute the distribution of strings after ``prompt`` from logits, without the sampler.

        A token's probability is softmax(logits / temperature) over the ``top_k`` largest logits, in
        double precision. If ``llm`` is not exact, tokens that rounding may put among the ``top_k``
        count as possible, too.
        """
        cells = dict[Cell, float]()
        possible = dict[Cell, frozenset[int]]()
        information = 0.0
        prefixes: dict[Cell, float] = {(): 1.0}
        for _ in range(NUM_TESTED_TOKENS):
            scored = score_next(llm, prompt.ids, list(prefixes), DRAW)
            longer = dict[Cell, float]()
            for (prefix, mass), recorder in zip(prefixes.items(), scored, strict=True):
                next_token = _NextToken.of_logits(llm, recorder.logits)
                possible[prefix] = next_token.possible
                information += mass * next_token.variance
                for token, prob in next_token.letters.items():
                    longer[*prefix, token] = mass * prob
                cells[*prefix, OTHER] = mass * (1.0 - sum(next_token.letters.values()))
            prefixes = longer
        return cls(prompt, cells | prefixes, possible, information)

    def cell(self, string: Sequence[int]) -> Cell | None:
        """Return the cell of a string of ``NUM_TESTED_TOKENS`` tokens; ``None``: probability 0."""
        cell: Cell = ()
        for token in string:
            if token not in self.possible[cell]:
                return None
            if (*cell, token) not in self.possible and (*cell, token) not in self.cells:
                return *cell, OTHER
            cell = (*cell, token)
        return cell


class _NextToken(NamedTuple):
    """Distribution of the token that :data:`DRAW` samples after a text.

    Attributes:
        letters: probabilities of the ``LETTERS`` likeliest tokens, the likeliest first.
        possible: tokens that can be sampled, those included that rounding may make possible.
        variance: expected variance of the scaled logits.
    """

    letters: dict[int, float]
    possible: frozenset[int]
    variance: float

    @classmethod
    def of_logits(cls, llm: LLM, logits: Array) -> _NextToken:
        """Compute the distribution from ``logits``, ``[vocab]``."""
        logits = logits.astype(np.float64)
        likely = np.argsort(-logits, kind="stable")[: DRAW.top_k]
        scaled = logits[likely] / DRAW.temperature
        probs = np.exp(scaled - scaled[0])
        probs /= probs.sum()
        variance = float(probs @ (scaled - probs @ scaled) ** 2)
        letters = likely[:LETTERS].tolist()
        letter_probs = probs[:LETTERS].tolist()
        # Rounding may raise the token's logit and lower the smallest of the top k: twice the error
        # of one logit.
        slack = 0.0 if llm.exact else 2 * rounding(llm, float(np.abs(logits).max()))
        possible = np.flatnonzero(logits >= logits[likely[-1]] - slack)
        return cls(
            dict(zip(letters, letter_probs, strict=True)), frozenset(possible.tolist()), variance
        )


def choose_extended(llm: LLM, prompts: Sequence[NamedPrompt]) -> ExactDistribution | None:
    """Extend all prompts, and return the distribution after the most informative one.

    ``None`` if no prompt can be extended, or if after each of them the strings are nearly certain.

    A prompt ``… X`` becomes ``… X abcd X efgh X ijkl X mnop X``. Each continuation of ``X`` begins
    with another of the likeliest tokens and goes on with tokens sampled by plain decoding. Drafters
    that copy from the text can therefore propose most tokens with which a string begins.
    """
    extended = (_extend(llm, prompt) for prompt in prompts)
    candidates = [ExactDistribution.after(llm, prompt) for prompt in extended if prompt is not None]
    uncertain = [exact for exact in candidates if max(exact.cells.values()) < _CERTAIN]
    return max(uncertain, key=lambda exact: exact.information, default=None)


def _extend(llm: LLM, prompt: NamedPrompt) -> NamedPrompt | None:
    repeated = prompt.ids[-_REPEATED:]
    text = list(prompt.ids)
    used = set[int]()
    context = llm.config.context
    num_drawn = NUM_TESTED_TOKENS + 1
    num_added = 1 + _CONTINUED + len(repeated)
    for round_ in range(_ROUNDS):
        if len(text) + num_added + num_drawn > context:
            break
        (recorder,) = score_next(llm, text, [[]], DRAW)
        likely = np.argsort(-recorder.logits, kind="stable")[:_ROUNDS].tolist()
        first = next((token for token in likely if token not in used), likely[0])
        used.add(first)
        params = SamplingParams(**DRAW.to_dict() | {"max_tokens": _CONTINUED, "seed": round_})
        done = llm.generate([*text, first], params, drafter="autoregressive")
        text += [first, *done.token_ids, *repeated]
    if len(text) + num_drawn > context:
        return None
    return NamedPrompt(prompt.id, text)
