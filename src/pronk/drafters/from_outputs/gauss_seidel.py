"""Gauss-Seidel Jacobi decoding (Santilli et al. 2023): Jacobi iteration on a block that slides over the text.

Where ``jacobi`` solves one system to its end before the next begins, here new unknowns come in as
old ones are solved, so that every pass has as many guesses ::

    pass 1   the ── ?1 ── ?2 ── ?3              outputs  cat  a   b   c
    pass 2   cat ── a ── b ── c                 outputs  sat  on  c'  d
    pass 3   sat ── on ── c' ── d               "on" was the output after "sat" already

When to use it: as the base line of fixed cost that methods with a memory have to beat. 20,000 steps a second.
"""

from __future__ import annotations

from dataclasses import dataclass

from pronk.drafters.from_outputs.jacobi import Jacobi, JacobiState

__all__ = ["GaussSeidel"]


@dataclass(frozen=True)
class GaussSeidel(Jacobi):
    """Options of the sliding variant.

    Attributes:
        num_tokens: length of the block, 1..128.
    """

    name = "gauss_seidel"

    def _end(self, state: JacobiState, first: int) -> int:  # noqa: ARG002 - the block starts where the text ends
        return first + self.num_tokens
