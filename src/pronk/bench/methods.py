"""What a benchmark compares: our drafters, in this process, and peers, each in its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from pronk.bench.machine import PeakMemory
from pronk.bench.peers import Peer, PeerError, PeerRequest, PeerSpec
from pronk.bench.records import Sample
from pronk.drafters import Proposer, make_drafter
from pronk.engine.request_factory import end_ids
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams

__all__ = ["Drafting", "Item", "Method", "Missing", "PeerMethod"]


@dataclass(frozen=True)
class Item:
    """A prompt to measure: its token ids, the request's options, and the sample to fill in."""

    ids: list[int]
    params: SamplingParams
    sample: Sample


class Method(ABC):
    """A way to generate that is measured."""

    name: str
    engine: str

    @abstractmethod
    def run(self, items: Sequence[Item]) -> list[Sample]:
        """Generate for all items at once and say what it took."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what it holds."""


class Drafting(Method):
    """One of our drafters.

    Those that remember earlier outputs have a memory of their own for each repeat and temperature: nobody is measured
    on a prompt that it has answered before.
    """

    engine = "pronk"

    def __init__(self, llm: LLM, drafter: str, peak: PeakMemory) -> None:
        self.name = drafter
        self._llm = llm
        self._peak = peak
        self._proposers: dict[tuple[float, int], Proposer[Any]] = {}

    def run(self, items: Sequence[Item]) -> list[Sample]:
        """Time the whole call; a batch's time is shared by its prompts.

        Raises:
            PronkError: the drafter has raised for one of them, which cost all of them time.
        """
        memory = (items[0].sample.temperature, items[0].sample.repeat)
        if memory not in self._proposers:
            self._proposers[memory] = make_drafter(self.name).bind(self._llm.target)
        prompts, params = [item.ids for item in items], [item.params for item in items]
        self._peak.reset()
        runner = self._llm.engine.runner
        began, waited = perf_counter(), runner.waited
        completions = self._llm.generate(prompts, params, drafter=self._proposers[memory])
        seconds = (perf_counter() - began) / len(items)
        waited = (runner.waited - waited) / len(items)
        peak = self._peak.read()
        for out in completions:
            out.stats.check_proposer()
        return [
            replace(
                item.sample,
                seconds=seconds,
                total_seconds=out.stats.total_seconds,
                prompt_tokens=out.stats.prompt_tokens,
                tokens=tuple(out.token_ids),
                ttft=out.stats.ttft,
                steps=tuple(out.stats.steps),
                gain_stats=tuple(out.stats.gain_stats),
                peak_memory=peak,
                batch=len(items),
                waited=waited if self._llm.workers > 1 else None,
            )
            for item, out in zip(items, completions, strict=True)
        ]


class PeerMethod(Method):
    """Another engine, one prompt at a time."""

    def __init__(self, peer: Peer, eos_ids: Sequence[int]) -> None:
        self.name = peer.name
        self.engine = peer.spec.mode.engine
        self._peer = peer
        self._eos_ids = eos_ids

    def run(self, items: Sequence[Item]) -> list[Sample]:
        """The time is the peer's own, taken where it generates."""
        return [self._run(item) for item in items]

    def close(self) -> None:
        """End the peer's process."""
        self._peer.close()

    def _run(self, item: Item) -> Sample:
        params, ends = item.params, sorted(end_ids(item.params, self._eos_ids))
        result = self._peer.generate(
            PeerRequest(item.ids, params.max_tokens, params.temperature, params.seed or 0, ends, params.ignore_eos)
        )
        return replace(
            item.sample,
            seconds=result.seconds,
            total_seconds=result.seconds,
            prompt_tokens=len(item.ids),
            tokens=tuple(result.token_ids),
            ttft=result.ttft,
            peak_memory=result.peak_memory,
        )


class Missing(Method):
    """A peer that could not be started: it fails at every prompt, for the reason it gave."""

    def __init__(self, spec: PeerSpec, error: PeerError) -> None:
        self.name = str(spec)
        self.engine = spec.mode.engine
        self._error = error

    def run(self, items: Sequence[Item]) -> list[Sample]:  # noqa: ARG002 - there is nothing to run
        """Fail."""
        raise self._error
