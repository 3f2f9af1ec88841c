"""Kangaroo's adapters for tests, as folders, and targets whose later layers change little.

An adapter whose last projection is zero applies the target's head to an early layer's output. Its
draft tokens are right where the later layers change little.
"""

from copy import deepcopy
from dataclasses import asdict
from functools import cache
from typing import Any

import torch

from drafting.helpers import CHECKPOINTS
from pronk.base.arrays import FLOAT32, DType
from pronk.base.convert import torch_dtype
from pronk.lab.drafters.modules.files import TRAINED_FORMAT
from pronk.lab.drafters.modules.kangaroo import KangarooShape
from pronk.models.decoder import Decoder
from pronk.train.export import export_drafter
from pronk.train.modules.decoder import DecoderModule
from pronk.train.modules.drafters import KangarooModule
from tiny_models import decoder_of, kernels, tiny_decoder
from train.tiny_modules import tiny_module

LAYERS = 4


@cache
def calm_module(
    dtype: DType = FLOAT32,
    *,
    calm: float = 0.3,
    windows: tuple[int | None, ...] = (None,) * LAYERS,
    classic: bool = False,
) -> DecoderModule:
    """Return a target whose layers after the first add ``calm`` times their usual output, as a
    module of torch.
    """
    module = deepcopy(tiny_module(windows=windows, classic=classic))
    for layer in module.layers[1:]:
        for linear in (layer.out, layer.down):
            linear.weight.mul_(calm)
            if linear.bias is not None:
                linear.bias.mul_(calm)
    return module.to(torch_dtype(dtype))


@cache
def calm_decoder(dtype: DType = FLOAT32, **options: Any) -> Decoder:
    """Return the decoder of :func:`calm_module`, for the kernels or for torch."""
    return decoder_of(calm_module(dtype, **options), kernels())


@cache
def adapter_folder(
    decoder: Decoder | None = None,
    exit_layer: int = 1,
    adapter: str = "attention",
    *,
    noise: float = 0.0,
    gain: float = 1.0,
) -> str:
    """Return an adapter for ``decoder`` that adds ``noise`` times a random change of the early
    output.

    ``gain`` multiplies the other matrices; a larger one makes the attention sharper.
    """
    decoder = tiny_decoder() if decoder is None else decoder
    shape = KangarooShape.of_target(decoder.config, exit_layer, adapter)
    module = KangarooModule(shape, decoder.config)
    plain = tiny_module(windows=decoder.config.windows, classic=decoder.config.norm == "layer")
    module.initialize(torch.Generator().manual_seed(1), plain.norm, plain.head.weight)
    for name, parameter in module.layers.named_parameters():
        if name.endswith(("out.weight", "down.weight")):
            parameter.data.mul_(50 * noise)
        elif parameter.dim() > 1:
            parameter.data.mul_(gain)
    folder = CHECKPOINTS / f"{id(decoder)}-{exit_layer}-{adapter}-{noise}-{gain}"
    document: dict[str, Any] = {
        "format": TRAINED_FORMAT,
        "kind": "kangaroo",
        "shape": asdict(shape),
    }
    export_drafter(
        folder, module, document | {"target": {"architecture": "tiny", "weights": "tiny"}}, ""
    )
    return str(folder)


def spec() -> str:
    """Return the specification for tests of all drafters; about a tenth of the draft tokens are
    right.
    """
    return f"kangaroo(model={adapter_folder(noise=0.1)!r}, num_tokens=4, eta=0.2)"
