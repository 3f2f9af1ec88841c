"""Measurement of all methods on all prompts, interleaved.

For each batch of prompts, each temperature and each turn of a conversation, all repeats of all
methods run one after the other, and each repeat begins with another method, so that noise on the
machine affects all methods alike. The results are the
records of :mod:`pronk.lab.bench.records`, from which :mod:`pronk.lab.bench.figures` computes the
metrics.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np

from pronk import LLM, PromptError, PronkError, Proposer, SamplingParams, TokenTree
from pronk.base import describe_error
from pronk.diagnosis import BandwidthMeter
from pronk.drafting import DraftContext, derive_seed
from pronk.lab.bench.methods import Item, Method
from pronk.lab.bench.prompts import Prompt, drop_middle, encode
from pronk.lab.bench.records import (
    PLAIN,
    Bandwidth,
    DivergenceRecord,
    Finished,
    PassTime,
    Sample,
    Skip,
    Trace,
)
from pronk.lab.verification.plain_decoding import rounding, score_next

_WARM_UP_TOKENS = 8  # number of tokens that each method generates before the first measurement
_REFILL_TOKENS = 64  # length of the prompt whose decoding refills the CPU caches

ROWS = (1, 2, 4, 8, 16, 32, 64)  # numbers of rows of the measured forward passes
_ROUNDS = 3  # default number of rounds over all numbers of rows
_STEPS = 6  # maximum number of forward passes of one number of rows in a round

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    max_tokens: int = 128  # maximum number of tokens of each output
    temperatures: tuple[float, ...] = (0.0, 0.8)  # sampling temperatures; 0 is greedy decoding
    repeats: int = 3  # number of runs of every method on every prompt
    batch: int = 1  # number of prompts that are decoded together
    seed: int = 7  # the seeds of all requests are derived from this one
    ignore_eos: bool = False  # whether to continue after an end-of-text token
    chat: bool = True  # whether to render conversations with the model's chat template
    fit: bool = False  # prompts that are too long: True cuts out their middle, False skips them
    # Time limit for the prompts of a model; the first batch is always measured.
    minutes: float | None = None


@dataclass
class Bench:
    """Measures methods on one model; the first method is plain decoding."""

    llm: LLM
    methods: Sequence[Method]
    options: Options
    _: KW_ONLY
    bandwidth: BandwidthMeter
    trace: Trace

    def run(
        self, tasks: Mapping[str, Sequence[Prompt]], progress: Progress = lambda _done, _total: None
    ) -> None:
        """Measure the prompts of all tasks; ``progress(done, total)`` receives numbers of runs.

        The first batch of each task comes first, then the second of each, so that a run with a time
        limit or an interrupted one has prompts of all tasks. The time limit counts from the end of
        the warm-up, and the batch that is running is finished, so that every call measures
        something.
        """
        runs = len(self.options.temperatures) * self.options.repeats * len(self.methods)
        total = runs * sum(prompt.num_turns for prompts in tasks.values() for prompt in prompts)
        self._progress = progress
        self._done = 0
        self._total = total
        self._advance(0)
        self._warm_up([prompt for prompts in tasks.values() for prompt in prompts])
        self._advance(0)  # the estimate of the duration counts from here, without the warm-up
        began = perf_counter()
        limit = math.inf if self.options.minutes is None else 60 * self.options.minutes
        for number, (task, batch) in enumerate(_interleave(tasks, self.options.batch)):
            if number and perf_counter() - began >= limit:
                return
            for temperature in self.options.temperatures:
                self._measure_batch(task, batch, temperature)
            for prompt in batch:
                names = tuple(_turn_name(prompt, turn) for turn in range(prompt.num_turns))
                self.trace.add(Finished(task, prompt.id, names))

    def _warm_up(self, prompts: Sequence[Prompt]) -> None:
        """Run every method once to fill caches and start threads, then time forward passes."""
        ids = drop_middle(self._first_ids(prompts), max(1, self.llm.config.context // 2))
        params = SamplingParams(max_tokens=_WARM_UP_TOKENS, ignore_eos=True)
        # Repeat -1: a proposer belongs to one repeat, so no measured repeat shares the proposer of
        # the warm-up.
        item = Item(ids, params, Sample("", "", "", "", 0.0, 0, -1))
        for method in self.methods:
            self._attempt(method, [item])
        # A model that fails here also fails in the measured runs, whose samples report the error.
        with suppress(PronkError):
            for record in pass_times(self.llm, ids):
                self.trace.add(record)

    def _first_ids(self, prompts: Sequence[Prompt]) -> list[int]:
        """Return the token ids of the first prompt that can be encoded; ``[0]`` without any."""
        for prompt in prompts:
            with suppress(PromptError):
                return encode(self.llm, prompt, chat=self.options.chat)
        return [0]

    def _measure_batch(self, task: str, prompts: Sequence[Prompt], temperature: float) -> None:
        """Measure all turns of a batch of prompts.

        The prompt of a later turn contains the answers of plain decoding to the earlier turns.
        """
        answers: dict[str, list[str]] = {prompt.id: [] for prompt in prompts}
        for turn in range(max(prompt.num_turns for prompt in prompts)):
            due = [prompt for prompt in prompts if turn < prompt.num_turns]
            items = self._items(task, due, turn, answers, temperature)
            self._advance((len(due) - len(items)) * self.options.repeats * len(self.methods))
            if not items:
                continue
            self.trace.add(Bandwidth(self.bandwidth.measure()))
            # Measuring the bandwidth has emptied the CPU caches; a short run refills them before
            # the first method.
            # An error is also that of the measured samples, which report it.
            with suppress(PronkError):
                ids = items[0][1].ids[:_REFILL_TOKENS]
                self.llm.generate(ids, SamplingParams(max_tokens=2), drafter=PLAIN)
            plain = self._run_repeats([item for _, item in items])
            for (prompt, _), sample in zip(items, plain, strict=True):
                if sample.error is None:
                    answers[prompt.id].append(self.llm.tokenizer.decode(sample.tokens))

    def _items(
        self,
        task: str,
        prompts: Sequence[Prompt],
        turn: int,
        answers: Mapping[str, Sequence[str]],
        temperature: float,
    ) -> list[tuple[Prompt, Item]]:
        """Return the prompts that fit the model's context, each with the item to measure.

        The other prompts are recorded as skipped.
        """
        options = self.options
        items = list[tuple[Prompt, Item]]()
        limit = self.llm.config.context - options.max_tokens
        for prompt in prompts:
            name = _turn_name(prompt, turn)
            if len(answers[prompt.id]) < turn:
                self.trace.add(Skip(name, task, "an earlier turn has no answer"))
                continue
            try:
                ids = encode(self.llm, prompt, answers[prompt.id], chat=options.chat)
            except PromptError as error:  # the tokenizer or the chat template refuses the prompt
                self.trace.add(Skip(name, task, str(error)))
                continue
            if options.fit:
                ids = drop_middle(ids, limit)
            if not 0 < len(ids) <= limit:
                context = self.llm.config.context
                reason = (
                    f"{len(ids)} tokens and {options.max_tokens} more; "
                    f"the model's context is {context}"
                )
                self.trace.add(Skip(name, task, reason))
                continue
            seed = derive_seed(options.seed, 1 + zlib.crc32(f"{task}/{name}".encode()))
            params = SamplingParams(
                max_tokens=options.max_tokens,
                temperature=temperature,
                seed=seed,
                ignore_eos=options.ignore_eos,
            )
            sample = Sample(task, name, "", "", temperature, seed, 0)
            items.append((prompt, Item(ids, params, sample)))
        return items

    def _run_repeats(self, items: Sequence[Item]) -> list[Sample]:
        """Run all repeats of all methods; return plain decoding's samples of the first repeat."""
        first_samples: dict[str, list[Sample]] = {}
        for repeat in range(self.options.repeats):
            shift = repeat % len(self.methods)
            for method in [*self.methods[shift:], *self.methods[:shift]]:
                names: dict[str, Any] = {
                    "method": method.name,
                    "engine": method.engine,
                    "repeat": repeat,
                }
                labelled = [replace(item, sample=replace(item.sample, **names)) for item in items]
                samples = self._attempt(method, labelled)
                first_samples.setdefault(method.name, samples)
                for sample in samples:
                    self.trace.add(sample)
                self._advance(len(samples))
        self._record_divergences(items, first_samples)
        return first_samples[PLAIN]

    def _attempt(self, method: Method, items: Sequence[Item]) -> list[Sample]:
        """Run a method once; if the method raises, return samples with its message as ``error``."""
        try:
            return method.run(items)
        except Exception as error:  # noqa: BLE001
            reason = describe_error(error)
            return [replace(item.sample, error=reason) for item in items]

    def _record_divergences(
        self, items: Sequence[Item], first_samples: Mapping[str, Sequence[Sample]]
    ) -> None:
        """Record outputs that differ from those of plain decoding.

        Sampled outputs of a peer are left out, because the peer draws its own random numbers.
        """
        for method in self.methods:
            if method.engine != "pronk" and not items[0].params.greedy:
                continue
            plain_samples = first_samples[PLAIN]
            samples = first_samples[method.name]
            for item, plain, other in zip(items, plain_samples, samples, strict=True):
                divergence = find_divergence(self.llm, item, plain, other)
                if divergence is not None:
                    self.trace.add(divergence)

    def _advance(self, runs: int) -> None:
        self._done += runs
        self._progress(self._done, self._total)


