"""Engine that the server needs: an :class:`~pronk.async_llm.AsyncLLM`, or a dispatcher to replicas."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, Protocol

from pronk.architecture.config import ModelConfig
from pronk.async_llm import EngineLoad
from pronk.engine.request_factory import RequestFactory
from pronk.llm import Prompt
from pronk.outputs import Piece
from pronk.sampling.params import SamplingParams
from pronk.speculation.proposer import Drafter
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["ServedEngine", "ServedModel"]


class ServedModel(Protocol):
    """Metadata of a served model."""

    path: Path
    tokenizer: Tokenizer
    config: ModelConfig
    request_factory: RequestFactory
    drafter: Drafter  # the default

    @property
    def kernels(self) -> str:
        """Instruction set of the kernels in use, or ``"torch"``."""

    def get_proposer(self, spec: str | Drafter | None = None) -> Any:
        """Return the proposer of a drafter, by default the model's; see :meth:`pronk.llm.LLM.get_proposer`."""


class ServedEngine(Protocol):
    """Generates text for prompts."""

    @property
    def llm(self) -> ServedModel:
        """Model of the engine."""

    @property
    def num_requests(self) -> int:
        """Number of running and waiting samples."""

    @property
    def alive(self) -> bool:
        """Whether the engine accepts requests."""

    @property
    def load(self) -> EngineLoad:
        """Current load."""

    def steps(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = None,
        priority: int = 0,
        deadline: float | None = None,
        salt: bytes = b"",
        tenant: str = "",
    ) -> AsyncGenerator[list[Piece]]:
        """Continue prompts and yield the pieces of each step; see :meth:`pronk.async_llm.AsyncLLM.steps`."""

    def stop(self) -> None:
        """Fail all requests after the current step and refuse new ones."""

    async def close(self) -> None:
        """Stop and wait for the end of the engine thread."""
