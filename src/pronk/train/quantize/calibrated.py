"""Quantization of a layer by the methods that need a calibration text."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pronk.architecture.config import ModelConfig
from pronk.arrays import Array
from pronk.kernels.threads import num_threads
from pronk.quantization.formats.matrix import QuantizedMatrix
from pronk.quantization.quantize.rounding import LINEARS, RoundingRule
from pronk.torch_backend.convert import to_tensor
from pronk.train.quantize.gptq import gptq
from pronk.train.quantize.hessians import compute_hessians
from pronk.train.quantize.scaling import scale_layer

__all__ = ["quantize_calibrated"]


@torch.no_grad()
def quantize_calibrated(
    config: ModelConfig,
    window: int | None,
    weights: Mapping[str, Array],
    rows: Array,
    length: int,
    *,
    method: str,
    rule: RoundingRule,
) -> dict[str, QuantizedMatrix]:
    """Return the quantized matrices of a layer; the method ``scaled`` changes ``weights`` in place.

    Args:
        config: configuration of the model.
        window: sliding window of the layer; ``None``: full attention.
        weights: weights of the layer in float32, by names such as ``qkv.weight``.
        rows: the layer's input for the calibration text, float32 ``[sequences * length, hidden]``.
        length: number of tokens per sequence.
        method: ``"scaled"`` or ``"gptq"``.
        rule: rounding rule of the matrices.

    Raises:
        ValueError: the weights or products of the inputs are not finite, or GPTQ cannot use these.
    """
    torch.set_num_threads(num_threads())  # as many as the kernels, whose number the user chooses
    tensors = {name: to_tensor(array) for name, array in weights.items()}
    hessians = compute_hessians(config, window, tensors, to_tensor(rows), length)
    if method == "scaled":
        scale_layer(config, tensors, hessians, rule)
        return {name: rule.nearest(weights[f"{name}.weight"]) for name in LINEARS}
    return {name: gptq(tensors[f"{name}.weight"], hessians[name], rule) for name in LINEARS}
