"""Gauss-Seidel decoding (Santilli et al. 2023): Jacobi iteration on a block that slides over the text.

Source of the draft tokens: the target's greedy outputs in the previous forward pass, as in ``jacobi``. ``jacobi``
solves one block to its end before the next begins; here a new unknown enters for each solved one, so every forward pass
has ``num_tokens`` draft tokens ::

    forward pass 1   the ── ?1 ── ?2 ── ?3              outputs  cat  a   b   c
    forward pass 2   cat ── a ── b ── c                 outputs  sat  on  c'  d
    forward pass 3   sat ── on ── c' ── d               "on" was already the output after "sat"

When it pays: rarely by itself. It is the baseline of constant cost for methods with a memory. A step takes 50 µs on the
host.
"""

from __future__ import annotations

from dataclasses import dataclass

from pronk.drafters.from_outputs.jacobi import Jacobi, JacobiState

__all__ = ["GaussSeidel"]


@dataclass(frozen=True)
class GaussSeidel(Jacobi):
    """Options of Gauss-Seidel decoding.

    Attributes:
        num_tokens: draft tokens per forward pass (length of the block), 1..128.
    """

    name = "gauss_seidel"

    def _block_end(self, state: JacobiState, first: int) -> int:  # noqa: ARG002 - the block starts at the text's end
        return first + self.num_tokens
