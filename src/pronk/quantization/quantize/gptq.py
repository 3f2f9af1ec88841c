"""GPTQ (Frantar et al. 2023, algorithm 1): columns are rounded in order, and those to come make up for each error.

With ``W`` ``[outputs, inputs]``, the layer's inputs ``X`` and ``H = X Xᵀ``, the error of the outputs is
``tr((W - Q) H (W - Q)ᵀ)``. Once column ``j`` is rounded to ``q_j``, the best that the later columns ``F`` can do is::

    W_F -= (w_j - q_j) / U_jj · U_jF        H⁻¹ = Uᵀ U, U upper triangular

Rows do not meet, so matrices with the same inputs are done on top of each other. Columns stay in their order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronk.quantization.formats.matrix import QuantizedMatrix
from pronk.quantization.quantize.rounding import RoundingRule

__all__ = ["gptq", "output_error"]

# Added to the diagonal of H, as a part of its mean (section 3.3 of the paper).
_DAMPING = 0.01
# How often ten times as much is tried.
_TRIES = 8
# Columns whose errors reach the columns behind them in one product.
_BLOCK = 128


def gptq(weight: Tensor, hessian: Tensor, rule: RoundingRule) -> QuantizedMatrix:
    """Round ``weight`` so that the outputs err least.

    A group's scale is chosen when its first column is rounded, for the weights as they are by then.

    Args:
        weight: ``[outputs, inputs]`` float32.
        hessian: ``H`` ``[inputs, inputs]``, up to a factor.
        rule: how it is quantized.

    Raises:
        ValueError: numbers that are not finite, or a matrix that is no ``H``; the message is one line.
    """
    inputs = weight.shape[1]
    group = rule.group or inputs
    block = _block(group)
    left = weight.t().clone(memory_format=torch.contiguous_format)  # [inputs, outputs]: columns are in one piece
    factor = _factor(hessian)
    codes, scales = torch.empty_like(left), torch.empty(inputs // group, len(weight))
    for start in range(0, inputs, block):
        end = min(start + block, inputs)
        if start % group == 0 and group >= block:
            scales[start // group] = _scale(left[start : start + group], rule)
        errors = torch.empty(end - start, len(weight))
        for j in range(start, end):
            if j % group == 0 and group < block:
                scales[j // group] = _scale(left[j : j + group], rule)
            scale = scales[j // group]
            codes[j] = rule.codes(left[j], scale)
            errors[j - start] = (left[j] - codes[j] * scale) / factor[j, j]
            left[j + 1 : end].addr_(factor[j, j + 1 : end], errors[j - start], alpha=-1)
        left[end:].addmm_(factor[start:end, end:].t(), errors, alpha=-1)
    return QuantizedMatrix(
        codes.t().add(rule.zero).to(torch.uint8).contiguous(), scales.t().contiguous(), None, rule.bits, group
    )


def output_error(weight: Tensor, quantized: Tensor, hessian: Tensor) -> float:
    """``tr((W - Q) H (W - Q)ᵀ)``: squared error of the outputs, summed."""
    wrong = weight - quantized
    return float((wrong @ hessian).mul_(wrong).sum(dtype=torch.float64))


def _scale(columns: Tensor, rule: RoundingRule) -> Tensor:
    return rule.scales(columns.t())[:, 0]


def _block(group: int) -> int:
    """Columns of a block: whole groups, or a part that fits into one."""
    if group <= _BLOCK:
        return _BLOCK // group * group
    return next(size for size in range(_BLOCK, 0, -1) if group % size == 0)


def _factor(hessian: Tensor) -> Tensor:
    """``U`` with ``H⁻¹ = Uᵀ U``, float32. An input that is always 0 is rounded by itself."""
    if not bool(hessian.isfinite().all()):
        msg = "expected finite products of the inputs, found others; quantize without a text to calibrate with"
        raise ValueError(msg)
    wide = hessian.double()
    wide.diagonal().masked_fill_(wide.diagonal() <= 0, 1.0)
    mean = wide.diagonal().mean()
    damping = _DAMPING
    for _ in range(_TRIES):
        wide.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(wide)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper.float()
        damping *= 10  # so few tokens, or so alike, that rounding made H indefinite
    msg = "expected products of the inputs with each other, found a matrix that is far from positive definite"
    raise ValueError(msg)
