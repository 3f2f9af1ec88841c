"""Scaling of inputs before rounding, as in AWQ (Lin et al. 2024, section 3.2).

``W x = (W diag(s)) (x / s)`` for inputs ``x`` and scales ``s``. With large scales for large inputs, the weights of
large inputs become larger within their groups, so their relative rounding error shrinks. ``x / s`` costs nothing: the
weights of the norm or matrix that computes ``x`` are divided by ``s``. The scales are ``s = rms(x) ** α``; the search
keeps the power ``α`` with the smallest error of the outputs (``α = 0`` is no scaling).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pronk.architecture.config import ModelConfig
from pronk.quantization.quantize.rounding import RoundingRule
from pronk.torch_backend.convert import to_array, to_tensor, torch_dtype
from pronk.train.quantize.gptq import output_error

__all__ = ["scale_layer"]

_POWERS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)  # values of ``α`` that the search tries, besides 0
# Minimum of ``rms(x)`` in the search, relative to the largest, so that inputs near 0 do not get extreme scales.
_MIN_RELATIVE_RMS = 1e-4


def scale_layer(
    config: ModelConfig, weights: Mapping[str, Tensor], hessians: Mapping[str, Tensor], rule: RoundingRule
) -> None:
    """Scale the inputs of a layer's matrices in place; its output changes only by rounding errors.

    Args:
        config: configuration of the model.
        weights: unquantized weights of the layer in float32, by names such as ``qkv.weight``.
        hessians: ``X Xᵀ`` of the inputs ``X`` of ``qkv``, ``up`` and ``down``, by these names.
        rule: rounding rule of the matrices; divided norms and biases are rounded to its dtype.
    """
    for name, norm in (("qkv", weights["attention_norm.weight"]), ("up", weights["mlp_norm.weight"])):
        weight = weights[f"{name}.weight"]
        quotients, divisors = _divide(norm, _best_scale(weight, hessians[name], rule), rule)
        norm.copy_(quotients)
        weight.mul_(divisors)
    if config.gated:
        down, up = weights["down.weight"], weights["up.weight"]
        scale = _best_scale(down, hessians["down"], rule)
        if "up.bias" in weights:
            bias = weights["up.bias"][len(scale) :]
            divided, divisors = _divide(bias, scale, rule)
            scale = torch.where(bias == 0, scale, divisors)
            bias.copy_(divided)
        down.mul_(scale)
        up[len(scale) :].div_(scale[:, None])


def _divide(values: Tensor, scale: Tensor, rule: RoundingRule) -> tuple[Tensor, Tensor]:
    """Return ``values / scale``, rounded to the file's dtype, and ``values`` divided by the results.

    A value whose quotient would round to 0 or infinity is not divided: its divisor is 1.
    """
    quotients = (values / scale).to(torch_dtype(rule.dtype)).float()
    is_valid = (quotients != 0) & quotients.isfinite()
    return torch.where(is_valid, quotients, values), torch.where(is_valid, values / quotients, 1.0)


def _best_scale(weight: Tensor, hessian: Tensor, rule: RoundingRule) -> Tensor:
    """Return the scales of the inputs, float32 ``[inputs]``, that give the smallest error of the outputs."""
    rms = hessian.diagonal().clamp_min(0).sqrt()
    rms = rms.clamp_min(_MIN_RELATIVE_RMS * float(rms.max()) + 1e-30)
    best = torch.ones_like(rms)
    min_error = output_error(weight, _nearest(weight, rule), hessian)
    for power in _POWERS:
        scale = rms**power
        scale = scale / (scale.max() * scale.min()).sqrt()
        error = output_error(weight, _nearest(weight * scale, rule) / scale, hessian)
        if error < min_error:
            best, min_error = scale, error
    return best


def _nearest(weight: Tensor, rule: RoundingRule) -> Tensor:
    """Return the weight rounded to the nearest codes."""
    return to_tensor(rule.nearest(to_array(weight)).dequantize())
