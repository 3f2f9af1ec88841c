"""One replica: a model in a process of Ray's."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

from pronk.async_llm import AsyncLLM
from pronk.errors import ClosedError, PronkError
from pronk.llm import LLM
from pronk.parallel.connection import ConnectionLostError
from pronk.replicas.identity import identity
from pronk.replicas.messages import GenerateRequest, ReplicaInfo, RequestAccepted, RequestFailed, Said, StepReply

__all__ = ["Replica", "enter"]

_log = logging.getLogger(__name__)

# The front counts requests, and lets in no more than it is allowed: here all that it sends have a place.
_ROOM = 2**20


class Replica:
    """Holds a model, and continues what it is asked to."""

    def __init__(self, options: Mapping[str, Any], also: Sequence[str], folder: str) -> None:
        """Load it.

        Args:
            options: of :class:`pronk.LLM`.
            also: further drafters that requests may ask for.
            folder: that paths in the options start from, where there is one of that name.

        Raises:
            PronkError: it cannot be loaded.
        """
        # An extra, which whoever has replicas has.
        from ray import get_runtime_context, serve  # noqa: PLC0415

        enter(folder)
        self._llm = LLM(**options)
        self._met = [self._llm.get_proposer(spec) for spec in also]  # their models stay
        self._engine = AsyncLLM(self._llm, max_requests=_ROOM)
        self._identity, self._model = identity(self._llm, options)
        name, node = serve.get_replica_context().replica_id.unique_id, get_runtime_context().get_node_id()
        self._begun = RequestAccepted(name, self._identity, self._llm.exact, node, os.getpid())

    def about(self) -> ReplicaInfo:
        """What it is."""
        return ReplicaInfo(self._identity, self._model, self._llm.kernels, self._llm.get_proposer().name)

    def check_health(self) -> None:
        """Ray asks; a replica that raises is replaced.

        Raises:
            ClosedError: it cannot serve any more.
        """
        if not self._engine.alive:
            msg = "expected a model that computes, found one that has ended"
            raise ClosedError(msg)

    async def steps(self, ask: GenerateRequest) -> AsyncGenerator[Said]:
        """Continue prompts; errors of the request are said, and not raised."""
        yield self._begun
        if ask.model not in ("", self._model):
            yield RequestFailed(PronkError(f"expected a replica of {ask.model}, found one of {self._model}"))
            return
        if ask.identity not in (None, self._identity):
            return  # it goes on with no text of another model's, as who asks has heard by now
        steps = self._engine.steps(
            ask.prompts,
            ask.params,
            drafter=ask.drafter,
            priority=ask.priority,
            deadline=ask.deadline,
            salt=ask.salt,
            tenant=ask.tenant,
            given=ask.given,
        )
        try:
            async with aclosing(steps):
                async for pieces in steps:
                    yield StepReply(pieces, self._engine.load)
        except (ClosedError, ConnectionLostError):
            raise  # of the replica: another one goes on
        except PronkError as error:
            yield RequestFailed(type(error)(str(error)))  # without what it holds on to
        except Exception as error:
            if not self._engine.alive:
                raise
            _log.exception("a request has failed")
            yield RequestFailed(RuntimeError(f"{type(error).__name__} in a replica, whose log has the cause"))

    async def __del__(self) -> None:
        """Ray lets it go."""
        self._llm.calibration.save()
        await self._engine.close()


def enter(folder: str) -> None:
    """Ray's processes begin elsewhere: relative paths are meant from where the command was given."""
    with suppress(OSError):
        os.chdir(folder)
