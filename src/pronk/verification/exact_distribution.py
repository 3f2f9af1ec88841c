"""The exact distribution of the first tokens after a prompt, and prompts that help drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from pronk.verification.plain_decoding import rounding, score_next
from pronk.verification.prompts import NamedPrompt

__all__ = ["DRAW", "NUM_TESTED_TOKENS", "OTHER", "ExactDistribution", "stage"]

# A small top_k, so that draft tokens are often accepted and often rejected.
DRAW = SamplingParams(temperature=1.0, top_k=4, ignore_eos=True)

NUM_TESTED_TOKENS = 3  # tokens per string
LETTERS = 2  # number of likeliest tokens per position that cells distinguish: 15 cells in all
OTHER = -1  # stands for any other token, and ends a cell

# Extension of a prompt, see `stage`.
_REPEATED = 12  # last tokens of the prompt that are repeated
_ROUNDS = 4  # number of repetitions
_CONTINUED = 3  # tokens between repetitions, after a chosen first token

_CERTAIN = 0.95  # probability of a single cell from which on the test has too little power

Cell = tuple[int, ...]


@dataclass(frozen=True)
class ExactDistribution:
    """Probabilities of the strings that :data:`DRAW` samples after a prompt.

    Cells are ``(a, b, c)``, ``(a, b, OTHER)``, ``(a, OTHER)`` and ``(OTHER,)``, where each letter is one of the two
    likeliest tokens after the tokens before it.
    """

    prompt: NamedPrompt
    cells: dict[Cell, float]  # probabilities; the sum is 1
    possible: dict[Cell, frozenset[int]]  # token ids of probability above 0 after each beginning of a cell
    # Power to detect a wrong temperature: the variance of the scaled logits, summed over positions. This is the Fisher
    # information about the inverse temperature; it is 0 for a certain or a uniform distribution.
    information: float = 0.0

    @classmethod
    def after(cls, llm: LLM, prompt: NamedPrompt) -> ExactDistribution:
        """Compute the distribution from the logits of plain forward passes, without the sampler.

        It is the softmax of the ``top_k`` largest logits over the temperature, in double precision. If logits are not
        exact, rounding may put another token among the ``top_k``.
        """
        cells: dict[Cell, float] = {}
        possible: dict[Cell, frozenset[int]] = {}
        information = 0.0
        prefixes: dict[Cell, float] = {(): 1.0}
        for _ in range(NUM_TESTED_TOKENS):
            scored = score_next(llm, prompt.ids, list(prefixes), DRAW)
            longer: dict[Cell, float] = {}
            for (prefix, mass), recorder in zip(prefixes.items(), scored, strict=True):
                logits = recorder.logits.double()
                top = logits.topk(min(DRAW.top_k, len(logits)))
                scaled = top.values / DRAW.temperature
                likely = scaled.softmax(0)
                information += mass * float(likely @ (scaled - likely @ scaled) ** 2)
                probs = likely[:LETTERS].tolist()
                # Within the rounding error, any token that ties with the last of the top k is possible.
                slack = 0.0 if llm.exact else 2 * rounding(llm, float(logits.abs().max()))
                kept = (logits >= top.values[-1] - slack).nonzero().flatten()
                possible[prefix] = frozenset(kept.tolist())
                named = top.indices[:LETTERS].tolist()
                longer |= {(*prefix, token): mass * p for token, p in zip(named, probs, strict=True)}
                cells[*prefix, OTHER] = mass * (1.0 - sum(probs))
            prefixes = longer
        return cls(prompt, cells | prefixes, possible, information)

    def cell(self, string: Sequence[int]) -> Cell | None:
        """Return the cell of a string of :data:`NUM_TESTED_TOKENS` tokens; ``None`` if the string has probability 0."""
        cell: Cell = ()
        for token in string:
            if token not in self.possible[cell]:
                return None
            if (*cell, token) not in self.possible and (*cell, token) not in self.cells:
                return *cell, OTHER
            cell = (*cell, token)
        return cell


def stage(llm: LLM, prompts: Sequence[NamedPrompt]) -> ExactDistribution | None:
    """Return the most informative exact distribution after an extended prompt, or ``None``.

    A prompt ``… X`` becomes ``… X abc X def X ghi X jkl X``. Each continuation is a plain sample and begins with a
    different likely token. Drafters that copy then have a draft token for most first tokens. ``None`` means that
    no prompt has enough free context, or that every continuation is nearly certain.
    """
    staged = (_extend(llm, prompt) for prompt in prompts)
    candidates = [ExactDistribution.after(llm, prompt) for prompt in staged if prompt is not None]
    uncertain = [each for each in candidates if max(each.cells.values()) < _CERTAIN]
    return max(uncertain, key=lambda each: each.information, default=None)


def _extend(llm: LLM, prompt: NamedPrompt) -> NamedPrompt | None:
    again = prompt.ids[-_REPEATED:]
    text, used = list(prompt.ids), set[int]()
    for round_ in range(_ROUNDS):
        if len(text) + _CONTINUED + 1 + len(again) + NUM_TESTED_TOKENS + 1 > llm.config.context:
            break
        (recorder,) = score_next(llm, text, [[]], DRAW)
        likely = recorder.logits.topk(min(_ROUNDS, len(recorder.logits))).indices.tolist()
        first = next((token for token in likely if token not in used), likely[0])
        used.add(first)
        params = SamplingParams(**DRAW.to_dict() | {"max_tokens": _CONTINUED, "seed": round_})
        done = llm.generate([*text, first], params, drafter="autoregressive")
        text += [first, *done.token_ids, *again]
    if len(text) + NUM_TESTED_TOKENS + 1 > llm.config.context:
        return None
    return NamedPrompt(prompt.id, text)
