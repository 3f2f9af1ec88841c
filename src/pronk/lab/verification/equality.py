"""Test of equality: the tokens are those of plain decoding, for every drafter and any batch.

Texts sampled under the acceptance rules ``"rejection"`` and ``"block"`` are skipped: the rules
promise the distribution of plain decoding, not its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import zip_longest
from typing import Any

import numpy as np

from pronk import LLM, Completion, Guide, Proposer, SamplingParams
from pronk.drafting import derive_seed
from pronk.lab.verification.plain_decoding import LogitsRecorder, rounding, score_next
from pronk.lab.verification.prompts import NamedPrompt, ProgressMeter, VerifySettings

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8},
    "shaped": {
        "temperature": 0.8,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
    },
}


if find_spec("llguidance") is not None:  # guides need this optional dependency
    MODES["guided"] = {
        "temperature": 0.8,
        "guide": Guide(
            json={"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 9}
        ),
        # With the mode "forced", the guide drafts the text that it forces, and its accepted tokens
        # would count as those of the tested drafter.
        "guide_mode": "plain",
    }


@dataclass(frozen=True)
class Candidate:
    """One of the two tokens at the first difference of two texts, scored by plain decoding.

    Attributes:
        token_id: id of the token.
        text: text of the token; for a special token, its name.
        logit: the target's logit after the tokens that both texts have.
        score: the value whose argmax over the vocabulary the sampler takes: the logit after
            processors and, if the temperature is above 0, with the noise of the request's seed at
            this position. ``None``: a processor banned the token.
    """

    token_id: int
    text: str
    logit: float
    score: float | None


@dataclass(frozen=True)
class Divergence:
    """The first difference between a text and that of plain decoding.

    If changing each logit by at most ``tolerance`` can make plain decoding choose ``found``, the
    difference is a near tie, which rounding explains. Otherwise it is a defect.
    """

    prompt: str  # id of the prompt
    mode: str  # decoding mode, a key of MODES such as "greedy"
    batch: bool  # whether the text with the drafter was generated in a batch
    position: int  # index of the first differing token among the generated ones
    what: str  # the difference in words
    # The tokens of the two texts at ``position``. One is ``None`` if its text ends there. Both are
    # ``None`` if only the finish reason or the decoded text differs, or if the drafter raised.
    expected: Candidate | None = None  # token of the text by plain decoding
    found: Candidate | None = None  # token of the text with the drafter
    # Score of ``expected`` minus score of ``found``; ``None`` if one of the scores is missing.
    gap: float | None = None
    tolerance: float | None = None  # estimated rounding error of a logit; None if no token differs
    near_tie: bool = False  # whether rounding explains the difference


def find_divergence(llm: LLM, reference: GeneratedText, text: GeneratedText) -> Divergence | None:
    """Return the first difference between plain decoding and another text of the same prompt.

    ``None`` means that the texts are equal. A text whose drafter raised was completed without the
    drafter; this counts as a difference.
    """
    assert (reference.prompt, reference.params) == (text.prompt, text.params)
    plain = reference.completion
    other = text.completion
    diverge = partial(Divergence, text.prompt.id, text.mode, text.batch)
    if other.stats.draft_error is not None:
        what = f"its drafter raised {other.stats.draft_error}"
        return diverge(len(plain.token_ids), what)
    position = _first_difference(plain.token_ids, other.token_ids)
    if position is None:
        difference = _difference_beside_tokens(plain, other)
        return None if difference is None else diverge(len(plain.token_ids), difference)
    (recorder,) = score_next(llm, plain.prompt_token_ids, [plain.token_ids[:position]], text.params)
    tolerance = rounding(llm, float(np.abs(recorder.logits).max()))
    expected = _candidate(llm, recorder, plain.token_ids, position)
    found = _candidate(llm, recorder, other.token_ids, position)
    if expected is None or found is None:
        verb = "ends" if found is None else "goes on"
        what = f"{verb} after {position} tokens"
        return diverge(position, what, expected, found, tolerance=tolerance)
    return diverge(
        position,
        "another token",
        expected,
        found,
        gap=_score_gap(expected, found),
        tolerance=tolerance,
        near_tie=recorder.could_choose(found.token_id, expected.token_id, tolerance),
    )


def _first_difference(tokens: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the index of the first token that differs; ``None`` if all are equal.

    If one text is the beginning of the other, the index is its length.
    """
    for position, (token, other_token) in enumerate(zip_longest(tokens, other)):
        if token != other_token:
            return position
    return None


def _difference_beside_tokens(plain: Completion, other: Completion) -> str | None:
    """Return the difference of two completions with equal tokens, in words; ``None``: none."""
    plain_end = (plain.finish_reason, plain.stop_reason)
    other_end = (other.finish_reason, other.stop_reason)
    if plain_end != other_end:
        return f"finish {other_end}, expected {plain_end}"
    if plain.text != other.text:
        return "another text of the same tokens"
    return None


