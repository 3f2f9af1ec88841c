"""Number of parameters, and the size and formats of the weights that a forward pass reads."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from pronk.architecture.config import ModelConfig
from pronk.models.decoder import Decoder
from pronk.models.tensor_plan import plan_tensors


@dataclass(frozen=True)
class ForwardWeights:
    """Weight matrices of a forward pass; an embedding counts if it is also the LM head."""

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
    in_file = 1.0 if decoder.stored_bytes is None else min(1.0, decoder.stored_bytes / total)
    floor_bytes = round(in_file * (total - _unread_bytes(decoder)))
    return ForwardWeights(", ".join(kind for kind, _ in sizes.most_common()), total, floor_bytes, count)


def _unread_bytes(decoder: Decoder) -> float:
    """Return the size in memory of the experts that a row does not choose."""
    mixture = decoder.config.mixture
    return 0.0 if mixture is None else expert_bytes(decoder) * (1.0 - mixture.per_row / mixture.experts)


def expert_bytes(decoder: Decoder) -> int:
    """Return the size in memory of all experts of all layers."""
    return sum(linear.packed.nbytes for layer in decoder.layers for linear in layer.experts())


def expert_costs(decoder: Decoder) -> tuple[float, float]:
    """Return the arguments of :class:`~pronk.speculation.cost_model.CostModel` for a model with experts."""
    mixture = decoder.config.mixture
    assert mixture is not None, "expected a model with experts"
    total, unread = sum(linear.packed.nbytes for linear in decoder.linears()), _unread_bytes(decoder)
    return (expert_bytes(decoder) - unread) / (total - unread), mixture.per_row / mixture.experts


def count_parameters(config: ModelConfig) -> int:
    """Return the number of parameters, without quantization scales; a tied embedding and head count once."""
    tensors = {tensor.name: tensor.shape for part in plan_tensors(config) for tensor in part.tensors}
    return sum(map(math.prod, tensors.values()))
