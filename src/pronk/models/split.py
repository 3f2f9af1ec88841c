"""Which part of a model one of several processes has: tensor parallelism (Shoeybi et al. 2019, section 3).

Heads and columns of the MLP are dealt out. The products before them are cut by their outputs, the products behind them
by their inputs, so that a layer takes two sums over all processes. Embeddings, norms and the stream of rows are
everybody's. The tokens that the head speaks of are dealt out as well, in blocks of 16; the first process has the whole
head, which drafters share.
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

# Columns that are dealt together: the most of these of which everybody gets some. Groups of quantized weights are
# mostly as large as the first ones.
_TOGETHER = (128, 64, 32, 16, 8, 1)
_BLOCK = 16  # outputs that the kernels keep together
_LEAST_GROUP = 8  # inputs that share a scale
_BEYOND = 31  # how many more a group may have than there are


@dataclass(frozen=True)
class TensorSplit:
    """One process's part.

    Attributes:
        config: of the whole model.
        rank: of the process.
        workers: how many there are.

    Raises:
        OptionError: there is not a head for each of them.
    """

    config: ModelConfig
    rank: int
    workers: int

    def __post_init__(self) -> None:
        most = min(self.config.num_kv_heads, self.config.intermediate_size, ceil(self.config.vocab_size / _BLOCK))
        if self.workers > most:
            msg = (
                f"workers: expected at most {most}, the heads of keys and values, with parallel='tensor', "
                f"found {self.workers}; use fewer, or parallel='tree'"
            )
            raise OptionError(msg)

    @property
    def share(self) -> ModelConfig:
        """The shape of its layers."""
        heads, columns = self._heads, self._columns
        return replace(
            self.config,
            num_heads=len(heads) * self.config.group,
            num_kv_heads=len(heads),
            intermediate_size=len(columns),
        )

    def tokens(self, rank: int) -> range:
        """Those whose logits a process computes; only the last one's need not be whole blocks."""
        size, blocks = self.config.vocab_size, ceil(self.config.vocab_size / _BLOCK)
        begin, end = (_BLOCK * (blocks * each // self.workers) for each in (rank, rank + 1))
        return range(begin, min(end, size))

    def cut(self, part: DecoderPart, number: int, weight: Weight) -> Weight:
        """What it has of piece ``number`` of a linear layer's weights ``[outputs, inputs]``.

        Raises:
            CheckpointError: quantized in a form that cannot be cut there.
        """
        name = part.target.rpartition(".")[2]
        inputs = self._inputs(name)
        if inputs is not None and inputs != range(weight.shape[1]):
            weight = _columns(weight, inputs, part.target)
        sizes = [piece.shape[1 if part.transposed else 0] for piece in part.weight] or [weight.shape[0]]
        return _rows(weight, self._outputs(name, sizes, number))

    def cut_bias(self, part: DecoderPart, number: int, bias: Tensor) -> Tensor | None:
        """The same of a bias ``[outputs]``; what is added to a sum is added once."""
        name = part.target.rpartition(".")[2]
        if self._inputs(name) is not None and self.rank:
            return None
        return _rows(bias, self._outputs(name, [piece.shape[0] for piece in part.bias], number))

    @cached_property
    def _heads(self) -> range:
        """Of keys and values."""
        return self._some(self.config.num_kv_heads, 1)

    @cached_property
    def _columns(self) -> range:
        size = self.config.intermediate_size
        together = next(each for each in _TOGETHER if size // each >= self.workers)
        return self._some(size, together)

    def _some(self, size: int, together: int) -> range:
        whole = size // together
        begin, end = (together * (whole * each // self.workers) for each in (self.rank, self.rank + 1))
        return range(begin, size if self.rank == self.workers - 1 else end)

    def _inputs(self, name: str) -> range | None:
        """Of a layer that others have other inputs of."""
        if name == "out":
            width = self.config.group * self.config.head_dim
            return range(self._heads.start * width, self._heads.stop * width)
        return self._columns if name == "down" else None

    def _outputs(self, name: str, sizes: Sequence[int], number: int) -> list[range]:
        """Of piece ``number`` of pieces of these sizes, counted within it."""
        begin = sum(sizes[:number])
        piece = range(begin, begin + sizes[number])
        wanted = [range(max(each.start, piece.start), min(each.stop, piece.stop)) for each in self._wanted(name, sizes)]
        return [range(each.start - begin, each.stop - begin) for each in wanted if each]

    def _wanted(self, name: str, sizes: Sequence[int]) -> list[range]:
        """Of all outputs of a layer."""
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


def _rows(weight: Weight, wanted: Sequence[range]) -> Weight:
    if len(wanted) == 1:
        return weight[wanted[0].start : wanted[0].stop] if isinstance(weight, Tensor) else _outputs(weight, wanted)
    if isinstance(weight, Tensor):
        return torch.cat([weight[each.start : each.stop] for each in wanted]) if wanted else weight[:0]
    return _outputs(weight, wanted)


def _outputs(weight: QuantizedMatrix, wanted: Sequence[range]) -> QuantizedMatrix:
    if len(wanted) == 1:
        return weight.rows(wanted[0].start, wanted[0].stop)
    parts = [weight.rows(each.start, each.stop) for each in wanted]
    minima = [part.minimum for part in parts if part.minimum is not None]
    return replace(
        weight,
        codes=torch.cat([part.codes for part in parts]),
        scale=torch.cat([part.scale for part in parts]),
        minimum=torch.cat(minima) if minima else None,
    )


def _columns(weight: Weight, wanted: range, where: str) -> Weight:
    if isinstance(weight, Tensor):
        return weight[:, wanted.start : wanted.stop]
    inputs = weight.shape[1]
    # A group can be cut into smaller ones with the same scale.
    group = gcd(weight.group, wanted.start, wanted.stop if wanted.stop < inputs else 0)
    while group > len(wanted) + _BEYOND and group % (2 * _LEAST_GROUP) == 0:
        group //= 2
    if weight.order is not None or group % _LEAST_GROUP or group > len(wanted) + _BEYOND:
        found = "an order of their inputs" if weight.order is not None else f"groups of {weight.group}"
        msg = (
            f"{where}: expected weights whose inputs can be dealt to several processes at {wanted.start} and "
            f"{wanted.stop}, found quantized ones with {found}; use parallel='tree'"
        )
        raise CheckpointError(msg)
    times, places = weight.group // group, slice(wanted.start // group, ceil(wanted.stop / group))
    minimum = None if weight.minimum is None else weight.minimum.repeat_interleave(times, dim=1)[:, places].contiguous()
    return QuantizedMatrix(
        weight.codes[:, wanted.start : wanted.stop],
        weight.scale.repeat_interleave(times, dim=1)[:, places].contiguous(),
        minimum,
        weight.bits,
        group,
    )