def _score_gap(expected: Candidate, found: Candidate) -> float | None:
    """Return the difference of two tokens' scores; ``None`` if one of the tokens is banned."""
    if expected.score is None or found.score is None:
        return None
    return expected.score - found.score


def _candidate(
    llm: LLM, recorder: LogitsRecorder, tokens: Sequence[int], position: int
) -> Candidate | None:
    """Return the token at ``position`` with its scores; ``None`` if the text has ended there."""
    if position >= len(tokens):
        return None
    token = tokens[position]
    text = llm.tokenizer.decode([token], skip_special_tokens=False)
    logit = float(recorder.logits[token])
    score = float(recorder.scores(recorder.logits)[token])
    return Candidate(token, text, logit, score if math.isfinite(score) else None)


@dataclass(frozen=True)
class GeneratedText:
    """One generated text, and how it was generated."""

    prompt: NamedPrompt
    mode: str  # decoding mode, a key of :data:`MODES` such as "greedy"
    batch: bool  # whether the text was generated in a batch
    params: SamplingParams
    completion: Completion


@dataclass(frozen=True)
class Equality:
    """Result of comparing one drafter's texts with those of plain decoding."""

    # Whether the device guarantees bit-identical logits: near ties then count as failures.
    exact: bool
    texts: int = 0  # number of compared texts
    equal: int = 0  # number of texts that are equal to those of plain decoding
    drafted: int = 0  # number of verified draft tokens
    accepted: int = 0  # number of accepted draft tokens
    divergences: tuple[Divergence, ...] = ()  # one for each text that differs

    @property
    def near_ties(self) -> int:
        """Number of differing texts whose first difference can be explained by rounding."""
        return sum(divergence.near_tie for divergence in self.divergences)

    @property
    def failed(self) -> bool:
        """Whether a text differs; near ties are allowed unless ``exact``."""
        return bool(self.divergences) if self.exact else self.near_ties < len(self.divergences)

    def to_dict(self) -> dict[str, Any]:
        """Return the counts and divergences as JSON values."""
        counts = {"near_ties": self.near_ties, "defects": len(self.divergences) - self.near_ties}
        values = asdict(self)
        values["divergences"] = [asdict(divergence) for divergence in self.divergences]
        del values["exact"]  # the report has it once for all drafters
        return {"failed": self.failed} | counts | values


def generate_texts(
    llm: LLM,
    proposer: Proposer[Any],
    prompts: Sequence[NamedPrompt],
    mode: str,
    settings: VerifySettings,
    meter: ProgressMeter,
    *,
    batch: bool,
) -> list[GeneratedText]:
    """Generate the texts of a mode, one at a time or as one batch.

    Prompts of a batch may differ in length, be prefilled in chunks, and end at different steps.

    Args:
        llm: the target.
        proposer: the drafter to verify, bound to the target.
        prompts: the prompts; prompt ``i`` has the seed ``derive_seed(settings.seed, i)``.
        mode: decoding mode, a key of :data:`MODES`.
        settings: length of the texts, seed and acceptance rule.
        meter: receives the progress.
        batch: whether all prompts are decoded together.
    """
    options = SamplingParams(
        max_tokens=settings.max_tokens, logprobs=1, rule=settings.rule, **MODES[mode]
    )
    # The prompt as the prediction: parts of it often recur in the text.
    params = [
        replace(options, seed=derive_seed(settings.seed, index), prediction=prompt.ids)
        for index, prompt in enumerate(prompts)
    ]
    batch_size = len(prompts) if batch else 1
    completions: list[Completion] = []
    for start in range(0, len(prompts), batch_size):
        group = slice(start, start + batch_size)
        ids = [prompt.ids for prompt in prompts[group]]
        progress = meter.batch_callback(settings.max_tokens)
        completions += llm.generate(ids, params[group], drafter=proposer, progress=progress)
        progress(len(ids), len(ids))  # generate() reports only before each step
    return [
        GeneratedText(prompt, mode, batch, own_params, completion)
        for prompt, own_params, completion in zip(prompts, params, completions, strict=True)
    ]


def compare(
    llm: LLM, so_far: Equality, reference: Sequence[GeneratedText], texts: Sequence[GeneratedText]
) -> Equality:
    """Return ``so_far`` plus the results of comparing ``texts`` with plain decoding.

    ``reference`` has the texts of plain decoding, in the same order.
    """
    pairs = [pair for pair in zip(reference, texts, strict=True) if not pair[1].params.rejects]
    found = [find_divergence(llm, plain, text) for plain, text in pairs]
    divergences = [divergence for divergence in found if divergence is not None]
    return Equality(
        exact=so_far.exact,
        texts=so_far.texts + len(pairs),
        equal=so_far.equal + len(pairs) - len(divergences),
        drafted=so_far.drafted + sum(text.completion.stats.drafted for _, text in pairs),
        accepted=so_far.accepted + sum(text.completion.stats.accepted for _, text in pairs),
        divergences=(*so_far.divergences, *divergences),
    )
