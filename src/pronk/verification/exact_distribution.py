"""The exact distribution of the first tokens after a prompt, and prompts that drafters can continue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from pronk.verification.plain_decoding import rounding, score_next
from pronk.verification.prompts import NamedPrompt

# Options with which the tested strings are sampled. With a small top_k, both acceptance and rejection are frequent.
DRAW = SamplingParams(temperature=1.0, top_k=4, ignore_eos=True)

NUM_TESTED_TOKENS = 3  # length of a string in tokens
# Number of likeliest tokens per position that cells distinguish. 15 cells: 1 + 2 + 4 end with OTHER, 8 have 3 letters.
LETTERS = 2
OTHER = -1  # last element of a cell: any token but the two likeliest, with any tokens after it

# Parts of the extended prompt … X abcd X efgh X ijkl X mnop X, see `choose_extended`.
_REPEATED = 12  # tokens in X, the end of the original prompt
_ROUNDS = 4  # number of continuations (abcd, efgh …), each followed by X
_CONTINUED = 3  # tokens in bcd: sampled after the first token a, which _extend chooses
_CERTAIN = 0.95  # skip a prompt with a cell of at least this probability: nearly all its strings would be equal

Cell = tuple[int, ...]


@dataclass(frozen=True)
class ExactDistribution:
    """Probabilities of the strings that :data:`DRAW` samples after a prompt.

    A cell is a set of strings: ``(a, b, c)``, ``(a, b, OTHER)``, ``(a, OTHER)`` or ``(OTHER,)``. Each letter is one of
    the two likeliest tokens after the tokens before it.
    """

    prompt: NamedPrompt
    cells: dict[Cell, float]  # cell to probability
    possible: dict[Cell, frozenset[int]]  # prefix of letters (0 to 2 tokens) to the tokens that may follow it
    # Measure of how well strings reveal a wrong temperature: the expected variance of the scaled logits, summed over
    # positions (Fisher information about the inverse temperature; 0 for a certain or a uniform distribution).
    information: float = 0.0

    @classmethod
    def after(cls, llm: LLM, prompt: NamedPrompt) -> ExactDistribution:
        """Compute the distribution of strings after ``prompt`` from logits, without the sampler.

        A token's probability is softmax(logits / temperature) over the ``top_k`` largest logits, in double precision.
        If ``llm`` is not exact, tokens that rounding may put among the ``top_k`` count as possible, too.
        """
        cells: dict[Cell, float] = {}
        possible: dict[Cell, frozenset[int]] = {}
        information = 0.0
        prefixes: dict[Cell, float] = {(): 1.0}
        for _ in range(NUM_TESTED_TOKENS):
            scored = score_next(llm, prompt.ids, list(prefixes), DRAW)
            longer: dict[Cell, float] = {}
            for (prefix, mass), recorder in zip(prefixes.items(), scored, strict=True):
                logits = recorder.logits.astype(np.float64)
                likely = np.argsort(-logits, kind="stable")[: DRAW.top_k]
                scaled = logits[likely] / DRAW.temperature
                probs = np.exp(scaled - scaled[0])
                probs /= probs.sum()
                information += mass * float(probs @ (scaled - probs @ scaled) ** 2)
                letter_probs = probs[:LETTERS].tolist()
                # Factor 2: rounding may raise the token's logit and lower the smallest of the top k.
                slack = 0.0 if llm.exact else 2 * rounding(llm, float(np.abs(logits).max()))
                possible[prefix] = frozenset(np.flatnonzero(logits >= logits[likely[-1]] - slack).tolist())
                letters = likely[:LETTERS].tolist()
                longer |= {(*prefix, token): mass * p for token, p in zip(letters, letter_probs, strict=True)}
                cells[*prefix, OTHER] = mass * (1.0 - sum(letter_probs))
            prefixes = longer
        return cls(prompt, cells | prefixes, possible, information)

    def cell(self, string: Sequence[int]) -> Cell | None:
        """Return the cell that contains ``string`` (``NUM_TESTED_TOKENS`` tokens); ``None``: probability 0."""
        cell: Cell = ()
        for token in string:
            if token not in self.possible[cell]:
                return None
            if (*cell, token) not in self.possible and (*cell, token) not in self.cells:
                return *cell, OTHER
            cell = (*cell, token)
        return cell


def choose_extended(llm: LLM, prompts: Sequence[NamedPrompt]) -> ExactDistribution | None:
    """Extend each prompt; return the distribution after the most informative one; ``None`` if none is.

    A prompt ``… X`` becomes ``… X abcd X efgh X ijkl X mnop X``. Each continuation of ``X`` begins with another of the
    likeliest tokens and goes on with tokens sampled by plain decoding. Drafters that copy from the text can therefore
    propose most tokens with which a string begins.
    """
    extended = (_extend(llm, prompt) for prompt in prompts)
    candidates = [ExactDistribution.after(llm, prompt) for prompt in extended if prompt is not None]
    uncertain = [exact for exact in candidates if max(exact.cells.values()) < _CERTAIN]
    return max(uncertain, key=lambda exact: exact.information, default=None)


def _extend(llm: LLM, prompt: NamedPrompt) -> NamedPrompt | None:
    repeated = prompt.ids[-_REPEATED:]
    text, used = list(prompt.ids), set[int]()
    for round_ in range(_ROUNDS):
        if len(text) + _CONTINUED + 1 + len(repeated) + NUM_TESTED_TOKENS + 1 > llm.config.context:
            break
        (recorder,) = score_next(llm, text, [[]], DRAW)
        likely = np.argsort(-recorder.logits, kind="stable")[:_ROUNDS].tolist()
        first = next((token for token in likely if token not in used), likely[0])
        used.add(first)
        params = SamplingParams(**DRAW.to_dict() | {"max_tokens": _CONTINUED, "seed": round_})
        done = llm.generate([*text, first], params, drafter="autoregressive")
        text += [first, *done.token_ids, *repeated]
    if len(text) + NUM_TESTED_TOKENS + 1 > llm.config.context:
        return None
    return NamedPrompt(prompt.id, text)