def _interleave(
    tasks: Mapping[str, Sequence[Prompt]], size: int
) -> Iterator[tuple[str, Sequence[Prompt]]]:
    """Yield (task, batch of prompts): the first batch of each task, then the second of each."""
    longest = max((len(prompts) for prompts in tasks.values()), default=0)
    for start in range(0, longest, size):
        for task, prompts in tasks.items():
            if batch := prompts[start : start + size]:
                yield task, batch


def _turn_name(prompt: Prompt, turn: int) -> str:
    return f"{prompt.id} turn {turn + 1}" if turn else prompt.id


def find_divergence(llm: LLM, item: Item, plain: Sample, other: Sample) -> DivergenceRecord | None:
    """Return the record of the first token at which an output differs from plain decoding's.

    ``plain`` is the sample of plain decoding, and ``other`` that of another method, for the same
    prompt ``item``. The result is ``None`` if the outputs are equal, or if a method failed.

    A near tie is a difference that rounding can cause, if the logits of both runs have errors of at
    most :func:`~pronk.lab.verification.plain_decoding.rounding`. A difference in length alone is
    never a near tie.
    """
    if plain.tokens == other.tokens or plain.error or other.error:
        return None
    pairs = zip(plain.tokens, other.tokens, strict=False)
    shorter = min(len(plain.tokens), len(other.tokens))
    position = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)
    leading_fields = (other.task, other.id, other.method, other.temperature, position)
    # A peer can generate token ids beyond the target's vocabulary; they have no logit.
    if position == shorter or other.tokens[position] >= llm.config.vocab_size:
        return DivergenceRecord(*leading_fields, gap=None, near_tie=False)
    ours = plain.tokens[position]
    theirs = other.tokens[position]
    (recorder,) = score_next(llm, item.ids, [plain.tokens[:position]], item.params)
    scores = recorder.scores(recorder.logits)
    gap = float(scores[ours] - scores[theirs])
    slack = 2 * rounding(llm, float(np.abs(recorder.logits).max()))  # twice the error of one run
    near_tie = recorder.could_choose(theirs, ours, slack)
    return DivergenceRecord(
        *leading_fields, gap=gap if math.isfinite(gap) else None, near_tie=near_tie
    )


