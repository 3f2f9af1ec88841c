"""Sharding of a model over processes by tensor parallelism (Shoeybi et al. 2019, section 3).

Attention heads and MLP columns (outputs of ``up``) are distributed. ``qkv`` and ``up`` (with the
gate) are split by outputs, ``out`` and ``down`` by inputs, so a layer needs two all-reduce sums.
Embeddings, norms and the residual stream are replicated. The LM head is split by outputs, in blocks
of 16 token ids. Rank 0 holds the whole head, because drafters use it, but computes only its block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, gcd
from typing import TypeVar

import numpy as np

from pronk.base.arrays import Array
from pronk.base.errors import OptionError, refuse
from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.formats.matrix import GROUP_MULTIPLE, MAX_GROUP_PADDING, QuantizedMatrix
from pronk.models.tensor_plan import DecoderPart

Weight = TypeVar("Weight", Array, QuantizedMatrix, Array | QuantizedMatrix)

# Shards of MLP columns begin at multiples of one of these numbers: the largest that gives every
# process some columns. A large number avoids cuts through quantization groups, which mostly have 32
# to 128 inputs.
_GRANULARITIES = (128, 64, 32, 16, 8, 1)
_BLOCK_OUTPUTS = 16  # number of outputs per block of packed weights


@dataclass(frozen=True)
class TensorSplit:
    """Shard ``rank``, from 0, of a model on ``workers`` processes.

    ``config`` is that of the whole model.

    An OptionError is raised if there are fewer key/value heads, MLP columns or blocks of token ids
    than ``workers``.
    """

    config: ModelConfig
    rank: int
    workers: int

    def __post_init__(self) -> None:
        for part, config in (
            ("experts", self.config.mixture),
            ("short convolutions", self.config.convolution),
        ):
            if config is not None:
                found = f"found {self.config.family}; use parallel='tree'"
                refuse(
                    "parallel",
                    f"expected a model without {part} for 'tensor', {found}",
                    OptionError,
                )
        for part, present in (
            ("attention sinks", self.config.attention_sinks),
            ("layers of one sublayer", bool(self.config.sublayers)),
            ("gated attention", self.config.gated_attention or self.config.head_gates),
            ("layers of different shapes", self.config.attention_shapes),
        ):
            if present:
                found = f"found {self.config.family}; use parallel='tree'"
                expected = f"expected a model without {part} for 'tensor'"
                refuse("parallel", f"{expected}, {found}", OptionError)
        if self.config.norm_places != "input" or self.config.whole_qk_norm:
            # A norm of outputs needs the sum over all processes before the residual connection.
            expected = (
                "expected a model with norms of the inputs of attention and MLP only for 'tensor'"
            )
            refuse(
                "parallel",
                f"{expected}, found {self.config.family}; use parallel='tree'",
                OptionError,
            )
        max_workers, limit = min(
            (self.config.num_kv_heads, "key/value heads"),
            (self.config.intermediate_size, "MLP columns"),
            (ceil(self.config.vocab_size / _BLOCK_OUTPUTS), "blocks of 16 token ids"),
        )
        if self.workers > max_workers:
            expected = (
                f"expected at most {max_workers}, the number of {limit}, with parallel='tensor'"
            )
            refuse(
                "workers",
                f"{expected}, found {self.workers}; use fewer, or parallel='tree'",
                OptionError,
            )

    @property
    def shard_config(self) -> ModelConfig:
        """Config with this process's numbers of heads and MLP columns."""
        kv_heads = len(self._kv_heads)
        columns = len(self._columns)
        heads = kv_heads * self.config.group
        return replace(
            self.config, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=columns
        )

    def tokens(self, rank: int) -> range:
        """Return the token ids whose logits process ``rank`` computes.

        The first is a multiple of 16.
        """
        size = self.config.vocab_size
        blocks = ceil(size / _BLOCK_OUTPUTS)
        begin = _BLOCK_OUTPUTS * (blocks * rank // self.workers)
        end = _BLOCK_OUTPUTS * (blocks * (rank + 1) // self.workers)
        return range(begin, min(end, size))

    def shard(self, part: DecoderPart, number: int, weight: Weight) -> Weight:
        """Return this process's shard of ``weight`` ``[outputs, inputs]``, ``part.weight[number]``.

        A CheckpointError is raised if the quantization groups of the weight cannot be split.
        """
        name = part.target.rpartition(".")[2]
        inputs = self._shard_inputs(name)
        if inputs is not None and inputs != range(weight.shape[1]):
            weight = _take_inputs(weight, inputs, part.target)
        sizes = [tensor.part_shape[1 if part.transposed else 0] for tensor in part.weight]
        sizes = sizes or [weight.shape[0]]  # a tied LM head has no tensor of its own
        return self._take_outputs(weight, name, sizes, number)

    def shard_bias(self, part: DecoderPart, number: int, bias: Array) -> Array | None:
        """Return this process's shard of the bias ``part.bias[number]``.

        ``None`` for ``out`` and ``down`` on all ranks except 0, because their outputs are summed.
        """
        name = part.target.rpartition(".")[2]
        if self._shard_inputs(name) is not None and self.rank:
            return None  # the outputs of all processes are summed, so only rank 0 adds the bias
        sizes = [tensor.part_shape[0] for tensor in part.bias]
        return self._take_outputs(bias, name, sizes, number)

    @cached_property
    def _kv_heads(self) -> range:
        return self._shard_range(self.config.num_kv_heads, 1)

    @cached_property
    def _columns(self) -> range:
        size = self.config.intermediate_size
        granularity = next(number for number in _GRANULARITIES if size // number >= self.workers)
        return self._shard_range(size, granularity)

    def _shard_range(self, size: int, granularity: int) -> range:
        """Divide ``range(size)`` at multiples of ``granularity``.

        Return the part of this process.
        """
        count = size // granularity
        begin = granularity * (count * self.rank // self.workers)
        end = granularity * (count * (self.rank + 1) // self.workers)
        return range(begin, size if self.rank == self.workers - 1 else end)

    def _shard_inputs(self, name: str) -> range | None:
        """Return the range of inputs that this process has of the layer ``name``.

        ``None`` for layers that are not split by inputs: all but ``out`` and ``down``.
        """
        if name == "out":
            width = self.config.group * self.config.head_dim
            return range(self._kv_heads.start * width, self._kv_heads.stop * width)
        return self._columns if name == "down" else None

    def _take_outputs(self, weight: Weight, name: str, sizes: Sequence[int], number: int) -> Weight:
        """Return the rows of a tensor that are outputs of this process.

        The result is a view if the rows are one range, else a copy. ``sizes`` has the number of
        outputs of each stacked tensor, and ``number`` is the index of this one.
        """
        begin = sum(sizes[:number])
        end = sum(sizes[: number + 1])
        kept = list[range]()  # ranges of the tensor's rows that this process has
        for outputs in self._shard_outputs(name, sizes):
            first = max(outputs.start, begin)
            stop = min(outputs.stop, end)
            if first < stop:
                kept.append(range(first - begin, stop - begin))
        rows: slice | list[int] = [row for each in kept for row in each]
        if len(kept) == 1:
            rows = slice(kept[0].start, kept[0].stop)
        return weight.take_outputs(rows) if isinstance(weight, QuantizedMatrix) else weight[rows]  # type: ignore[return-value]

    def _shard_outputs(self, name: str, sizes: Sequence[int]) -> list[range]:
        """Return this process's outputs of a layer of stacked tensors with ``sizes`` outputs."""
        config = self.config
        if name == "qkv":
            sections = list[range]()
            begin = 0
            for size, heads_per_kv_head in zip(config.qkv_sizes, (config.group, 1, 1), strict=True):
                width = heads_per_kv_head * config.head_dim
                sections.append(
                    range(begin + self._kv_heads.start * width, begin + self._kv_heads.stop * width)
                )
                begin += size
            return sections
        if name == "up":
            begins = (0, config.intermediate_size) if config.gated else (0,)
            return [
                range(begin + self._columns.start, begin + self._columns.stop) for begin in begins
            ]
        if name == "head" and self.rank:
            return [self.tokens(self.rank)]
        return [range(sum(sizes))]


def _take_inputs(weight: Weight, kept: range, target: str) -> Weight:
    if not isinstance(weight, QuantizedMatrix):
        return weight[:, kept.start : kept.stop]
    inputs = weight.shape[1]
    # If `kept` begins or ends within a group, divide every group into smaller groups with the same
    # scale. For example, for inputs 64 .. 191 every group of 128 becomes two groups of 64.
    group = gcd(weight.group, kept.start, kept.stop if kept.stop < inputs else 0)
    # A group may be longer than its row by the padding only.
    while group > len(kept) + MAX_GROUP_PADDING and group % (2 * GROUP_MULTIPLE) == 0:
        group //= 2
    if weight.order is not None or group % GROUP_MULTIPLE or group > len(kept) + MAX_GROUP_PADDING:
        found = f"groups of {weight.group}"
        if weight.order is not None:
            found = "an order of their inputs"
        places = f"{kept.start} and {kept.stop}"
        expected = f"weights whose inputs can be split between processes at {places}"
        refuse(
            target, f"expected {expected}, found quantized ones with {found}; use parallel='tree'"
        )
    splits_per_group = weight.group // group
    groups = slice(kept.start // group, ceil(kept.stop / group))

    def take_groups(values: Array) -> Array:
        return np.ascontiguousarray(np.repeat(values, splits_per_group, axis=1)[:, groups])

    minimum = None if weight.minimum is None else take_groups(weight.minimum)
    return QuantizedMatrix(  # type: ignore[return-value]
        weight.codes[:, kept.start : kept.stop],
        take_groups(weight.scale),
        minimum,
        weight.bits,
        group,
    )
