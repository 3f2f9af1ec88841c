"""Default parts of combined drafters."""

from __future__ import annotations

from pronk.drafters.from_outputs.recycling import Recycling
from pronk.drafters.from_text.suffix import Suffix
from pronk.speculation.proposer import Drafter

__all__ = ["default_parts"]


def default_parts() -> tuple[Drafter, ...]:
    """Return a drafter that copies repeated text, and one that nearly always has draft tokens."""
    return Suffix(min_match=2), Recycling()
