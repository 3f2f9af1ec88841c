"""The worker process of one peer: ``python worker.py``, JSON lines on standard input and output.

The process is started by the path of this file rather than as a module of pronk, so that it also
runs with an interpreter that has the peer's packages but not pronk. Each request is one line
``{"op": "load" | "generate", ...}``; each answer is one line, ``{"ok": {...}}`` or ``{"error": ...,
"missing": package or null}``.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from pronk.lab.bench.peers.engines.contract import PeerEngine, PeerRequest, WorkerConfig
    from pronk.lab.bench.peers.engines.memory import peak_memory, reset_peak_memory
else:
    sys.path[0] = str(Path(__file__).resolve().parent)
    from engines.contract import PeerEngine, PeerRequest, WorkerConfig
    from engines.memory import peak_memory, reset_peak_memory

_ENGINE_PACKAGE = f"{__package__}.engines" if __package__ else "engines"
# Module and class of each engine. Only the requested module is imported, because each one needs
# other packages.
_ENGINES = {
    "transformers": ("hf", "HuggingFace"),
    "openvino": ("ov", "OpenVino"),
    "llama_cpp": ("llamacpp", "LlamaCpp"),
    "llama_server": ("llamaserver", "LlamaServer"),
}


def main() -> None:
    """Answer requests until standard input ends, at the latest with the parent process."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")  # answers go to a copy of standard output
    os.dup2(2, 1)  # what libraries print goes to standard error
    for line in sys.stdin:
        document = json.loads(line)
        try:
            if document.pop("op") == "load":
                config = WorkerConfig(**document)
                file, class_name = _ENGINES[config.engine]
                module = importlib.import_module(f"{_ENGINE_PACKAGE}.{file}")
                engine: PeerEngine = getattr(module, class_name)()
                answer: dict[str, Any] = {"ok": engine.load(config)}
            else:  # "generate", which the parent sends only after a "load" without an error
                gc.collect()  # now rather than during the measured time
                reset_peak_memory()
                result = engine.generate(PeerRequest(**document))
                peak = result.peak_memory or peak_memory() or 0
                answer = {"ok": asdict(result) | {"peak_memory": peak}}
        except Exception as error:  # noqa: BLE001 - any exception of a library becomes one line for the parent
            missing = None
            if isinstance(error, ModuleNotFoundError) and error.name:
                missing = error.name.partition(".")[0]
            text = " ".join(str(error).split()) or type(error).__name__
            answer = {"error": f"{type(error).__name__}: {text}"[:300], "missing": missing}
        channel.write(json.dumps(answer) + "\n")
        channel.flush()


if __name__ == "__main__":
    main()
