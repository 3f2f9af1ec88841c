"""Chains of draft tokens as one CUDA graph: k passes of a draft model without the host.

The first pass computes the tokens of each text that the model has not read; each later pass has one
row per request, the draft token before. The host knows everything about these rows but their
tokens, so it sends the rows of all passes at once::

    request   new tokens   draft tokens     rows of the passes
       0      a b          x y z            a b d   x u   y v
       1      d            u v w

Of each pass, the host receives the likeliest tokens with their scores.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from pronk import TokenTree
from pronk.backends import BatchEntry, ChainJob, ForwardBatch
from pronk.base.convert import to_array
from pronk.drafting import DraftToken
from pronk.gpu.choose import noise_of, score
from pronk.gpu.graphs import GraphClock, Graphs, Inputs
from pronk.gpu.layout import LayoutSize, RowLayout, layout_of, measure, pack_layout
from pronk.gpu.pool import GpuPool
from pronk.gpu.steps import ROW_BUCKETS, context_bucket

# Number of tokens of each pass that the host receives: a chain's token and the siblings that the
# drafter ``cape`` may add, at most 16.
_LIKELIEST = 17

# Largest number of rows of the first pass, of all requests; the rows before them are run without a
# graph.
MAX_FIRST_ROWS = ROW_BUCKETS[-1]

# Callback ``forward(layout, features, rows)``: runs rows through a model. Returns the features of
# the next pass ``[len(rows), hidden]``, and the logits of ``rows`` (int64 indices), float32
# ``[len(rows), vocab]``. ``features`` ``[rows, hidden]`` are what the model reads besides tokens;
# ``None`` for a model that reads tokens alone.
ForwardRows = Callable[[RowLayout, Tensor | None, Tensor], tuple[Tensor | None, Tensor]]


def split_jobs(jobs: Sequence[ChainJob]) -> tuple[list[BatchEntry], list[ChainJob]]:
    """Divide the rows of jobs among passes without a graph and the first pass of a graph.

    Returns:
        Entries of the first rows of each job with more than ``MAX_FIRST_ROWS / number of jobs``
        rows; and the jobs with the rows after these.
    """
    most = MAX_FIRST_ROWS // len(jobs)
    early = list[BatchEntry]()
    rest = list[ChainJob]()
    for job in jobs:
        entry = job.entry
        num_early = max(0, entry.num_rows - most)
        rest.append(job._replace(entry=entry._replace(num_computed=num_early)))
        if num_early:
            tree = TokenTree.chain(entry.tree.tokens[:num_early])
            early.append(entry._replace(tree=tree, logits_nodes=range(0)))
    return early, rest


class _ChainSize(NamedTuple):
    """Sizes of the passes of a graph.

    Attributes:
        layout: sizes of the rows of all passes.
        first: number of rows of the first pass.
        passes: number of passes; each but the first has a row per entry.
    """

    layout: LayoutSize
    first: int
    passes: int


class Chains:
    """Drafts chains of several requests together, each size by a graph of its own.

    Attributes:
        pads: whether sizes are rounded up, so that chains of similar sizes share a graph; on a
            CPU, only tests want that.
        graphs: the recorded chains.
    """

    def __init__(
        self,
        pool: GpuPool,
        forward: ForwardRows,
        reserve: Callable[[int], None],
        version: Callable[[], Hashable],
        clock: GraphClock,
        ids: Tensor | None = None,
    ) -> None:
        """Create the chains of a model.

        Args:
            pool: the model's KV pool.
            forward: runs rows through the model.
            reserve: makes a number of positions ready.
            version: as for :class:`~pronk.gpu.graphs.Graphs`.
            clock: as for :class:`~pronk.gpu.graphs.Graphs`.
            ids: int32 ``[vocab]``: the target's token of each logit; ``None`` for 0, 1, ….
        """
        self.pool = pool
        self.pads = pool.device.type == "cuda"
        self._forward = forward
        self._reserve = reserve
        self._ids = ids
        self.graphs = Graphs[Tensor](pool.device, version, clock)

    def draft(
        self,
        jobs: Sequence[ChainJob],
        features: Tensor | None = None,
        slots: Sequence[NDArray[np.int64]] = (),
    ) -> list[int]:
        """Draft a chain for each job.

        The graph has all passes. The results after the token that ends a chain are dropped.

        Args:
            jobs: at most :data:`MAX_FIRST_ROWS` rows of new tokens. The samplers have a
                :attr:`~pronk.sampling.sampler.Sampler.stateless_sampler`.
            features: pool ``[slots, hidden]`` of the features of new tokens, for a model that reads
                features.
            slots: for each job, the slots of its new tokens' features.

        Returns:
            For each job, the number of passes that its tokens needed.
        """
        pool = self.pool
        passes = max(job.max_tokens for job in jobs)
        if self.pads:
            passes = triton.next_power_of_2(passes)
        counts = [job.entry.num_rows for job in jobs]
        batch = ForwardBatch([_with_drafts(job) for job in jobs])
        size = self._size_of(batch, sum(counts), passes)
        self._reserve(size.layout.pages * pool.block_size)
        places = _places(jobs, size)
        numbers = pack_layout(batch, pool, size.layout, pool.free_slot, places)
        entries = size.layout.entries
        last_rows = np.zeros(entries, np.int64)
        last_rows[: len(jobs)] = np.cumsum(counts) - 1
        parts = [numbers, last_rows, *_noise_of_passes(jobs, size)]
        if features is not None:
            padded = np.zeros(size.first, np.int64)
            padded[: sum(counts)] = np.concatenate(slots)
            parts.append(padded)
        inputs = [torch.from_numpy(part) for part in parts]
        function = partial(self._compute, size, features)
        found = to_array(self.graphs.run((size, features is None), function, inputs))
        return [
            deliver([_draft_token(row) for row in found[: job.max_tokens, index]], job.on_token)
            for index, job in enumerate(jobs)
        ]

    def _size_of(self, batch: ForwardBatch, first: int, passes: int) -> _ChainSize:
        size = measure(batch, self.pool)
        entries = size.entries
        if self.pads:
            first = next(rows for rows in ROW_BUCKETS if rows >= first)
            entries = triton.next_power_of_2(entries)
            pages = context_bucket(size.pages, self.pool.block_size)
            size = size._replace(pages=pages, depth=first + passes)
        rows = first + (passes - 1) * entries
        return _ChainSize(size._replace(rows=rows, entries=entries, paths=entries), first, passes)

    @torch.inference_mode()
    def _compute(self, size: _ChainSize, pool: Tensor | None, inputs: Inputs) -> Tensor:
        """Return the likeliest tokens after each pass, float64 ``[passes, entries, numbers]``.

        The numbers are the confidence, the tokens and their scores.
        """
        numbers, rows, keys, temperatures, *feature_slots = inputs
        last = size.layout.pages * self.pool.block_size - 1
        layout = layout_of(numbers, size.layout, self.pool.block_size, last)
        current = layout.part(0, size.first)
        features = None if pool is None else pool[feature_slots[0]]
        results = list[Tensor]()
        for number in range(size.passes):
            features, logits = self._forward(current, features, rows)
            result, tokens = self._rank(logits, keys[number], temperatures[number])
            results.append(result)
            start = size.first + number * size.layout.entries
            current = layout.part(start, start + size.layout.entries, tokens)
            rows = torch.arange(size.layout.entries, device=self.pool.device)
        return torch.stack(results)

    def _rank(self, logits: Tensor, keys: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of a pass for the host, and its tokens, int32 ``[entries]``."""
        scores = score(logits, keys, temperatures, self._ids)
        best, index = scores.topk(min(_LIKELIEST, scores.shape[1]))
        tokens = index.int() if self._ids is None else self._ids[index]
        confidence = torch.exp(best[:, :1] - scores.logsumexp(1, keepdim=True))
        return torch.cat((confidence.double(), tokens.double(), best.double()), 1), tokens[:, 0]


