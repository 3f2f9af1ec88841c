"""Methods that a benchmark compares: drafters of pronk, and methods of other engines (peers).

Drafters run in this process, and each peer in a process of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from pronk import LLM, Proposer, SamplingParams
from pronk.drafting import make_drafter
from pronk.lab.bench.machine import PeakMemory
from pronk.lab.bench.peers.engines.contract import PeerRequest
from pronk.lab.bench.peers.process import Peer, PeerError
from pronk.lab.bench.records import Sample
from pronk.serving import stop_ids_with_eos


@dataclass(frozen=True)
class Item:
    """A prompt to measure, its sampling parameters, and a sample without measured values.

    :meth:`Method.run` returns a copy of ``sample`` with the measured values filled in.
    """

    ids: list[int]
    params: SamplingParams
    sample: Sample


class Method(ABC):
    """A way to generate text: a drafter of pronk, or another engine."""

    name: str
    engine: str

    @abstractmethod
    def run(self, items: Sequence[Item]) -> list[Sample]:
        """Generate for all items in one batch, and return one complete sample per item."""


class DrafterMethod(Method):
    """A drafter of pronk.

    Each pair of temperature and repeat has a proposer of its own: a drafter that stores earlier
    outputs must not find the answer to a prompt there, from another run of the same prompt.
    """

    engine = "pronk"

    def __init__(self, llm: LLM, drafter: str, peak: PeakMemory) -> None:
        self.name = drafter
        self._llm = llm
        self._peak = peak
        self._proposers: dict[tuple[float, int], Proposer[Any]] = {}

    def run(self, items: Sequence[Item]) -> list[Sample]:
        """Generate for all items in one batch; the samples share the time of the call equally.

        Raises PronkError if the drafter raised an exception: the times are then not those of
        speculative decoding.
        """
        key = (items[0].sample.temperature, items[0].sample.repeat)
        if key not in self._proposers:
            self._proposers[key] = make_drafter(self.name).bind(self._llm.target)
        prompts = [item.ids for item in items]
        params = [item.params for item in items]
        self._peak.reset()
        runner = self._llm.engine.runner
        began = perf_counter()
        waited_before = runner.communication_seconds
        completions = self._llm.generate(prompts, params, drafter=self._proposers[key])
        seconds = (perf_counter() - began) / len(items)
        waited = (runner.communication_seconds - waited_before) / len(items)
        peak = self._peak.read()
        for completion in completions:
            completion.stats.check_proposer()
        return [
            replace(
                item.sample,
                seconds=seconds,
                total_seconds=completion.stats.total_seconds,
                prompt_tokens=completion.stats.prompt_tokens,
                tokens=tuple(completion.token_ids),
                ttft=completion.stats.ttft,
                steps=tuple(completion.stats.steps),
                trust=tuple(completion.stats.gain_stats),
                peak_memory=peak,
                batch=len(items),
                waited=waited if self._llm.workers > 1 else None,
            )
            for item, completion in zip(items, completions, strict=True)
        ]


class PeerMethod(Method):
    """Another engine, which gets one prompt at a time."""

    # Error of the start of the peer, with which every prompt fails; ``None``: the peer has started.
    error: PeerError | None = None

    def __init__(self, peer: Peer, eos_ids: Sequence[int]) -> None:
        self.name = peer.name
        self.engine = peer.spec.engine
        self._peer = peer
        self._eos_ids = eos_ids

    def run(self, items: Sequence[Item]) -> list[Sample]:
        """Generate for one item after the other; the peer's process measures the time."""
        if self.error is not None:
            raise self.error
        return [self._run(item) for item in items]

    def _run(self, item: Item) -> Sample:
        params = item.params
        request = PeerRequest(
            prompt=item.ids,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            seed=params.seed or 0,
            stop_token_ids=sorted(stop_ids_with_eos(params, self._eos_ids)),
            ignore_eos=params.ignore_eos,
        )
        result = self._peer.generate(request)
        return replace(
            item.sample,
            seconds=result.seconds,
            total_seconds=result.seconds,
            prompt_tokens=len(item.ids),
            tokens=tuple(result.token_ids),
            ttft=result.ttft,
            peak_memory=result.peak_memory,
        )
