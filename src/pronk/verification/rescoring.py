"""Test of log-probabilities: generation against scoring the whole text in one forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from pronk.verification.equality import GeneratedText
from pronk.verification.plain_decoding import rounding, score_next
from pronk.verification.prompts import NamedPrompt

__all__ = ["Rescoring", "TextScorer", "rescore"]

Report = dict[int, float]


@dataclass(frozen=True)
class Rescoring:
    """Comparison of one drafter's log-probabilities with scoring."""

    tolerance: float  # largest allowed difference; 0 if the device guarantees equality bit for bit
    tokens: int = 0
    wrong: int = 0  # tokens whose log-probability is missing or differs by more than the tolerance
    worst: float = 0.0
    where: str | None = None  # first wrong token: prompt, mode, position
    left_out: int = 0  # texts that :meth:`TextScorer.can_score` excludes
    drafted: int = 0
    accepted: int = 0

    @property
    def failed(self) -> bool:
        """Whether a log-probability is wrong."""
        return self.wrong > 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        names = ("failed", "tokens", "wrong", "worst", "tolerance", "where", "left_out", "drafted", "accepted")
        return {name: getattr(self, name) for name in names}


@dataclass
class TextScorer:
    """Scores texts in one forward pass each and caches results, as most drafters produce the same texts."""

    llm: LLM
    tolerance: float
    _known: dict[tuple[int, ...], list[Report | None]] = field(default_factory=dict, repr=False)

    @classmethod
    def make(cls, llm: LLM, prompts: Sequence[NamedPrompt]) -> TextScorer:
        """Return a scorer whose tolerance fits the logits after the prompts; 0 if logits are exact.

        A log-probability is a logit minus the logsumexp of all logits. Rounding may move each of the two terms by as
        much as a logit, hence the factor 2.
        """
        if llm.exact:
            return cls(llm, 0.0)
        judges = [score_next(llm, prompt.ids, [[]], SamplingParams())[0] for prompt in prompts]
        return cls(llm, 2 * rounding(llm, max(float(judge.logits.abs().max()) for judge in judges)))

    def can_score(self, length: int) -> bool:
        """Return whether RoPE rotates a text of ``length`` tokens alike as a prompt and as generated tokens."""
        rope = self.llm.config.rope
        return rope is None or rope.kind != "dynamic" or length <= rope.original

    def score(self, texts: Iterable[Sequence[int]]) -> list[list[Report | None]]:
        """Return ``{token: log-probability}`` for each position: its token and the likeliest one."""
        wanted = [tuple(text) for text in texts]
        new = list(dict.fromkeys(text for text in wanted if text not in self._known))
        if new:
            params = SamplingParams(max_tokens=1, prompt_logprobs=1)
            scored = self.llm.generate([list(text) for text in new], params, drafter="autoregressive")
            for text, done in zip(new, scored, strict=True):
                assert done.prompt_logprobs is not None
                self._known[text] = done.prompt_logprobs
        return [self._known[text] for text in wanted]


def rescore(scorer: TextScorer, so_far: Rescoring, texts: Sequence[GeneratedText]) -> Rescoring:
    """Compare the texts with scoring; return the updated totals."""
    full = [[*text.prompt.ids, *text.done.token_ids] for text in texts]
    fit = [index for index, tokens in enumerate(full) if scorer.can_score(len(tokens))]
    result = replace(
        so_far,
        left_out=so_far.left_out + len(texts) - len(fit),
        drafted=so_far.drafted + sum(text.done.stats.drafted for text in texts),
        accepted=so_far.accepted + sum(text.done.stats.accepted for text in texts),
    )
    for index, scored in zip(fit, scorer.score(full[index] for index in fit), strict=True):
        result = _compare(result, texts[index], scored[len(texts[index].prompt.ids) :])
    return result


def _compare(result: Rescoring, text: GeneratedText, scored: Sequence[Report | None]) -> Rescoring:
    tokens, reports = text.done.token_ids, text.done.logprobs or []
    wrong, worst, where = result.wrong, result.worst, result.where
    for place, token in enumerate(tokens):
        report, want = reports[place] if place < len(reports) else {}, scored[place] or {}
        known = token in report and token in want
        gap = abs(report[token] - want[token]) if known else 0.0
        # Without tolerance, the likeliest token and its log-probability must be equal too.
        correct = report == want if result.tolerance == 0.0 else known and gap <= result.tolerance
        worst = max(worst, gap)
        wrong += not correct
        if not correct and where is None:
            where = f"{text.prompt.id}, {text.mode}{' in a batch' if text.batch else ''}, token {place}"
    return replace(result, tokens=result.tokens + len(tokens), wrong=wrong, worst=worst, where=where)
