"""The one seam for matrix products: plain, prepacked and quantized weights.

Whatever the implementation, ``forward`` maps ``[rows, in]`` to ``[rows, out]`` in the dtype of its input. On a
CPU the result of a row must not depend on the other rows of the call (see :mod:`pronk.engine.runner`, which pads the
number of rows to a multiple of 4 for that purpose).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pronk.errors import OptionError
from pronk.model.hugepages import use_huge_pages

__all__ = ["WEIGHTS", "Int8Linear", "Linear", "LinearFactory", "PackedLinear", "PlainLinear", "choose_linear"]

WEIGHTS = ("plain", "int8")

# Rows of a matrix that are quantized at a time; more would need more memory beside it.
_ROWS = 4096


class Linear(nn.Module):
    """``y = x Wᵀ + b``."""

    in_features: int
    out_features: int

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``[rows, in]`` to ``[rows, out]``."""
        raise NotImplementedError


LinearFactory = Callable[[Tensor, Tensor | None], Linear]


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


class PackedLinear(Linear):
    """Weights reordered once into oneDNN's blocked layout, which reads them 1.4 times faster for a few rows.

    This is the operator that inductor's weight freezing emits. The blocked copy replaces the plain one.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        use_huge_pages(int(torch.ops.mkldnn.data_ptr(self.weight)), weight.nbytes)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """See :class:`Linear`."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    @staticmethod
    def supports(dtype: torch.dtype, device: torch.device) -> bool:
        """Whether this build of torch and this processor have a fast prepacked product for ``dtype``."""
        if device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
            return False
        if dtype == torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return dtype == torch.float32


class Int8Linear(Linear):
    """Weights in 8 bits, half of bfloat16: for models whose outputs need not be exact, such as drafts.

    Each row of the weights has a scale, and so has each row of the input, which is rounded to 8 bits as well; their
    products are whole numbers, so a row never depends on the others. Against the float product a random one is 1.2 %
    off. On the project's machine 1 to 4 rows take 0.6 to 0.7 of the time of packed bfloat16 with 4096 x 11008 weights,
    0.7 (one thread) to 1 (two) with 2048 x 2048, and up to 1.5 with 320 x 4096, where small steps outweigh the reading.
    Keeping the input as it is (``_weight_int8pack_mm``) takes the time of bfloat16 for 1 to 4 rows, twice that for 16.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if not self.supports(weight.device):
            found = "one without" if weight.device.type == "cpu" else f"device {weight.device}"
            msg = f"weights: expected a CPU with VNNI instructions for int8, found {found}; use plain"
            raise OptionError(msg)
        super().__init__()
        self.out_features, self.in_features = weight.shape
        rounded = torch.empty(weight.shape, dtype=torch.int8)
        self.scale = torch.empty(self.out_features)
        for start in range(0, self.out_features, _ROWS):
            block = slice(start, start + _ROWS)
            rows = weight.detach()[block]
            scale = _row_scale(rows)
            self.scale[block] = scale[:, 0]
            rounded[block] = (rows / scale).round_()
        self.weight = torch.ops.onednn.qlinear_prepack(rounded, None)
        use_huge_pages(int(torch.ops.mkldnn.data_ptr(self.weight)), rounded.nbytes)
        self._zeros = torch.zeros(self.out_features, dtype=torch.int32)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """See :class:`Linear`."""
        scale = _row_scale(x)
        # oneDNN wants an input without signs: 128 is zero, and a half more makes cutting off rounding.
        rounded = (x / scale).add_(128.5).to(torch.uint8)
        scales = (self.scale, self._zeros)
        y = torch.ops.onednn.qlinear_pointwise(
            rounded, 1.0, 128, self.weight, *scales, None, 1.0, 0, torch.float32, "none", [], ""
        )
        y.mul_(scale)
        return (y if self.bias is None else y.add_(self.bias)).to(x.dtype)

    @staticmethod
    def supports(device: torch.device) -> bool:
        """Whether this build of torch and this processor have a fast product of 8-bit numbers that cannot overflow."""
        if device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        return torch.cpu._is_vnni_supported()  # noqa: SLF001 - it has no public name


def _row_scale(x: Tensor) -> Tensor:
    """What -127..127 stands for in each row, float32 ``[rows, 1]``."""
    return x.abs().amax(1, keepdim=True).float().div_(127).clamp_min_(1e-30)


def choose_linear(dtype: torch.dtype, device: torch.device, weights: str = "plain") -> LinearFactory:
    """The fastest implementation that ``device`` has for ``dtype``.

    Args:
        dtype: of inputs and outputs.
        device: where the weights are.
        weights: ``"plain"``, which is exact, or ``"int8"``.

    Raises:
        OptionError: ``weights`` is neither, or ``device`` has no fast product for it.
    """
    if weights == "int8":
        return Int8Linear
    if weights != "plain":
        msg = f"weights: expected {' or '.join(WEIGHTS)}, found {weights!r}"
        raise OptionError(msg)
    return PackedLinear if PackedLinear.supports(dtype, device) else PlainLinear
