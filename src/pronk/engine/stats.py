"""What a request cost and what guessing gained it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Stats"]


@dataclass
class Stats:
    """Counts and seconds of one request.

    Attributes:
        prompt_tokens: tokens of the prompt.
        generated_tokens: tokens of the output.
        target_steps: passes of the target that chose tokens; the last pass over the prompt is the first of them, so
            that plain decoding has exactly one token per step.
        drafted: acceptable guesses that were computed.
        accepted: guesses that the target confirmed.
        carried: rows computed a second time to make provisional tokens certain.
        draft_seconds: time in the drafter, of the batches this request was in.
        target_seconds: time in the target's forward pass, of the batches this request was in.
        total_seconds: from the request's start to its end.
        ttft: seconds to the first token.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    target_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    carried: int = 0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    total_seconds: float = 0.0
    ttft: float = 0.0
    _offered: Counter[int] = field(default_factory=Counter, repr=False)
    _taken: Counter[int] = field(default_factory=Counter, repr=False)

    def record_draft(self, guesses: int, depth: int, accepted: int) -> None:
        """Count a step: ``guesses`` acceptable nodes down to ``depth``, and a right path of ``accepted``."""
        self.drafted += guesses
        self.accepted += accepted
        self._offered.update(range(depth))
        self._taken.update(range(accepted))

    @property
    def acceptance(self) -> list[float]:
        """Share of the steps with a guess at position ``i`` (0 = next to the root) whose guess there was accepted."""
        return [self._taken[i] / self._offered[i] for i in sorted(self._offered)]

    @property
    def step_compression(self) -> float:
        """S: generated tokens per pass of the target; 1 for plain decoding."""
        return self.generated_tokens / self.target_steps if self.target_steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the whole time, prompt included."""
        return self.generated_tokens / self.total_seconds if self.total_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "target_steps": self.target_steps,
            "step_compression": self.step_compression,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "carried": self.carried,
            "acceptance": self.acceptance,
            "draft_seconds": self.draft_seconds,
            "target_seconds": self.target_seconds,
            "total_seconds": self.total_seconds,
            "ttft": self.ttft,
            "tokens_per_second": self.tokens_per_second,
        }
