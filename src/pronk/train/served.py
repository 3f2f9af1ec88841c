"""How good a draft is where it counts: guessing for its target in the decoding engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pronk.bench.metrics import acceptance_rate, step_compression
from pronk.drafters import make_drafter
from pronk.llm import LLM
from pronk.sampling import SamplingParams, derive_seed

__all__ = ["measure_draft"]

_TEMPERATURE = 0.8


def measure_draft(
    llm: LLM, draft: Path, prompts: Sequence[list[int]], num_tokens: int, max_tokens: int
) -> dict[str, float]:
    """Acceptance rate alpha and step compression S, greedy and sampled.

    Args:
        llm: the target; it must compute every guess (``budget="all"``).
        draft: the draft's checkpoint.
        prompts: what to continue.
        num_tokens: guesses per step.
        max_tokens: tokens after each prompt.
    """
    drafter = make_drafter(f"draft_model(model={str(draft)!r}, num_tokens={num_tokens})")
    figures: dict[str, float] = {}
    for name, temperature in (("greedy", 0.0), (f"T={_TEMPERATURE}", _TEMPERATURE)):
        params = [
            SamplingParams(
                max_tokens=min(max_tokens, llm.config.context - len(prompt)),
                temperature=temperature,
                seed=derive_seed(0, number),
            )
            for number, prompt in enumerate(prompts)
        ]
        stats = [each.stats for each in llm.generate(list(prompts), params, drafter=drafter)]
        steps = [step for each in stats for step in each.steps]
        rate = acceptance_rate([step.depth for step in steps], [step.accepted for step in steps])
        tokens = sum(each.generated_tokens for each in stats)
        figures |= {f"{name} alpha": rate or 0.0, f"{name} S": step_compression(tokens, len(steps))}
    return figures
