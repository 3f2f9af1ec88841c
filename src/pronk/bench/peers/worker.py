"""The worker process of one peer: ``python worker.py``, JSON lines on standard input and output.

It is started by its path rather than as a module of pronk, so that it also runs with an interpreter that has the
peer's packages but not pronk. Each request is one line ``{"op": "prepare" | "load" | "generate", ...}``; each
answer is one line, ``{"ok": {...}}`` or ``{"error": ..., "missing": package or null}``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING or __package__:
    from pronk.bench.peers.engines.contract import PeerEngine, PeerRequest, Unsupported, WorkerConfig
else:
    sys.path[0] = str(Path(__file__).resolve().parent)
    from engines.contract import PeerEngine, PeerRequest, Unsupported, WorkerConfig

__all__: list[str] = []

_HOME = f"{__package__}.engines" if __package__ else "engines"
# The file and the class of each engine; imported when one is asked for, because each needs its own packages.
_ENGINES = {
    "transformers": ("hf", "HuggingFace"),
    "openvino": ("ov", "OpenVino"),
    "llama_cpp": ("llamacpp", "LlamaCpp"),
}


def main() -> None:
    """Answer requests until standard input ends, which it also does when the parent dies."""
    channel = _private_stdout()
    worker = _Worker()
    for line in sys.stdin:
        document = json.loads(line)
        try:
            answer: dict[str, Any] = {"ok": worker.answer(document.pop("op"), document)}
        except Exception as error:  # noqa: BLE001 - whatever a library raises becomes one line for the parent
            answer = _failure(error)
        channel.write(json.dumps(answer) + "\n")
        channel.flush()


class _Worker:
    def __init__(self) -> None:
        self.engine: PeerEngine | None = None

    def answer(self, op: str, document: dict[str, Any]) -> dict[str, Any]:
        if op == "generate":
            if self.engine is None:
                msg = "nothing is loaded"
                raise Unsupported(msg)
            # So that the collector has no reason to run inside the measured time.
            gc.collect()
            _reset_peak()
            return asdict(self.engine.generate(PeerRequest(**document))) | {"peak_memory": _peak_memory()}
        config = WorkerConfig.from_json(document)
        file, name = _ENGINES[config.engine]
        engine: PeerEngine = getattr(importlib.import_module(f"{_HOME}.{file}"), name)()
        if op == "prepare":
            engine.prepare(config)
            return {}
        loaded = engine.load(config)
        self.engine = engine
        return asdict(loaded)


def _private_stdout() -> TextIO:
    """The protocol's own copy of standard output; what libraries print goes to standard error instead."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def _failure(error: Exception) -> dict[str, Any]:
    # A file of the library's own that is not found is a broken installation, not a missing package.
    missing = error.name.partition(".")[0] if isinstance(error, ModuleNotFoundError) and error.name else None
    text = " ".join(str(error).split()) or type(error).__name__
    kind = "" if isinstance(error, Unsupported) else f"{type(error).__name__}: "
    return {"error": f"{kind}{text}"[:300], "missing": missing}


def _reset_peak() -> None:
    """Loading may take more than generating does; where the system cannot forget it, it stays in."""
    with contextlib.suppress(OSError):
        # 5 sets the process's peak to what it has resident now (proc(5), clear_refs).
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak_memory() -> int:
    """In bytes. ``ru_maxrss`` would include what the parent had when it forked; the kernel's own mark does not."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ModuleNotFoundError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()
