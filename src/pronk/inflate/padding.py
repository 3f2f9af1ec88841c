"""Where the parts of a small model are in a large one that computes the same.

Why that is the same function, and what is added between them, is told in :mod:`pronk.inflate.checkpoint`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pronk.architecture.config import ModelConfig

__all__ = [
    "Axis",
    "blank",
    "gain_factor",
    "is_rounded",
    "part_axes",
    "pick",
    "put",
    "query_key_factor",
    "real_layers",
    "same",
]

# Rows or columns of the source, and where they are in the large model; indices.
Axis = tuple[Tensor, Tensor]


def real_layers(small: int, big: int) -> list[tuple[int, bool]]:
    """For each layer of the large model the small model's layer at or below it, and whether it is that layer itself.

    The first and the last layer are real, and the added ones are spread evenly: 2 in 4 gives 0, (0), (0), 1.
    """
    places = [index * (big - 1) // max(1, small - 1) for index in range(small)]
    return [(sum(place <= index for place in places) - 1, index in places) for index in range(big)]


def same(count: int) -> Axis:
    """An axis that is copied as it is."""
    return torch.arange(count), torch.arange(count)


def part_axes(small: ModelConfig, big: ModelConfig) -> dict[str, Axis]:
    """Which rows or columns of the source go where, for every kind of them.

    Queries follow their key/value head. With 5 queries per head in the source and 2 in the large model, source head 0
    becomes the heads 0, 1, 2 with the queries 0 1, 2 3, 4 and one that is random.
    """
    old, new, dim = small.group, big.group, small.head_dim
    copies = math.ceil(old / new)
    queries = [(q, (q // old * copies + q % old // new) * new + q % old % new) for q in range(small.num_heads)]
    kv_heads = [(kv, kv * copies + copy) for kv in range(small.num_kv_heads) for copy in range(copies)]
    sizes = {"": 1, "vocab": small.vocab_size, "hidden": small.hidden_size, "mlp": small.intermediate_size, "head": dim}
    axes = {kind: same(count) for kind, count in sizes.items()}
    for kind, pairs in (("query", queries), ("kv", kv_heads)):
        rows = torch.tensor(pairs)[..., None] * dim + torch.arange(dim)
        axes[kind] = rows[:, 0].flatten(), rows[:, 1].flatten()
    return axes


def gain_factor(small: ModelConfig, big: ModelConfig) -> float:
    """What the gains of norms over the residual stream are multiplied by."""
    return math.sqrt(small.hidden_size / big.hidden_size)


def query_key_factor(gain: float, dtype: torch.dtype) -> float:
    """What queries and keys that are normed are multiplied by, in matrices of ``dtype``.

    Their norms share the epsilon, so what they norm shrinks as the gains do. Rounding that to 16 bits would harm more
    than the next power of two, which leaves them an epsilon of half to twice the source's.
    """
    return gain if dtype == torch.float32 else 2.0 ** round(math.log2(gain))


def is_rounded(factor: float) -> bool:
    """Whether numbers of 16 bits lose by being multiplied by ``factor``."""
    return math.frexp(factor)[0] != 0.5


def blank(shape: Sequence[int], dtype: torch.dtype, filling: float | None, seed: str) -> Tensor:
    """A tensor of ``filling``, or of random numbers by ``seed`` if that is ``None``."""
    made = torch.full(tuple(shape), filling or 0.0, dtype=dtype)
    if filling is None:
        digest = hashlib.blake2b(seed.encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        for part in made.view(-1).split(1 << 22):  # drawn in float32, so not all at once
            part.copy_(torch.randn(part.shape, generator=generator).mul_(0.02))
    return made


def pick(tensor: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """``[rows, columns]`` of a matrix, or of a vector, which is a matrix of one column."""
    return tensor.view(len(tensor), -1)[rows[:, None], columns]


def put(made: Tensor, source: Tensor, rows: Axis, columns: Axis) -> None:
    """Copy ``source`` into ``made``."""
    made.view(len(made), -1)[rows[1][:, None], columns[1]] = pick(source, rows[0], columns[0])
