"""What is combined where nobody says what."""

from __future__ import annotations

from pronk.drafters.from_outputs.recycling import Recycling
from pronk.drafters.from_text.suffix import Suffix
from pronk.speculation.proposer import Drafter

__all__ = ["default_parts"]


def default_parts() -> tuple[Drafter, ...]:
    """A drafter that copies where the text repeats itself, and one that always has a guess."""
    return Suffix(min_match=2), Recycling()
