"""Linear layers, whose weights are packed for the kernels; and norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pronk.base.arrays import BFLOAT16, FLOAT32, Array, DType
from pronk.base.checks import check_choice
from pronk.checkpoint.config import MixtureConfig, ModelConfig
from pronk.checkpoint.formats.matrix import Bits, QuantizedMatrix, ScaleFormat
from pronk.checkpoint.gguf.blocks import BlockMatrix
from pronk.kernels.adapters import PackedAdapter
from pronk.kernels.library import Kernels
from pronk.kernels.rounding import round_weights
from pronk.kernels.weight_cache import WeightCache
from pronk.kernels.weights import CodedRows, PackedMatrix, pack
from pronk.models.operations import Operations
from pronk.models.options import WEIGHTS

# Weight ``[outputs, inputs]`` of a linear layer as a checkpoint has it: floats, or quantized.
AnyWeight = Array | QuantizedMatrix | BlockMatrix


class WeightLayout(NamedTuple):
    """Properties of a linear layer that decide the order and precision of its packed weights."""

    # Number of adjacent outputs that the kernels pad together to whole blocks of 16: ``head_dim``
    # if the outputs are attention heads. ``None``: all outputs are padded together.
    unit: int | None = None
    # whether the first half of the outputs are gates, and the second half the values to multiply
    # with the activated gates, as in SwiGLU
    gated: bool = False
    head: bool = False  # whether this is the LM head, for which 4 bits are too imprecise
    # whether plain weights and the bias stay in float32: for the router of a mixture of experts,
    # because rounded scores could choose other experts
    exact: bool = False
    # whether the kernels accept several matrices, of which each has a format of its own
    several: bool = False


# Function that builds a layer from a weight ``[out, in]``, a bias ``[out]`` or ``None``, and a
# layout.
LinearFactory = Callable[[AnyWeight, Array | None, WeightLayout], "Linear"]


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm over the features of a row: RMSNorm, or LayerNorm with ``bias``."""

    weight: Array  # float32 ``[features]``
    bias: Array | None  # float32 ``[features]``; LayerNorm has a bias, RMSNorm has none (``None``)
    eps: float

    @classmethod
    def of(cls, config: ModelConfig, weight: Array, bias: Array | None = None) -> Norm:
        """Return a norm of the type in ``config``, with its numbers in float32.

        The type is LayerNorm, which needs a ``bias``, or RMSNorm, which has none.
        """
        assert (config.norm == "layer") == (bias is not None), "expected a bias for LayerNorm only"
        return cls(
            weight.astype(FLOAT32), None if bias is None else bias.astype(FLOAT32), config.norm_eps
        )


class Linear:
    """Linear layer ``y = x Wᵀ + b`` with packed weights.

    The :class:`~pronk.models.program.Program` of a whole model uses ``packed``. :meth:`logits`
    computes only this layer, whose layout must have no ``unit`` and must not be ``gated``.
    """

    def __init__(
        self,
        kernels: Kernels,
        weight: AnyWeight | CodedRows,
        bias: Array | None,
        layout: WeightLayout,
        cache: WeightCache | None,
    ) -> None:
        self.out_features: int = weight.shape[0]
        self.in_features: int = weight.shape[1]
        self.kernels = kernels
        self.layout = layout
        self.scale: float = 1.0  # number by which the outputs are multiplied
        # c in ``c · tanh(output / c)``, which limits the outputs; ``None``: no limit
        self.cap: float | None = None
        # For each adapter of the model, by the adapter's number: what the adapter adds to this
        # layer, packed. ``None``: the adapter leaves this layer unchanged.
        self.adapters: list[PackedAdapter | None] = []
        self.packed: PackedMatrix = pack(
            kernels, weight, bias, unit=layout.unit, gated=layout.gated, cache=cache
        )
        self._programs: dict[DType, Operations] = {}

    @property
    def parts(self) -> Sequence[Linear]:
        """The layers that this layer consists of: itself.

        A :class:`StackedLinear` has several parts, whose outputs are concatenated.
        """
        return (self,)

    def take_outputs(self, rows: Array) -> Linear:
        """Return a layer with the outputs ``rows`` of this one, int ``[outputs]``, bit for bit.

        Its weights are copies in the packed format, without rounding. It has no adapters.
        """
        return self._with(self.packed.take_outputs(rows))

    def slice_outputs(self, start: int, stop: int) -> Linear:
        """Return a layer with the outputs ``start .. stop - 1``, as a view, without adapters.

        See :meth:`PackedMatrix.slice_outputs` for the conditions.
        """
        return self._with(self.packed.slice_outputs(start, stop))

    def _with(self, packed: PackedMatrix) -> Linear:
        """Return a copy of this layer with some of its outputs."""
        taken = copy(self)
        taken.packed = packed
        taken.out_features = packed.shape[0]
        taken.adapters = []
        taken._programs = {}  # noqa: SLF001 - of the copy
        return taken

    def logits(self, x: Array) -> Array:
        """Return the layer's outputs, float32 ``[rows, out]``, for inputs ``x`` ``[rows, in]``."""
        runs_alone = self.layout.unit is None and not self.layout.gated
        assert runs_alone, (
            "expected a layout without heads and gate, found that of a qkv or gated up projection"
        )
        dtype = BFLOAT16 if x.dtype == BFLOAT16 else FLOAT32
        if dtype not in self._programs:
            program = Operations(self.kernels, self.in_features, dtype)
            program.linear(self, to="logits")
            self._programs[dtype] = program
        y = np.empty((len(x), self.out_features), np.float32)
        if len(x):
            self._programs[dtype].run(None, np.ascontiguousarray(x, dtype), y)
        return y


