"""Input of a forward pass: one job per request, with its rows, and the range of layers to run.

*Early rows* are rows whose first layers a drafter has computed before the target's forward pass: Kangaroo drafts with
the target's own first layers (Liu et al. 2024, section 3.2). The keys and values of these layers, and the output of the
last of them, are then already in the target's cache, and the forward pass computes only the later layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pronk.cache.blocks import BlockTable
from pronk.sampling.stateless import StatelessSampler
from pronk.sampling.tree import TokenTree


class EarlyTokens(NamedTuple):
    """Tokens of a request whose first layers a drafter has computed in this step."""

    num_layers: int  # number of first layers computed
    tokens: tuple[int, ...]  # ids of the tokens; their KV slots follow those of the committed tokens


class EarlyRows(NamedTuple):
    """Early rows of a token tree: its first ``num_nodes`` nodes skip the first ``num_layers`` layers."""

    num_layers: int
    num_nodes: int

    @classmethod
    def of(cls, early: EarlyTokens | None, tree: TokenTree) -> EarlyRows | None:
        """Return the leading main-chain nodes of ``tree`` with the tokens of ``early``; ``None`` if none."""
        if early is None:
            return None
        same = zip(early.tokens, tree.tokens[: tree.main_chain], strict=False)
        num_nodes = next((node for node, (a, b) in enumerate(same) if a != b), min(len(early.tokens), tree.main_chain))
        return cls(early.num_layers, num_nodes) if num_nodes else None


class Segment(NamedTuple):
    """One request's rows in a forward pass: the nodes of ``tree``, which follow the committed tokens.

    A row sees the cached tokens of its request, its ancestors in the tree, and itself.
    """

    block_table: BlockTable  # KV slots of the committed tokens, then of the nodes in order
    tree: TokenTree
    # Number of leading nodes that earlier forward passes have computed, as when a drafter adds one depth per pass. They
    # get no rows, and the other nodes attend to them.
    num_computed: int = 0
    # Leading nodes that skip the first layers, because a drafter has already computed these; ``None``: no such nodes.
    early: EarlyRows | None = None

    @property
    def num_rows(self) -> int:
        """Number of nodes that the forward pass computes."""
        return len(self.tree) - self.num_computed


class ForwardJob(NamedTuple):
    """One request's input to a forward pass."""

    segment: Segment
    logits_nodes: range  # indices of the tree nodes whose logits are needed
    prompt_length: int  # number of prompt tokens; dynamic RoPE scaling depends on it
    cross_block_table: BlockTable | None = None  # request's blocks in the cache that cross-attention reads
    # True: worker processes return the logits of all ``logits_nodes``. False: a node's logits are sent when it is read.
    all_logits: bool = True
    stateless_sampler: StatelessSampler | None = None  # if set, workers sample tokens and send these, not logits


class LayerRange(NamedTuple):
    """Layers ``start .. stop - 1`` (from 0), and the rows of each job that they compute."""

    jobs: Sequence[tuple[ForwardJob, Segment]]  # each job, and the segment of its nodes that these layers compute
    start: int
    stop: int
    collect: tuple[int, ...]  # layer numbers (from 1; 0: the embedding) whose output is returned
    logits_rows: Sequence[int] | range | None  # see ``find_logits_rows``; ``None`` without the last layer

    @staticmethod
    def find_logits_rows(jobs: Sequence[tuple[ForwardJob, Segment]]) -> list[int] | range:
        """Return the indices of the rows of ``logits_nodes`` in the concatenated rows of all jobs."""
        if len(jobs) == 1:
            ((job, segment),) = jobs
            return range(job.logits_nodes.start - segment.num_computed, job.logits_nodes.stop - segment.num_computed)
        rows, start = list[int](), 0
        for job, segment in jobs:
            rows.extend(start + node - segment.num_computed for node in job.logits_nodes)
            start += segment.num_rows
        return rows
