"""Kangaroo's adapters for tests, as folders, and targets whose later layers change little.

An adapter whose last projection is zero applies the target's head to an early layer's output. Its draft tokens are
right where the later layers change little.
"""

from copy import deepcopy
from dataclasses import asdict
from functools import cache
from typing import Any

import torch

from drafters.helpers import CHECKPOINTS
from pronk.drafters.from_target.modules.files import FORMAT
from pronk.drafters.from_target.modules.kangaroo import KangarooAdapter, KangarooShape
from pronk.models.decoder import Decoder, pack_linears
from pronk.models.linear import choose_linear
from pronk.train.export import export_drafter
from tiny_models import CPU, kernels, tiny_decoder

LAYERS = 4


@cache
def calm_decoder(
    dtype: torch.dtype = torch.float32,
    *,
    calm: float = 0.3,
    windows: tuple[int | None, ...] = (None,) * LAYERS,
    classic: bool = False,
    packed: bool = True,
) -> Decoder:
    """Return a target whose layers after the first add ``calm`` times their usual output."""
    decoder = deepcopy(tiny_decoder(windows=windows, classic=classic, packed=False))
    for layer in decoder.layers[1:]:
        for linear in (layer.out, layer.down):
            linear.weight.data.mul_(calm)
            if linear.bias is not None:
                linear.bias.data.mul_(calm)
    decoder.to(dtype)
    if packed:
        pack_linears(decoder, choose_linear(kernels(), CPU))
    return decoder


@cache
def adapter_folder(
    decoder: Decoder | None = None,
    exit_layer: int = 1,
    adapter: str = "attention",
    *,
    noise: float = 0.0,
    gain: float = 1.0,
) -> str:
    """Return an adapter for ``decoder`` that adds ``noise`` times a random change of the early output.

    ``gain`` multiplies the other matrices; a larger one makes the attention sharper.
    """
    decoder = tiny_decoder() if decoder is None else decoder
    shape = KangarooShape.of_target(decoder.config, exit_layer, adapter)
    module = KangarooAdapter(shape, decoder.config)
    c = decoder.config
    plain = tiny_decoder(windows=c.windows, classic=c.norm == "layer", packed=False)  # for its head, unpacked
    module.initialize(torch.Generator().manual_seed(1), decoder.norm, plain.head.weight)
    for name, parameter in module.layers.named_parameters():
        if name.endswith(("out.weight", "down.weight")):
            parameter.data.mul_(50 * noise)
        elif parameter.dim() > 1:
            parameter.data.mul_(gain)
    folder = CHECKPOINTS / f"{id(decoder)}-{exit_layer}-{adapter}-{noise}-{gain}"
    document: dict[str, Any] = {"format": FORMAT, "kind": "kangaroo", "shape": asdict(shape)}
    export_drafter(folder, module, document | {"target": {"architecture": "tiny", "weights": "tiny"}}, "")
    return str(folder)


def spec() -> str:
    """Return the specification for tests of all drafters; about a tenth of the draft tokens are right."""
    return f"kangaroo(model={adapter_folder(noise=0.1)!r}, num_tokens=4, eta=0.2)"
