"""Prompts and settings of a verification, and the callback for its progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pronk import LLM, OptionError, PromptError, SamplingParams
from pronk.base import refuse
from pronk.base.checks import check_integer
from pronk.serving import Rule

# Progress callback: (label of the current part, tokens done, total number of tokens).
Progress = Callable[[str, int, int], None]

# Minimum number of strings; with fewer, `merge_small` would merge most cells into one.
MIN_SAMPLES = 100


@dataclass(frozen=True)
class NamedPrompt:
    """A prompt to verify with."""

    id: str  # name in the report
    ids: list[int]  # token ids, at least one


@dataclass(frozen=True)
class VerifySettings:
    """Amount of text, seed and acceptance rule of a verification.

    Under the rules ``"rejection"`` and ``"block"``, sampled tokens depend on the draft tokens, so
    equality is checked for greedy texts only. Raises OptionError if a value is out of range.
    """

    max_tokens: int = 64  # generated tokens per text, at least 1
    # Strings to sample per drafter for the test of the distribution, at least MIN_SAMPLES; 0: no
    # test.
    samples: int = 2000
    seed: int = 0
    rule: Rule = "coupled"  # acceptance rule of all requests with temperature above 0

    def __post_init__(self) -> None:
        check_integer("max_tokens", self.max_tokens, 1)
        if self.samples != 0 and self.samples < MIN_SAMPLES:
            refuse(
                "samples",
                f"expected 0 or at least {MIN_SAMPLES}, found {self.samples}",
                OptionError,
            )
        check_integer("seed", self.seed, 0, 2**63 - 1)
        SamplingParams(rule=self.rule)  # raises if the rule is unknown


@dataclass
class ProgressMeter:
    """Progress of a verification in tokens; a finished request counts as ``max_tokens`` tokens."""

    callback: Progress | None
    total: int  # number of tokens of the whole verification
    done: int = 0  # number of tokens so far
    label: str = field(default="", init=False)  # name of the part that is running

    def begin(self, label: str) -> None:
        """Set the label of the current part of the verification."""
        self.label = label
        self.add(0)

    def add(self, tokens: int) -> None:
        """Add ``tokens`` to the number of tokens done, and call the callback."""
        self.done += tokens
        if self.callback is not None:
            self.callback(self.label, self.done, self.total)

    def batch_callback(self, tokens: int) -> Callable[[int, int], None]:
        """Return a progress callback for a batch of requests, which advances this meter.

        The callback takes the numbers of finished requests and of all requests. A finished request
        counts as ``tokens`` tokens, the maximum per request.
        """
        done_before = self.done
        return lambda finished, _total: self.add(done_before + finished * tokens - self.done)


def select_fitting(llm: LLM, prompts: Sequence[NamedPrompt], max_tokens: int) -> list[NamedPrompt]:
    """Return the prompts that leave room for ``max_tokens`` + 1 tokens in the model's context.

    Scoring a text generates one more token. Raises PromptError if no prompt fits.
    """
    limit = llm.config.context - max_tokens - 1
    fitting = [prompt for prompt in prompts if 0 < len(prompt.ids) <= limit]
    if not fitting:
        found = f"{len(prompts)} that are too long" if prompts else "none"
        msg = (
            f"expected prompts of at most {limit} tokens (the model's context of "
            f"{llm.config.context} less {max_tokens} tokens of answer and 1), found {found}"
        )
        raise PromptError(msg)
    return fitting
