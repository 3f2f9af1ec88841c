"""Number of parameters, and the size and formats of the weights that a forward pass reads."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from torch import Tensor

from pronk.architecture.config import ModelConfig
from pronk.kernels.library import CODED_TYPES, SUPER_BLOCK_TYPES
from pronk.kernels.weights import PackedMatrix
from pronk.models.decoder import Decoder
from pronk.models.families import plan_tensors
from pronk.models.linear import KernelLinear, Linear, StackedLinear

__all__ = ["ForwardWeights", "count_parameters", "forward_weights"]

_BITS_OF_TYPE = {number: bits for bits, number in [*CODED_TYPES.items(), *SUPER_BLOCK_TYPES.items()]}


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
    for linear in decoder.modules():
        is_lookup_table = linear is decoder.table and linear is not decoder.head
        if isinstance(linear, Linear) and not isinstance(linear, StackedLinear) and not is_lookup_table:
            kind, nbytes = _format_and_bytes(linear)
            sizes[kind] += nbytes
            count += linear.in_features * linear.out_features
    total = sizes.total()
    floor_bytes = total if decoder.stored_bytes is None else min(total, decoder.stored_bytes)
    return ForwardWeights(", ".join(kind for kind, _ in sizes.most_common()), total, floor_bytes, count)


def count_parameters(config: ModelConfig) -> int:
    """Return the number of parameters, without quantization scales; a tied embedding and head count once."""
    return sum(math.prod(tensor.shape) for part in plan_tensors(config) for tensor in part.tensors)


def _format_and_bytes(linear: Linear) -> tuple[str, int]:
    if isinstance(linear, KernelLinear):
        return _packed_format(linear.packed), linear.packed.data.nbytes
    weight = linear.weight
    assert isinstance(weight, Tensor), "expected a torch weight, found none"
    return str(weight.dtype).removeprefix("torch."), weight.nbytes


def _packed_format(packed: PackedMatrix) -> str:
    bits = _BITS_OF_TYPE.get(packed.struct.type)
    if bits is None:
        return str(packed.data.dtype).removeprefix("torch.")
    super_blocks = " in super-blocks of 256" if packed.struct.type in SUPER_BLOCK_TYPES.values() else ""
    return f"int{bits} in groups of {packed.struct.group}{super_blocks}"
