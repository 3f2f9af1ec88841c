"""Re-scoring: the log-probabilities that come with a text are those of scoring prompt and text in one pass."""

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
    """How one drafter's log-probabilities compare.

    Attributes:
        tolerance: largest difference that is allowed; 0 where the device promises equality to the bit.
        tokens: how many were compared.
        wrong: how many differ by more than the tolerance, or lack a report.
        worst: largest difference between the log-probabilities of a generated token.
        where: the first wrong one: prompt, mode, position.
        left_out: texts that the model reads otherwise as a prompt (beyond the context that *dynamic* RoPE scaling
            starts from, whose frequencies depend on the length of the prompt).
        drafted: guesses in all texts.
        accepted: guesses there that the target confirmed.
    """

    tolerance: float
    tokens: int = 0
    wrong: int = 0
    worst: float = 0.0
    where: str | None = None
    left_out: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def failed(self) -> bool:
        """Whether a log-probability is wrong."""
        return self.wrong > 0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        names = ("failed", "tokens", "wrong", "worst", "tolerance", "where", "left_out", "drafted", "accepted")
        return {name: getattr(self, name) for name in names}


@dataclass
class TextScorer:
    """Scores texts in one pass each, and remembers them: most drafters give the same ones."""

    llm: LLM
    tolerance: float
    _known: dict[tuple[int, ...], list[Report | None]] = field(default_factory=dict, repr=False)

    @classmethod
    def make(cls, llm: LLM, prompts: Sequence[NamedPrompt], *, exact: bool) -> TextScorer:
        """A scorer whose tolerance fits the logits after the prompts.

        It is 0 if they are to be ``exact``. A log-probability is a logit less the log of a sum over all logits;
        rounding may move each of the two by what it may move a logit.
        """
        if exact:
            return cls(llm, 0.0)
        judges = [score_next(llm, prompt.ids, [[]], SamplingParams())[0] for prompt in prompts]
        return cls(llm, 2 * rounding(llm, max(float(judge.logits.abs().max()) for judge in judges)))

    def can_score(self, length: int) -> bool:
        """Whether a text of that length is to the model what it was while it was generated."""
        rope = self.llm.config.rope
        return rope is None or rope.kind != "dynamic" or length <= rope.original

    def score(self, texts: Iterable[Sequence[int]]) -> list[list[Report | None]]:
        """``{token: log-probability}`` of each token of each text and of the likeliest one in its place."""
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
    """Add texts to the count."""
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
        # To the bit, the likeliest token and its log-probability agree as well.
        fine = report == want if result.tolerance == 0.0 else known and gap <= result.tolerance
        worst = max(worst, gap)
        wrong += not fine
        if not fine and where is None:
            where = f"{text.prompt.id}, {text.mode}{' in a batch' if text.batch else ''}, token {place}"
    return replace(result, tokens=result.tokens + len(tokens), wrong=wrong, worst=worst, where=where)
