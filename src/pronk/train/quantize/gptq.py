"""GPTQ (Frantar et al. 2023, algorithm 1): round columns one by one, and update later columns.

With weights ``W`` ``[outputs, inputs]``, rounded weights ``Q``, inputs ``X`` ``[inputs, tokens]`` and ``H = X Xᵀ``, the
squared error of the outputs is ``tr((W - Q) H (W - Q)ᵀ)``. Rounding column ``w_j`` to ``q_j`` updates later columns
``W_F`` by::

    W_F -= (w_j - q_j) / U_jj · U_jF        H⁻¹ = Uᵀ U, U upper triangular

Rows are independent, so matrices with the same inputs are concatenated. Columns are not reordered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronk.quantization.formats.matrix import QuantizedMatrix
from pronk.quantization.quantize.rounding import RoundingRule
from pronk.torch_backend.convert import to_array, to_tensor

__all__ = ["gptq", "output_error"]

_DAMPING = 0.01  # fraction of the mean of H's diagonal that is added to the diagonal (section 3.3 of the paper)
_MAX_ATTEMPTS = 8  # number of attempts to invert H; each adds ten times as much to the diagonal as the one before
# Maximum number of columns per block; the errors of a block are applied to the later columns in one matrix product.
_BLOCK_COLUMNS = 128


def gptq(weight: Tensor, hessian: Tensor, rule: RoundingRule) -> QuantizedMatrix:
    """Quantize ``weight``, float32 ``[outputs, inputs]``; ``hessian`` is ``H``, or ``H`` times a constant.

    The scale of a group is chosen from the updated weights, when the first column of the group is rounded.

    Raises:
        ValueError: a tensor is not finite, or ``hessian`` is far from positive definite; the message is one line.
    """
    inputs = weight.shape[1]
    group = rule.group or inputs
    block = _block_size(group)
    # Transposed to [inputs, outputs], so that each column of W is contiguous.
    remaining = weight.t().clone(memory_format=torch.contiguous_format)
    factor = _inverse_factor(hessian)
    codes, scales = torch.empty_like(remaining), torch.empty(inputs // group, len(weight))
    for start in range(0, inputs, block):
        end = min(start + block, inputs)
        if start % group == 0 and group >= block:
            scales[start // group] = _scale(remaining[start : start + group], rule)
        errors = torch.empty(end - start, len(weight))
        for j in range(start, end):
            if j % group == 0 and group < block:
                scales[j // group] = _scale(remaining[j : j + group], rule)
            scale = scales[j // group]
            codes[j] = to_tensor(rule.codes(to_array(remaining[j]), to_array(scale)))
            errors[j - start] = (remaining[j] - codes[j] * scale) / factor[j, j]
            remaining[j + 1 : end].addr_(factor[j, j + 1 : end], errors[j - start], alpha=-1)
        remaining[end:].addmm_(factor[start:end, end:].t(), errors, alpha=-1)
    unsigned = codes.t().add(rule.zero).to(torch.uint8).contiguous()
    return QuantizedMatrix(to_array(unsigned), to_array(scales.t().contiguous()), None, rule.bits, group)


def output_error(weight: Tensor, quantized: Tensor, hessian: Tensor) -> float:
    """Return the sum of the squared errors of the outputs, ``tr((W - Q) H (W - Q)ᵀ)``."""
    error = weight - quantized
    return float((error @ hessian).mul_(error).sum(dtype=torch.float64))


def _scale(columns: Tensor, rule: RoundingRule) -> Tensor:
    return to_tensor(rule.scales(to_array(columns.t())))[:, 0]


def _block_size(group: int) -> int:
    """Return the largest size up to ``_BLOCK_COLUMNS`` that is a multiple or a divisor of ``group``."""
    if group <= _BLOCK_COLUMNS:
        return _BLOCK_COLUMNS // group * group
    return next(size for size in range(_BLOCK_COLUMNS, 0, -1) if group % size == 0)


def _inverse_factor(hessian: Tensor) -> Tensor:
    """Return the upper triangular ``U`` with ``H⁻¹ = Uᵀ U``, float32, for the damped ``H``."""
    if not bool(hessian.isfinite().all()):
        msg = "expected finite products of the inputs, found NaN or inf; quantize without a calibration text"
        raise ValueError(msg)
    damped = hessian.double()
    damped.diagonal().masked_fill_(damped.diagonal() <= 0, 1.0)  # for an input that is always 0, the entry is 0
    mean = damped.diagonal().mean()
    damping = _DAMPING
    for _ in range(_MAX_ATTEMPTS):
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper.float()
        damping *= 10  # for few or similar tokens, rounding errors can make H indefinite
    msg = "expected products of inputs (X Xᵀ), found a matrix that is far from positive definite"
    raise ValueError(msg)
