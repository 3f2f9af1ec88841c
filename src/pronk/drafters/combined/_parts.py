"""The drafters that ``first_of`` and ``merged`` combine by default."""

from __future__ import annotations

from pronk.drafters.from_outputs.recycling import Recycling
from pronk.drafters.from_text.suffix import Suffix
from pronk.speculation.proposer import Drafter

__all__ = ["default_parts"]


def default_parts() -> tuple[Drafter, ...]:
    """Return ``suffix``, which copies repeated text, and ``recycling``, which nearly always proposes."""
    return Suffix(min_match=2), Recycling()
