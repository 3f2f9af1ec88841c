"""Slow dense attention as the reference of all faster implementations."""

import torch
from torch import Tensor

from pronk.base.arrays import FLOAT32, Array, DType
from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.rope import RopeConfig, RopeTable
from pronk.torch.convert import to_array, to_tensor, torch_dtype
from pronk.train.modules.decoder import DecoderModule, Rope


class DenseAttend:
    """Causal attention over all positions of one text by matrix products, in float32 or wider."""

    def __init__(self, config: ModelConfig, *, coded: bool = False) -> None:
        """With ``coded``, round keys and values as an 8-bit KV cache does."""
        self.config = config
        self.coded = coded

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        c, rows = self.config, q.shape[0]
        if self.coded:
            k, v = (round_to_8_bits(x) for x in (k, v))
        wide = torch.promote_types(q.dtype, torch.float32)
        query, key, value = (x.to(wide).transpose(0, 1) for x in (q, k, v))
        key, value = (x.repeat_interleave(c.group, dim=0) for x in (key, value))
        scores = query @ key.transpose(1, 2) * c.head_dim**-0.5
        if c.attention_cap is not None:
            scores = c.attention_cap * torch.tanh(scores / c.attention_cap)
        scores = scores.masked_fill(~visible(rows, c.windows[layer]), -torch.inf)
        mixed = torch.softmax(scores, dim=-1) @ value
        return mixed.transpose(0, 1).reshape(rows, -1).to(q.dtype)


def round_to_8_bits(rows: Tensor) -> Tensor:
    """Round ``[rows, heads, size]`` to multiples of 1/127 of each head's largest magnitude."""
    step = rows.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return torch.round(rows / step) * step


def visible(rows: int, window: int | None) -> Tensor:
    """Return the causal mask ``[rows, rows]``: row ``i`` sees row ``j`` if ``0 <= i - j < window``."""
    distance = torch.arange(rows)[:, None] - torch.arange(rows)[None, :]
    return (distance >= 0) & (distance < (rows if window is None else window))


def _rotations(rope: RopeConfig | None, length: int, dtype: torch.dtype) -> Rope:
    if rope is None:
        return None
    cos, sin = to_tensor(RopeTable(rope).compute_entries(range(length), [length] * length)).to(dtype)[:, None].unbind(2)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


@torch.no_grad()
def dense_logits(module: DecoderModule, tokens: list[int], dtype: DType = FLOAT32, *, coded: bool = False) -> Array:
    """Return logits ``[len(tokens), vocab]`` of a whole text in one pass, in float32 or wider."""
    positions, size, config = torch.arange(len(tokens)), torch_dtype(dtype), module.config
    rope = [_rotations(config.rope_of(layer), len(tokens), size) for layer in range(config.num_layers)]
    x = module.embed(torch.tensor(tokens), positions, size)
    *_, (_, hidden) = module.run(x, rope, DenseAttend(config, coded=coded))
    return to_array(module.logits(hidden).to(torch.promote_types(size, torch.float32)))
