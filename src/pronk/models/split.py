"""Sharding of a model over processes by tensor parallelism (Shoeybi et al. 2019, section 3).

Heads and MLP columns are distributed. ``qkv`` and ``up`` are split by outputs, ``out`` and ``down`` by inputs, so a
layer needs two all-reduce sums. Embeddings, norms and the residual stream are replicated. The head's outputs are
distributed in blocks of 16 tokens, except that rank 0 holds the whole head, which drafters share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, gcd
from typing import TypeVar

import torch
from torch import Tensor

from pronk.architecture.config import ModelConfig
from pronk.errors import CheckpointError, OptionError
from pronk.models.families import DecoderPart
from pronk.quantization.formats.matrix import QuantizedMatrix

__all__ = ["TensorSplit"]

Weight = TypeVar("Weight", Tensor, QuantizedMatrix, Tensor | QuantizedMatrix)

# Granularity of the MLP column split: the largest of these that gives every process some. Large values keep
# quantization groups, mostly of 32 to 128 inputs, whole.
_GRANULARITIES = (128, 64, 32, 16, 8, 1)
_BLOCK = 16  # outputs per block of packed weights
_MIN_GROUP = 8  # inputs that share a scale
_MAX_EXCESS = 31  # inputs by which a quantization group may exceed the shard


@dataclass(frozen=True)
class TensorSplit:
    """The shard of one of several processes; ``config`` is that of the whole model.

    An OptionError is raised if ``workers`` exceeds the key/value heads, MLP columns or vocabulary blocks.
    """

    config: ModelConfig
    rank: int
    workers: int

    def __post_init__(self) -> None:
        max_workers = min(
            self.config.num_kv_heads, self.config.intermediate_size, ceil(self.config.vocab_size / _BLOCK)
        )
        if self.workers > max_workers:
            msg = (
                f"workers: expected at most {max_workers}, the number of key/value heads, with parallel='tensor', "
                f"found {self.workers}; use fewer, or parallel='tree'"
            )
            raise OptionError(msg)

    @property
    def shard_config(self) -> ModelConfig:
        """The config of this process's layers."""
        heads, columns = self._heads, self._columns
        return replace(
            self.config,
            num_heads=len(heads) * self.config.group,
            num_kv_heads=len(heads),
            intermediate_size=len(columns),
        )

    def tokens(self, rank: int) -> range:
        """Return the token ids whose logits a process computes; a multiple of 16, except for the last process."""
        size, blocks = self.config.vocab_size, ceil(self.config.vocab_size / _BLOCK)
        begin, end = (_BLOCK * (blocks * each // self.workers) for each in (rank, rank + 1))
        return range(begin, min(end, size))

    def shard(self, part: DecoderPart, number: int, weight: Weight) -> Weight:
        """Return this process's shard of piece ``number`` of a linear layer's weights ``[outputs, inputs]``.

        A quantization format that cannot be split at this place raises a CheckpointError.
        """
        name = part.target.rpartition(".")[2]
        inputs = self._inputs(name)
        if inputs is not None and inputs != range(weight.shape[1]):
            weight = _columns(weight, inputs, part.target)
        sizes = [piece.shape[1 if part.transposed else 0] for piece in part.weight] or [weight.shape[0]]
        return _rows(weight, self._outputs(name, sizes, number))

    def shard_bias(self, part: DecoderPart, number: int, bias: Tensor) -> Tensor | None:
        """Return the shard of a bias ``[outputs]``; the bias of a summed product belongs to rank 0 alone."""
        name = part.target.rpartition(".")[2]
        if self._inputs(name) is not None and self.rank:
            return None
        return _rows(bias, self._outputs(name, [piece.shape[0] for piece in part.bias], number))

    @cached_property
    def _heads(self) -> range:
        return self._range_of_rank(self.config.num_kv_heads, 1)

    @cached_property
    def _columns(self) -> range:
        size = self.config.intermediate_size
        unit = next(each for each in _GRANULARITIES if size // each >= self.workers)
        return self._range_of_rank(size, unit)

    def _range_of_rank(self, size: int, unit: int) -> range:
        whole = size // unit
        begin, end = (unit * (whole * each // self.workers) for each in (self.rank, self.rank + 1))
        return range(begin, size if self.rank == self.workers - 1 else end)

    def _inputs(self, name: str) -> range | None:
        """Return the inputs of a layer that is split by inputs, or ``None``."""
        if name == "out":
            width = self.config.group * self.config.head_dim
            return range(self._heads.start * width, self._heads.stop * width)
        return self._columns if name == "down" else None

    def _outputs(self, name: str, sizes: Sequence[int], number: int) -> list[range]:
        """Return the outputs to keep of piece ``number``, counted from the start of the piece."""
        begin = sum(sizes[:number])
        piece = range(begin, begin + sizes[number])
        ranges = [
            range(max(each.start, piece.start), min(each.stop, piece.stop)) for each in self._output_ranges(name, sizes)
        ]
        return [range(each.start - begin, each.stop - begin) for each in ranges if each]

    def _output_ranges(self, name: str, sizes: Sequence[int]) -> list[range]:
        """Return the outputs to keep of a whole layer."""
        config = self.config
        if name == "qkv":
            sections, begin = list[range](), 0
            for size, width in zip(config.qkv_sizes, (config.group, 1, 1), strict=True):
                unit = width * config.head_dim
                sections.append(range(begin + self._heads.start * unit, begin + self._heads.stop * unit))
                begin += size
            return sections
        if name == "up":
            begins = (0, config.intermediate_size) if config.gated else (0,)
            return [range(begin + self._columns.start, begin + self._columns.stop) for begin in begins]
        if name == "head" and self.rank:
            return [self.tokens(self.rank)]
        return [range(sum(sizes))]


def _rows(weight: Weight, ranges: Sequence[range]) -> Weight:
    if len(ranges) == 1:
        return weight[ranges[0].start : ranges[0].stop] if isinstance(weight, Tensor) else _outputs(weight, ranges)
    if isinstance(weight, Tensor):
        return torch.cat([weight[each.start : each.stop] for each in ranges]) if ranges else weight[:0]
    return _outputs(weight, ranges)


def _outputs(weight: QuantizedMatrix, ranges: Sequence[range]) -> QuantizedMatrix:
    if len(ranges) == 1:
        return weight.rows(ranges[0].start, ranges[0].stop)
    parts = [weight.rows(each.start, each.stop) for each in ranges]
    minima = [part.minimum for part in parts if part.minimum is not None]
    return replace(
        weight,
        codes=torch.cat([part.codes for part in parts]),
        scale=torch.cat([part.scale for part in parts]),
        minimum=torch.cat(minima) if minima else None,
    )


def _columns(weight: Weight, columns: range, where: str) -> Weight:
    if isinstance(weight, Tensor):
        return weight[:, columns.start : columns.stop]
    inputs = weight.shape[1]
    # A quantization group can be split into smaller groups with the same scale.
    group = gcd(weight.group, columns.start, columns.stop if columns.stop < inputs else 0)
    while group > len(columns) + _MAX_EXCESS and group % (2 * _MIN_GROUP) == 0:
        group //= 2
    if weight.order is not None or group % _MIN_GROUP or group > len(columns) + _MAX_EXCESS:
        found = "an order of their inputs" if weight.order is not None else f"groups of {weight.group}"
        msg = (
            f"{where}: expected weights whose inputs can be split between processes at {columns.start} and "
            f"{columns.stop}, found quantized ones with {found}; use parallel='tree'"
        )
        raise CheckpointError(msg)
    splits_per_group, groups = weight.group // group, slice(columns.start // group, ceil(columns.stop / group))
    minimum = (
        None
        if weight.minimum is None
        else weight.minimum.repeat_interleave(splits_per_group, dim=1)[:, groups].contiguous()
    )
    return QuantizedMatrix(
        weight.codes[:, columns.start : columns.stop],
        weight.scale.repeat_interleave(splits_per_group, dim=1)[:, groups].contiguous(),
        minimum,
        weight.bits,
        group,
    )
