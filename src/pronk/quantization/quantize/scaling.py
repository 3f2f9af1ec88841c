"""Scaling inputs before rounding, as AWQ does (Lin et al. 2024, section 3.2).

``W x = (W diag(s)) (x / s)``: inputs that are large get weights that are large within their groups, and so are rounded
less. Dividing by ``s`` costs nothing where what makes the input can do it: the gain of a norm, or the rows of the
matrix before. The best ``s`` is searched among powers of the inputs' size, by the error of the outputs::

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
# Of the root mean square of an input in that of the largest: what is smaller is as good as never there.
_LEAST = 1e-4


def scale_layer(layer: Layer, hessians: Mapping[str, Tensor], rule: RoundingRule) -> None:
    """Scale the inputs of a layer's matrices in place; it computes what it did, up to roundings of float32.

    Args:
        layer: with plain weights in float32.
        hessians: ``X Xᵀ`` of the inputs of ``qkv``, ``up`` and ``down``.
        rule: how the matrices will be quantized; what is divided is rounded to its dtype, too.
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
    """Values divided by scales, as the file will hold them, and what each is divided by in the end, it being rounded.

    One that would become 0 or infinite stays: nothing could make up for that.
    """
    divided = (values / scale).to(rule.dtype).float()
    fits = (divided != 0) & divided.isfinite()
    return torch.where(fits, divided, values), torch.where(fits, values / divided, 1.0)


def _linear(layer: Layer, name: str) -> PlainLinear:
    linear = layer.get_submodule(name)
    assert isinstance(linear, PlainLinear)
    return linear


def _search(weight: Tensor, hessian: Tensor, rule: RoundingRule) -> Tensor:
    """The best scale of each input, float32 ``[inputs]``."""
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
