"""One replica: an actor process of Ray Serve with a whole model and its engine."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

from ray import get_actor, get_runtime_context, serve

from pronk import LLM, AsyncLLM, ClosedError, PronkError
from pronk.base import ConnectionLostError
from pronk.server.replicas.messages import (
    GenerateRequest,
    ReplicaInfo,
    ReplicaMessage,
    RequestAccepted,
    RequestFailed,
    StepReply,
    identity,
)

_log = logging.getLogger(__name__)

NAMESPACE = "pronk"  # Ray's namespace of :class:`ServerProcess`
# Maximum number of samples in a replica's engine. The dispatcher and Ray Serve have lower limits.
_MAX_REQUESTS = 2**20


class ServerProcess:
    """Actor that Ray ends together with the server's process; it has no methods.

    Replicas look it up to learn whether the server still runs.
    """


class Replica:
    """Actor process of Ray Serve with a whole model and its engine."""

    def __init__(
        self, options: Mapping[str, Any], also: Sequence[str], folder: str, app: str | None = None
    ) -> None:
        """Load the model and start its engine.

        Args:
            options: arguments of :class:`pronk.LLM`.
            also: drafters that requests may select besides the default one.
            folder: working directory, to which paths are relative.
            app: name of the server's :class:`ServerProcess`, and of the application to delete when
                that actor has ended; ``None`` deletes nothing.
        """
        change_directory(folder)
        self._app = app
        self._llm = LLM(**options)
        # These references keep the draft models loaded.
        self._proposers = [self._llm.get_proposer(spec) for spec in also]
        self._engine = AsyncLLM(self._llm, max_requests=_MAX_REQUESTS)
        self._identity, self._model = identity(self._llm, options)
        name = serve.get_replica_context().replica_id.unique_id
        node = get_runtime_context().get_node_id()
        self._accepted = RequestAccepted(name, self._identity, self._llm.exact, node, os.getpid())

    def about(self) -> ReplicaInfo:
        """Return the description of the replica.

        Raises:
            ClosedError: the engine has stopped.
        """
        self.check_health()
        drafter = self._llm.get_proposer().name
        return ReplicaInfo(self._identity, self._model, self._llm.kernels, drafter)

    def check_health(self) -> None:
        """Raise ``ClosedError`` if the engine has stopped, so that Ray Serve replaces the replica.

        Ray Serve calls this method every few seconds. If the server's process has ended, the call
        also deletes the application with all its replicas.
        """
        if self._app is not None:
            try:
                get_actor(self._app, NAMESPACE)
            except ValueError:  # Ray's error for an unknown name
                _log.warning("the process of the server has ended; its replicas end, too")
                serve.delete(self._app, _blocking=False)
        if not self._engine.alive:
            msg = (
                "expected a running engine, found one that has stopped; see the log of the replica"
            )
            raise ClosedError(msg)

    async def steps(self, request: GenerateRequest) -> AsyncGenerator[ReplicaMessage]:
        """Run a request, and yield the messages about it.

        An error of the request is yielded as ``RequestFailed``; an error of the replica is raised.
        """
        yield self._accepted
        if request.model not in ("", self._model):
            message = f"expected a replica of {request.model}, found one of {self._model}"
            yield RequestFailed(PronkError(message))
            return
        if request.identity not in (None, self._identity):
            # The dispatcher sees this identity in RequestAccepted, and tries another replica.
            return
        steps = self._engine.steps(
            request.prompts,
            request.params,
            drafter=request.drafter,
            adapter=request.adapter,
            priority=request.priority,
            deadline=request.deadline,
            salt=request.salt,
            tenant=request.tenant,
            given=request.given,
            calls=request.calls,
            branch_positions=request.branch_positions,
        )
        try:
            async with aclosing(steps):
                async for pieces in steps:
                    yield StepReply(pieces, self._engine.load)
        except (ClosedError, ConnectionLostError):
            raise  # an error of the replica: the dispatcher resumes the request on another one
        except PronkError as error:
            # A copy has neither traceback nor cause, which may not be serializable.
            yield RequestFailed(type(error)(str(error)))
        except Exception as error:
            if not self._engine.alive:
                raise
            _log.exception("a request failed")
            message = f"{type(error).__name__} in a replica; its log has the traceback"
            yield RequestFailed(RuntimeError(message))

    async def __del__(self) -> None:
        """Save the drafters' statistics and close the engine.

        Ray Serve awaits this method when the replica ends.
        """
        self._llm.calibration.save()
        await self._engine.close()


def change_directory(folder: str) -> None:
    """Change the working directory to a folder, if the folder exists on this machine."""
    with suppress(OSError):
        os.chdir(folder)
