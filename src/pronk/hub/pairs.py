"""The table of pairs: which heads or draft model makes which target model faster.

A row of ``pairs.json`` has the target's fingerprint (``architecture`` and ``weights``), the ``drafter``'s name and the
``source`` of its model, a name as in :mod:`pronk.hub.names`. A row is added with a measurement that shows the gain.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pronk.architecture.config import ModelConfig
from pronk.hub.names import HubModel, parse_name
from pronk.models.fingerprint import Fingerprint, describe_architecture

__all__ = ["Pair", "all_pairs", "find_pairs"]


class Pair(NamedTuple):
    """A drafter with a model that was measured to make a target faster."""

    target: Fingerprint
    drafter: str  # name of a drafter with the option ``model``
    source: str  # the drafter's model

    @property
    def model(self) -> HubModel:
        """The drafter's model on the Hub."""
        model = parse_name(self.source)
        assert model is not None, self.source
        return model


@cache
def all_pairs() -> tuple[Pair, ...]:
    """Return the rows of the table."""
    rows = json.loads((Path(__file__).parent / "pairs.json").read_bytes())
    return tuple(Pair(Fingerprint(row["architecture"], row["weights"]), row["drafter"], row["source"]) for row in rows)


def find_pairs(path: Path, config: ModelConfig) -> list[Pair]:
    """Return the pairs of a target.

    Its weights are hashed only if a pair has a target of the same architecture.
    """
    architecture = describe_architecture(config)
    pairs = [pair for pair in all_pairs() if pair.target.architecture == architecture]
    fingerprint = Fingerprint.of(path) if pairs else None
    return [pair for pair in pairs if pair.target == fingerprint]
