"""Trained heads that come with pronk, in the folders of ``pronk/heads``; each has a card."""

from __future__ import annotations

from pathlib import Path

from pronk.architecture.config import ModelConfig
from pronk.errors import ConfigError
from pronk.models.checkpoint import read_json
from pronk.models.loader import describe_architecture

PACKAGED = Path(__file__).parents[3] / "heads"


def find_packaged_head(target: ModelConfig) -> Path | None:
    """Return the folder of the EAGLE-3 head for targets of this architecture; ``None`` if there is none.

    A head is used whatever the weights: quantizations and fine-tunes of its target accept many of its draft tokens,
    and the policy does not ask a head that does not pay.
    """
    architecture = describe_architecture(target)
    for config in sorted(PACKAGED.glob("*/config.json")):
        if read_json(config, ConfigError)["pronk"]["target"]["architecture"] == architecture:
            return config.parent
    return None
