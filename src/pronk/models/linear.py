"""Linear layers with weights for torch, or with packed weights, quantized or not, for the kernels."""

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
from pronk.kernels.weight_cache import WeightCache
from pronk.kernels.weights import CodedRows, pack
from pronk.models.program import Program, ProgramRows
from pronk.quantization.formats.matrix import Bits, QuantizedMatrix, ScaleFormat
from pronk.quantization.gguf.blocks import BlockMatrix

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

# Values of the option ``weights``: as in the checkpoint, or quantized to 8 or 4 bits when the model is loaded.
WEIGHTS = ("plain", "int8", "int4")


class WeightLayout(NamedTuple):
    """Properties of a linear layer that determine the order and the precision of the packed weights."""

    # Number of outputs that the kernels pad together to whole blocks of 16: ``head_dim`` for heads; ``None``: all.
    unit: int | None = None
    gated: bool = False  # whether the outputs are those of the gate, then of the up projection, as in SwiGLU
    head: bool = False  # whether this is the LM head, for which 4 bits are too imprecise


class Linear(nn.Module):
    """Linear layer ``y = x Wᵀ + b``; ``forward`` returns ``y`` in the dtype of ``x``."""

    in_features: int
    out_features: int

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` ``[rows, in]`` to ``[rows, out]``."""
        raise NotImplementedError

    def logits(self, x: Tensor) -> Tensor:
        """Return ``y`` in float32; kernels compute it without rounding to the dtype of ``x``."""
        return self(x).float()

    @property
    def parts(self) -> Sequence[Linear]:
        """Layers with one weight matrix each, whose concatenated outputs are the output of this layer."""
        return (self,)


# Function that builds a layer from a weight ``[out, in]``, a bias ``[out]`` or ``None``, and a layout.
LinearFactory = Callable[[Tensor | QuantizedMatrix | BlockMatrix, Tensor | None, WeightLayout], Linear]


class PlainLinear(Linear):
    """Linear layer of torch with a weight ``[out, in]``; the only trainable subclass."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # A given Parameter is kept as it is, so that the LM head can be tied to the embedding.
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, weight.requires_grad)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=bias.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` ``[rows, in]`` to ``[rows, out]``."""
        return F.linear(x, self.weight, self.bias)


class KernelLinear(Linear):
    """Linear layer with packed weights for the kernels; the bits of a row do not depend on other rows.

    The :class:`Program` of a whole model uses ``packed``. ``forward`` and ``logits`` compute only this layer, and are
    for layouts without heads and gate.
    """

    def __init__(
        self,
        kernels: Kernels,
        weight: Tensor | CodedRows | BlockMatrix,
        bias: Tensor | None,
        layout: WeightLayout,
        cache: WeightCache | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.layout = layout
        self.packed = pack(kernels, weight, bias, unit=layout.unit, gated=layout.gated, cache=cache)
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
            self._programs[dtype].run(ProgramRows.without_segments(len(x)), x.contiguous().to(dtype), y)
        return y


class StackedLinear(Linear):
    """Linear layers with the same input and concatenated outputs; their weight formats may differ."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        super().__init__()
        self._parts = nn.ModuleList(parts)
        self.out_features, self.in_features = sum(part.out_features for part in parts), parts[0].in_features

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` ``[rows, in]`` to ``[rows, out]``."""
        return torch.cat([part(x) for part in self._parts], dim=-1)

    @property
    def parts(self) -> Sequence[Linear]:
        """The stacked layers, in the order of their outputs."""
        return [cast("Linear", part) for part in self._parts]


def choose_linear(
    kernels: Kernels | None,
    device: torch.device,
    weights: str = "plain",
    dtype: torch.dtype | None = None,
    release: Callable[[], None] = lambda: None,
    cache: WeightCache | None = None,
) -> LinearFactory:
    """Return a function that builds the linear layers of a model.

    Args:
        kernels: kernels that compute the layers; ``None`` means torch.
        device: device of the weights.
        weights: ``"plain"`` keeps the precision of the checkpoint; ``"int8"`` and ``"int4"`` quantize the weights that
            the checkpoint does not (the LM head always to 8 bits), and raise an OptionError without kernels.
        dtype: dtype to which quantized weights are dequantized for torch; ``None`` means float32.
        release: called after each quantized slice of a weight, to free pages of the mapped checkpoint.
        cache: packed blocks of earlier loads, and where to add others.
    """
    if weights not in WEIGHTS:
        msg = f"weights: expected {', '.join(WEIGHTS)}; found {weights!r}"
        raise OptionError(msg)
    if kernels is not None:

        def build_packed(
            weight: Tensor | QuantizedMatrix | BlockMatrix, bias: Tensor | None, layout: WeightLayout
        ) -> Linear:
            if not isinstance(weight, Tensor) or weights == "plain":
                return KernelLinear(kernels, weight, bias, layout, cache)
            bits: Bits = 4 if weights == "int4" and not layout.head else 8
            return KernelLinear(kernels, _LazyCodedRows(kernels, weight.detach(), bits, release), bias, layout)

        return build_packed
    if weights != "plain":
        found = "no kernels" if device.type == "cpu" else f"device {device}"
        msg = f"weights: expected a CPU and pronk's kernels for {weights}, found {found}; use plain"
        raise OptionError(msg)

    def build_plain(weight: Tensor | QuantizedMatrix | BlockMatrix, bias: Tensor | None, _: WeightLayout) -> Linear:
        assert not isinstance(weight, BlockMatrix), "expected weights that torch can read, found blocks of a file"
        if isinstance(weight, QuantizedMatrix):
            weight = weight.dequantize().to(device, dtype)
        return PlainLinear(weight, bias)

    return build_plain


@dataclass(frozen=True)
class _LazyCodedRows:
    """Unquantized matrix; each slice is quantized when :func:`pack` reads it, to save peak memory."""

    kernels: Kernels
    weight: Tensor
    bits: Bits
    release: Callable[[], None]

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def scale_format(self) -> ScaleFormat:
        return ScaleFormat(torch.float32, zeros=False)

    def slice_outputs(self, start: int, stop: int) -> QuantizedMatrix:
        quantized = round_weights(self.kernels, self.weight[start:stop], self.bits)
        self.release()
        return quantized
