"""Prompts, settings and progress of a verification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pronk.checks import check_integer
from pronk.errors import OptionError, PromptError
from pronk.llm import LLM
from pronk.sampling.params import Rule, SamplingParams

__all__ = ["LEAST_SAMPLES", "NamedPrompt", "Progress", "ProgressMeter", "VerifySettings", "fitting"]

Progress = Callable[[str, int, int], None]

LEAST_SAMPLES = 100  # with fewer strings the chi-square test has hardly any cells


@dataclass(frozen=True)
class NamedPrompt:
    """A prompt with the name ``id`` for the report and at least one token id in ``ids``."""

    id: str
    ids: list[int]


@dataclass(frozen=True)
class VerifySettings:
    """Amount of text, seed and acceptance rule of a verification.

    With a rule other than ``"coupled"`` sampled tokens depend on the draft tokens, so equality is checked for greedy
    texts only.

    Raises:
        OptionError: a value is out of range.
    """

    max_tokens: int = 64  # generated tokens per text, at least 1
    samples: int = 2000  # strings per drafter for the test of the distribution, 100 or more; 0 skips the test
    seed: int = 0
    rule: Rule = "coupled"  # acceptance rule of sampled texts and strings

    def __post_init__(self) -> None:
        check_integer("max_tokens", self.max_tokens, 1)
        if self.samples != 0 and self.samples < LEAST_SAMPLES:
            msg = f"samples: expected 0 or at least {LEAST_SAMPLES}, found {self.samples}"
            raise OptionError(msg)
        check_integer("seed", self.seed, 0, 2**63 - 1)
        SamplingParams(rule=self.rule)  # validates the rule


@dataclass
class ProgressMeter:
    """Reports progress in tokens; a finished request counts with its maximum number of tokens."""

    tell: Progress | None
    total: int
    done: int = 0
    label: str = field(default="", init=False)

    def begin(self, label: str) -> None:
        """Start the part of the work called ``label``."""
        self.label = label
        self.add(0)

    def add(self, tokens: int) -> None:
        """Report ``tokens`` more as done."""
        self.done += tokens
        if self.tell is not None:
            self.tell(self.label, self.done, self.total)

    def requests(self, tokens: int) -> Callable[[int, int], None]:
        """Return a callback that reports finished requests of ``tokens`` tokens each, given their number."""
        began = self.done
        return lambda finished, _total: self.add(began + finished * tokens - self.done)


def fitting(llm: LLM, prompts: Sequence[NamedPrompt], max_tokens: int) -> list[NamedPrompt]:
    """Return the prompts that fit the context with their answer and the one token that scoring generates."""
    limit = llm.config.context - max_tokens - 1
    fit = [prompt for prompt in prompts if 0 < len(prompt.ids) <= limit]
    if not fit:
        found = f"{len(prompts)} that are too long" if prompts else "none"
        msg = (
            f"expected prompts of at most {limit} tokens (the model's context of {llm.config.context} less "
            f"{max_tokens} tokens of answer and 1), found {found}"
        )
        raise PromptError(msg)
    return fit
