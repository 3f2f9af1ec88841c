"""Random LoRA adapters in PEFT's format, and reference logits with an adapter.

The reference is transformers with the adapter merged into the weights.
"""

import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from checkpoints import load_with_transformers
from pronk.base.arrays import FLOAT32, Array
from pronk.models.adapters import Adapter, AdapterModule, Adapters
from pronk.models.decoder import Decoder

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def _adapted(folder: Path, targets: tuple[str, ...]) -> dict[str, torch.nn.Module]:
    """Return the modules of a checkpoint in transformers whose names end in ``targets``."""
    model = load_with_transformers(folder, torch.float32)
    return {
        name: module for name, module in model.named_modules() if name.rpartition(".")[2] in targets
    }


def _size(module: torch.nn.Module) -> tuple[int, int]:
    """Return the numbers of outputs and inputs; GPT-2's layers have transposed weights."""
    outputs, inputs = module.weight.shape
    return (outputs, inputs) if isinstance(module, torch.nn.Linear) else (inputs, outputs)


def write_adapter(
    folder: Path,
    checkpoint: Path,
    *,
    targets: tuple[str, ...] = LINEAR,
    rank: int = 4,
    seed: int = 0,
    dtype: Any = np.float32,
    **options: Any,
) -> Path:
    """Write a random adapter of a checkpoint; ``options`` are keys of its config."""
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [*targets],
        "bias": "none",
    }
    config |= options
    numbers = np.random.default_rng(seed)
    tensors = {}
    for name, module in _adapted(folder=checkpoint, targets=targets).items():
        outputs, inputs = _size(module)
        own = next(
            (r for end, r in config.get("rank_pattern", {}).items() if name.endswith(f".{end}")),
            rank,
        )
        down = numbers.normal(size=(own, inputs)) * inputs**-0.5
        up = numbers.normal(size=(outputs, own)) * 0.3 * own**-0.5
        tensors[f"base_model.model.{name}.lora_A.weight"] = down.astype(dtype)
        tensors[f"base_model.model.{name}.lora_B.weight"] = up.astype(dtype)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged_logits(checkpoint: Path, adapter: Path, tokens: list[int]) -> Array:
    """Return the logits of transformers with an adapter, float32 ``[len(tokens), vocab]``.

    Each adapted weight ``W`` is replaced by ``W + scale B A``.
    """
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    model = deepcopy(load_with_transformers(checkpoint, torch.float32))
    with torch.no_grad():
        for key in [key for key in tensors if ".lora_A." in key]:
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            down, up = (
                torch.from_numpy(tensors[each].astype(np.float32))
                for each in (key, key.replace("_A.", "_B."))
            )
            alphas = config.get("alpha_pattern", {}).items()
            alpha = next(
                (alpha for end, alpha in alphas if name.endswith(f".{end}")), config["lora_alpha"]
            )
            scale = alpha / (len(down) ** 0.5 if config.get("use_rslora") else len(down))
            module = model.get_submodule(name)
            added = scale * up @ down
            module.weight += added if isinstance(module, torch.nn.Linear) else added.T
        logits: Array = model(torch.tensor([tokens])).logits[0].float().numpy()
    return logits


def adapt(
    decoder: Decoder,
    ranks: tuple[int, ...] = (3, 16, 33),
    names: tuple[str, ...] = ("qkv", "out", "up", "down"),
    seed: int = 0,
) -> list[Adapter]:
    """Add random adapters to a decoder, one per rank; each changes a few of the linear layers."""
    numbers = np.random.default_rng(seed)
    dice = random.Random(seed)
    adapters = Adapters(None, decoder.config)
    for number, rank in enumerate(ranks):
        modules = []
        for layer in range(len(decoder.layers)):
            for name in names:
                linear = getattr(decoder.layers[layer], name)
                start = 0
                if dice.random() < 0.2:
                    continue
                sizes = decoder.config.qkv_sizes if name == "qkv" else (linear.out_features,)
                for part, size in enumerate(sizes):
                    if part != 1:  # as often, the keys stay as they are
                        down = (
                            numbers.normal(size=(rank, linear.in_features))
                            * linear.in_features**-0.5
                        )
                        up = numbers.normal(size=(size, rank)) * 0.5 * rank**-0.5
                        modules.append(
                            AdapterModule(
                                f"layers.{layer}.{name}",
                                start,
                                down.astype(FLOAT32),
                                up.astype(FLOAT32),
                            )
                        )
                    start += size
        name = f"adapter {number}"
        adapters[name] = Adapter(name, number, bytes([number]) * 32)
        adapters._modules.append(modules)
    adapters.attach(decoder)
    return [*adapters.values()]
