"""Trained drafters and draft models that are known to fit a model, on this machine or not."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.hub.cache import model_label
from pronk.checkpoint.hub.model_identity import equal_names, model_names, simplify_name
from pronk.drafting.combined.auto import find_heads
from pronk.drafting.from_target.eagle3 import Eagle3, packaged_heads
from pronk.models.pairs import find_pairs


class KnownDrafter(NamedTuple):
    """A drafter with a head or draft model.

    Attributes:
        drafter: name of the drafter.
        source: folder or file of a head that comes with the model or with pronk; of another head or
            draft model the name by which ``pronk pull`` downloads it.
        here: whether the head or draft model is on this machine.
    """

    drafter: str
    source: str
    here: bool

    @property
    def name(self) -> str:
        """Name of the head or draft model, without the place of its files."""
        path = Path(self.source)
        return model_label(path) if path.exists() else self.source

    @property
    def label(self) -> str:
        """The drafter and the name of its head or draft model, such as ``eagle3: owner/head``."""
        return f"{self.drafter}: {self.name}"


def list_drafters(path: Path, config: ModelConfig) -> list[KnownDrafter]:
    """Return the drafters of a model, in the order in which ``auto`` tries them.

    First come the heads in the model's files, beside them, or in pronk, then the heads and draft
    models that others have published (:mod:`pronk.models.pairs`).

    Args:
        path: folder or GGUF file of the model.
        config: config of the model.
    """
    heads = find_heads(path, config).items()
    found = [KnownDrafter(drafter.name, str(head), here=True) for drafter, head in heads]
    return found + _listed(model_names(path, config))


def list_drafters_by_name(name: str) -> list[KnownDrafter]:
    """Return the drafters of a model that are found by its simplified name alone.

    No file of the model is read, so heads in them or beside them are not among the drafters.
    """
    names = equal_names(name)
    found = [
        KnownDrafter(Eagle3.name, str(head.folder), here=True)
        for head in packaged_heads()
        if simplify_name(head.target) in names
    ]
    return found + _listed(names)


def _listed(names: frozenset[str]) -> list[KnownDrafter]:
    """Return the published drafters of a model with these simplified names."""
    pairs = find_pairs(names)
    return [KnownDrafter(pair.drafter, pair.source, pair.is_here) for pair in pairs]
