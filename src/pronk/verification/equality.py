"""Test of equality: the tokens are those of plain decoding, for every drafter and any batch.

Texts sampled with a rule other than ``"coupled"`` are skipped: their tokens depend on the draft tokens, and only the
distribution of their tokens is that of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from pronk.drafters import Proposer
from pronk.llm import LLM
from pronk.outputs import Completion
from pronk.sampling.guide import Guide
from pronk.sampling.noise import derive_seed
from pronk.sampling.params import SamplingParams
from pronk.verification.divergence import Divergence, explain
from pronk.verification.prompts import NamedPrompt, ProgressMeter, VerifySettings

__all__ = ["MODES", "Equality", "GeneratedText", "compare", "generate_texts", "options"]

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
        "guide": Guide(json={"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 9}),
        # the mode "forced" drafts text that the guide forces; its tokens would count as the tested drafter's
        "guide_mode": "plain",
    }


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

    exact: bool  # whether the device guarantees bit-identical logits; if so, near ties count as failures
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
        return {
            "failed": self.failed,
            "texts": self.texts,
            "equal": self.equal,
            "near_ties": self.near_ties,
            "defects": len(self.divergences) - self.near_ties,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "divergences": [asdict(divergence) for divergence in self.divergences],
        }


def options(mode: str, index: int, settings: VerifySettings) -> SamplingParams:
    """Return the sampling options of a mode for prompt number ``index``, which determines the seed."""
    seed = derive_seed(settings.seed, index)
    return SamplingParams(max_tokens=settings.max_tokens, seed=seed, logprobs=1, rule=settings.rule, **MODES[mode])


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
    texts = [(prompt, mode, batch, options(mode, index, settings)) for index, prompt in enumerate(prompts)]
    completions: list[Completion] = []
    for group in [texts] if batch else [[text] for text in texts]:
        ids, params = [prompt.ids for prompt, *_ in group], [params for *_, params in group]
        progress = meter.batch_callback(settings.max_tokens)
        completions += llm.generate(ids, params, drafter=proposer, progress=progress)
        progress(len(group), len(group))  # generate() reports before each step, hence never that all have finished
    return [GeneratedText(*text, completion) for text, completion in zip(texts, completions, strict=True)]


def compare(llm: LLM, so_far: Equality, reference: Sequence[GeneratedText], texts: Sequence[GeneratedText]) -> Equality:
    """Compare ``texts`` with plain decoding (``reference``); return ``so_far`` with these results added."""
    divergences: list[Divergence] = []
    pairs = [pair for pair in zip(reference, texts, strict=True) if not pair[1].params.rejects]
    for plain, text in pairs:
        assert (plain.prompt, plain.params) == (text.prompt, text.params)
        labels = (text.prompt.id, text.mode, text.batch)
        divergence = explain(llm, plain.completion, text.completion, text.params, labels)
        if divergence is not None:
            divergences.append(divergence)
    return Equality(
        so_far.exact,
        so_far.texts + len(pairs),
        so_far.equal + len(pairs) - len(divergences),
        so_far.drafted + sum(text.completion.stats.drafted for _, text in pairs),
        so_far.accepted + sum(text.completion.stats.accepted for _, text in pairs),
        (*so_far.divergences, *divergences),
    )
