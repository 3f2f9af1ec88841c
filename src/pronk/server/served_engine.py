"""Interface of the server's engine, which is an ``AsyncLLM``, or with replicas a ``Dispatcher``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from pronk.architecture.config import ModelConfig
from pronk.arrays import Array
from pronk.async_llm import EngineLoad
from pronk.engine.pooling import Pooling
from pronk.engine.request_factory import RequestFactory
from pronk.llm import Prompt
from pronk.outputs import Piece
from pronk.sampling.params import SamplingParams
from pronk.speculation.proposer import Drafter
from pronk.tokenization.tokenizer import Tokenizer


class ServedModel(Protocol):
    """Attributes of a model that the server uses: of ``LLM``, or of ``ModelReader`` if replicas run it."""

    path: Path
    tokenizer: Tokenizer
    config: ModelConfig
    request_factory: RequestFactory
    drafter: Drafter  # drafter of requests that select none

    @property
    def adapters(self) -> Collection[str]:
        """Names of the model's adapters."""

    @property
    def kernels(self) -> str:
        """Instruction set of the kernels in use, or ``"torch"``."""

    def get_proposer(self, spec: str | Drafter | None = None) -> Any:
        """Return the proposer for ``spec``, by default ``drafter``; see :meth:`pronk.llm.LLM.get_proposer`."""


class ServedEngine(Protocol):
    """Interface of an engine that generates text for prompts."""

    @property
    def llm(self) -> ServedModel:
        """Model that the engine runs."""

    @property
    def num_requests(self) -> int:
        """Number of running and waiting samples."""

    @property
    def alive(self) -> bool:
        """Whether the engine accepts requests."""

    async def is_ready(self) -> bool:
        """Return whether the engine, or at least one replica, answers now."""

    @property
    def load(self) -> EngineLoad:
        """Current numbers of requests and use of the KV cache."""

    def steps(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = None,
        adapter: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        salt: bytes = b"",
        tenant: str = "",
    ) -> AsyncGenerator[list[Piece]]:
        """Continue prompts; yield the new tokens of each step; see :meth:`pronk.async_llm.AsyncLLM.steps`."""

    async def embed(
        self,
        texts: Sequence[Prompt],
        *,
        pooling: Pooling = "mean",
        dimensions: int | None = None,
        normalize: bool = True,
        adapter: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        salt: bytes = b"",
        tenant: str = "",
    ) -> Array:
        """Return one embedding per text; see :meth:`pronk.async_llm.AsyncLLM.embed`."""
        ...

    def stop(self) -> None:
        """Fail all requests after the current step and refuse new ones."""

    async def close(self) -> None:
        """Call :meth:`stop`, then wait for the end of the engine thread, if there is one."""
