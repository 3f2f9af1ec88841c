"""Interface between the worker process and an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class WorkerConfig:
    """Engine, model and options of a worker process."""

    engine: str  # name of the engine, a key of worker.py's table
    variant: str  # decoding method of the engine; "" is plain decoding
    model: str  # a folder in the Hugging Face layout, or a GGUF file
    dtype: str  # data type of the computation: bfloat16, float16 or float32
    threads: int


@dataclass(frozen=True)
class PeerRequest:
    """Token ids of one prompt, and its sampling parameters."""

    prompt: list[int]  # token ids
    max_tokens: int  # maximum number of tokens to generate
    # 0 is greedy; above 0, tokens are drawn from the whole distribution, without top-k or top-p
    temperature: float
    seed: int
    stop_token_ids: list[int]  # tokens at which the output ends
    ignore_eos: bool  # whether to continue after stop tokens


@dataclass(frozen=True)
class PeerResult:
    """Output of an engine for one prompt."""

    token_ids: list[int]  # generated tokens, a stop token included
    seconds: float  # duration of prefill and decoding together
    ttft: float | None = None  # seconds to the first token; ``None`` if the engine reports none
    # In bytes; 0 if the system does not report it. worker.py sets it to that of its own process,
    # unless the engine runs in another one.
    peak_memory: int = 0


class PeerEngine(Protocol):
    """An engine other than pronk, loaded in a worker process."""

    def load(self, config: WorkerConfig) -> dict[str, str]:
        """Load the model; return the versions of the engine's packages and the settings by name."""
        ...

    def generate(self, request: PeerRequest) -> PeerResult:
        """Continue one prompt from an empty KV cache."""
        ...
