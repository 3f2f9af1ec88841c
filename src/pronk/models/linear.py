"""The one seam for matrix products: plain weights for torch, packed ones for the kernels, quantized or not.

Whatever the implementation, ``forward`` maps ``[rows, in]`` to ``[rows, out]`` in the dtype of its input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pronk.errors import OptionError
from pronk.kernels.library import Kernels
from pronk.kernels.rounding import round_weights
from pronk.kernels.weights import CodedRows, pack
from pronk.models.program import Program, ProgramRows
from pronk.quantization.formats.matrix import Bits, QuantizedMatrix

__all__ = [
    "WEIGHTS",
    "KernelLinear",
    "Linear",
    "LinearFactory",
    "PlainLinear",
    "StackedLinear",
    "WeightLayout",
    "choose_linear",
]

# How a model's weights are kept: as they were stored, or rounded as they are loaded.
WEIGHTS = ("plain", "int8", "int4")


class WeightLayout(NamedTuple):
    """How the outputs of a product are used, which decides how its weights are packed.

    Attributes:
        unit: outputs that belong together, a head for example; ``None`` is all of them.
        gated: whether the first half of the outputs gates the second.
        head: whether they are the logits of tokens, for which 4 bits are too few.
    """

    unit: int | None = None
    gated: bool = False
    head: bool = False


class Linear(nn.Module):
    """``y = x Wᵀ + b``."""

    in_features: int
    out_features: int

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``[rows, in]`` to ``[rows, out]``."""
        raise NotImplementedError

    def logits(self, x: Tensor) -> Tensor:
        """The same in float32, as wide as the product was summed."""
        return self(x).float()

    @property
    def parts(self) -> Sequence[Linear]:
        """The matrices that the outputs lie in, in their order."""
        return (self,)


# Makes a linear layer of a weight ``[out, in]``, which may be quantized already, a bias ``[out]`` and the layout that
# its user expects.
LinearFactory = Callable[[Tensor | QuantizedMatrix, Tensor | None, WeightLayout], Linear]


class PlainLinear(Linear):
    """Weights as the checkpoint stores them, ``[out, in]``; the only trainable implementation."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # A Parameter is kept as it is, so that a head can be tied to the embedding.
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, weight.requires_grad)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=bias.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        """See :class:`Linear`."""
        return F.linear(x, self.weight, self.bias)


class KernelLinear(Linear):
    """Weights packed for the kernels; a row's bits do not depend on the other rows.

    Within a layer the kernels use them directly; ``forward`` is for a product by itself.
    """

    def __init__(self, kernels: Kernels, weight: Tensor | CodedRows, bias: Tensor | None, layout: WeightLayout) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.layout = layout
        self.packed = pack(kernels, weight, bias, unit=layout.unit, gated=layout.gated)
        self._programs: dict[torch.dtype, Program] = {}

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``[rows, in]`` to ``[rows, out]``; only for a layout in which all outputs are one unit."""
        return self.logits(x).to(x.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """See :class:`Linear`."""
        alone = self.layout.unit is None and not self.layout.gated
        assert alone, "expected a product by itself, found one whose outputs are used within a layer"
        dtype = x.dtype if x.dtype == torch.bfloat16 else torch.float32
        if dtype not in self._programs:
            program = Program(self.packed.kernels, self.in_features, dtype)
            program.linear(self, to="logits")
            self._programs[dtype] = program
        out = torch.empty(len(x), self.out_features)
        if len(x):
            self._programs[dtype].run(ProgramRows.loose(len(x)), x.contiguous().to(dtype), out)
        return out


class StackedLinear(Linear):
    """Several matrices of the same inputs, whose outputs follow each other: each is kept in its own form."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        super().__init__()
        self._parts = nn.ModuleList(parts)
        self.out_features, self.in_features = sum(part.out_features for part in parts), parts[0].in_features

    def forward(self, x: Tensor) -> Tensor:
        """See :class:`Linear`."""
        return torch.cat([part(x) for part in self._parts], dim=-1)

    @property
    def parts(self) -> Sequence[Linear]:
        """See :class:`Linear`."""
        return [cast("Linear", part) for part in self._parts]


def choose_linear(
    kernels: Kernels | None,
    device: torch.device,
    weights: str = "plain",
    dtype: torch.dtype | None = None,
    release: Callable[[], None] = lambda: None,
) -> LinearFactory:
    """What makes the linear layers of a model.

    Args:
        kernels: who will read the weights; ``None`` is torch.
        device: where the weights are.
        weights: ``"plain"`` leaves them as they are; ``"int8"`` and ``"int4"`` round those that are not quantized
            yet, the head to 8 bits in both.
        dtype: what torch computes with quantized weights in; ``None`` is float32.
        release: called when some more of a weight that is rounded need not be in memory any longer.

    Raises:
        OptionError: ``weights`` is none of these, or there are no kernels for it.
    """
    if weights not in WEIGHTS:
        msg = f"weights: expected {', '.join(WEIGHTS)}; found {weights!r}"
        raise OptionError(msg)
    if kernels is not None:

        def packed(weight: Tensor | QuantizedMatrix, bias: Tensor | None, layout: WeightLayout) -> Linear:
            if isinstance(weight, QuantizedMatrix) or weights == "plain":
                return KernelLinear(kernels, weight, bias, layout)
            bits: Bits = 4 if weights == "int4" and not layout.head else 8
            return KernelLinear(kernels, _Rounded(kernels, weight.detach(), bits, release), bias, layout)

        return packed
    if weights != "plain":
        found = "no kernels" if device.type == "cpu" else f"device {device}"
        msg = f"weights: expected a CPU and pronk's kernels for {weights}, found {found}; use plain"
        raise OptionError(msg)

    def plain(weight: Tensor | QuantizedMatrix, bias: Tensor | None, _: WeightLayout) -> Linear:
        if isinstance(weight, QuantizedMatrix):
            weight = weight.dequantize().to(device, dtype)
        return PlainLinear(weight, bias)

    return plain


@dataclass(frozen=True)
class _Rounded:
    """A matrix that is rounded as it is packed: neither all its numbers need be in memory, nor all its codes."""

    kernels: Kernels
    weight: Tensor
    bits: Bits
    release: Callable[[], None]

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.weight.shape[0], self.weight.shape[1]

    def rows(self, start: int, stop: int) -> QuantizedMatrix:
        """Some outputs of it."""
        made = round_weights(self.kernels, self.weight[start:stop], self.bits)
        self.release()
        return made
