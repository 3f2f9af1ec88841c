"""Peers: other engines, measured on the same model file, prompts, token counts and threads as pronk.

Each peer runs in a process of its own, which isolates crashes, memory and threads. Time is measured in that process,
around the engine's generate call, so that communication does not count. Input and output are token ids::

    peer = Peer(PEERS["llama_cpp"], Path("model.gguf"), draft=None, dtype="bfloat16", threads=2)
    peer.load()
    result = peer.generate(PeerRequest([1, 2, 3], 64, 0.0, seed=0, stop_token_ids=[0], ignore_eos=False))
    peer.close()
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pronk.bench.peers.engines.contract import PeerRequest, PeerResult, WorkerConfig
from pronk.bench.peers.process import PeerError, WorkerProcess
from pronk.bench.peers.specs import PEERS, PeerSpec, choose_peers

__all__ = ["PEERS", "Peer", "PeerError", "PeerRequest", "PeerResult", "PeerSpec", "choose_peers"]

_MAX_RESTARTS = 2  # of a peer's worker process

_DTYPES = ("bfloat16", "float16", "float32")


class Peer:
    """A worker process that decodes with one method of an engine.

    Args:
        spec: the engine and its decoding method.
        model: a folder in the Hugging Face layout, or a GGUF file; see :attr:`PeerSpec.reads_gguf`.
        draft, dtype, threads: see :class:`WorkerConfig`.
        python: interpreter that has the engine's packages; this interpreter by default.
        timeout: maximum seconds of a call of :meth:`generate`; :meth:`load` may take ten times as long.
    """

    def __init__(
        self,
        spec: PeerSpec,
        model: Path,
        *,
        draft: Path | None,
        dtype: str,
        threads: int,
        python: str | None = None,
        timeout: float = 300.0,
    ) -> None:
        self.spec, self.name = spec, str(spec)
        self.versions: dict[str, str] = {}
        self.settings: dict[str, str] = {}
        draft_path = None if draft is None or not spec.needs_draft else str(draft.absolute())
        self._config = WorkerConfig(spec.engine, spec.variant, str(model.absolute()), draft_path, dtype, threads)
        self._python = python or sys.executable
        self._timeout = timeout
        self._worker: WorkerProcess | None = None
        self._failure: str | None = None
        self._restarts_left = _MAX_RESTARTS

    def load(self) -> None:
        """Start the worker process and load the model.

        Raises:
            PeerError: a package is missing, the model is not supported, or the engine failed.
        """
        self.close()
        self._failure = None
        if self.spec.needs_draft and self._config.draft is None:
            msg = f"{self.name}: expected a draft model"
            raise PeerError(msg)
        if self._config.dtype not in _DTYPES:
            msg = f"{self.name}: expected a dtype of {', '.join(_DTYPES)}, found {self._config.dtype!r}"
            raise PeerError(msg)
        loaded = self._ask("load", self._config, 10 * self._timeout)
        self.versions, self.settings = loaded["versions"], loaded["settings"]

    def generate(self, request: PeerRequest) -> PeerResult:
        """Continue one prompt from an empty KV cache.

        If the worker process died or timed out at an earlier prompt, a new one is started, at most twice per peer.

        Raises:
            PeerError: no model is loaded, or the engine failed, died, timed out or returned a wrong number of tokens.
        """
        if self._worker is None:
            if self._failure is None:
                msg = f"{self.name}: expected load() before generate()"
                raise PeerError(msg)
            if not self._restarts_left:
                msg = f"{self._failure} (no restart is left)"
                raise PeerError(msg)
            self._restarts_left -= 1
            self.load()
        answer = self._ask("generate", request, self._timeout)
        try:
            result = PeerResult(**answer)
            _check_result(result, request)
        except (TypeError, ValueError) as error:
            msg = f"{self.name}: {error}"
            raise PeerError(msg) from error
        return result

    def close(self) -> None:
        """Kill the worker process; a second call does nothing."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _command(self) -> list[str]:
        return [self._python, str(Path(__file__).with_name("worker.py"))]

    def _ask(self, op: str, values: WorkerConfig | PeerRequest, timeout: float) -> dict[str, Any]:
        if self._worker is None:
            self._worker = WorkerProcess(self.name, self._command(), self._config.threads)
        try:
            return self._worker.ask(op, asdict(values), timeout)
        except PeerError as error:
            if op != "generate" or not self._worker.is_open:  # else only this prompt failed
                self._failure = str(error)
                self.close()
            raise


def _check_result(result: PeerResult, request: PeerRequest) -> None:
    """Raise ValueError for invalid values, and for fewer or more tokens than the request asks for."""
    tokens = result.token_ids
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        msg = f"expected token ids, found {tokens!r:.60}"
        raise ValueError(msg)
    if not isinstance(result.seconds, float) or result.seconds <= 0:
        msg = f"expected seconds above 0, found {result.seconds!r}"
        raise ValueError(msg)
    stop_ids = () if request.ignore_eos else request.stop_token_ids
    last_index = next((i for i, token in enumerate(tokens) if token in stop_ids), request.max_tokens - 1)
    if len(tokens) != last_index + 1:
        msg = f"expected {last_index + 1} tokens, found {len(tokens)}"
        raise ValueError(msg)
