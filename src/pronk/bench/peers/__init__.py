"""Other engines, measured beside ours on the same checkpoint, prompts, tokens and threads.

Each peer runs in a process of its own: a crash, its memory and its threads stay there, and its clock runs around its
own generate call, so that talking to it costs it nothing. Token ids go in and token ids come out::

    with Peer(PeerSpec("openvino"), checkpoint, draft=None, dtype="bfloat16", threads=2, cache=cache) as peer:
        peer.load()
        result = peer.generate(PeerRequest([1, 2, 3], 64, temperature=0.0, seed=0, ends=[0], ignore_eos=False))
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pronk.bench.peers.engines.contract import PeerRequest
from pronk.bench.peers.process import PeerError, WorkerProcess
from pronk.bench.peers.specs import PeerSpec

__all__ = ["Peer", "PeerError", "PeerRequest", "PeerResult", "PeerSpec"]

# How often a worker that died is started again.
_RESTARTS = 2

_TYPES = {"bfloat16", "float16", "float32"}


@dataclass(frozen=True)
class PeerResult:
    """``token_ids`` include the end token; ``seconds`` is the whole generation, prompt included.

    ``ttft`` is ``None`` where the engine does not tell; ``peak_memory`` is the worker's during it, in bytes,
    where the system can tell that from what loading took.
    """

    token_ids: list[int]
    seconds: float
    ttft: float | None
    peak_memory: int


class Peer:
    """One worker process that decodes one checkpoint with one method.

    Args:
        spec: the method, and the type of weights that the engine's own tools make for it, if not the checkpoint's.
        checkpoint: a local folder in the Hugging Face layout, or, for llama.cpp, a GGUF file that is taken as it is.
        draft: the draft model's folder, for the methods that need one.
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``: of the computation, and of weights that stay as they are.
        threads: of the engine.
        cache: where converted models are kept.
        python: the interpreter that the peer is installed for, ours by default.
        timeout: seconds after which a request counts as hung; converting and loading get ten times that.
    """

    def __init__(
        self,
        spec: PeerSpec,
        checkpoint: Path,
        *,
        draft: Path | None,
        dtype: str,
        threads: int,
        cache: Path,
        python: str | None = None,
        timeout: float = 300.0,
    ) -> None:
        self.spec, self.name = spec, str(spec)
        self.versions: dict[str, str] = {}
        self.settings: dict[str, str] = {}
        self._config = {
            "engine": spec.mode.engine,
            "variant": spec.mode.variant,
            "checkpoint": str(checkpoint.resolve()),
            "draft": str(draft.resolve()) if draft is not None and spec.mode.needs_draft else None,
            "dtype": dtype,
            "weights": spec.weights,
            "threads": threads,
            "cache": str(cache.resolve()),
        }
        self._python = python or sys.executable
        self._threads = threads
        self._timeout = timeout
        self._worker: WorkerProcess | None = None
        self._failure: str | None = None
        self._restarts = _RESTARTS

    def load(self) -> None:
        """Convert the checkpoint if the engine needs that and it is not in the cache, then load it.

        Raises:
            PeerError: a package is missing, the checkpoint is not supported, or the engine failed.
        """
        self.close()
        self._failure = None
        if self.spec.mode.needs_draft and self._config["draft"] is None:
            msg = f"{self.name}: expected a draft model"
            raise PeerError(msg)
        if self._config["dtype"] not in _TYPES:
            msg = f"{self.name}: expected a dtype of {', '.join(sorted(_TYPES))}, found {self._config['dtype']!r}"
            raise PeerError(msg)
        if self.spec.mode.converts:
            # In a process of its own: the peak memory of a conversion is not the engine's.
            self._ask("prepare", self._config, 10 * self._timeout)
            self.close()
        loaded = self._ask("load", self._config, 10 * self._timeout)
        self.versions, self.settings = loaded["versions"], loaded["settings"]

    def generate(self, request: PeerRequest) -> PeerResult:
        """Continue one prompt from an empty cache.

        A worker that died or hung is started again for the next prompt, a few times.

        Raises:
            PeerError: nothing is loaded, or the engine failed, died, hung or broke the request's rules.
        """
        if self._worker is None:
            if self._failure is None:
                msg = f"{self.name}: expected load() before generate()"
                raise PeerError(msg)
            if not self._restarts:
                msg = f"{self._failure} (not asked again)"
                raise PeerError(msg)
            self._restarts -= 1
            self.load()
        answer = self._ask("generate", asdict(request), self._timeout)
        try:
            result = PeerResult(**answer)
            _check(result, request)
        except (TypeError, ValueError) as error:
            msg = f"{self.name}: {error}"
            raise PeerError(msg) from error
        return result

    def close(self) -> None:
        """Kill the worker. Closing twice is fine."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _command(self) -> list[str]:
        return [self._python, str(Path(__file__).with_name("worker.py"))]

    def _ask(self, op: str, document: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        if self._worker is None:
            self._worker = WorkerProcess(self.name, self._command(), self._threads)
        try:
            return self._worker.ask(op, dict(document), timeout)
        except PeerError as error:
            if op != "generate" or not self._worker.alive:
                self._failure = str(error)
                self.close()
            raise


def _check(result: PeerResult, request: PeerRequest) -> None:
    """A run that is shorter or longer than asked would be compared with ours unfairly."""
    tokens = result.token_ids
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        msg = f"expected token ids, found {tokens!r:.60}"
        raise ValueError(msg)
    if not isinstance(result.seconds, float) or result.seconds <= 0:
        msg = f"expected seconds above 0, found {result.seconds!r}"
        raise ValueError(msg)
    ends = () if request.ignore_eos else request.ends
    early = next((i for i, token in enumerate(tokens) if token in ends), request.max_tokens - 1)
    if len(tokens) != early + 1:
        msg = f"expected {early + 1} tokens, found {len(tokens)}"
        raise ValueError(msg)
