"""What a server needs of a model: one in this process, or replicas elsewhere."""

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
    """What is known of a model without asking it.

    Attributes:
        path: its folder.
        tokenizer: its own.
        config: its shape.
        request_factory: reads prompts.
        drafter: who guesses, if a request does not say.
    """

    path: Path
    tokenizer: Tokenizer
    config: ModelConfig
    request_factory: RequestFactory
    drafter: Drafter

    @property
    def kernels(self) -> str:
        """What computes."""
        ...

    def get_proposer(self, spec: str | Drafter | None = None) -> Any:
        """Return the proposer of a drafter, by default the model's own; see :meth:`pronk.llm.LLM.get_proposer`."""
        ...


class ServedEngine(Protocol):
    """Continues prompts; :class:`~pronk.async_llm.AsyncLLM` is one."""

    @property
    def llm(self) -> ServedModel:
        """What it continues them with."""
        ...

    @property
    def num_requests(self) -> int:
        """Samples that are here, waiting ones included."""
        ...

    @property
    def alive(self) -> bool:
        """Whether requests are still served."""
        ...

    @property
    def load(self) -> EngineLoad:
        """What it is busy with."""
        ...

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
        """See :meth:`pronk.async_llm.AsyncLLM.steps`."""
        ...

    def stop(self) -> None:
        """End what still runs, with an error."""
        ...

    async def close(self) -> None:
        """The same, and wait for it."""
        ...
