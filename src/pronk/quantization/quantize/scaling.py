"""Scaling of inputs before rounding, as in AWQ (Lin et al. 2024, section 3.2).

``W x = (W diag(s)) (x / s)``: weights of large inputs become large within their groups, so their relative rounding
error is smaller. The division by ``s`` is folded into the preceding operation at no cost: the gain of a norm, or the
rows of the preceding matrix. The best ``s`` is searched among powers of the inputs' RMS, by the error of the outputs::

    s = rms(x) ** α        α of 0 changes nothing
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from pronk.models.decoder import Layer
from pronk.models.linear import PlainLinear
from pronk.quantization.quantize.gptq import output_error
from pronk.quantization.quantize.rounding import RoundingRule

__all__ = ["scale_layer"]

_POWERS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
# Lower bound of an input's RMS relative to the largest one; avoids extreme scales for unused inputs.
_LEAST = 1e-4


def scale_layer(layer: Layer, hessians: Mapping[str, Tensor], rule: RoundingRule) -> None:
    """Scale the inputs of a layer's matrices in place, keeping its function up to float32 rounding.

    Args:
        layer: layer with unquantized float32 weights.
        hessians: ``X Xᵀ`` of the inputs of ``qkv``, ``up`` and ``down``.
        rule: quantization of the matrices; divided gains and biases are rounded to its dtype.
    """
    for name, norm in (("qkv", layer.attention_norm), ("up", layer.mlp_norm)):
        linear = _linear(layer, name)
        scale = _search(linear.weight, hessians[name], rule)
        norm.weight.data, by = _divide(cast(Tensor, norm.weight.data), scale, rule)
        linear.weight.data.mul_(by)
    if layer.config.gated:
        down, up = _linear(layer, "down"), _linear(layer, "up")
        scale = _search(down.weight, hessians["down"], rule)
        if up.bias is not None:
            bias = up.bias.data[len(scale) :]
            divided, by = _divide(bias, scale, rule)
            scale = torch.where(bias == 0, scale, by)
            bias.copy_(divided)
        down.weight.data.mul_(scale)
        up.weight.data[len(scale) :].div_(scale[:, None])


def _divide(values: Tensor, scale: Tensor, rule: RoundingRule) -> tuple[Tensor, Tensor]:
    """Divide and round to the stored dtype; return the results and the effective divisors after rounding.

    A value that would become 0 or infinite is kept with divisor 1, as no weight could compensate it.
    """
    divided = (values / scale).to(rule.dtype).float()
    fits = (divided != 0) & divided.isfinite()
    return torch.where(fits, divided, values), torch.where(fits, values / divided, 1.0)


def _linear(layer: Layer, name: str) -> PlainLinear:
    linear = layer.get_submodule(name)
    assert isinstance(linear, PlainLinear)
    return linear


def _search(weight: Tensor, hessian: Tensor, rule: RoundingRule) -> Tensor:
    """Search the best scale of each input, float32 ``[inputs]``."""
    size = hessian.diagonal().clamp_min(0).sqrt()
    size = size.clamp_min(_LEAST * float(size.max()) + 1e-30)
    best = torch.ones_like(size)
    least = output_error(weight, rule.nearest(weight).dequantize(), hessian)
    for power in _POWERS:
        scale = size**power
        scale = scale / (scale.max() * scale.min()).sqrt()
        error = output_error(weight, rule.nearest(weight * scale).dequantize() / scale, hessian)
        if error < least:
            best, least = scale, error
    return best
