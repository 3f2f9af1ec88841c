"""Peers: decoding methods of other engines, in processes that answer JSON lines (see worker.py)."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from pronk import OptionError, PronkError
from pronk.base import refuse
from pronk.base.checks import install_extra, refuse_choice
from pronk.lab.bench.peers.engines.contract import PeerRequest, PeerResult, WorkerConfig

# Number of bytes to read at the end of a worker's log, its standard error. They may say why the
# worker ended.
_LOG_TAIL_BYTES = 4096
# Maximum number of starts of a worker: one that dies at every prompt must not load its model for
# each prompt.
_MAX_STARTS = 3
_ALL = "all"


@dataclass(frozen=True)
class PeerSpec:
    """A decoding method of another engine."""

    name: str  # name of the peer, as in ``--peer NAME``
    engine: str
    variant: str  # decoding method of the engine; "" is plain decoding
    reads_gguf: bool  # True: the engine reads GGUF files; False: folders with safetensors files


# Decoding methods of each engine; "" is plain decoding. Those of llama-server are its --spec-type.
_VARIANTS = {
    "transformers": ("", "prompt_lookup"),
    "openvino": ("", "prompt_lookup"),
    "llama_cpp": ("", "prompt_lookup"),
    "llama_server": (
        "",
        "ngram-simple",
        "ngram-map-k",
        "ngram-map-k4v",
        "ngram-mod",
        "ngram-cache",
    ),
}
PEERS = {
    spec.name: spec
    for engine, variants in _VARIANTS.items()
    for spec in (
        PeerSpec(
            "_".join(filter(None, [engine, variant.replace("-", "_")])),
            engine,
            variant,
            reads_gguf=engine != "transformers",
        )
        for variant in variants
    )
}


def choose_peers(names: list[str], models: list[Path]) -> tuple[PeerSpec, ...]:
    """Return the peers with these names, without duplicates.

    The name ``all`` stands for every peer that reads the format of ``models[0]``. Raises
    OptionError if a peer is unknown, or cannot read a model.
    """
    chosen: dict[str, PeerSpec] = {}
    gguf = [model.suffix.lower() == ".gguf" for model in models]
    for name in names:
        if name == _ALL:
            chosen |= {name: spec for name, spec in PEERS.items() if spec.reads_gguf == gguf[0]}
        elif name in PEERS:
            chosen[name] = PEERS[name]
        else:
            refuse_choice("peer", name, (_ALL, *PEERS))
    formats = "a folder with safetensors files", "a GGUF file"
    for name, spec in chosen.items():
        for model, is_gguf in zip(models, gguf, strict=True):
            if is_gguf != spec.reads_gguf:
                wanted = formats[spec.reads_gguf]
                has = formats[is_gguf]
                msg = (
                    f"peer {name}: expected {wanted} as --model, found {has}, {model}; give the "
                    "model in this format"
                )
                raise OptionError(msg)
    return tuple(chosen.values())


class PeerError(PronkError):
    """Failure of a peer: not installed, not supported, or ended. The message is one line."""


class Peer:
    """A worker process that decodes with one method of an engine.

    ``python`` is the interpreter that has the engine's packages (default: that of this process).
    :class:`WorkerConfig` describes ``dtype`` and ``threads``.
    """

    _timeout = 300.0  # maximum seconds of a call of generate(); load() may take ten times as long

    def __init__(
        self, spec: PeerSpec, model: Path, *, dtype: str, threads: int, python: str | None = None
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self._config = WorkerConfig(
            spec.engine, spec.variant, str(model.absolute()), dtype, threads
        )
        self._python = python or sys.executable
        self._process: subprocess.Popen[bytes] | None = None
        self._num_starts = 0

    def load(self) -> dict[str, str]:
        """Load the model, in a new worker process unless one is running.

        Returns versions and settings by name. Raises PeerError if a package is missing, the model
        is not supported, or the engine fails.
        """
        if self._process is None:
            self._start()
        return self._ask("load", asdict(self._config), 10 * self._timeout)

    def _start(self) -> None:
        if self._num_starts >= _MAX_STARTS:
            msg = (
                f"{self.name}: expected a worker that stays alive, found {_MAX_STARTS} that ended; "
                "measure without it"
            )
            raise PeerError(msg)
        self._num_starts += 1
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        command = self._command()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - no shell, no words of a request
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=_environment(self._config.threads),
                # Ctrl-C then interrupts only this process, which closes its workers.
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            msg = f"{self.name}: cannot start {command[0]}: {error.strerror}"
            raise PeerError(msg) from error
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._reader = threading.Thread(
            target=_read_lines, args=(self._process.stdout, self._lines), daemon=True
        )
        self._reader.start()

    def generate(self, request: PeerRequest) -> PeerResult:
        """Continue one prompt from an empty KV cache.

        A worker that died or timed out before is started again, at most twice. Raises PeerError if
        the engine fails, dies, times out or returns a wrong number of tokens.
        """
        if self._process is None:
            self.load()
        result = PeerResult(**self._ask("generate", asdict(request), self._timeout))
        stop_ids = () if request.ignore_eos else request.stop_token_ids
        last_index = next(
            (i for i, token in enumerate(result.token_ids) if token in stop_ids),
            request.max_tokens - 1,
        )
        if len(result.token_ids) != last_index + 1:
            refuse(
                self.name,
                f"expected {last_index + 1} tokens, found {len(result.token_ids)}",
                PeerError,
            )
        return result

    def close(self) -> None:
        """Kill the worker and its child processes, and free its log; a second call does nothing."""
        process = self._process
        self._process = None
        if process is None:
            return
        # While ``returncode`` is None nothing has waited for the process, so the system cannot have
        # reused its id.
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if hasattr(os, "killpg"):
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.kill()
        process.wait()
        self._reader.join(timeout=5)
        for stream in (process.stdin, process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _command(self) -> list[str]:
        return [self._python, str(Path(__file__).with_name("worker.py"))]

    def _ask(self, op: str, arguments: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send the request ``op`` with ``arguments``, and return the worker's answer.

        Raises PeerError without an answer in ``timeout`` seconds, or if the answer is an error. The
        worker stays open only if the engine reports an error of a single prompt.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        # A worker that has ended is detected below, where its answer is read.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        answer: Any = None
        try:
            line = self._lines.get(timeout=timeout)
            with contextlib.suppress(ValueError):
                answer = json.loads(line)
            reason = f"expected a JSON answer to {op}, found {line[:60]!r}"
            if not line:
                reason = f"the worker died during {op}: {self._describe_end(self._process)}"
        except queue.Empty:
            reason = f"no answer to {op} within {timeout:g} s"
        if isinstance(answer, dict) and isinstance(answer.get("ok"), dict):
            return dict(answer["ok"])
        reports = isinstance(answer, dict) and isinstance(answer.get("error"), str)
        if reports:
            missing = answer.get("missing")
            reason = answer["error"]
            if missing:
                reason = f"{missing} is not installed; {install_extra('peers')}"
        if op == "load" or not reports:
            self.close()
        msg = f"{self.name}: {reason}"
        raise PeerError(msg)

    def _describe_end(self, process: subprocess.Popen[bytes]) -> str:
        """Return the exit status or signal of the ended worker, and the last line of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        code = process.returncode
        cause = f"exit status {code}"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                cause = signal.Signals(-code).name
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _LOG_TAIL_BYTES))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"{cause}, {lines[-1].strip()[:200]}" if lines else cause


def _environment(threads: int) -> dict[str, str]:
    """Return a worker's environment variables: no network, no Python paths of this interpreter."""
    environment = dict(os.environ)
    for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
        environment.pop(name, None)
    # The model is local: libraries must not look for it in the network.
    environment["HF_HUB_OFFLINE"] = "1"
    environment["TRANSFORMERS_OFFLINE"] = "1"
    environment["TOKENIZERS_PARALLELISM"] = "false"
    environment["OMP_NUM_THREADS"] = str(threads)
    environment["PYTHONIOENCODING"] = "utf-8"
    return environment


def _read_lines(stream: IO[bytes], lines: queue.Queue[bytes]) -> None:
    """Put each line of ``stream`` into ``lines``, then ``b""`` at its end.

    Runs in its own thread: reading from a pipe has no timeout, reading from a queue has one.
    """
    with contextlib.suppress(ValueError):  # raised if close() closes the stream during the loop
        for line in stream:
            lines.put(line)
    lines.put(b"")