def _with_drafts(job: ChainJob) -> BatchEntry:
    """Return a job's entry with a node for each draft token that gets a row; tokens are unknown."""
    tokens = (*job.entry.tree.tokens, *[0] * (job.max_tokens - 1))
    return job.entry._replace(tree=TokenTree.chain(tokens))


def _places(jobs: Sequence[ChainJob], size: _ChainSize) -> NDArray[np.int64]:
    """Return the row of each node, in the order of the jobs."""
    places = list[int]()
    first = 0
    for number, job in enumerate(jobs):
        count = job.entry.num_rows
        places += range(first, first + count)
        first += count
        start = size.first + number
        places += [start + step * size.layout.entries for step in range(job.max_tokens - 1)]
    return np.array(places)


def _noise_of_passes(jobs: Sequence[ChainJob], size: _ChainSize) -> Sequence[NDArray[np.generic]]:
    """Return the noise of each pass and entry: keys and temperatures, ``[passes, entries]``."""
    samplers = [job.sampler.stateless_sampler for job in jobs]
    positions = [len(job.sampler.context) for job in jobs]
    parts = [
        noise_of(samplers, [first + step for first in positions], size.layout.entries)
        for step in range(size.passes)
    ]
    return [
        np.stack([part.keys for part in parts]),
        np.stack([part.temperatures for part in parts]),
    ]


def _draft_token(numbers: NDArray[np.float64]) -> DraftToken | None:
    """Return the draft token of one pass and entry."""
    confidence = float(numbers[0])
    if not confidence > 0.0:
        return None
    ids, scores = np.split(numbers[1:], 2)
    tokens = ids.astype(np.int32)
    return DraftToken(int(tokens[0]), confidence, scores.astype(np.float32), tokens)


def deliver(tokens: Sequence[DraftToken | None], on_token: Callable[[DraftToken], bool]) -> int:
    """Give a chain's tokens to ``on_token`` until it returns False, or a token is ``None``.

    Returns the number of passes that were needed for these tokens.
    """
    for count, token in enumerate(tokens, 1):
        if token is None or not on_token(token):
            return count
    return len(tokens)
