"""First weights of an EAGLE-3 head, by least squares instead of at random.

Let ``x`` be the balanced outputs of the target's layers at a position, ``e`` the normed embedding of the next token,
and ``z`` the target's last output there, one position further, after the final norm without its weight. The matrices
``A`` and ``B`` with the smallest mean of ``|A x + B e - z|²`` are known in closed form. A head computes ``A x + B e``
if ``A`` is its ``fc``, each row attends to itself alone, and values and output projection have the product ``B``, up to
the rank of the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["LinearStart", "fit", "low_rank"]

_RIDGE = 1e-3  # added to the mean squares, whose mean is 1


class LinearStart(NamedTuple):
    """Matrices of a linear prediction of ``z``."""

    from_hidden: Tensor  # ``[size, sources * size]``
    from_embedding: Tensor  # ``[size, size]``
    embeddings: Tensor  # ``[size, size]``, mean of ``e e^T``
    scale: float  # root mean square of the prediction


def fit(rows: Iterable[tuple[Tensor, Tensor, Tensor]]) -> LinearStart:
    """Return the matrices for ``x [rows, sources * size]``, ``e`` and ``z [rows, size]``, given in parts.

    There must be at least one part.
    """
    sums, count, width = list[Tensor](), 0, 0
    for x, e, z in rows:
        inputs = torch.cat((x, e), dim=-1)
        own = [(inputs.T @ inputs).double(), (inputs.T @ z).double()]
        sums = [one + other for one, other in zip(sums, own, strict=True)] if sums else own
        width, count = x.shape[1], count + len(x)
    gram, products = (each / count for each in sums)
    weights = torch.linalg.solve(gram + _RIDGE * torch.eye(len(gram), dtype=gram.dtype), products)
    square = (weights * (gram @ weights)).sum() / weights.shape[1]
    solution = weights.T.float()
    return LinearStart(solution[:, :width], solution[:, width:], gram[width:, width:].float(), math.sqrt(square))


def low_rank(matrix: Tensor, moments: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return ``left [size, rank]`` and ``right [rank, size]`` with a product near ``matrix``.

    The product is the best one of this rank for inputs with the mean square products ``moments``.
    """
    values, vectors = torch.linalg.eigh(moments.double())
    root = vectors * values.clamp_min(1e-9).sqrt()
    u, s, v = torch.linalg.svd(matrix.double() @ root)
    rank = min(rank, len(s))
    inverse = vectors / values.clamp_min(1e-9).sqrt()
    return (u[:, :rank] * s[:rank].sqrt()).float(), (s[:rank].sqrt()[:, None] * (v[:rank] @ inverse.T)).float()