@dataclass(frozen=True)
class _StarProposer(Proposer[None]):
    """Proposer for measuring forward passes of ``rows`` rows.

    It proposes ``rows - 1`` children of the text's last token; their tokens do not matter.
    """

    name = "star"
    rows: int
    vocab_size: int

    def start(self, prompt: Sequence[int]) -> None:
        """Return ``None``: the proposer has no state."""

    def propose(self, contexts: Sequence[DraftContext[None]]) -> list[TokenTree]:
        """Propose the tokens after the last one by id (modulo ``vocab_size``), all as siblings."""
        parents = (-1, *[0] * (self.rows - 1))
        trees: list[TokenTree] = []
        for context in contexts:
            root = context.tokens[-1]
            tokens = [(root + i) % self.vocab_size for i in range(self.rows)]
            trees.append(TokenTree(tuple(tokens), parents))
        return trees


def pass_times(
    llm: LLM, prompt: list[int], sizes: Sequence[int] | None = None, *, rounds: int | None = None
) -> Iterator[PassTime]:
    """Measure the time of forward passes by their number of rows, after the tokens ``prompt``.

    ``sizes`` are the numbers of rows (default :data:`ROWS`). The measurement has ``rounds`` rounds
    (default 3), each of at most six forward passes of each number of rows.
    """
    params = SamplingParams(max_tokens=_STEPS + 1, ignore_eos=True)
    for _ in range(rounds or _ROUNDS):
        for rows in sizes or ROWS:
            stats = llm.generate(
                prompt, params, drafter=_StarProposer(rows, llm.config.vocab_size)
            ).stats
            for previous, step in pairwise(stats.steps):
                # Near the end of the text, ``max_tokens`` allows fewer draft tokens, and the pass
                # has fewer rows.
                if step.rows == rows:
                    yield PassTime(rows, step.target_clock - previous.target_clock)
