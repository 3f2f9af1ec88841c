"""Linear layers: plain weights for torch, packed weights for the kernels, quantized or not.

Every implementation maps ``[rows, in]`` to ``[rows, out]`` in the dtype of its input.
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

# Values of the option ``weights``: stored precision, or rounding at load.
WEIGHTS = ("plain", "int8", "int4")


class WeightLayout(NamedTuple):
    """Use of a product's outputs, which determines how the weights are packed.

    Attributes:
        unit: number of outputs that form a unit, such as a head; ``None`` means all outputs.
        gated: whether the first half of the outputs gates the second.
        head: whether the outputs are logits, for which 4 bits are not precise enough.
    """

    unit: int | None = None
    gated: bool = False
    head: bool = False


class Linear(nn.Module):
    """``y = x Wᵀ + b``."""

    in_features: int
    out_features: int

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` ``[rows, in]`` to ``[rows, out]``."""
        raise NotImplementedError

    def logits(self, x: Tensor) -> Tensor:
        """Return the product in float32; the kernels do not round it to the input's dtype first."""
        return self(x).float()

    @property
    def parts(self) -> Sequence[Linear]:
        """The matrices whose outputs are concatenated, in order."""
        return (self,)


# Arguments: weight ``[out, in]``, plain or quantized; bias ``[out]`` or None; layout of the outputs.
LinearFactory = Callable[[Tensor | QuantizedMatrix, Tensor | None, WeightLayout], Linear]


class PlainLinear(Linear):
    """Torch weights ``[out, in]``; the only trainable implementation."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # Keep a given Parameter, so that a head can be tied to the embedding.
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, weight.requires_grad)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=bias.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` ``[rows, in]`` to ``[rows, out]``."""
        return F.linear(x, self.weight, self.bias)


class KernelLinear(Linear):
    """Weights packed for the kernels; the bits of a row's result do not depend on other rows.

    A compiled layer uses the packed weights directly; ``forward`` computes a single product.
    """

    def __init__(self, kernels: Kernels, weight: Tensor | CodedRows, bias: Tensor | None, layout: WeightLayout) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.layout = layout
        self.packed = pack(kernels, weight, bias, unit=layout.unit, gated=layout.gated)
        self._programs: dict[torch.dtype, Program] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` ``[rows, in]`` to ``[rows, out]``; the layout must have one unit and no gate."""
        return self.logits(x).to(x.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """Return the product in float32; the layout must have one unit and no gate."""
        plain = self.layout.unit is None and not self.layout.gated
        assert plain, "expected a layout with one unit and no gate, found a layer-internal layout"
        dtype = x.dtype if x.dtype == torch.bfloat16 else torch.float32
        if dtype not in self._programs:
            program = Program(self.packed.kernels, self.in_features, dtype)
            program.linear(self, to="logits")
            self._programs[dtype] = program
        out = torch.empty(len(x), self.out_features)
        if len(x):
            self._programs[dtype].run(ProgramRows.independent(len(x)), x.contiguous().to(dtype), out)
        return out


class StackedLinear(Linear):
    """Matrices with the same inputs and concatenated outputs, each stored in its own format."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        super().__init__()
        self._parts = nn.ModuleList(parts)
        self.out_features, self.in_features = sum(part.out_features for part in parts), parts[0].in_features

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` ``[rows, in]`` to ``[rows, out]``."""
        return torch.cat([part(x) for part in self._parts], dim=-1)

    @property
    def parts(self) -> Sequence[Linear]:
        """The matrices whose outputs are concatenated, in order."""
        return [cast("Linear", part) for part in self._parts]


def choose_linear(
    kernels: Kernels | None,
    device: torch.device,
    weights: str = "plain",
    dtype: torch.dtype | None = None,
    release: Callable[[], None] = lambda: None,
) -> LinearFactory:
    """Return the factory that makes the linear layers of a model.

    Args:
        kernels: kernels that use the weights; ``None`` means torch.
        device: device of the weights.
        weights: ``"plain"`` keeps the stored precision; ``"int8"`` and ``"int4"`` round weights that are not quantized
            yet, the head to 8 bits in both cases. Rounding without kernels raises an OptionError.
        dtype: dtype to which torch dequantizes quantized weights; ``None`` is float32.
        release: callback that frees mapped pages, called after each slice of a rounded weight.
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
    """A matrix that is rounded slice by slice while it is packed, to bound peak memory."""

    kernels: Kernels
    weight: Tensor
    bits: Bits
    release: Callable[[], None]

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def rows(self, start: int, stop: int) -> QuantizedMatrix:
        rounded = round_weights(self.kernels, self.weight[start:stop], self.bits)
        self.release()
        return rounded
