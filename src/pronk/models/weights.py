"""Number of parameters, and the size and formats of the weights that a forward pass reads."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from pronk.architecture.config import ModelConfig
from pronk.models.decoder import Decoder
from pronk.models.families import plan_tensors

__all__ = ["ForwardWeights", "count_parameters", "forward_weights"]


@dataclass(frozen=True)
class ForwardWeights:
    """Weight matrices that a forward pass reads as a whole; an embedding counts if it is also the LM head."""

    formats: str  # formats in memory, most bytes first, such as ``int4 in groups of 32, int8 in groups of 128``
    nbytes: int  # size in memory in bytes, scales, minima and padding included
    floor_bytes: int  # size in the checkpoint's files, or in memory where that is less: what a token has to read
    count: int  # number of parameters

    @property
    def bits(self) -> float:
        """Average number of bits per parameter."""
        return 8 * self.nbytes / self.count


def forward_weights(decoder: Decoder) -> ForwardWeights:
    """Return the size and formats of the weights of a loaded model."""
    sizes, count = Counter[str](), 0
    for linear in decoder.linears():
        sizes[linear.packed.format] += linear.packed.nbytes
        count += linear.in_features * linear.out_features
    total = sizes.total()
    floor_bytes = total if decoder.stored_bytes is None else min(total, decoder.stored_bytes)
    return ForwardWeights(", ".join(kind for kind, _ in sizes.most_common()), total, floor_bytes, count)


def count_parameters(config: ModelConfig) -> int:
    """Return the number of parameters, without quantization scales; a tied embedding and head count once."""
    return sum(math.prod(tensor.shape) for part in plan_tensors(config) for tensor in part.tensors)
