"""Reading of compressed-tensors folders by the format's own rule, independent of pronk."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import transformers_logits
from pronk.base.arrays import Array


def tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def config(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return document


def unpacked(stored: dict[str, Tensor], module: str, bits: int) -> tuple[NDArray[Any], Tensor]:
    """Return signed integers ``[outputs, inputs]`` and scales ``[outputs, groups]`` of a module."""
    words = stored[f"{module}.weight_packed"].numpy().view(np.uint32).astype(np.int64)
    outputs, inputs = stored[f"{module}.weight_shape"].tolist()
    assert words.shape == (outputs, -(-inputs * bits // 32))
    places = np.arange(inputs)
    fields = words[:, places * bits // 32] >> (places * bits % 32) & (2**bits - 1)
    return fields - 2 ** (bits - 1), stored[f"{module}.weight_scale"]


def dequantized(folder: Path, out: Path) -> Path:
    """Write a plain checkpoint of the dequantized weights in float32."""
    document = config(folder)
    weights = document.pop("quantization_config")["config_groups"]["group_0"]["weights"]
    stored = tensors(folder)
    plain = {}
    for name, tensor in stored.items():
        if name.endswith(".weight_packed"):
            module = name.removesuffix(".weight_packed")
            codes, scale = unpacked(stored, module, weights["num_bits"])
            wide = scale.float().repeat_interleave(codes.shape[1] // scale.shape[1], dim=1)
            plain[f"{module}.weight"] = wide * torch.from_numpy(codes).float()
        elif not name.endswith((".weight_scale", ".weight_shape")):
            plain[name] = tensor.float()
    out.mkdir()
    save_file(plain, out / "model.safetensors", metadata={"format": "pt"})
    document |= {"dtype": "float32", "torch_dtype": "float32"}
    (out / "config.json").write_text(json.dumps(document))
    return out


def perplexity(folder: Path, tokens: Array) -> float:
    """Return the perplexity by transformers, over all tokens but the first of each row."""
    losses = []
    for row in tokens.tolist():
        logits = torch.from_numpy(transformers_logits(folder, row)[:-1])
        losses.append(
            torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:]), reduction="none")
        )
    return float(torch.cat(losses).mean().exp())
