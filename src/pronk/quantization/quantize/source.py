"""The checkpoint that is to be quantized, read one layer at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pronk.errors import CheckpointError, ConfigError
from pronk.models.checkpoint import Checkpoint, read_json
from pronk.models.decoder import Decoder, Layer, empty_linear, make_norm
from pronk.models.families import FAMILY_NAMES, CheckpointTensor, DecoderPart, plan_tensors
from pronk.models.inventory import Inventory
from pronk.models.linear import PlainLinear
from pronk.models.loader import parse_dtype, read_config
from pronk.quantization.formats.matrix import QuantizedMatrix
from pronk.quantization.gguf.checkpoint import is_gguf

__all__ = ["SourceCheckpoint"]

_REMEDY = "give the checkpoint with float32, float16 or bfloat16 weights that it was made from"


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
        if self.names.transposed:
            msg = (
                f"{folder}: expected a llama, mistral, qwen2 or qwen3 model, found {self.config.family}, which "
                "compressed-tensors does not support; load it with --weights int8 or int4"
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

    def load_without_layers(self) -> Decoder:
        """Return the model without its layers: embedding, final norm and LM head."""
        with torch.device("meta"):
            decoder = Decoder(self.config)
        decoder.layers = nn.ModuleList()
        decoder.norm = make_norm(self.config, self.config.hidden_size)
        parts = {part.target: part for part in self.parts}
        decoder.embedding = nn.Parameter(self.inventory.tensor(parts["embedding"].weight[0]), requires_grad=False)
        self._fill(decoder.norm, parts["norm"])
        head = parts["head"].weight
        decoder.head = PlainLinear(self.inventory.tensor(head[0]) if head else decoder.embedding)
        return decoder.requires_grad_(False).eval()

    def load_layer(self, index: int) -> Layer:
        """Return a layer with unquantized weights in float32."""
        layer = Layer(self.config, empty_linear)
        for part in self.parts_of_layer(index):
            self._fill(layer.get_submodule(part.target.rpartition(".")[2]), part)
        self.checkpoint.release()
        return layer.requires_grad_(False).eval()

    def layer_tensors(
        self, index: int, layer: Layer, matrices: Mapping[str, QuantizedMatrix]
    ) -> Iterator[tuple[str, Tensor | QuantizedMatrix]]:
        """Yield the name and value of each tensor of a layer, as it is to be written to the new checkpoint.

        Args:
            index: index of the layer, from 0.
            layer: source of norms and biases, which are converted to their dtypes in the checkpoint.
            matrices: quantized matrices by linear module; a stacked one (``qkv``) is split into its tensors.
        """
        for part in self.parts_of_layer(index):
            name = part.target.rpartition(".")[2]
            module = layer.get_submodule(name)
            weight: Any = matrices.get(name, module.weight)
            bias: Any = getattr(module, "bias", None)
            for tensors, values in ((part.weight, weight), (part.bias, bias)):
                start = 0
                for tensor in tensors:
                    end = start + tensor.shape[0]
                    if isinstance(values, QuantizedMatrix):
                        yield tensor.name, values.slice_outputs(start, end)
                    else:
                        yield tensor.name, values[start:end].to(self.inventory.tensor(tensor).dtype)
                    start = end

    def _fill(self, module: nn.Module, part: DecoderPart) -> None:
        """Copy the weight and bias of ``module`` from the tensors of the checkpoint that ``part`` names."""
        for key, tensors in (("weight", part.weight), ("bias", part.bias)):
            if tensors:
                values = getattr(module, key).data
                for rows, tensor in zip(values.split([tensor.shape[0] for tensor in tensors]), tensors, strict=True):
                    rows.copy_(self.inventory.tensor(tensor))
