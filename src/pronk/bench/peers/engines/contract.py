"""Interface between the worker process and an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Generated", "Loaded", "PeerEngine", "PeerRequest", "WorkerConfig"]


@dataclass(frozen=True)
class WorkerConfig:
    """Model and options of a worker.

    Attributes:
        engine: name of the engine.
        variant: decoding method of the engine, ``""`` for plain decoding.
        model: a folder in the Hugging Face layout, or a GGUF file.
        draft: folder of the draft model, if the variant needs one.
        dtype: of the computation.
        threads: of the engine.
    """

    engine: str
    variant: str
    model: str
    draft: str | None
    dtype: str
    threads: int


@dataclass(frozen=True)
class PeerRequest:
    """One prompt and its sampling parameters.

    Attributes:
        prompt: token ids.
        max_tokens: maximum number of output tokens.
        temperature: 0 is greedy; above, tokens are drawn from the whole distribution.
        seed: of the sampling.
        stop_token_ids: tokens that end the output.
        ignore_eos: whether to ignore ``stop_token_ids``.
    """

    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int
    stop_token_ids: list[int]
    ignore_eos: bool


@dataclass(frozen=True)
class Generated:
    """Output token ids, and seconds of prefill, of decoding and, if reported, to the first token."""

    token_ids: list[int]
    seconds: float
    ttft: float | None = None


@dataclass(frozen=True)
class Loaded:
    """Versions of the engine's packages, and the settings in effect."""

    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)


class PeerEngine(Protocol):
    """Another engine."""

    def load(self, config: WorkerConfig) -> Loaded:
        """Load the model."""
        ...

    def generate(self, request: PeerRequest) -> Generated:
        """Continue one prompt from an empty KV cache."""
        ...
