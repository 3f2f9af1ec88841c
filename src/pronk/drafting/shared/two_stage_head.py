"""An LM head of a large vocabulary in two stages: clusters of tokens first, then their tokens.

The tokens are divided into clusters of one size, and each cluster has a centroid. For a hidden
state ``h``, the clusters with the largest ``centroid · h`` are chosen, and only their tokens get
logits::

    stage 1   centroids h            2,048 products       the best 32 clusters
    stage 2   head rows of these h   32 · 128 products    logits of 4,096 of 262,144 tokens

This is the head of Gemma 4's assistants. It approximates the largest logits, so it is for draft
tokens: no token outside the chosen clusters is drafted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from pronk.base.arrays import Array
from pronk.base.errors import refuse
from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.tensors import AnyCheckpoint
from pronk.kernels.library import Kernels
from pronk.models.decoder import Decoder
from pronk.models.linear import Linear
from pronk.sampling.draft_token import DraftIds, DraftLogits

CLUSTER_TOKENS = "masked_embedding.token_ordering"  # tensor with the rows of all clusters


@dataclass(frozen=True, eq=False)
class TwoStageHead:
    """An LM head whose rows are grouped by clusters of tokens.

    Attributes:
        centroids: layer from a hidden state to one score for each cluster.
        clusters: for each cluster, the rows of the LM head of its tokens.
        tokens: the token ids of each cluster, ``[clusters, size]``, ascending.
        num_best: number of clusters whose tokens get logits, at most the number of clusters.
    """

    centroids: Linear
    clusters: Sequence[Linear]
    tokens: DraftIds
    num_best: int

    @classmethod
    def split(cls, head: Linear, centroids: Linear, tokens: DraftIds, num_best: int) -> Self:
        """Divide an LM head into clusters.

        The rows are copies in the packed format, so that their logits keep their bits.

        Args:
            head: LM head of all tokens.
            centroids: layer from a hidden state to one score for each cluster.
            tokens: the token ids of each cluster, ``[clusters, size]``.
            num_best: number of clusters whose tokens get logits.
        """
        ascending = np.sort(tokens, axis=1).astype(np.int32)
        return cls(centroids, [head.take_outputs(rows) for rows in ascending], ascending, num_best)

    def linears(self) -> Iterator[Linear]:
        """Yield the layers that one row reads: the centroids, and the largest possible clusters."""
        yield self.centroids
        yield from self.clusters[: self.num_best]

    def logits(self, hidden: Array) -> list[DraftLogits]:
        """Return the logits of the tokens in the best clusters of each row.

        The result of a row depends on this row alone. Of clusters with equal scores, those with
        smaller numbers are chosen.

        Args:
            hidden: ``[rows, hidden]``, after the final norm.
        """
        scores = self.centroids.logits(hidden)
        order = np.argsort(-scores, axis=1, kind="stable")
        best = np.sort(order[:, : self.num_best], axis=1)
        return [self._row(hidden[row : row + 1], best[row]) for row in range(len(hidden))]

    def _row(self, hidden: Array, chosen: Array) -> DraftLogits:
        parts = [self.clusters[cluster].logits(hidden)[0] for cluster in chosen]
        return DraftLogits(np.concatenate(parts), self.tokens[chosen].reshape(-1))


class TwoStageDecoder(Decoder):
    """Base of drafters whose LM head may have two stages.

    Attributes:
        centroids: scores of the clusters of tokens, if the drafter's files have two stages.
        two_stage_head: the LM head, if it has two stages; ``None``: it is ``head``.
    """

    centroids: Linear

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        super().__init__(config, kernels)
        self.two_stage_head: TwoStageHead | None = None

    def linears(self) -> Iterator[Linear]:
        """Yield the linear layers that a row reads, the LM head first.

        Stacked matrices come one by one.
        """
        if self.two_stage_head is None:
            yield self.head
        else:
            yield from self.two_stage_head.linears()
        for layer in self.layers:
            yield from layer.linears()


def read_clusters(checkpoint: AnyCheckpoint, count: int, num_clusters: int) -> DraftIds:
    """Return the rows of the LM head in each cluster, int32 ``[clusters, size]``.

    Args:
        checkpoint: files of a two-stage head, as transformers writes those of Gemma 4's assistants.
        count: number of rows of the LM head.
        num_clusters: number of clusters, a divisor of ``count``.

    Raises:
        CheckpointError: the tensor is missing, or has not each row once.
    """
    where = f"{checkpoint.folder}: tensor {CLUSTER_TOKENS}"
    if CLUSTER_TOKENS not in checkpoint:
        remedy = "use a complete checkpoint"
        refuse(where, f"expected the tokens of the clusters, found none; {remedy}")
    checkpoint.check_dtype(CLUSTER_TOKENS, ("I64", "I32"))
    rows = checkpoint.tensor(CLUSTER_TOKENS).reshape(-1)
    if not np.array_equal(np.sort(rows), np.arange(count)):
        refuse(where, f"expected each of {count} tokens once, found others; download it again")
    return rows.reshape(num_clusters, -1).astype(np.int32)
