"""Test of equality: the tokens are those of plain decoding, for every drafter and any batch.

Texts sampled with a rule other than ``"coupled"`` are skipped: only their distribution is that of
plain decoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
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
        # the mode "forced" drafts text that the guide forces; its tokens would count as the tested
        # drafter's
        "guide_mode": "plain",
    }


@dataclass(frozen=True)
class Candidate:
    """One of the two tokens at the first difference, scored by plain decoding after the common text.

    ``score`` is the value whose argmax over the vocabulary the sampler takes: the logit after
    processors and, if the temperature is above 0, the noise of this seed and position. ``score`` is
    ``None`` if a processor banned the token.
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

    prompt: str
    mode: str  # key of MODES, such as "greedy"
    batch: bool
    position: int  # index of the first differing token among the generated ones
    what: str
    # The two texts' tokens at ``position``. One is None if its text ends there; both are None if no
    # token differs (but the finish reason or the decoded text does) or the drafter raised.
    expected: Candidate | None = None  # token of plain decoding
    found: Candidate | None = None  # token of the other text
    # score of ``expected`` minus score of ``found``; None if one of the scores is missing
    gap: float | None = None
    tolerance: float | None = None  # estimated rounding error of a logit; None if no token differs
    near_tie: bool = False


def find_divergence(llm: LLM, reference: GeneratedText, text: GeneratedText) -> Divergence | None:
    """Return the first difference between plain decoding and another text of the same prompt, or ``None``.

    ``None`` means that the texts are equal. If the drafter raised, the engine completed the text
    without it; this counts as a difference.
    """
    assert (reference.prompt, reference.params) == (text.prompt, text.params)
    plain = reference.completion
    other = text.completion
    labels = (text.prompt.id, text.mode, text.batch)
    pairs = enumerate(zip_longest(plain.token_ids, other.token_ids))
    if other.stats.draft_error is not None:
        return Divergence(
            *labels, len(plain.token_ids), f"its drafter raised {other.stats.draft_error}"
        )
    position = next((place for place, (token, other_token) in pairs if token != other_token), None)
    if position is None:
        reasons = [
            (completion.finish_reason, completion.stop_reason) for completion in (plain, other)
        ]
        if reasons[0] == reasons[1] and plain.text == other.text:
            return None
        same = reasons[0] == reasons[1]
        what = (
            "another text of the same tokens"
            if same
            else f"finish {reasons[1]}, expected {reasons[0]}"
        )
        return Divergence(*labels, len(plain.token_ids), what)
    (recorder,) = score_next(llm, plain.prompt_token_ids, [plain.token_ids[:position]], text.params)
    tolerance = rounding(llm, float(np.abs(recorder.logits).max()))
    expected, found = (
        _candidate(llm, recorder, completion.token_ids, position) for completion in (plain, other)
    )
    if expected is None or found is None:
        what = (
            f"ends after {position} tokens" if found is None else f"goes on after {position} tokens"
        )
        return Divergence(*labels, position, what, expected, found, None, tolerance)
    gap = (
        None
        if None in (expected.score, found.score)
        else (expected.score or 0.0) - (found.score or 0.0)
    )
    near_tie = recorder.could_choose(found.token_id, expected.token_id, tolerance)
    return Divergence(*labels, position, "another token", expected, found, gap, tolerance, near_tie)


def _candidate(
    llm: LLM, recorder: LogitsRecorder, tokens: Sequence[int], position: int
) -> Candidate | None:
    if position >= len(tokens):
        return None
    token = tokens[position]
    score = float(recorder.scores(recorder.logits)[token])
    text = llm.tokenizer.decode([token], skip_special_tokens=False)
    return Candidate(
        token, text, float(recorder.logits[token]), score if math.isfinite(score) else None
    )


@dataclass(frozen=True)
class GeneratedText:
    """One generated text: its mode (key of :data:`MODES`), and whether it was generated in a batch."""

    prompt: NamedPrompt
    mode: str
    batch: bool
    params: SamplingParams
    completion: Completion


@dataclass(frozen=True)
class Equality:
    """Result of comparing one drafter's texts with those of plain decoding."""

    # whether the device guarantees bit-identical logits; if so, near ties count as failures
    exact: bool
    texts: int = 0
    equal: int = 0
    drafted: int = 0
    accepted: int = 0
    divergences: tuple[Divergence, ...] = ()

    @property
    def near_ties(self) -> int:
        """Number of differing texts whose first difference can be explained by rounding."""
        return sum(divergence.near_tie for divergence in self.divergences)

    @property
    def failed(self) -> bool:
        """Whether a text differs: in any way if ``exact``, otherwise in a way that rounding does not explain."""
        return bool(self.divergences) if self.exact else self.near_ties < len(self.divergences)

    def to_dict(self) -> dict[str, Any]:
        """Return the counts and divergences as JSON values."""
        counts = {"near_ties": self.near_ties, "defects": len(self.divergences) - self.near_ties}
        values = asdict(self) | {
            "divergences": [asdict(divergence) for divergence in self.divergences]
        }
        del values["exact"]  # the report has it for all drafters
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
    """
    options = SamplingParams(
        max_tokens=settings.max_tokens, logprobs=1, rule=settings.rule, **MODES[mode]
    )
    seeds = [derive_seed(settings.seed, index) for index in range(len(prompts))]
    texts = [
        (prompt, mode, batch, replace(options, seed=seed))
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    completions: list[Completion] = []
    for group in [texts] if batch else [[text] for text in texts]:
        ids = [prompt.ids for prompt, *_ in group]
        params = [params for *_, params in group]
        progress = meter.batch_callback(settings.max_tokens)
        completions += llm.generate(ids, params, drafter=proposer, progress=progress)
        # generate() reports before each step, hence never that all have finished
        progress(len(group), len(group))
    return [
        GeneratedText(*text, completion)
        for text, completion in zip(texts, completions, strict=True)
    ]


def compare(
    llm: LLM, so_far: Equality, reference: Sequence[GeneratedText], texts: Sequence[GeneratedText]
) -> Equality:
    """Compare ``texts`` with plain decoding (``reference``).

    Return ``so_far`` with these results added.
    """
    pairs = [pair for pair in zip(reference, texts, strict=True) if not pair[1].params.rejects]
    found = [find_divergence(llm, plain, text) for plain, text in pairs]
    divergences = [divergence for divergence in found if divergence is not None]
    return Equality(
        so_far.exact,
        so_far.texts + len(pairs),
        so_far.equal + len(pairs) - len(divergences),
        so_far.drafted + sum(text.completion.stats.drafted for _, text in pairs),
        so_far.accepted + sum(text.completion.stats.accepted for _, text in pairs),
        (*so_far.divergences, *divergences),
    )
