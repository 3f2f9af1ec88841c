"""Draft models and heads that others have published, by the model for which they draft.

The rows of ``pairs.json`` are read from public documentation, whose address each row has. pronk has
not measured the speed of these pairs: ``auto`` uses one that is on this machine only where its
draft tokens save time. The sizes of a head are checked when it is loaded.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pronk.checkpoint.hub.cache import find_cached
from pronk.checkpoint.hub.model_identity import simplify_name
from pronk.checkpoint.hub.names import HubModel, known_models, require_name


class Pair(NamedTuple):
    """A target model with a draft model or head: a row of ``pairs.json``.

    Attributes:
        target: repository of the original target model on the Hub, ``owner/name``.
        drafter: name of the drafter, which has the option ``model``.
        source: value of this option: a short name, or the name of a repository on the Hub.
        license: license of the draft model or head; "" if the documentation does not state it.
        confirmed: address of a public page that names the pair.
    """

    target: str
    drafter: str
    source: str
    license: str
    confirmed: str

    @property
    def target_name(self) -> str:
        """Simplified name of the target."""
        _, _, name = self.target.rpartition("/")
        return simplify_name(name)

    @property
    def model(self) -> HubModel:
        """The draft model or head on the Hub."""
        return require_name(self.source)

    @property
    def specification(self) -> str:
        """The drafter with its option, as for ``--drafter``."""
        return f'{self.drafter}(model="{self.source}")'

    @property
    def is_here(self) -> bool:
        """Whether the draft model or head is on this machine."""
        return find_cached(self.model) is not None


@cache
def all_pairs() -> tuple[Pair, ...]:
    """Return the rows of ``pairs.json``; those of a target are in order of preference."""
    rows = json.loads((Path(__file__).parent / "pairs.json").read_bytes())
    known = known_models()
    return tuple(
        Pair(
            row["target"],
            row["drafter"],
            row["source"],
            known[row["source"]].license if row["source"] in known else row.get("license", ""),
            row["confirmed"],
        )
        for row in rows
    )


def find_pairs(names: frozenset[str]) -> list[Pair]:
    """Return the pairs of a target model, in order of preference.

    ``names`` are all simplified names of the target (:mod:`pronk.checkpoint.hub.model_identity`),
    by which it is found in any quantization.
    """
    return [pair for pair in all_pairs() if pair.target_name in names]


def targets_of(repository: str | None) -> list[str]:
    """Return the targets of a repository with a listed head; empty if it is another repository.

    The targets of draft models are not returned, because a draft model is also used alone.
    """
    heads = [pair for pair in all_pairs() if pair.source not in known_models()]
    return [pair.target for pair in heads if pair.source == repository]
