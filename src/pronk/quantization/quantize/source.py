"""The checkpoint that is quantized, a layer at a time: no more of it is in memory."""

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

_INSTEAD = "give the checkpoint with float32, float16 or bfloat16 weights that it was made from"


class SourceCheckpoint:
    """A plain checkpoint.

    Attributes:
        folder: where it is.
        document: its ``config.json``.
        config: what that says.
        dtype: of the model.

    Raises:
        CheckpointError: it cannot be read, is quantized already, or is of a family whose matrices are no linear
            modules for the engines that read the result.
    """

    def __init__(self, folder: Path) -> None:
        if is_gguf(folder):
            msg = f"{folder}: expected a folder with safetensors files, found a GGUF file; {_INSTEAD}"
            raise CheckpointError(msg)
        self.folder, self.config = folder, read_config(folder)
        self.document = read_json(folder / "config.json", ConfigError)
        if self.config.quantization is not None:
            method = self.config.quantization.get("quant_method", "unknown")
            msg = f"{folder}: expected plain weights, found a model that is quantized already ({method}); {_INSTEAD}"
            raise CheckpointError(msg)
        self.names = FAMILY_NAMES[self.config.family]
        if self.names.transposed:
            msg = (
                f"{folder}: expected a llama, mistral, qwen2 or qwen3 model, found {self.config.family}, which "
                "compressed-tensors does not cover; load it with --weights int8 or int4"
            )
            raise CheckpointError(msg)
        self.dtype = parse_dtype("auto", self.config)
        self.checkpoint = Checkpoint(folder)
        self.parts = list(plan_tensors(self.config))
        self.inventory = Inventory(self.checkpoint, self.config, self.parts)

    @property
    def num_bytes(self) -> int:
        """Of its weights."""
        return sum(self.inventory.nbytes(part) for part in self.parts)

    def file_name(self, name: str) -> str:
        """What other engines call a tensor."""
        return name if name.startswith(f"{self.names.head}.") else self.names.prefix + name

    def beside(self) -> list[CheckpointTensor]:
        """The tensors that belong to no layer."""
        return [piece for part in self.parts if not part.target.startswith("layers.") for piece in part.pieces]

    def of_layer(self, index: int) -> list[DecoderPart]:
        """What a layer consists of."""
        return [part for part in self.parts if part.target.startswith(f"layers.{index}.")]

    def frame(self) -> Decoder:
        """The model without its layers: what comes before and behind them, in float32."""
        with torch.device("meta"):
            decoder = Decoder(self.config)
        decoder.layers = nn.ModuleList()
        decoder.norm = make_norm(self.config, self.config.hidden_size)
        plain = {part.target: part for part in self.parts}
        decoder.embedding = nn.Parameter(self.inventory.tensor(plain["embedding"].weight[0]), requires_grad=False)
        self._fill(decoder.norm, plain["norm"])
        head = plain["head"].weight
        decoder.head = PlainLinear(self.inventory.tensor(head[0]) if head else decoder.embedding)
        return decoder.requires_grad_(False).eval()

    def layer(self, index: int) -> Layer:
        """A layer with plain weights in float32."""
        layer = Layer(self.config, empty_linear)
        for part in self.of_layer(index):
            self._fill(layer.get_submodule(part.target.rpartition(".")[2]), part)
        self.checkpoint.release()
        return layer.requires_grad_(False).eval()

    def tensors(
        self, index: int, layer: Layer, matrices: Mapping[str, QuantizedMatrix]
    ) -> Iterator[tuple[str, Tensor | QuantizedMatrix]]:
        """The tensors of a layer by their names, matrices as codes; the others have the types that they had.

        Args:
            index: of the layer.
            layer: its gains and biases.
            matrices: by the names of its linear modules, several of the checkpoint's on top of each other.
        """
        for part in self.of_layer(index):
            name = part.target.rpartition(".")[2]
            module = layer.get_submodule(name)
            weight: Any = matrices.get(name, module.weight)
            bias: Any = getattr(module, "bias", None)
            for pieces, values in ((part.weight, weight), (part.bias, bias)):
                start = 0
                for piece in pieces:
                    end = start + piece.shape[0]
                    if isinstance(values, QuantizedMatrix):
                        yield piece.name, values.rows(start, end)
                    else:
                        yield piece.name, values[start:end].to(self.inventory.tensor(piece).dtype)
                    start = end

    def _fill(self, module: nn.Module, part: DecoderPart) -> None:
        for key, pieces in (("weight", part.weight), ("bias", part.bias)):
            if pieces:
                values = getattr(module, key).data
                for rows, piece in zip(values.split([p.shape[0] for p in pieces]), pieces, strict=True):
                    rows.copy_(self.inventory.tensor(piece))
