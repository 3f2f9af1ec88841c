"""What a pass is made of: some requests' rows, and the layers that they go through together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from pronk.execution.attention import Segment
from pronk.kv_cache.blocks import BlockTable
from pronk.kv_cache.paged import PagedCache
from pronk.models.decoder import Decoder
from pronk.sampling.stateless import StatelessSampler

__all__ = ["CrossAttentionSource", "Executor", "ForwardJob", "LayerRange"]


class ForwardJob(NamedTuple):
    """One request's share of a pass.

    Attributes:
        segment: its rows.
        wanted: the nodes whose logits are needed, in order.
        prompt_length: tokens of its prompt, which is the length that *dynamic* RoPE scaling starts from.
        beside: where cross-attention finds the request's text in another model's cache.
        whole: whether the logits of all wanted nodes are looked at for sure, not of some of them alone.
        stateless_sampler: how the token after a node is chosen, if whoever computes its logits can do that.
    """

    segment: Segment
    wanted: range
    prompt_length: int
    beside: BlockTable | None = None
    whole: bool = True
    stateless_sampler: StatelessSampler | None = None


@dataclass(frozen=True)
class CrossAttentionSource:
    """Another model's cache, which a model with cross-attention reads and never writes.

    Attributes:
        decoder: the other model.
        cache: its keys and values.
        layers: for each layer of the reading model the number, from 0, of the layer that it reads.
    """

    decoder: Decoder
    cache: PagedCache
    layers: tuple[int, ...]


class LayerRange(NamedTuple):
    """Some layers over some rows.

    Attributes:
        jobs: those that have rows here, with the part of their segment that these layers compute.
        start: first layer.
        stop: the layer behind the last one.
        collect: numbers of layers whose output is wanted.
        wanted: rows whose logits are wanted, in order; ``None`` if this is not the end of the model.
    """

    jobs: Sequence[tuple[ForwardJob, Segment]]
    start: int
    stop: int
    collect: tuple[int, ...]
    wanted: Sequence[int] | range | None

    @staticmethod
    def wanted_of(jobs: Sequence[tuple[ForwardJob, Segment]]) -> list[int] | range:
        """The rows, in a stage of ``jobs``, of the nodes whose logits are wanted."""
        if len(jobs) == 1:
            ((job, segment),) = jobs
            return range(job.wanted.start - segment.computed, job.wanted.stop - segment.computed)
        rows, start = list[int](), 0
        for job, segment in jobs:
            rows.extend(start + node - segment.computed for node in job.wanted)
            start += segment.rows
        return rows

    def places(self) -> tuple[list[int], list[int], list[int]]:
        """Token, position and RoPE span of every row."""
        tokens, positions, spans = list[int](), list[int](), list[int]()
        for job, segment in self.jobs:
            length, computed = segment.block_table.length, segment.computed
            tokens.extend(segment.tree.tokens[computed:])
            places = [length + depth for depth in segment.tree.depths[computed:]]
            positions.extend(places)
            spans.extend(max(job.prompt_length, place + 1) for place in places)
        return tokens, positions, spans


class Executor(Protocol):
    """Who computes the stages of a pass.

    Attributes:
        usable: whether they can be computed at all.
        waited: seconds that went into other processes so far: telling them, and waiting for what they say.
    """

    @property
    def usable(self) -> bool:
        """See above."""
        ...

    @property
    def waited(self) -> float:
        """See above."""
        ...

    def run(self, layer_range: LayerRange, rows: Tensor | None) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
        """Rows ``[rows, hidden]`` through a stage; ``None`` where they begin as embeddings.

        Returns:
            Their state afterwards, the collected layers' outputs, and the logits of the wanted rows.
        """
        ...
