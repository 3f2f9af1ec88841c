"""llama.cpp through its own server, ``llama-server``: plain decoding and drafting from n-grams.

The program is found on PATH.
"""

from __future__ import annotations

import atexit
import json
import shutil
import socket
import subprocess
import time
from http.client import HTTPConnection
from time import perf_counter
from typing import Any

from .contract import PeerRequest, PeerResult, WorkerConfig
from .memory import peak_memory, reset_peak_memory

_INITIAL_CONTEXT = 1024  # tokens; a longer request starts the server again, with a larger context
_DRAFTED = 64  # more draft tokens than any of these types proposes in a step
_START_SECONDS = 600.0


class LlamaServer:
    """The engine llama.cpp, asked through HTTP on the loopback device with token ids."""

    def load(self, config: WorkerConfig) -> dict[str, str]:
        """Start the server with a small context, which grows on demand."""
        self.config = config
        self.process: subprocess.Popen[bytes] | None = None
        program = shutil.which("llama-server")
        if program is None:
            msg = "expected the command llama-server, found none; add its folder to PATH"
            raise FileNotFoundError(msg)
        self.program = program
        atexit.register(self.close)
        self._open(_INITIAL_CONTEXT)
        printed = subprocess.run(  # noqa: S603 - the user's own program
            [program, "--version"], capture_output=True, text=True, check=False
        )
        version = (printed.stdout + printed.stderr).strip().partition("\n")[0]
        version = version.removeprefix("version: ")
        notes = {"llama-server": version, "flash_attention": "auto"}
        if config.variant:
            notes["speculation"] = config.variant
        return notes

    def generate(self, request: PeerRequest) -> PeerResult:
        """Continue one prompt from an empty KV cache."""
        needed = len(request.prompt) + request.max_tokens + _DRAFTED + 1
        if needed > self.context:
            self._open(1 << (needed - 1).bit_length())
        body = {
            "prompt": request.prompt,
            "n_predict": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "samplers": ["temperature"],
            "ignore_eos": request.ignore_eos,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
        }
        stops = frozenset(() if request.ignore_eos else request.stop_token_ids)
        tokens: list[int] = []
        ttft = None
        assert self.process is not None
        reset_peak_memory(self.process.pid)
        began = perf_counter()
        connection = HTTPConnection("127.0.0.1", self.port)
        connection.request(
            "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
        )
        reply = connection.getresponse()
        if reply.status != 200:
            raise RuntimeError(reply.read().decode(errors="replace"))
        for line in reply:
            if not line.startswith(b"data:"):
                continue
            event: dict[str, Any] = json.loads(line[5:])
            found = event.get("tokens") or []
            if found and ttft is None:
                ttft = perf_counter() - began
            tokens += found
            if event.get("stop"):
                break
        seconds = perf_counter() - began
        connection.close()
        end = next((place for place, token in enumerate(tokens) if token in stops), len(tokens))
        peak = peak_memory(self.process.pid) or 0
        return PeerResult(tokens[: end + 1], seconds, ttft, peak)

    def close(self) -> None:
        """Stop the server."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.process = None

    def _open(self, context: int) -> None:
        self.close()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.context = context
        threads = str(self.config.threads)
        command = [self.program, "--model", self.config.model, "--ctx-size", str(context)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--parallel", "1"]
        command += ["--threads", threads, "--threads-batch", threads, "--no-webui"]
        if self.config.variant:
            command += ["--spec-type", self.config.variant]
        self.process = subprocess.Popen(  # noqa: S603 - the user's own program
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + _START_SECONDS
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                msg = f"expected a server that answers, found none: {' '.join(command)}"
                raise RuntimeError(msg)
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self.port)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()
