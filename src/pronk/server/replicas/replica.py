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
# limit of the replica's engine; never reached, as the dispatcher and Ray Serve allow fewer
_MAX_REQUESTS = 2**20


class ServerProcess:
    """Actor without methods, which Ray ends with the process of the server that created it."""


class Replica:
    """Actor of Ray Serve with one engine."""

    def __init__(
        self, options: Mapping[str, Any], also: Sequence[str], folder: str, app: str | None = None
    ) -> None:
        """Load the model and start its engine; ``options`` are the arguments of :class:`pronk.LLM`.

        Requests may select the default drafter or one of ``also``. Relative paths are relative to
        ``folder``. ``app`` is the name of the :class:`ServerProcess` of the replica's server, and
        of the application to delete without it.
        """
        change_directory(folder)
        self._app = app
        self._llm = LLM(**options)
        # keeps the draft models loaded
        self._proposers = [self._llm.get_proposer(spec) for spec in also]
        self._engine = AsyncLLM(self._llm, max_requests=_MAX_REQUESTS)
        self._identity, self._model = identity(self._llm, options)
        name = serve.get_replica_context().replica_id.unique_id
        node = get_runtime_context().get_node_id()
        self._accepted = RequestAccepted(name, self._identity, self._llm.exact, node, os.getpid())

    def about(self) -> ReplicaInfo:
        """Return the description of the replica.

        Raise ``ClosedError`` if the engine has stopped.
        """
        self.check_health()
        return ReplicaInfo(
            self._identity, self._model, self._llm.kernels, self._llm.get_proposer().name
        )

    def check_health(self) -> None:
        """Raise ``ClosedError`` if the engine has stopped; Ray Serve then replaces the replica.

        Ray Serve calls this method every few seconds. If the server's process has ended, end all
        its replicas.
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
        """Continue prompts.

        Yield an error of the request as ``RequestFailed``; raise an error of the replica.
        """
        yield self._accepted
        if request.model not in ("", self._model):
            yield RequestFailed(
                PronkError(f"expected a replica of {request.model}, found one of {self._model}")
            )
            return
        if request.identity not in (None, self._identity):
            # the dispatcher sees the other identity in RequestAccepted, and tries another replica
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
        )
        try:
            async with aclosing(steps):
                async for pieces in steps:
                    yield StepReply(pieces, self._engine.load)
        except (ClosedError, ConnectionLostError):
            raise  # an error of the replica: the dispatcher resumes the request on another one
        except PronkError as error:
            # without traceback and cause, which may not be serializable
            yield RequestFailed(type(error)(str(error)))
        except Exception as error:
            if not self._engine.alive:
                raise
            _log.exception("a request failed")
            yield RequestFailed(
                RuntimeError(f"{type(error).__name__} in a replica; its log has the traceback")
            )

    async def __del__(self) -> None:
        """Save the calibration and close the engine.

        Ray Serve awaits this method when the replica ends.
        """
        self._llm.calibration.save()
        await self._engine.close()


def change_directory(folder: str) -> None:
    """Change to ``folder``, the base of relative paths.

    Do nothing if it does not exist on this machine.
    """
    with suppress(OSError):
        os.chdir(folder)