class StackedLinear:
    """Linear layers with the same input, whose outputs are concatenated.

    The layers are separate because the formats of their weights may differ.
    """

    scale = 1.0  # as :attr:`Linear.scale`
    cap = None  # as :attr:`Linear.cap`

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)
        self.out_features = sum(part.out_features for part in parts)
        self.in_features = parts[0].in_features


class Experts:
    """Linear layers of a mixture of experts, one per expert, of equal shape and format.

    Each row passes through the layers of the experts that the router chose for the row.

    Attributes:
        mixture: number of experts, and how they are chosen.
        layout: how to pack the layers.
        gathers: True if the outputs of a row's experts are added up, each times the router's
            weight of the expert. False if each expert of a row has outputs of its own.
    """

    def __init__(self, mixture: MixtureConfig, layout: WeightLayout, *, gathers: bool) -> None:
        self.mixture = mixture
        self.gathers = gathers
        self.layout = layout
        self._linears: dict[int, Linear] = {}

    @property
    def parts(self) -> Sequence[Linear]:
        """The layer of each expert, in the order of the experts' numbers."""
        return [self._linears[number] for number in range(len(self._linears))]

    def set(self, number: int, linear: Linear) -> None:
        """Set the layer of expert ``number`` (from 0).

        Raise a ValueError if its weights have another format than those of the other experts.
        """
        other = next(iter(self._linears.values()), linear).packed.format
        if linear.packed.format != other:
            msg = f"expected all experts in one format, found {other} and {linear.packed.format}"
            raise ValueError(msg)
        self._linears[number] = linear


def choose_linear(
    kernels: Kernels,
    weights: str = "plain",
    release: Callable[[], None] = lambda: None,
    cache: WeightCache | None = None,
) -> LinearFactory:
    """Return a function that packs a weight and returns the linear layer.

    Args:
        kernels: the kernels that compute the layers.
        weights: ``"plain"`` keeps the precision of the checkpoint. ``"int8"`` and ``"int4"``
            quantize the weights that are not quantized in the checkpoint, the LM head always to 8
            bits.
        release: called after each slice of a weight is quantized, to free pages of the mapped
            checkpoint.
        cache: packed weights of earlier loads, which are reused; newly packed weights are added.

    Raises:
        OptionError: ``weights`` is unknown.
    """
    check_choice("weights", weights, WEIGHTS)

    def build(weight: AnyWeight, bias: Array | None, layout: WeightLayout) -> Linear:
        if weights == "plain" or layout.exact or not isinstance(weight, np.ndarray):
            return Linear(kernels, weight, bias, layout, cache)
        bits: Bits = 4 if weights == "int4" and not layout.head else 8
        rounded = _LazyCodedRows(kernels, weight, bits, release)
        return Linear(kernels, rounded, bias, layout, None)

    return build


@dataclass(frozen=True)
class _LazyCodedRows:
    """An unquantized matrix that is quantized slice by slice while :func:`pack` reads it.

    So the quantized codes of the whole matrix are never in memory at once.
    """

    kernels: Kernels
    weight: Array
    bits: Bits
    release: Callable[[], None]

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def scale_format(self) -> ScaleFormat:
        return ScaleFormat(FLOAT32, zeros=False)

    def slice_outputs(self, start: int, stop: int) -> QuantizedMatrix:
        quantized = round_weights(self.kernels, self.weight[start:stop], self.bits)
        self.release()
        return quantized
