"""Test of log-probabilities: generation against scoring the whole text in one forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from pronk import LLM, SamplingParams
from pronk.lab.verification.equality import GeneratedText
from pronk.lab.verification.plain_decoding import rounding, score_next
from pronk.lab.verification.prompts import NamedPrompt

LogProbs = dict[int, float]  # token id to log-probability, at one position


@dataclass(frozen=True)
class Rescoring:
    """Comparison of the log-probabilities of one drafter's texts with those of :class:`TextScorer`."""

    # largest allowed difference of a log-probability; 0 if the kernels' logits are bit-identical
    tolerance: float
    tokens: int = 0
    # number of tokens whose log-probability is missing or differs by more than the tolerance
    wrong: int = 0
    worst: float = 0.0  # largest difference of a log-probability
    # prompt, mode and position of the first of these tokens; None without one
    where: str | None = None
    left_out: int = 0  # number of texts not compared because :meth:`TextScorer.can_score` is false
    drafted: int = 0
    accepted: int = 0

    @property
    def failed(self) -> bool:
        """Whether a log-probability is missing or differs by more than the tolerance."""
        return self.wrong > 0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and ``failed`` as JSON values."""
        return {"failed": self.failed} | asdict(self)


@dataclass
class TextScorer:
    """Computes log-probabilities in one prefill per text.

    Caches them, as most drafters yield equal texts.
    """

    llm: LLM
    tolerance: float
    _cache: dict[tuple[int, ...], list[LogProbs | None]] = field(default_factory=dict, repr=False)

    @classmethod
    def make(cls, llm: LLM, prompts: Sequence[NamedPrompt]) -> TextScorer:
        """Return a scorer.

        Its tolerance is 0 if logits are exact, else estimated from the prompts' logits.

        A log-probability is a logit minus the logsumexp of all logits. Rounding may change the
        logsumexp by as much as a logit, hence the factor 2.
        """
        if llm.exact:
            return cls(llm, 0.0)
        recorders = [score_next(llm, prompt.ids, [[]], SamplingParams())[0] for prompt in prompts]
        return cls(
            llm,
            2 * rounding(llm, max(float(np.abs(recorder.logits).max()) for recorder in recorders)),
        )

    def can_score(self, length: int) -> bool:
        """Return False if dynamic RoPE rotates a text of ``length`` differently in a prefill than in decoding."""
        rope = self.llm.config.rope
        return rope is None or rope.kind != "dynamic" or length <= rope.original

    def score(self, texts: Iterable[Sequence[int]]) -> list[list[LogProbs | None]]:
        """Return, for each position of a text, the log-probabilities of its token and of the likeliest one."""
        keys = [tuple(text) for text in texts]
        new = list(dict.fromkeys(text for text in keys if text not in self._cache))
        if new:
            params = SamplingParams(max_tokens=1, prompt_logprobs=1)
            scored = self.llm.generate(
                [list(text) for text in new], params, drafter="autoregressive"
            )
            for text, completion in zip(new, scored, strict=True):
                assert completion.prompt_logprobs is not None
                self._cache[text] = completion.prompt_logprobs
        return [self._cache[text] for text in keys]


def rescore(scorer: TextScorer, so_far: Rescoring, texts: Sequence[GeneratedText]) -> Rescoring:
    """Compare the texts' log-probabilities with the scorer's.

    Return ``so_far`` with these results added.
    """
    sequences = [[*text.prompt.ids, *text.completion.token_ids] for text in texts]
    scorable = [index for index, tokens in enumerate(sequences) if scorer.can_score(len(tokens))]
    result = replace(
        so_far,
        left_out=so_far.left_out + len(texts) - len(scorable),
        drafted=so_far.drafted + sum(text.completion.stats.drafted for text in texts),
        accepted=so_far.accepted + sum(text.completion.stats.accepted for text in texts),
    )
    for index, scored in zip(
        scorable, scorer.score(sequences[index] for index in scorable), strict=True
    ):
        result = _compare(result, texts[index], scored[len(texts[index].prompt.ids) :])
    return result


def _compare(
    result: Rescoring, text: GeneratedText, scored: Sequence[LogProbs | None]
) -> Rescoring:
    tokens = text.completion.token_ids
    generated = text.completion.logprobs or []
    wrong = result.wrong
    worst = result.worst
    where = result.where
    for index, token in enumerate(tokens):
        got = generated[index] if index < len(generated) else {}
        expected = scored[index] or {}
        comparable = token in got and token in expected
        gap = abs(got[token] - expected[token]) if comparable else 0.0
        # `got` and `expected` also have the likeliest token. With tolerance 0, its log-probability
        # must be equal, too.
        correct = (
            got == expected if result.tolerance == 0.0 else comparable and gap <= result.tolerance
        )
        worst = max(worst, gap)
        wrong += not correct
        if not correct and where is None:
            where = (
                f"{text.prompt.id}, {text.mode}{' in a batch' if text.batch else ''}, token {index}"
            )
    return replace(
        result, tokens=result.tokens + len(tokens), wrong=wrong, worst=worst, where=where
    )
