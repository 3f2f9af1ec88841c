"""Input of a forward pass: one job per request, with its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pronk.cache.blocks import BlockTable
from pronk.sampling.stateless import StatelessSampler
from pronk.sampling.tree import TokenTree


class Segment(NamedTuple):
    """One request's rows in a forward pass: the nodes of ``tree``, which follow the committed tokens.

    A row sees the cached tokens of its request, its ancestors in the tree, and itself.
    """

    block_table: BlockTable  # KV slots of the committed tokens, then of the nodes in order
    tree: TokenTree
    # Number of leading nodes that earlier forward passes have computed, as when a drafter adds one
    # depth per pass. They get no rows, and the other nodes attend to them.
    num_computed: int = 0

    @property
    def num_rows(self) -> int:
        """Number of nodes that the forward pass computes."""
        return len(self.tree) - self.num_computed


class ForwardJob(NamedTuple):
    """One request's input to a forward pass."""

    segment: Segment
    logits_nodes: range  # indices of the tree nodes whose logits are needed
    prompt_length: int  # number of prompt tokens; dynamic RoPE scaling depends on it
    # The request's tokens in each of the runner's ``other_caches``; empty if the job only measures
    # a duration.
    other_tables: tuple[BlockTable, ...] = ()
    # True: worker processes return the logits of all ``logits_nodes``. False: a node's logits are
    # sent when it is read.
    all_logits: bool = True
    # if set, workers sample tokens and send these, not logits
    stateless_sampler: StatelessSampler | None = None

    @staticmethod
    def find_logits_rows(jobs: Sequence[ForwardJob]) -> list[int] | range:
        """Return the indices of the rows of ``logits_nodes`` in the concatenated rows of all jobs."""
        if len(jobs) == 1:
            (job,) = jobs
            nodes = job.logits_nodes
            num_computed = job.segment.num_computed
            return range(nodes.start - num_computed, nodes.stop - num_computed)
        rows = list[int]()
        start = 0
        for job in jobs:
            rows.extend(start + node - job.segment.num_computed for node in job.logits_nodes)
            start += job.segment.num_rows
        return rows
