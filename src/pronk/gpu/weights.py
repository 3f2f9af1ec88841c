"""Weight matrices on a GPU: plain, or quantized as the checkpoint has them.

Codes, scales and minima of a quantized checkpoint are stored without loss:

- 4-bit codes take half a byte, other codes a byte.
- Scales and minima are float16 if that represents all of them exactly, otherwise float32.
- In Q4_K and Q5_K, a scale is the product of a float16 *factor* of 256 inputs and a number of 6
  bits of 32 inputs; a minimum likewise. Factors and numbers are stored, as in the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pronk.backends import BlockMatrix, Kernels, QuantizedMatrix, WeightLayout, round_weights
from pronk.base.arrays import FLOAT16, FLOAT32, UINT8, Array, DType
from pronk.base.convert import to_tensor, torch_dtype

# Number of inputs of a block of a product; rows are padded to whole blocks.
INPUT_BLOCK = 128
# Numbers of inputs of a group that the kernels can repeat in half a block; so are their multiples.
_GROUPS = (16, 32, 64)
# Number of groups that share a factor, in the types of GGUF blocks that have factors.
FACTOR_GROUPS = 8
_WITH_FACTORS = ("Q4_K", "Q5_K")

Format = Literal["plain", "int8", "int4"]
# Weights as a checkpoint has them.
AnyWeight = Array | QuantizedMatrix | BlockMatrix


@dataclass(frozen=True, eq=False)
class GpuMatrix:
    """A weight matrix ``[outputs, inputs]`` on a device.

    A weight is ``scale * (code - zero) + minimum``, with a scale and a minimum for each group of
    inputs; both are multiplied by the factors of :data:`FACTOR_GROUPS` groups, if there are any.

    Attributes:
        values: weights ``[outputs, padded inputs]``, or their codes in the order of
            :mod:`pronk.gpu.gemm`.
        outputs: number of outputs; those of an MLP's gate precede those of its up projection.
        inputs: number of inputs.
        bias: ``[outputs]``, or ``None``.
        format: form of ``values``.
        group: number of inputs per scale; 0 for plain weights.
        zero: number that is subtracted from codes.
        scale: ``[outputs, groups]``, of whole blocks of inputs; ``None`` for plain weights.
        minimum: ``[outputs, groups]``, or ``None``.
        factor: ``[outputs, groups / 8]``: factor of the scales, or ``None``.
        minimum_factor: ``[outputs, groups / 8]``: factor of the minima, or ``None``.
        order: int64 ``[inputs]``: the input of each column; ``None``: they are in order.
    """

    values: Tensor
    outputs: int
    inputs: int
    bias: Tensor | None = None
    format: Format = "plain"
    group: int = 0
    zero: int = 0
    scale: Tensor | None = None
    minimum: Tensor | None = None
    factor: Tensor | None = None
    minimum_factor: Tensor | None = None
    order: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Size in the device's memory in bytes, without the bias."""
        parts = (self.values, self.scale, self.minimum, self.factor, self.minimum_factor)
        return sum(part.nbytes for part in parts if part is not None)

    def take_outputs(self, outputs: Tensor) -> GpuMatrix:
        """Return a matrix of some outputs, int64 ``[count]``."""
        index = outputs.to(self.values.device)

        def take(part: Tensor | None) -> Tensor | None:
            return None if part is None else part[index]

        return replace(
            self,
            values=self.values[index],
            outputs=len(index),
            bias=take(self.bias),
            scale=take(self.scale),
            minimum=take(self.minimum),
            factor=take(self.factor),
            minimum_factor=take(self.minimum_factor),
        )

    def rows(self, outputs: Tensor) -> Tensor:
        """Return the weights of some outputs, ``[len(outputs), inputs]``, dequantized in float32.

        Args:
            outputs: int64 ``[count]``.
        """
        values = self.values[outputs]
        if self.format == "plain":
            return values[:, : self.inputs].float()
        if self.format == "int4":
            runs = values.unflatten(1, (-1, INPUT_BLOCK // 2))
            values = torch.cat((runs & 15, runs >> 4), dim=2).flatten(1)
        assert self.scale is not None, "expected scales of quantized weights"
        weights = (values.float() - self.zero) * self._spread(self.scale, self.factor, outputs)
        if self.minimum is not None:
            weights += self._spread(self.minimum, self.minimum_factor, outputs)
        weights = weights[:, : self.inputs]
        return weights if self.order is None else weights[:, self.order.argsort()]

    def _spread(self, numbers: Tensor, factors: Tensor | None, outputs: Tensor) -> Tensor:
        """Return the number of each input, float32 ``[len(outputs), padded inputs]``."""
        of_groups = numbers[outputs].float()
        if factors is not None:
            of_groups *= factors[outputs].float().repeat_interleave(FACTOR_GROUPS, dim=1)
        return of_groups.repeat_interleave(self.group, dim=1)[:, : self._padded_inputs]

    @property
    def _padded_inputs(self) -> int:
        return padded_inputs(self.inputs)


def padded_inputs(inputs: int) -> int:
    """Return a number of inputs, rounded up to whole blocks."""
    return ceil(inputs / INPUT_BLOCK) * INPUT_BLOCK


def load_matrix(
    weight: AnyWeight,
    bias: Array | None,
    *,
    dtype: DType,
    device: torch.device,
) -> GpuMatrix:
    """Copy a matrix and its bias to a device.

    Quantized weights keep their numbers, unless their groups are of a size that the kernels lack;
    these are dequantized to ``dtype``.
    """
    own_bias = None if bias is None else to_tensor(bias).to(device, torch_dtype(dtype))
    factors: tuple[Array, Array] | None = None
    if isinstance(weight, BlockMatrix):
        factors = _read_factors(weight) if weight.type in _WITH_FACTORS else None
        weight = weight.unpack()
    if isinstance(weight, QuantizedMatrix) and _has_known_groups(weight):
        return _load_quantized(weight, own_bias, factors, device)
    plain = weight.dequantize() if isinstance(weight, QuantizedMatrix) else weight
    outputs, inputs = plain.shape
    padded = torch.zeros(outputs, padded_inputs(inputs), dtype=torch_dtype(dtype), device=device)
    padded[:, :inputs] = to_tensor(plain).to(device, torch_dtype(dtype))
    return GpuMatrix(padded, outputs, inputs, own_bias)


def _has_known_groups(matrix: QuantizedMatrix) -> bool:
    return matrix.group in _GROUPS or matrix.group % _GROUPS[-1] == 0


def _load_quantized(
    matrix: QuantizedMatrix,
    bias: Tensor | None,
    factors: tuple[Array, Array] | None,
    device: torch.device,
) -> GpuMatrix:
    outputs, inputs = matrix.shape
    width = padded_inputs(inputs)
    num_groups = ceil(width / matrix.group)
    is_int4 = matrix.bits == 4
    codes = np.zeros((outputs, width), UINT8)
    codes[:, :inputs] = matrix.codes
    if is_int4:
        runs = codes.reshape(outputs, -1, 2, INPUT_BLOCK // 2)
        codes = (runs[:, :, 0] | runs[:, :, 1] << 4).reshape(outputs, -1)
    scale = matrix.scale
    minimum = matrix.minimum
    of_scales: Array | None = None
    of_minima: Array | None = None
    if factors is not None:
        assert minimum is not None, "expected minima beside factors"
        of_scales, of_minima = factors
        scale = _divide(scale, of_scales)
        minimum = _divide(minimum, of_minima)
    return GpuMatrix(
        torch.from_numpy(codes).to(device),
        outputs,
        inputs,
        bias,
        format="int4" if is_int4 else "int8",
        group=matrix.group,
        zero=matrix.zero,
        scale=_group_tensor(scale, device, num_groups),
        minimum=_group_tensor(minimum, device, num_groups),
        factor=_group_tensor(of_scales, device),
        minimum_factor=_group_tensor(of_minima, device),
        order=None if matrix.order is None else torch.from_numpy(matrix.order).to(device),
    )


def _group_tensor(
    numbers: Array | None, device: torch.device, num_groups: int = 0
) -> Tensor | None:
    """Return numbers of groups in the smallest type that represents all of them exactly.

    Groups of zeros are added up to ``num_groups``.
    """
    if numbers is None:
        return None
    if num_groups > numbers.shape[1]:
        numbers = np.pad(numbers, ((0, 0), (0, num_groups - numbers.shape[1])))
    for dtype in (UINT8, FLOAT16):
        with np.errstate(over="ignore", invalid="ignore"):
            small = numbers.astype(dtype)
        if np.array_equal(small.astype(FLOAT32), numbers):
            return torch.from_numpy(small).to(device)
    return torch.from_numpy(np.ascontiguousarray(numbers, FLOAT32)).to(device)


def _divide(products: Array, factors: Array) -> Array:
    """Return the integers whose products with factors of 8 groups are ``products``."""
    spread = np.repeat(factors, FACTOR_GROUPS, axis=1)
    integers = np.rint(products / np.where(spread == 0, np.float32(1), spread))
    assert np.array_equal(integers * spread, products), "expected products of integers and factors"
    return integers


def _read_factors(matrix: BlockMatrix) -> tuple[Array, Array]:
    """Return the factors of scales and of minima of Q4_K or Q5_K, float32 ``[outputs, blocks]``.

    The first four bytes of a block are the two factors. The file's minima are subtracted.
    """
    both = np.ascontiguousarray(matrix.blocks()[..., :4]).view(FLOAT16).astype(FLOAT32)
    return both[..., 0], -both[..., 1]


class GpuLinear:
    """A linear layer on a device, with the attributes of :class:`~pronk.models.linear.Linear`.

    Attributes:
        matrix: the weights.
        scale: number by which the outputs are multiplied.
        cap: soft cap of the outputs, or ``None``.
    """

    def __init__(self, matrix: GpuMatrix) -> None:
        self.matrix = matrix
        self.out_features = matrix.outputs
        self.in_features = matrix.inputs
        self.scale = 1.0
        self.cap: float | None = None

    def take_outputs(self, rows: Array) -> GpuLinear:
        """Return a layer with the outputs ``rows`` of this one, int ``[outputs]``."""
        made = GpuLinear(self.matrix.take_outputs(torch.from_numpy(rows)))
        made.scale = self.scale
        made.cap = self.cap
        return made

    @property
    def parts(self) -> tuple[GpuLinear, ...]:
        """The layers that this layer consists of: itself."""
        return (self,)


def gpu_linear(
    kernels: Kernels, weights: str, dtype: DType, device: torch.device
) -> Callable[[AnyWeight, Array | None, WeightLayout], GpuLinear]:
    """Return a function that copies a weight to a device and returns the linear layer.

    Args:
        kernels: the CPU's kernels, which round weights.
        weights: ``plain``, ``int8`` or ``int4``, as :func:`~pronk.models.linear.choose_linear`.
        dtype: data type of plain weights and of activations.
        device: the device.
    """

    def build(weight: AnyWeight, bias: Array | None, layout: WeightLayout) -> GpuLinear:
        if weights != "plain" and isinstance(weight, np.ndarray):
            weight = round_weights(
                kernels, weight, 4 if weights == "int4" and not layout.head else 8
            )
        return GpuLinear(load_matrix(weight, bias, dtype=dtype, device=device))

    return build
