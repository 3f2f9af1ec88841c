"""Hessians of the linear modules of a layer, which is computed over a calibration text."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from pronk.architecture.config import ModelConfig
from pronk.quantization.quantize.rounding import LINEARS
from pronk.train.attention import DenseAttention
from pronk.train.modules.decoder import ModuleLayer, Rotations

__all__ = ["compute_hessians"]

_MAX_ROWS = 4096  # maximum tokens of sequences that the layer computes together; a longer one is alone


def compute_hessians(
    config: ModelConfig, window: int | None, weights: Mapping[str, Tensor], rows: Tensor, length: int
) -> dict[str, Tensor]:
    """Return ``X Xᵀ`` of all inputs ``X`` of each linear module of a layer, by the module's name.

    Args:
        config: configuration of the model.
        window: sliding window of the layer; ``None``: full attention.
        weights: weights of the layer, by names such as ``qkv.weight``.
        rows: input of the layer, ``[sequences * length, hidden]``.
        length: number of tokens per sequence.
    """
    with torch.device("meta"):
        layer = ModuleLayer(config)
    layer.load_state_dict(dict(weights), assign=True)
    products: dict[str, Tensor] = {}
    for name in LINEARS:
        layer.get_submodule(name).register_forward_pre_hook(_adder(name, products))
    rotations = Rotations(config.rope)
    for part in rows.split(max(1, _MAX_ROWS // length) * length):
        count = len(part) // length
        rope = rotations(torch.arange(length).repeat(count), torch.float32)
        layer(part, rope, 0, DenseAttention(count, length, (window,)))
    return products


def _adder(name: str, products: dict[str, Tensor]) -> Callable[[nn.Module, tuple[Tensor]], None]:
    """Return a hook that adds the product of a module's inputs to ``products[name]``."""

    def add_product(_: nn.Module, inputs: tuple[Tensor]) -> None:
        (rows,) = inputs  # ``[tokens, inputs]``: a part of the transpose of X
        if name not in products:
            products[name] = rows.new_zeros(rows.shape[1], rows.shape[1])
        products[name].addmm_(rows.t(), rows)

    return add_product
