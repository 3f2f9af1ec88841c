"""One replica: a model in a process of Ray's."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

from pronk.aio import AsyncLLM
from pronk.errors import ClosedError, PronkError
from pronk.kernels.library import installed
from pronk.llm import LLM
from pronk.model.fingerprint import Fingerprint
from pronk.parallel.peer import PeerError
from pronk.replicas.messages import About, Ask, Begun, Failed, Said, Step

__all__ = ["Replica", "enter", "identity"]


class Replica:
    """Holds a model, and continues what it is asked to."""

    def __init__(self, options: Mapping[str, Any], also: Sequence[str], max_requests: int, folder: str) -> None:
        """Load it.

        Args:
            options: of :class:`pronk.LLM`.
            also: further drafters that requests may ask for.
            max_requests: most samples at a time.
            folder: that paths in the options start from, where there is one of that name.

        Raises:
            PronkError: it cannot be loaded.
        """
        # An extra, which whoever has replicas has.
        from ray import get_runtime_context, serve  # noqa: PLC0415

        enter(folder)
        self._llm = LLM(**options)
        self._met = [self._llm.meet(spec) for spec in also]  # their models stay
        self._engine = AsyncLLM(self._llm, max_requests=max_requests)
        self._identity, self._model = identity(self._llm, options)
        name, node = serve.get_replica_context().replica_id.unique_id, get_runtime_context().get_node_id()
        self._begun = Begun(name, self._identity, node, os.getpid())

    def about(self) -> About:
        """What it is."""
        return About(self._identity, self._model, self._llm.kernels, self._llm.meet().name)

    def check_health(self) -> None:
        """Ray asks; a replica that raises is replaced.

        Raises:
            ClosedError: it cannot serve any more.
        """
        if not self._engine.alive:
            msg = "expected a model that computes, found one that has ended"
            raise ClosedError(msg)

    async def steps(self, ask: Ask) -> AsyncGenerator[Said]:
        """Continue prompts; errors of the request are said, and not raised."""
        yield self._begun
        if ask.model not in ("", self._model):
            yield Failed(PronkError(f"expected a replica of {ask.model}, found one of {self._model}"))
            return
        if ask.identity not in (None, self._identity):
            msg = (
                "expected a replica of the same model and kernels to go on with the text, found another: "
                f"{self._identity} instead of {ask.identity}"
            )
            yield Failed(PronkError(msg))
            return
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
                    yield Step(pieces, self._engine.load)
        except (ClosedError, PeerError):
            raise  # of the replica: another one goes on
        except PronkError as error:
            yield Failed(type(error)(str(error)))  # without what it holds on to

    async def __del__(self) -> None:
        """Ray lets it go."""
        self._llm.calibration.save()
        await self._engine.close()


def enter(folder: str) -> None:
    """Ray's processes begin elsewhere: relative paths are meant from where the command was given."""
    with suppress(OSError):
        os.chdir(folder)


def identity(llm: LLM, options: Mapping[str, Any]) -> tuple[str, str]:
    """Of whatever the tokens of a model depend on, with the kernels and without them."""
    from pronk import __version__  # noqa: PLC0415 - the package is above its rooms

    library = installed()
    kernels = hashlib.sha256(library.read_bytes()).hexdigest()[:12] if library.is_file() else "none"
    said = {
        "version": __version__,
        "model": str(Fingerprint.of(llm.path)),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "kv_dtype": options.get("kv_dtype", "auto"),
        "weights": options.get("weights", "plain"),
        "parts": options.get("workers", 1) if options.get("parallel") == "tensor" else 1,
    }
    return json.dumps({**said, "kernels": f"{llm.kernels} {kernels}"}), json.dumps(said)
