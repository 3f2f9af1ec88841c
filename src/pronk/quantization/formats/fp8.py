"""FP8 (e4m3) checkpoints, as DeepSeek, Qwen, vLLM and FBGEMM write them.

The scale of a weight belongs to a block of outputs and inputs (``weight_scale_inv``, usually 128 by 128), to an output,
or to the whole matrix (``weight_scale``). CPUs have no FP8 arithmetic, and e4m3 values do not fit 8-bit integers. So
the weights are dequantized: ``weight * scale`` is computed in float32 and rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from pronk.errors import CheckpointError
from pronk.quantization.formats.packing import OUTPUTS
from pronk.quantization.formats.scheme import (
    FLOATS,
    NOTHING,
    STATIC_NOTE,
    LinearModule,
    StoredTensor,
    listed,
    names,
    refuse,
)

__all__ = ["FP8", "FP8_NOTE", "FP8Weight"]

FP8_NOTE = "FP8 weights are dequantized to bfloat16, which takes twice the memory of the file"

_INSTEAD = "use a checkpoint of e4m3 weights with blocks, or the model's 16-bit weights"
_SCALES = ("weight_scale_inv", "weight_scale")
# Names of activation scales in checkpoints of transformers and vLLM.
_ACTIVATIONS = ("activation_scale", "input_scale", "input_scale_ub")


@dataclass(frozen=True)
class FP8:
    """Scheme of an FP8 checkpoint.

    Attributes:
        block: number of outputs and inputs per scale; ``None`` is one scale per output or per matrix.
        plain: patterns of the names of unquantized modules.
        notes: deviations from ``config.json``, one line each.
    """

    block: tuple[int, int] | None
    plain: tuple[str, ...] = ()
    notes: tuple[str, ...] = (FP8_NOTE,)

    name = "fp8"
    ignored = NOTHING

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> FP8:
        """Parse a ``quantization_config``."""
        if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            refuse("fmt e4m3", config["fmt"], _INSTEAD)
        if config.get("modules_to_convert"):
            refuse("no modules_to_convert", config["modules_to_convert"], _INSTEAD)
        block = config.get("weight_block_size")
        if block is not None and not (
            isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
        ):
            refuse("two sizes as weight_block_size", block, _INSTEAD)
        plain = listed(config, "modules_to_not_convert") + listed(config, "ignored_layers")
        static = (STATIC_NOTE,) if config.get("activation_scheme") == "static" else ()
        return cls(None if block is None else (block[0], block[1]), tuple(plain), (FP8_NOTE, *static))

    def weight(self, module: LinearModule) -> FP8Weight | None:
        """Implement :meth:`Scheme.weight <pronk.quantization.formats.scheme.Scheme.weight>`."""
        if module.head or module.transposed or any(names(module.name, pattern) for pattern in self.plain):
            return None
        return FP8Weight(module, self.block, _SCALES[:1] if self.block else _SCALES)


@dataclass(frozen=True)
class FP8Weight:
    """Stored weight of e4m3 values and its scales.

    Attributes:
        module: linear module of the weight.
        block: number of outputs and inputs per scale; ``None`` is one scale per output or per matrix.
        scales: possible names of the scale tensor, exactly one of which is in the file.
    """

    module: LinearModule
    block: tuple[int, int] | None
    scales: tuple[str, ...]

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Tensors of the file, by their names within the module."""
        _, outputs, inputs, *_ = self.module
        shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (outputs, 1), (outputs,))
        if self.block is not None:
            shapes = ((ceil(outputs / self.block[0]), ceil(inputs / self.block[1])),)
        return {
            "weight": StoredTensor(((outputs, inputs),), ("F8_E4M3",)),
            **{name: StoredTensor(shapes, FLOATS, required=len(self.scales) == 1) for name in self.scales},
            **{name: StoredTensor(None, FLOATS, required=False) for name in _ACTIVATIONS},
        }

    def read(self, tensors: Mapping[str, Tensor], codes: Tensor) -> Tensor:  # noqa: ARG002 - FP8 has no integer codes
        """Return the dequantized weight, bfloat16 ``[outputs, inputs]``; ``codes`` is not used."""
        found = [name for name in self.scales if name in tensors]
        if len(found) != 1:
            msg = f"expected one of {' and '.join(self.scales)}, found {len(found)}; check that the files are complete"
            raise CheckpointError(msg)
        scale = tensors[found[0]].float()
        return _dequantize(tensors["weight"], scale, self.block or (1, self.module.inputs), found[0])


def _dequantize(weight: Tensor, scale: Tensor, block: tuple[int, int], name: str) -> Tensor:
    """Dequantize to bfloat16 ``[outputs, inputs]``, in parts to keep float32 temporaries small."""
    outputs, inputs = weight.shape
    high, wide = min(block[0], outputs), min(block[1], inputs)
    if scale.dim() < 2 or scale.numel() == 1:
        scale = scale.reshape(-1, 1).expand(outputs, 1)
    out = torch.empty(outputs, inputs, dtype=torch.bfloat16)
    for start in range(0, outputs, OUTPUTS):
        rows = torch.arange(start, min(start + OUTPUTS, outputs)) // high
        factors = scale[rows].repeat_interleave(wide, 1)[:, :inputs]
        found = weight[start : start + OUTPUTS].float() * factors
        if not bool(found.isfinite().all()):
            msg = f"expected finite numbers in weight and {name}, found NaN or infinity; download the weights again"
            raise CheckpointError(msg)
        out[start : start + OUTPUTS] = found
    return out
