"""What the worker asks of an engine, and what it tells it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

__all__ = ["Generated", "Loaded", "PeerEngine", "PeerRequest", "Unsupported", "WorkerConfig"]


class Unsupported(Exception):  # noqa: N818 - it says what the engine cannot do, and is shown as such
    """What this engine cannot do with this checkpoint or these options, in one line."""


@dataclass(frozen=True)
class WorkerConfig:
    """The checkpoint and how to run it.

    ``variant`` is the engine's way to decode, ``""`` for the plain one; ``weights`` a type of its own that they are
    rounded to, ``None`` for none.
    """

    engine: str
    variant: str
    checkpoint: Path
    draft: Path | None
    dtype: str
    weights: str | None
    threads: int
    cache: Path

    @classmethod
    def from_json(cls, document: dict[str, str | int | None]) -> WorkerConfig:
        """Read what the parent sent."""
        draft, weights = document["draft"], document["weights"]
        return cls(
            engine=str(document["engine"]),
            variant=str(document["variant"]),
            checkpoint=Path(str(document["checkpoint"])),
            draft=None if draft is None else Path(str(draft)),
            dtype=str(document["dtype"]),
            weights=None if weights is None else str(weights),
            threads=int(document["threads"] or 1),
            cache=Path(str(document["cache"])),
        )


@dataclass(frozen=True)
class PeerRequest:
    """One prompt, as token ids, and how to continue it: greedily at temperature 0, else from the whole distribution.

    ``ends`` are the ids that end a text; ``ignore_eos`` goes on to ``max_tokens`` all the same.
    """

    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int
    ends: list[int]
    ignore_eos: bool


@dataclass(frozen=True)
class Generated:
    """New token ids, seconds of prompt and tokens together, and seconds to the first token where the engine tells."""

    token_ids: list[int]
    seconds: float
    ttft: float | None = None


@dataclass(frozen=True)
class Loaded:
    """Versions of the packages that matter, and the settings that the engine really runs with."""

    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)


class PeerEngine(Protocol):
    """Another library, behind three verbs."""

    def prepare(self, config: WorkerConfig) -> None:
        """Write the converted model to the cache, in a process of its own so that no measure includes it."""
        ...

    def load(self, config: WorkerConfig) -> Loaded:
        """Load the model, ready to generate."""
        ...

    def generate(self, request: PeerRequest) -> Generated:
        """Continue one prompt from an empty cache."""
        ...
