"""The exact law of the first tokens after a prompt, and a prompt that gives drafters something to guess."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from pronk.verification.plain_decoding import rounding, score_next
from pronk.verification.prompts import NamedPrompt

__all__ = ["DEPTH", "DRAW", "OTHER", "ExactDistribution", "stage"]

# Few tokens to choose from, so that guesses are right often and wrong often.
DRAW = SamplingParams(temperature=1.0, top_k=4, ignore_eos=True)

# Tokens per string, and of how many at each place the law keeps the names: 15 cells.
DEPTH = 3
LETTERS = 2

# Stands for all other tokens, after which a string is not followed further.
OTHER = -1

# A staged text is its last tokens again and again, each time with another continuation in between.
_REPEATED = 12
_ROUNDS = 4
_CONTINUED = 3

# A string that is as likely as this leaves nothing to test.
_CERTAIN = 0.95

Cell = tuple[int, ...]


@dataclass(frozen=True)
class ExactDistribution:
    """What :data:`DRAW` gives after a prompt.

    The cells are the leaves of a tree: at each place the two likeliest tokens by name, and one cell for all others.

    Attributes:
        prompt: the text.
        cells: probability of each cell, ``(a, b, c)``, ``(a, b, OTHER)``, ``(a, OTHER)`` or ``(OTHER,)``; their sum
            is 1.
        possible: for each string of named tokens, those that may follow at all.
        information: how clearly a wrong temperature shows in a string: the variance of its scaled logits, which is
            the Fisher information about the inverse temperature; 0 where all is certain or alike.
    """

    prompt: NamedPrompt
    cells: dict[Cell, float]
    possible: dict[Cell, frozenset[int]]
    information: float = 0.0

    @classmethod
    def after(cls, llm: LLM, prompt: NamedPrompt, *, exact: bool) -> ExactDistribution:
        """The law by its definition, from the logits of plain passes.

        That is the softmax of the ``top_k`` largest over the temperature, in double precision; nothing of
        ``sampler`` has a part in it. Where logits are not ``exact``, rounding may put another token in the top.
        """
        cells: dict[Cell, float] = {}
        possible: dict[Cell, frozenset[int]] = {}
        information = 0.0
        open_: dict[Cell, float] = {(): 1.0}
        for _ in range(DEPTH):
            judges = score_next(llm, prompt.ids, list(open_), DRAW)
            grown: dict[Cell, float] = {}
            for (prefix, mass), judge in zip(open_.items(), judges, strict=True):
                logits = judge.logits.double()
                top = logits.topk(min(DRAW.top_k, len(logits)))
                scaled = top.values / DRAW.temperature
                likely = scaled.softmax(0)
                information += mass * float(likely @ (scaled - likely @ scaled) ** 2)
                probs = likely[:LETTERS].tolist()
                # Of tokens that tie for the last place any may be taken; where rounding differs, also the next ones.
                slack = 0.0 if exact else 2 * rounding(llm, float(logits.abs().max()))
                kept = (logits >= top.values[-1] - slack).nonzero().flatten()
                possible[prefix] = frozenset(kept.tolist())
                named = top.indices[:LETTERS].tolist()
                grown |= {(*prefix, token): mass * p for token, p in zip(named, probs, strict=True)}
                cells[*prefix, OTHER] = mass * (1.0 - sum(probs))
            open_ = grown
        return cls(prompt, cells | open_, possible, information)

    def cell(self, string: Sequence[int]) -> Cell | None:
        """Where a string of :data:`DEPTH` tokens belongs; ``None`` if it cannot occur."""
        cell: Cell = ()
        for token in string:
            if token not in self.possible[cell]:
                return None
            if (*cell, token) not in self.possible and (*cell, token) not in self.cells:
                return *cell, OTHER
            cell = (*cell, token)
        return cell


def stage(llm: LLM, prompts: Sequence[NamedPrompt], *, exact: bool) -> ExactDistribution | None:
    """The law after one of the prompts, extended: the one that tells most. ``None`` if none has room, or a choice.

    After ``… X`` a text ``… X abc X def X ghi X jkl X`` is put, where abc and so on are plain samples after what
    stands before them and begin with different likely tokens. Then whoever copies has something to guess for most
    first tokens, and it is right as often as the model repeats itself; who guesses by a model needs no help.
    """
    laws = [
        ExactDistribution.after(llm, staged, exact=exact)
        for prompt in prompts
        if (staged := _extend(llm, prompt)) is not None
    ]
    open_ = [law for law in laws if max(law.cells.values()) < _CERTAIN]
    return max(open_, key=lambda law: law.information, default=None)


def _extend(llm: LLM, prompt: NamedPrompt) -> NamedPrompt | None:
    again = prompt.ids[-_REPEATED:]
    text, used = list(prompt.ids), set[int]()
    for round_ in range(_ROUNDS):
        if len(text) + _CONTINUED + 1 + len(again) + DEPTH + 1 > llm.config.context:
            break
        (judge,) = score_next(llm, text, [[]], DRAW)
        likely = judge.logits.topk(min(_ROUNDS, len(judge.logits))).indices.tolist()
        first = next((token for token in likely if token not in used), likely[0])
        used.add(first)
        params = SamplingParams(**DRAW.to_dict() | {"max_tokens": _CONTINUED, "seed": round_})
        done = llm.generate([*text, first], params, drafter="autoregressive")
        text += [first, *done.token_ids, *again]
    if len(text) + DEPTH + 1 > llm.config.context:
        return None
    return NamedPrompt(prompt.id, text)
