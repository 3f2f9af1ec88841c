"""Slow dense attention as the reference of all faster implementations."""

import torch
from torch import Tensor

from pronk.architecture.config import ModelConfig
from pronk.models.decoder import Decoder


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


@torch.no_grad()
def dense_logits(
    decoder: Decoder, tokens: list[int], dtype: torch.dtype = torch.float32, *, coded: bool = False
) -> Tensor:
    """Return logits ``[len(tokens), vocab]`` of a whole text in one pass."""
    ids = torch.tensor(tokens)
    positions = torch.arange(len(tokens))
    x = decoder.embed(ids, positions, dtype)
    rope = decoder.rope(positions, torch.full_like(positions, len(tokens)), dtype)
    *_, (_, hidden) = decoder.run(x, rope, DenseAttend(decoder.config, coded=coded))
    return decoder.logits(hidden)
