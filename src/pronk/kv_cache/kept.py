"""Layer outputs and projections that the KV cache keeps for drafters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pronk.arrays import Array


class Projection(Protocol):
    """A function of the outputs of several layers at one token, of which the cache keeps the value."""

    layers: tuple[int, ...]  # the layers, from 1; 0 is the embedding
    width: int  # size of a value

    @property
    def identity(self) -> str:
        """Digest of everything that the values depend on besides the model."""
        ...

    def project(self, outputs: Sequence[Array]) -> Array:
        """Return values ``[rows, width]``, given the output ``[rows, hidden]`` of each of ``layers``."""


# What the cache keeps for each token besides keys and values: the output of a layer (from 1), or a projection.
Kept = int | Projection
