"""Random Medusa heads for the tiny target, as folders."""

import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from drafting.helpers import CHECKPOINTS
from pronk.checkpoint.config import ModelConfig
from pronk.lab.drafters.modules.files import TRAINED_FORMAT
from pronk.lab.drafters.modules.heads import MedusaShape
from pronk.models.loader import Fingerprint
from pronk.train.export import export_drafter
from pronk.train.modules.drafters import MedusaModule
from tiny_models import tiny_config

TREE = ((0,), (1,), (0, 0), (2,), (0, 1), (1, 0), (0, 0, 0), (3,), (0, 0, 1))
SHAPE = MedusaShape(num_heads=3, blocks=2, tree=TREE)
UNKNOWN = Fingerprint("test", "0")


def write_heads(
    folder: Path,
    shape: MedusaShape = SHAPE,
    config: ModelConfig | None = None,
    target: Fingerprint = UNKNOWN,
) -> str:
    """Write heads, by default for the tiny target; large random weights change the hidden states
    much.
    """
    heads = MedusaModule(shape, config or tiny_config())
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    document = {
        "format": TRAINED_FORMAT,
        "kind": "medusa",
        "shape": asdict(shape),
        "target": asdict(target),
    }
    export_drafter(folder, heads, document, "")
    return str(folder)


@cache
def medusa_folder(unembeddings: str = "shared", vocab: int = tiny_config().vocab_size) -> str:
    """Return a folder of heads for the tiny target with ``vocab`` tokens."""
    shape = replace(SHAPE, unembeddings=unembeddings)
    return write_heads(CHECKPOINTS / f"{unembeddings}-{vocab}", shape, tiny_config(vocab=vocab))


@cache
def plain_heads(folder: str, vocab: int = tiny_config().vocab_size) -> MedusaModule:
    """Return the heads of a folder in torch, float32."""
    shape = json.loads((Path(folder) / "drafter.json").read_text())["shape"]
    heads = MedusaModule(MedusaShape(**shape), tiny_config(vocab=vocab))
    tensors = load_file(Path(folder) / "model.safetensors")
    heads.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return heads.requires_grad_(requires_grad=False)


def head_logits(heads: MedusaModule, hidden: Tensor, unembed: nn.Module) -> Tensor:
    """Return logits ``[heads, rows, vocab]``; ``hidden`` ``[rows, hidden]`` is after the target's
    final norm.

    ``unembed``, the target's unembedding, is used unless the heads have their own.
    """
    unembeddings = heads.unembeddings or [unembed] * len(heads.layers)
    return torch.stack(
        [layer(head(hidden)) for layer, head in zip(unembeddings, heads.layers, strict=True)]
    )


def spec(**options: object) -> str:
    """Return the drafter's specification for tests."""
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    return f"medusa(model={medusa_folder()!r}{given})"
