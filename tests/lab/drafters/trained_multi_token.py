"""Random multi-token heads for the tiny target, as folders."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import cache

import torch

from drafting.helpers import CHECKPOINTS
from pronk.base.arrays import Array
from pronk.base.convert import to_array
from pronk.checkpoint.config import ModelConfig
from pronk.lab.drafters.modules.files import TRAINED_FORMAT
from pronk.lab.drafters.modules.heads import HeadsShape
from pronk.train.attention import DenseAttention
from pronk.train.export import export_drafter
from pronk.train.modules.decoder import DecoderModule
from pronk.train.modules.drafters import HeadsModule
from tiny_models import tiny_config

SHAPE = HeadsShape(num_heads=3, layer=2, mlp=24)


def make_heads(shape: HeadsShape, config: ModelConfig) -> HeadsModule:
    """Return heads with weights so large that attention and MLP change the logits much."""
    heads = HeadsModule(shape, config)
    heads.initialize(torch.Generator().manual_seed(3))
    with torch.no_grad():
        for name, parameter in heads.named_parameters():
            if shape.kind == "linear" and name.startswith("layers"):
                parameter.normal_(
                    0.0, 0.125, generator=torch.Generator().manual_seed(int(name.split(".")[1]))
                )
            elif parameter.dim() == 2:
                parameter.mul_(150.0 if name.endswith(("out.weight", "down.weight")) else 12.0)
    return heads.eval()


@cache
def heads_folder(shape: HeadsShape = SHAPE, *, classic: bool = False) -> str:
    """Return a folder of heads for :func:`tiny_models.tiny_decoder` with any windows."""
    folder = CHECKPOINTS / f"heads-{abs(hash((shape, classic)))}"
    heads = make_heads(shape, tiny_config(classic=classic))
    target = {"name": "tiny", "architecture": "tiny", "weights": "0"}
    document = {
        "format": TRAINED_FORMAT,
        "kind": "multi_token",
        "shape": asdict(shape),
        "target": target,
    }
    export_drafter(folder, heads, document, "")
    return str(folder)


def spec(**options: object) -> str:
    """Return the drafter's specification for tests."""
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    return f"multi_token(model={heads_folder()!r}{given})"


@torch.no_grad()
def dense_heads(
    target: DecoderModule, shape: HeadsShape, text: Sequence[int], *, classic: bool = False
) -> list[Array]:
    """Return logits ``[tokens, vocab]`` of each head at every position, in one forward pass without
    a cache.
    """
    heads = make_heads(shape, tiny_config(classic=classic))
    length = len(text)
    config = target.config
    for parameter in heads.parameters():  # saved in bfloat16
        parameter.copy_(parameter.bfloat16())
    positions = torch.arange(length)
    x = target.embed(torch.tensor(text), positions, torch.float32)
    rope = target.rope(positions, torch.float32)
    outputs = [
        y
        for _, y in target.run(
            x,
            target.layer_ropes(positions, torch.float32),
            DenseAttention(1, length, config.windows),
        )
    ]
    attend = DenseAttention(1, length, (config.window,) * shape.num_heads)
    x = outputs[shape.layer - 1]
    made = dict[int, Array]()
    for index in shape.execution_order:
        out = heads.run_part(index, x, rope, attend)
        x = out if shape.is_chained else x
        unembedding = heads.unembeddings[index] if heads.unembeddings else target.head
        made[index] = to_array(unembedding(heads.norms[index](out)))
    return [made[index] for index in range(shape.num_heads)]
