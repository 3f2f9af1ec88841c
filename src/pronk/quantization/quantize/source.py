"""The checkpoint that is to be quantized, read one layer at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from pronk.arrays import FLOAT32, Array
from pronk.errors import CheckpointError, ConfigError
from pronk.models.checkpoint import Checkpoint, read_json
from pronk.models.families import FAMILY_NAMES
from pronk.models.inventory import Inventory
from pronk.models.loader import parse_dtype, read_config
from pronk.models.tensor_plan import CheckpointTensor, DecoderPart, plan_tensors
from pronk.quantization.formats.matrix import QuantizedMatrix
from pronk.quantization.gguf.checkpoint import is_gguf

__all__ = ["LayerWeights", "SourceCheckpoint"]

_REMEDY = "give the checkpoint with float32, float16 or bfloat16 weights that it was made from"

# Weights and biases of a layer in float32, by module and kind: ``{"qkv.weight": …, "qkv.bias": …, "out.weight": …}``.
LayerWeights = dict[str, Array]


class SourceCheckpoint:
    """Read access to the checkpoint that is to be quantized.

    Raises:
        CheckpointError: the checkpoint is unreadable, already quantized, or of a family that compressed-tensors does
            not support (GPT-2).
    """

    def __init__(self, folder: Path) -> None:
        if is_gguf(folder):
            msg = f"{folder}: expected a folder with safetensors files, found a GGUF file; {_REMEDY}"
            raise CheckpointError(msg)
        self.folder, self.config = folder, read_config(folder)
        self.document = read_json(folder / "config.json", ConfigError)  # contents of config.json
        if self.config.quantization is not None:
            method = self.config.quantization.get("quant_method", "unknown")
            msg = f"{folder}: expected plain weights, found a model that is quantized already ({method}); {_REMEDY}"
            raise CheckpointError(msg)
        self.names = FAMILY_NAMES[self.config.family]
        if self.names.transposed or len(self.names.layer["qkv"]) == 1 or not self.config.is_plain:
            msg = (
                f"{folder}: expected a llama, mistral, qwen2 or qwen3 model, found {self.config.family}, which this "
                "command does not support; load it with --weights int8 or int4"
            )
            raise CheckpointError(msg)
        self.dtype = parse_dtype("auto", self.config)
        self.checkpoint = Checkpoint(folder)
        self.parts = list(plan_tensors(self.config))  # modules of the model, with their tensors
        self.inventory = Inventory(self.checkpoint, self.config, self.parts)

    @property
    def num_bytes(self) -> int:
        """Size of the weights in the files, in bytes."""
        return sum(self.inventory.nbytes(part) for part in self.parts)

    def stored_name(self, name: str) -> str:
        """Return a tensor's name in the checkpoint: with the prefix of the family, except for the LM head."""
        return name if name.startswith(f"{self.names.head}.") else self.names.prefix + name

    def tensors_outside_layers(self) -> list[CheckpointTensor]:
        """Return the descriptions of the tensors of embedding, final norm and LM head."""
        return [tensor for part in self.parts if not part.target.startswith("layers.") for tensor in part.tensors]

    def parts_of_layer(self, index: int) -> list[DecoderPart]:
        """Return the descriptions of the modules of layer ``index``, with their tensors in the checkpoint."""
        return [part for part in self.parts if part.target.startswith(f"layers.{index}.")]

    def weight(self, target: str) -> Array:
        """Return the weight of ``embedding``, ``norm`` or ``head`` as it is stored."""
        part = next(part for part in self.parts if part.target == target)
        return self.inventory.tensor(part.weight[0]) if part.weight else self.weight("embedding")  # a tied head

    def load_layer(self, index: int) -> LayerWeights:
        """Return copies of the weights of a layer."""
        weights = LayerWeights()
        for part in self.parts_of_layer(index):
            name = part.target.rpartition(".")[2]
            for kind, tensors in (("weight", part.weight), ("bias", part.bias)):
                if tensors:
                    arrays = [self.inventory.tensor(tensor).astype(FLOAT32) for tensor in tensors]
                    weights[f"{name}.{kind}"] = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        self.checkpoint.release()
        return weights

    def layer_tensors(
        self, index: int, weights: LayerWeights, matrices: Mapping[str, QuantizedMatrix]
    ) -> Iterator[tuple[str, Array | QuantizedMatrix]]:
        """Yield the name and value of each tensor of a layer, as it is to be written to the new checkpoint.

        Args:
            index: index of the layer, from 0.
            weights: source of norms and biases, which are converted to their dtypes in the checkpoint.
            matrices: quantized matrices by linear module; a stacked one (``qkv``) is split into its tensors.
        """
        for part in self.parts_of_layer(index):
            name = part.target.rpartition(".")[2]
            for kind, tensors in (("weight", part.weight), ("bias", part.bias)):
                start, matrix = 0, matrices.get(name) if kind == "weight" else None
                for tensor in tensors:
                    end = start + tensor.shape[0]
                    if matrix is not None:
                        yield tensor.name, matrix.slice_outputs(start, end)
                    else:
                        values, dtype = weights[f"{name}.{kind}"][start:end], self.inventory.tensor(tensor).dtype
                        yield tensor.name, values.astype(dtype)
                    start = end
