"""Downloads of models that clients ask for, ``/api/pull`` of Ollama's API: off by default."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from pronk import CheckpointError, ClosedError
from pronk.base import FairExecutor
from pronk.checkpoint import pull_model
from pronk.server.errors import ApiError
from pronk.server.guard import tenant_of_key
from pronk.server.model_pool import ModelPool, PooledModel

# Seconds between two looks at the progress of a download: the shortest time between two lines.
_POLL_SECONDS = 0.2


class Pulls:
    """Downloads of one server; one runs at a time, and the others wait.

    A model that is downloaded joins the models of the server, under the name of the request. The
    files are those of ``pronk pull``. If a client disconnects, its download stops with the next
    bytes; a later request resumes it.
    """

    def __init__(self, models: ModelPool, make_model: Callable[[str, Path], PooledModel]) -> None:
        """Make the downloads of a server.

        Args:
            models: models of the server.
            make_model: returns a model that is not loaded, of a name and a folder or GGUF file.
        """
        self._models = models
        self._make_model = make_model
        keys = models.settings.pull_keys or ()
        self._tenants = {tenant_of_key(key) for key in keys}
        self._executor = FairExecutor(1, "pronk-pulls", shared=models.settings.is_shared)

    def shutdown(self) -> None:
        """End the thread after its download, which stops with its request."""
        self._executor.shutdown()

    async def pull(self, name: str, tenant: str) -> AsyncGenerator[list[dict[str, Any]]]:
        """Download a model; yield the lines of the reply, as Ollama writes them.

        Args:
            name: name of the request, as in ``pronk pull``; Ollama's tag ``:latest`` is ignored.
            tenant: tenant of the request.

        Raises:
            ApiError: the tenant may not download models, the server is shutting down, the name is
                none of the Hub's, or the download fails.
        """
        self._models.check_running()
        if self._tenants and tenant not in self._tenants:
            msg = (
                "Authorization: expected a key that may download models (--pull-key), found "
                "another; ask the operator of the server"
            )
            raise ApiError(HTTPStatus.FORBIDDEN, msg, "pull_not_allowed")
        name = name.removesuffix(":latest")
        progress = _Progress()
        download = partial(pull_model, name, progress=progress.update)
        job = asyncio.ensure_future(self._executor.run(tenant, download))
        try:
            yield [{"status": "pulling manifest"}]
            shown = (0, 0)
            while not job.done():
                await asyncio.wait({job}, timeout=_POLL_SECONDS)
                if progress.numbers != shown:
                    shown = progress.numbers
                    yield [_line(name, *shown)]
            path = await job
        except CheckpointError as error:
            raise ApiError(HTTPStatus.BAD_REQUEST, str(error), "pull_failed", "model") from error
        finally:
            progress.is_stopped = True
            job.cancel()
        if not any(name in model.names for model in self._models.models):
            self._models.add(self._make_model(name, path))
        yield [{"status": "success"}]


class _Progress:
    """Progress of a download, written by its thread and read by the event loop."""

    def __init__(self) -> None:
        self.numbers = (0, 0)  # bytes so far, bytes in all
        self.is_stopped = False  # whether the download is no longer wanted

    def update(self, num_done: int, num_bytes: int) -> None:
        """Store the numbers; raise ``ClosedError``, which ends the download, after the stop."""
        if self.is_stopped:
            msg = "the client has left"
            raise ClosedError(msg)
        self.numbers = (num_done, num_bytes)


def _line(name: str, num_done: int, num_bytes: int) -> dict[str, Any]:
    """Return a line with the progress of a download.

    Clients show a bar for each ``digest``. Ollama's is the hash of a file, which is unknown before
    the end of the download; here it is that of the name.
    """
    digest = f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"
    return {
        "status": f"pulling {name}",
        "digest": digest,
        "total": num_bytes,
        "completed": num_done,
    }
