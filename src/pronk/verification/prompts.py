"""The prompts that a verification uses, its settings, and how far it has got."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pronk.checks import check_integer
from pronk.errors import OptionError, PromptError
from pronk.llm import LLM
from pronk.sampling.params import Rule, SamplingParams

__all__ = ["LEAST_SAMPLES", "NamedPrompt", "Progress", "ProgressMeter", "VerifySettings", "fitting"]

Progress = Callable[[str, int, int], None]

# Fewer strings would leave the chi-square test hardly a cell.
LEAST_SAMPLES = 100


@dataclass(frozen=True)
class NamedPrompt:
    """A prompt with a name to report it by.

    Attributes:
        id: the name.
        ids: token ids, at least one.
    """

    id: str
    ids: list[int]


@dataclass(frozen=True)
class VerifySettings:
    """How much to verify.

    Attributes:
        max_tokens: tokens per text, at least 1.
        samples: strings per drafter for the test of the distribution, 100 or more; 0 leaves the test out.
        seed: of all that is drawn; with the same seed the verdicts are the same (where guesses are
            accepted by chance: if these are).
        rule: how guesses are accepted in sampled texts and strings. But for ``"coupled"`` sampled tokens depend on the
            guesses, so equality is asked of greedy texts alone, and log-probabilities agree up to rounding, because
            accepted rows are moved into place on every device.

    Raises:
        OptionError: one of them is out of its range.
    """

    max_tokens: int = 64
    samples: int = 2000
    seed: int = 0
    rule: Rule = "coupled"

    def __post_init__(self) -> None:
        check_integer("max_tokens", self.max_tokens, 1)
        if self.samples != 0 and self.samples < LEAST_SAMPLES:
            msg = f"samples: expected 0 or at least {LEAST_SAMPLES}, found {self.samples}"
            raise OptionError(msg)
        check_integer("seed", self.seed, 0, 2**63 - 1)
        SamplingParams(rule=self.rule)  # says what is wrong with another


@dataclass
class ProgressMeter:
    """Tells how far the work is, in tokens asked for."""

    tell: Progress | None
    total: int
    done: int = 0
    label: str = field(default="", init=False)

    def begin(self, label: str) -> None:
        """Name the part of the work that begins."""
        self.label = label
        self.add(0)

    def add(self, tokens: int) -> None:
        """Report ``tokens`` more as done."""
        self.done += tokens
        if self.tell is not None:
            self.tell(self.label, self.done, self.total)


def fitting(llm: LLM, prompts: Sequence[NamedPrompt], max_tokens: int) -> list[NamedPrompt]:
    """The prompts that leave room for the answer, and for scoring prompt and answer as one text.

    Raises:
        PromptError: there is none.
    """
    room = llm.config.context - max_tokens - 1
    fit = [prompt for prompt in prompts if 0 < len(prompt.ids) <= room]
    if not fit:
        found = f"{len(prompts)} that are too long" if prompts else "none"
        msg = (
            f"expected prompts that leave room for {max_tokens} tokens in the model's context of {llm.config.context}, "
            f"found {found}"
        )
        raise PromptError(msg)
    return fit
