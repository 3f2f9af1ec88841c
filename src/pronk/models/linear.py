"""Linear layers with plain weights for torch, or weights packed for the kernels, quantized or not."""

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

# Values of the option ``weights``: the precision of the checkpoint, or rounding to 8 or 4 bits at load.
WEIGHTS = ("plain", "int8", "int4")


class WeightLayout(NamedTuple):
    """Meaning of a linear layer's outputs, which determines the order of the packed weights."""

    # Number of outputs of a head, if the kernels process the outputs head by head: each head then starts a block of 16
    # packed outputs; ``None`` if there are no heads.
    unit: int | None = None
    gated: bool = False  # whether the first half of the outputs gates the second half, as in SwiGLU
    head: bool = False  # whether the outputs are logits, for which rounding to 4 bits is not precise enough


class Linear(nn.Module):
    """Linear layer ``y = x Wᵀ + b``; ``y`` has the dtype of ``x``."""

    in_features: int
    out_features: int

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` ``[rows, in]`` to ``[rows, out]``."""
        raise NotImplementedError

    def logits(self, x: Tensor) -> Tensor:
        """Return ``y`` in float32; kernels compute it in float32 without rounding to the dtype of ``x``."""
        return self(x).float()

    @property
    def parts(self) -> Sequence[Linear]:
        """The matrices whose outputs are concatenated, in order."""
        return (self,)


# Builds a layer from its weight ``[out, in]``, plain or quantized, its bias ``[out]`` or ``None``, and its layout.
LinearFactory = Callable[[Tensor | QuantizedMatrix, Tensor | None, WeightLayout], Linear]


class PlainLinear(Linear):
    """Linear layer of torch with weights ``[out, in]``; the only trainable implementation."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # Keep a given Parameter instead of copying it, so that a head can be tied to the embedding.
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, weight.requires_grad)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=bias.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` ``[rows, in]`` to ``[rows, out]``."""
        return F.linear(x, self.weight, self.bias)


class KernelLinear(Linear):
    """Linear layer with weights packed for the kernels; the bits of a row do not depend on other rows.

    The :class:`Program` of a model reads ``packed`` itself. ``forward`` and ``logits`` run the layer alone, which
    requires a layout without heads and gate.
    """

    def __init__(self, kernels: Kernels, weight: Tensor | CodedRows, bias: Tensor | None, layout: WeightLayout) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.layout = layout
        self.packed = pack(kernels, weight, bias, unit=layout.unit, gated=layout.gated)
        self._programs: dict[torch.dtype, Program] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` ``[rows, in]`` to ``[rows, out]``."""
        return self.logits(x).to(x.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """Return ``y`` in float32."""
        runs_alone = self.layout.unit is None and not self.layout.gated
        assert runs_alone, "expected a layout without heads and gate, found that of a qkv or gated up projection"
        dtype = x.dtype if x.dtype == torch.bfloat16 else torch.float32
        if dtype not in self._programs:
            program = Program(self.packed.kernels, self.in_features, dtype)
            program.linear(self, to="logits")
            self._programs[dtype] = program
        y = torch.empty(len(x), self.out_features)
        if len(x):
            self._programs[dtype].run(ProgramRows.independent(len(x)), x.contiguous().to(dtype), y)
        return y


class StackedLinear(Linear):
    """Linear layers on one input with concatenated outputs; the weight formats of the parts may differ."""

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
        kernels: kernels that compute the layers; ``None`` means torch.
        device: device of the weights.
        weights: ``"plain"`` keeps the precision of the checkpoint; ``"int8"`` and ``"int4"`` round weights that are not
            quantized yet, except that the LM head always gets 8 bits. Rounding without kernels raises an OptionError.
        dtype: dtype to which quantized weights are dequantized for torch; ``None`` means float32.
        release: callback that frees pages of the mapped checkpoint, called after each slice of a rounded weight.
    """
    if weights not in WEIGHTS:
        msg = f"weights: expected {', '.join(WEIGHTS)}; found {weights!r}"
        raise OptionError(msg)
    if kernels is not None:

        def build_packed(weight: Tensor | QuantizedMatrix, bias: Tensor | None, layout: WeightLayout) -> Linear:
            if isinstance(weight, QuantizedMatrix) or weights == "plain":
                return KernelLinear(kernels, weight, bias, layout)
            bits: Bits = 4 if weights == "int4" and not layout.head else 8
            return KernelLinear(kernels, _SlicewiseRounding(kernels, weight.detach(), bits, release), bias, layout)

        return build_packed
    if weights != "plain":
        found = "no kernels" if device.type == "cpu" else f"device {device}"
        msg = f"weights: expected a CPU and pronk's kernels for {weights}, found {found}; use plain"
        raise OptionError(msg)

    def build_plain(weight: Tensor | QuantizedMatrix, bias: Tensor | None, _: WeightLayout) -> Linear:
        if isinstance(weight, QuantizedMatrix):
            weight = weight.dequantize().to(device, dtype)
        return PlainLinear(weight, bias)

    return build_plain


@dataclass(frozen=True)
class _SlicewiseRounding:
    """Matrix that is rounded slice by slice while it is packed, to bound peak memory."""

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
