"""Loading of a checkpoint into a module of torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from pronk.architecture.config import ModelConfig
from pronk.arrays import UINT8, Array, mapped_zeros
from pronk.errors import OptionError
from pronk.models.checkpoint import open_checkpoint
from pronk.models.inventory import Inventory, tensor_names
from pronk.models.tensor_plan import CheckpointTensor, plan_tensors
from pronk.torch_backend.convert import to_tensor
from pronk.train.modules.decoder import DecoderModule, PlainLinear

__all__ = ["load_module"]


def load_module(folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> DecoderModule:
    """Return a frozen module with the weights of a model folder or GGUF file, which are dequantized.

    Raises:
        OptionError: the model scales queries by position, has attention sinks or short convolutions, which the module
            does not compute.
        CheckpointError: tensors are missing, unexpected, damaged, or of a wrong shape or dtype.
    """
    if config.query_growth is not None:
        msg = f"{folder}: expected a model whose queries have one scale at all positions, found {config.family}"
        raise OptionError(msg)
    if config.convolution is not None:
        msg = (
            f"{folder}: expected a model with attention in all layers, found {config.family} with short convolutions; "
            "use a drafter without training, such as prompt_lookup or a draft model"
        )
        raise OptionError(msg)
    if config.attention_sinks:
        msg = f"{folder}: expected a model without attention sinks, found {config.family}"
        raise OptionError(msg)
    checkpoint = open_checkpoint(folder)
    parts = list(plan_tensors(config, tensor_names(checkpoint, config)))
    inventory = Inventory(checkpoint, config, parts)
    with torch.device("meta"):
        module = DecoderModule(config)
    for part in parts:
        for key, sources in (("weight", part.weight), ("bias", part.bias)):
            if sources:
                path, _, name = (part.target if part.kind == "table" else f"{part.target}.{key}").rpartition(".")
                arrays = [_read(inventory, source, transposed=part.transposed) for source in sources]
                if part.kind == "norm" and key == "weight" and config.norm_offset:
                    arrays = [array.astype(np.float32) + np.float32(config.norm_offset) for array in arrays]
                values = nn.Parameter(_concatenate(arrays, dtype, device), requires_grad=False)
                setattr(module.get_submodule(path), name, values)
        checkpoint.release()
    if config.tied:
        module.head = PlainLinear(module.embedding)
    return module.requires_grad_(requires_grad=False).eval()


def _read(inventory: Inventory, source: CheckpointTensor, *, transposed: bool) -> Array:
    """Read a tensor; matrices that the checkpoint stores as ``[inputs, outputs]`` are transposed."""
    if not inventory.is_quantized(source):
        values = inventory.tensor(source)
        return values.T if transposed else values
    shape = source.shape[::-1] if transposed else source.shape
    weight = inventory.weight(source, mapped_zeros(shape, UINT8))
    if not isinstance(weight, np.ndarray):
        return weight.dequantize()
    return weight.T if transposed else weight


def _concatenate(arrays: Sequence[Array], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Convert arrays, one by one, to a tensor of all their rows."""
    rows = [len(array) for array in arrays]
    values = torch.empty(sum(rows), *arrays[0].shape[1:], dtype=dtype, device=device)
    for target, array in zip(values.split(rows), arrays, strict=True):
        target.copy_(to_tensor(array))
    return values
