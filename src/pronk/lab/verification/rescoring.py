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
    """Result of comparing log-probabilities of a drafter's texts with those of a scorer.

    The drafter's texts report log-probabilities of their tokens as they are generated. A
    :class:`TextScorer` computes them again, without draft tokens.
    """

    # Largest allowed difference of a log-probability; 0 if the kernels' logits are bit-identical.
    tolerance: float
    tokens: int = 0  # number of compared tokens
    # Number of tokens whose log-probability is missing, or differs by more than the tolerance.
    wrong: int = 0
    # Largest difference of a log-probability in decoding and in scoring, in nats.
    worst: float = 0.0
    # Prompt, mode and position of the first wrong token; ``None`` without one.
    where: str | None = None
    left_out: int = 0  # number of texts not compared because :meth:`TextScorer.can_score` is false
    drafted: int = 0  # number of verified draft tokens
    accepted: int = 0  # number of accepted draft tokens

    @property
    def failed(self) -> bool:
        """Whether a log-probability is missing or differs by more than the tolerance."""
        return self.wrong > 0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and ``failed`` as JSON values."""
        return {"failed": self.failed} | asdict(self)


@dataclass
class TextScorer:
    """Computes the log-probabilities of a text's tokens in one prefill of the whole text.

    Results are cached, because the texts of most drafters are equal.
    """

    llm: LLM
    tolerance: float  # largest allowed difference of a log-probability, in nats
    _cache: dict[tuple[int, ...], list[LogProbs | None]] = field(default_factory=dict, repr=False)

    @classmethod
    def make(cls, llm: LLM, prompts: Sequence[NamedPrompt]) -> TextScorer:
        """Return a scorer; its tolerance is 0 if logits are exact, else estimated from ``prompts``.

        A log-probability is a logit minus the logsumexp of all logits. Rounding may change the
        logsumexp by as much as a logit: the tolerance is twice the rounding error of a logit.
        """
        if llm.exact:
            return cls(llm, 0.0)
        magnitudes: list[float] = []
        for prompt in prompts:
            (recorder,) = score_next(llm, prompt.ids, [[]], SamplingParams())
            magnitudes.append(float(np.abs(recorder.logits).max()))
        return cls(llm, 2 * rounding(llm, max(magnitudes)))

    def can_score(self, length: int) -> bool:
        """Return whether a prefill of ``length`` tokens has the rotary embeddings of decoding.

        Dynamic RoPE changes its rotations with the length of the text beyond the original context.
        """
        rope = self.llm.config.rope
        return rope is None or rope.kind != "dynamic" or length <= rope.original

    def score(self, texts: Iterable[Sequence[int]]) -> list[list[LogProbs | None]]:
        """Return the log-probabilities at each position of each text.

        They are those of the text's token and of the likeliest token, by id; ``None`` at the first
        position.
        """
        keys = [tuple(text) for text in texts]
        new = list(dict.fromkeys(text for text in keys if text not in self._cache))
        if new:
            params = SamplingParams(max_tokens=1, prompt_logprobs=1)
            prompts = [list(text) for text in new]
            scored = self.llm.generate(prompts, params, drafter="autoregressive")
            for text, completion in zip(new, scored, strict=True):
                assert completion.prompt_logprobs is not None
                self._cache[text] = completion.prompt_logprobs
        return [self._cache[text] for text in keys]


def rescore(scorer: TextScorer, so_far: Rescoring, texts: Sequence[GeneratedText]) -> Rescoring:
    """Return ``so_far`` plus the results of comparing ``texts`` with the scorer."""
    sequences = [[*text.prompt.ids, *text.completion.token_ids] for text in texts]
    scorable = [index for index, tokens in enumerate(sequences) if scorer.can_score(len(tokens))]
    result = replace(
        so_far,
        left_out=so_far.left_out + len(texts) - len(scorable),
        drafted=so_far.drafted + sum(text.completion.stats.drafted for text in texts),
        accepted=so_far.accepted + sum(text.completion.stats.accepted for text in texts),
    )
    scores = scorer.score(sequences[index] for index in scorable)
    for index, scored in zip(scorable, scores, strict=True):
        text = texts[index]
        result = _compare(result, text, scored[len(text.prompt.ids) :])
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
        correct = comparable and gap <= result.tolerance
        if result.tolerance == 0.0:
            # Exact logits: the log-probability of the likeliest token must be equal, too.
            correct = got == expected
        worst = max(worst, gap)
        wrong += not correct
        if not correct and where is None:
            batch = " in a batch" if text.batch else ""
            where = f"{text.prompt.id}, {text.mode}{batch}, token {index}"
    return replace(
        result, tokens=result.tokens + len(tokens), wrong=wrong, worst=worst, where=where
    )
