"""Gauss-Seidel decoding (Santilli et al. 2023): Jacobi decoding with a chain of constant length.

In Jacobi decoding the chain of draft tokens gets shorter until its block of ``num_tokens`` positions is solved. In
Gauss-Seidel decoding every accepted token adds a new position, so every forward pass has ``num_tokens`` draft tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from pronk.drafters.from_outputs.jacobi import Jacobi, JacobiState

__all__ = ["GaussSeidel"]


@dataclass(frozen=True)
class GaussSeidel(Jacobi):
    """Options and proposer of Gauss-Seidel decoding.

    Attributes:
        num_tokens: number of draft tokens per forward pass, 1..128.
    """

    name = "gauss_seidel"

    def _block_end(self, state: JacobiState, first: int) -> int:  # noqa: ARG002 - every step begins a block
        return first + self.num_tokens
