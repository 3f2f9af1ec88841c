"""Drafters on the same texts by turns, for as long as there is time; who falls behind is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from pronk.advise.facts import Raced, Span, resampled
from pronk.bench.metrics import repeated_ngrams
from pronk.bench.records import PLAIN
from pronk.bench.summary import DEGENERATE_ABOVE
from pronk.drafters import Proposer, make_drafter
from pronk.errors import PronkError
from pronk.llm import LLM
from pronk.sampling.noise import derive_seed
from pronk.sampling.params import SamplingParams

__all__ = ["AUTO", "Race"]

AUTO = "auto"

# With fewer prompts the spans are of the times that they were continued, and not of prompts.
_APART = 5

# At least so many texts; then, as many as there is time for. With fewer nobody is left out.
_LEAST = 3

_WARM_UP, _SHORTEST, _TEXTS = 8, 24, 6


@dataclass
class _Runner:
    """A drafter, and what it took for each text: seconds a token, and tokens a step."""

    name: str
    proposer: Proposer[Any]
    seconds: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)

    def times(self, plain: _Runner, prompts: int) -> Span:
        """Its speed over plain decoding's on the texts that it was measured on, of so many prompts by turns."""
        groups = prompts if prompts >= _APART else max(1, len(self.seconds))  # of few prompts, by each time
        mine, others = (
            [sum(each.seconds[n : len(self.seconds) : groups]) for n in range(groups)] for each in (self, plain)
        )
        pairs = [pair for pair in zip(mine, others, strict=True) if pair[0]]
        return resampled(pairs, lambda each: sum(b for _, b in each) / sum(a for a, _ in each))


class Race:
    """Plain decoding, auto, and whoever else can guess for a model.

    Attributes:
        texts: tokens that plain decoding has written, each with its prompt.
    """

    def __init__(self, llm: LLM, names: Sequence[str], params: SamplingParams) -> None:
        """Load them.

        Args:
            llm: the target, with a prefix cache, so that a prompt is read once.
            names: drafters; of those that do not go with the target nothing is measured.
            params: of a text.
        """
        self._llm, self._params = llm, params
        self._runners = [
            _Runner(name, proposer) for name in names if (proposer := _get_proposer(llm, name)) is not None
        ]
        self._prompts = 1
        self.texts: list[tuple[list[int], list[int]]] = []

    @property
    def looped(self) -> int:
        """Prompts whose texts repeat themselves."""
        found = {tuple(prompt): repeated_ngrams(text) > DEGENERATE_ABOVE for prompt, text in self.texts}
        return sum(found.values())

    def run(self, prompts: Sequence[list[int]], seconds: float, tell: Callable[[str], None]) -> None:
        """Continue prompts for about so many seconds; ``tell`` hears who is at it."""
        began, self._prompts = perf_counter(), len(prompts)
        length = self._warm_up(prompts[0], seconds, tell)
        racing, took, number = self._runners, 0.0, 0
        while number < _LEAST or perf_counter() - began + took < seconds:
            if number and not number % len(prompts):  # nobody is measured on a text that it has written before
                for runner in self._runners:
                    runner.proposer = self._fresh(runner)
            started = perf_counter()
            params = replace(self._params, max_tokens=length, seed=derive_seed(self._params.seed or 0, number))
            shift = number % len(racing)
            for runner in (*racing[shift:], *racing[:shift]):
                tell(f"text {number + 1}, {runner.name}")
                self._write(runner, prompts[number % len(prompts)], params)
            took, number = perf_counter() - started, number + 1
            racing = self._left(racing)

    def results(self) -> list[Raced]:
        """What has been measured so far, fastest first."""
        plain = self._runners[0]
        whole = [runner for runner in self._runners if 0 < len(runner.seconds) <= len(plain.seconds)]
        found = [
            Raced(r.name, r.times(plain, self._prompts), sum(r.tokens) / len(r.tokens), len(r.seconds))
            for r in whole
            if r is not plain
        ]
        return sorted(found, key=lambda each: -each.times.middle)

    def _warm_up(self, prompt: list[int], seconds: float, tell: Callable[[str], None]) -> int:
        """What is done once is done; returns tokens of a text."""
        params, took = replace(self._params, max_tokens=_WARM_UP, ignore_eos=True), 1.0
        for runner in list(self._runners):
            tell(f"{runner.name} gets ready")
            stats = self._llm.generate(prompt, params, drafter=runner.proposer).stats
            if stats.draft_error is not None:
                self._runners.remove(runner)
            elif runner.name == PLAIN:
                took = (stats.total_seconds - stats.ttft) / (_WARM_UP - 1)
            runner.proposer = self._fresh(runner)
        fits = int(seconds / (_TEXTS * len(self._runners) * took))
        return min(self._params.max_tokens, max(_SHORTEST, fits))

    def _write(self, runner: _Runner, prompt: list[int], params: SamplingParams) -> None:
        out = self._llm.generate(prompt, params, drafter=runner.proposer)
        stats = out.stats
        later = stats.generated_tokens - (stats.steps[0].tokens if stats.steps else 0)
        # A text that ends at once says nothing of anybody.
        runner.seconds.append((stats.total_seconds - stats.ttft) / later if later else 1e-9)
        runner.tokens.append(stats.step_compression)
        if runner.name == PLAIN:
            self.texts.append((prompt, out.token_ids))

    def _left(self, racing: list[_Runner]) -> list[_Runner]:
        """Without those of whom it is clear that another one is faster."""
        plain = self._runners[0]
        if len(plain.seconds) < _LEAST:
            return racing
        times = {runner.name: runner.times(plain, self._prompts) for runner in racing}
        best = max(span.low for span in times.values())
        return [runner for runner in racing if runner.name in {PLAIN, AUTO} or times[runner.name].high >= best]

    def _fresh(self, runner: _Runner) -> Proposer[Any]:
        """Somebody who remembers nothing."""
        return make_drafter(runner.name).bind(self._llm.target)


def _get_proposer(llm: LLM, name: str) -> Proposer[Any] | None:
    try:
        return llm.get_proposer(name)
    except PronkError:
        return None
