"""Measure all methods on all prompts, interleaved: noise on the machine affects them alike.

For each batch of prompts, each temperature and each turn of a conversation, all repeats of all methods run one after
the other, and each repeat begins with another method. The results are raw records; :mod:`pronk.bench.summary` computes
the metrics.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from time import perf_counter

from pronk.bench.divergence import find_divergence
from pronk.bench.machine import BandwidthMeter
from pronk.bench.methods import Item, Method
from pronk.bench.passes import pass_times
from pronk.bench.prompts import Prompt, encode, fit
from pronk.bench.records import PLAIN, Bandwidth, End, Sample, Skip, StepTrace
from pronk.errors import PromptError, PronkError
from pronk.llm import LLM
from pronk.sampling.noise import derive_seed
from pronk.sampling.params import SamplingParams

__all__ = ["Bench", "Options", "Timer"]

_WARM_UP_TOKENS = 8
_SETTLE_TOKENS = 64

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Options:
    """Options of the measurement.

    Attributes:
        max_tokens: maximum tokens of each output.
        temperatures: sampling temperatures to measure; 0 is greedy.
        repeats: runs of every method on every prompt.
        batch: prompts that are decoded together.
        seed: base of the seeds of all requests.
        ignore_eos: whether to continue after an end-of-text token.
        chat: whether to render conversations with the model's chat template.
        fit: whether to cut the middle out of prompts that are too long; otherwise they are skipped.
    """

    max_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 0.8)
    repeats: int = 3
    batch: int = 1
    seed: int = 7
    ignore_eos: bool = False
    chat: bool = True
    fit: bool = False


class Timer:
    """Divides the time since its creation into runs of methods, preparation, and overhead of the harness."""

    def __init__(self) -> None:
        self._began = perf_counter()
        self._runs = self._other = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time as a run of a method."""
        began = perf_counter()
        try:
            yield
        finally:
            self._runs += perf_counter() - began

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Count the time as preparation: loading, warm-up, measuring the machine, comparing outputs."""
        began = perf_counter()
        try:
            yield
        finally:
            self._other += perf_counter() - began

    def end(self, *, interrupted: bool) -> End:
        """Return the record of the end, with the remaining time as the overhead of the harness."""
        harness = perf_counter() - self._began - self._runs - self._other
        return End(harness / self._runs if self._runs else 0.0, interrupted)


class Bench:
    """Measures methods on one model; the first method is plain decoding."""

    def __init__(
        self,
        llm: LLM,
        methods: Sequence[Method],
        options: Options,
        *,
        bandwidth: BandwidthMeter,
        trace: StepTrace,
        timer: Timer,
    ) -> None:
        self._llm = llm
        self._methods = list(methods)
        self._options = options
        self._bandwidth = bandwidth
        self._trace = trace
        self._timer = timer
        self._progress: Progress | None = None
        self._done = self._total = 0

    def run(self, tasks: Mapping[str, Sequence[Prompt]], progress: Progress | None = None) -> None:
        """Measure all prompts of all tasks; ``progress`` receives the finished runs and the total."""
        runs = len(self._options.temperatures) * self._options.repeats * len(self._methods)
        total = runs * sum(prompt.num_turns for prompts in tasks.values() for prompt in prompts)
        self._progress, self._done, self._total = progress, 0, total
        self._advance(0)
        self._warm_up([prompt for prompts in tasks.values() for prompt in prompts])
        for task, prompts in tasks.items():
            for first in range(0, len(prompts), self._options.batch):
                for temperature in self._options.temperatures:
                    self._converse(task, prompts[first : first + self._options.batch], temperature)

    def _warm_up(self, prompts: Sequence[Prompt]) -> None:
        """Run every method once to fill caches and start threads, then measure the time of forward passes."""
        ids = fit(self._first_ids(prompts), max(1, self._llm.config.context // 2))
        item = Item(
            ids, SamplingParams(max_tokens=_WARM_UP_TOKENS, ignore_eos=True), Sample("", "", "", "", 0.0, 0, -1)
        )
        with self._timer.preparing():
            for method in self._methods:
                self._attempt(method, [item])
            # If the model fails here, the samples report the error.
            with suppress(PronkError):
                for record in pass_times(self._llm, ids):
                    self._trace.add(record)

    def _settle(self, ids: Sequence[int]) -> None:
        """Warm the caches, which measuring the bandwidth empties, so that plain decoding does not pay for it."""
        with suppress(PronkError):  # the samples report the error
            self._llm.generate(list(ids[:_SETTLE_TOKENS]), SamplingParams(max_tokens=2), drafter=PLAIN)

    def _first_ids(self, prompts: Sequence[Prompt]) -> list[int]:
        """Return the token ids of the first prompt that can be encoded, or one token if there is none."""
        for prompt in prompts:
            with suppress(PromptError):
                return encode(self._llm, prompt, chat=self._options.chat)
        return [0]

    def _converse(self, task: str, prompts: Sequence[Prompt], temperature: float) -> None:
        """Measure all turns of a batch. Conversations continue with plain decoding's answers."""
        answers: dict[str, list[str]] = {prompt.id: [] for prompt in prompts}
        for turn in range(max(prompt.num_turns for prompt in prompts)):
            asked = [prompt for prompt in prompts if turn < prompt.num_turns]
            going = [prompt for prompt in asked if len(answers[prompt.id]) == turn]
            for prompt in asked:
                if prompt not in going:
                    self._trace.add(Skip(_name(prompt, turn), task, "an earlier turn has no answer"))
            items = self._items(task, going, answers, temperature)
            self._advance((len(asked) - len(items)) * self._options.repeats * len(self._methods))
            if not items:
                continue
            with self._timer.preparing():
                self._trace.add(Bandwidth(self._bandwidth.measure()))
                self._settle(items[0][1].ids)
            plain = self._repeat([item for _, item in items])
            for (prompt, _), sample in zip(items, plain, strict=True):
                if sample.error is None:
                    answers[prompt.id].append(self._llm.tokenizer.decode(sample.tokens))

    def _items(
        self, task: str, prompts: Sequence[Prompt], answers: Mapping[str, Sequence[str]], temperature: float
    ) -> list[tuple[Prompt, Item]]:
        options, items = self._options, list[tuple[Prompt, Item]]()
        limit = self._llm.config.context - options.max_tokens
        for prompt in prompts:
            turn = len(answers[prompt.id])
            name = _name(prompt, turn)
            try:
                ids = encode(self._llm, prompt, answers[prompt.id], chat=options.chat)
            except PromptError as error:  # refused by the tokenizer or the chat template
                self._trace.add(Skip(name, task, str(error)))
                continue
            if options.fit:
                ids = fit(ids, limit)
            if not 0 < len(ids) <= limit:
                context = self._llm.config.context
                reason = f"{len(ids)} tokens and {options.max_tokens} more; the model's context is {context}"
                self._trace.add(Skip(name, task, reason))
                continue
            seed = derive_seed(options.seed, 1 + zlib.crc32(f"{task}/{name}".encode()))
            params = SamplingParams(
                max_tokens=options.max_tokens, temperature=temperature, seed=seed, ignore_eos=options.ignore_eos
            )
            items.append((prompt, Item(ids, params, Sample(task, name, "", "", temperature, seed, 0))))
        return items

    def _repeat(self, items: Sequence[Item]) -> list[Sample]:
        """Run every repeat of every method; return plain decoding's samples of the first repeat."""
        first: dict[str, list[Sample]] = {}
        for repeat in range(self._options.repeats):
            shift = repeat % len(self._methods)
            for method in [*self._methods[shift:], *self._methods[:shift]]:
                named = [self._named(item, method, repeat) for item in items]
                with self._timer.running():
                    samples = self._attempt(method, named)
                first.setdefault(method.name, samples)
                for sample in samples:
                    self._trace.add(sample)
                self._advance(len(samples))
        with self._timer.preparing():
            self._explain(items, first)
        return first[PLAIN]

    def _named(self, item: Item, method: Method, repeat: int) -> Item:
        return replace(item, sample=replace(item.sample, method=method.name, engine=method.engine, repeat=repeat))

    def _attempt(self, method: Method, items: Sequence[Item]) -> list[Sample]:
        """Run a method; an exception becomes the error of its samples."""
        try:
            return method.run(items)
        except Exception as error:  # noqa: BLE001
            reason = " ".join(str(error).split()) or type(error).__name__
            return [replace(item.sample, error=reason) for item in items]

    def _explain(self, items: Sequence[Item], first: Mapping[str, Sequence[Sample]]) -> None:
        """Record differences from plain decoding; for peers, whose random numbers differ, only greedy ones."""
        for method in self._methods:
            if method.engine == "pronk" or items[0].params.greedy:
                for item, plain, other in zip(items, first[PLAIN], first[method.name], strict=True):
                    found = find_divergence(self._llm, item, plain, other)
                    if found is not None:
                        self._trace.add(found)

    def _advance(self, runs: int) -> None:
        self._done += runs
        if self._progress is not None:
            self._progress(self._done, self._total)


def _name(prompt: Prompt, turn: int) -> str:
    return f"{prompt.id} turn {turn + 1}" if turn else prompt.id
