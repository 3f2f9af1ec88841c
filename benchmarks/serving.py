"""Servers under load, measured by GuideLLM: pronk with and without speculation, and other servers.

    pip install guidellm
    python benchmarks/inflate.py big --layers 24
    python benchmarks/serving.py --model big
    python benchmarks/serving.py --model big --health
    python benchmarks/serving.py --model big --server llama=http://127.0.0.1:8080

Each measurement starts a `pronk serve` of its own, so that nothing is cached. `plain` requests the
drafter `autoregressive`, `speculative` the server's default or `--drafter`. Other servers must run
already, with the same model and threads; an idle server costs nothing. A level is a closed loop:
each client sends its next request when the last one is answered. There are two sets of prompts:
`random` words without repetition, and `edit`, bundled prompts with code to repair, whose answers
repeat the prompt.

With `--health`, the delays of `/health` beside each of the most expensive bodies of
`benchmarks/attack.py` are measured instead, without GuideLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from statistics import median
from typing import Any

from pronk.lab.bench.prompts import builtin_prompts

PORT = 8300
PLAIN = "plain"
SPECULATIVE = "speculative"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        help="folder of the checkpoint, for pronk and the tokenizer",
    )
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="another server; repeatable",
    )
    parser.add_argument(
        "--drafter", help="drafter of the speculative column; default: the server's"
    )
    parser.add_argument("--levels", default="1,2,4,8,16", help="numbers of clients")
    parser.add_argument(
        "--requests", type=int, default=2, help="requests per client, after one that is not counted"
    )
    parser.add_argument("--prompt-tokens", type=int, default=128, help="length of a random prompt")
    parser.add_argument("--tokens", type=int, default=32, help="length of each answer")
    parser.add_argument(
        "--rounds", type=int, default=1, help="rounds over all servers; the table has their medians"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of pronk serve")
    parser.add_argument(
        "--guidellm", default="guidellm", help="the guidellm command, if it is not on PATH"
    )
    parser.add_argument(
        "--health", action="store_true", help="measure /health beside the most expensive bodies"
    )
    options = parser.parse_args()
    if options.health:
        with (
            tempfile.TemporaryDirectory() as folder,
            pronk_serve(options.model, options.threads, Path(folder) / "log"),
        ):
            print(health_table(PORT))
        return
    if shutil.which(options.guidellm) is None:
        sys.exit(f"expected the command {options.guidellm}, found none; pip install guidellm")
    print(header([PLAIN, SPECULATIVE, *(each.partition("=")[0] for each in options.server)]))
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("random", "edit"):
            for level in map(int, options.levels.split(",")):
                loads = [EngineLoad(kind, level, turn) for turn in range(options.rounds)]
                rounds = [measure_all(options, load, Path(folder)) for load in loads]
                print(row(f"{kind}, {level}", rounds), flush=True)


@dataclass(frozen=True)
class EngineLoad:
    """Load of a measurement."""

    kind: str  # set of prompts: random or edit
    clients: int  # number of clients
    turn: int  # number of the round

    def data(self, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
        """Return GuideLLM's options for the prompts, which differ between levels and rounds."""
        if self.kind == "random":
            return {
                "kind": "synthetic_text",
                "prompt_tokens": options.prompt_tokens,
                "output_tokens": options.tokens,
            }
        texts = [prompt.text for prompt in builtin_prompts() if prompt.task == "edit"]
        path = folder / "edit.jsonl"
        with path.open("w") as file:
            for number in range((1 + options.requests) * self.clients):
                label = f"{self.clients}.{self.turn}.{number}"
                prompt = f"{label}\n{texts[number % len(texts)]}"
                row = {"prompt": prompt, "output_tokens_count": options.tokens}
                file.write(json.dumps(row) + "\n")
        return {"kind": "json_file", "path": str(path)}


def measure_all(
    options: argparse.Namespace, load: EngineLoad, folder: Path
) -> dict[str, dict[str, Any]]:
    """Return GuideLLM's metrics of each server, by name."""
    found = {}
    bodies = {PLAIN: {"drafter": "autoregressive"}, SPECULATIVE: {"drafter": options.drafter}}
    for name, body in bodies.items():
        with pronk_serve(options.model, options.threads, folder / "log"):
            found[name] = measure(options, load, folder, f"http://127.0.0.1:{PORT}", body)
    for server in options.server:
        name, _, url = server.partition("=")
        found[name] = measure(options, load, folder, url, {})
    return found


@contextmanager
def pronk_serve(model: Path, threads: int, log: Path) -> Iterator[None]:
    """Run `pronk serve` within the ``with`` block, which begins when the server is ready."""
    command = [sys.executable, "-m", "pronk", "serve", "--model", str(model)]
    command += ["--threads", str(threads), "--port", str(PORT)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)  # noqa: S603 - our own
        try:
            while not is_ready():
                if process.poll() is not None:
                    end = log.read_text()[-2000:]
                    sys.exit(f"expected pronk serve to run, found that it ended:\n{end}")
                time.sleep(0.5)
            yield
        finally:
            process.terminate()
            process.wait()


def health_table(port: int) -> str:
    """Return a Markdown table of the delays of /health while the server reads expensive bodies."""
    from attack import Probe, answer_to_body, worst_bodies  # noqa: PLC0415 - beside this script

    lines = ["| body | status | seconds | /health: median, longest |", "|---|---|---|---|"]
    for route, body in worst_bodies():
        probe = Probe(port)
        thread = threading.Thread(target=probe.ask_health)
        thread.start()
        start = time.perf_counter()
        status = answer_to_body(port, route, body)
        seconds = time.perf_counter() - start
        probe.stopped.set()
        thread.join()
        name = f"`{route}`, {len(body) >> 10} KiB: `{body[:40].decode()}…`"
        delays = probe.delays or [float("nan")]  # the body was answered at once
        health = f"{1000 * median(delays):.0f} ms, {1000 * max(delays):.0f} ms"
        lines.append(f"| {name} | {status} | {seconds:.2f} | {health} |")
    return "\n".join(lines)


def is_ready() -> bool:
    """Return whether the server accepts requests."""
    with suppress(OSError, HTTPException):
        connection = HTTPConnection("127.0.0.1", PORT, timeout=5)
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    return False


def measure(
    options: argparse.Namespace, load: EngineLoad, folder: Path, url: str, body: dict[str, Any]
) -> dict[str, Any]:
    """Run GuideLLM against a server; return the metrics of its report."""
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    extras = {"body": {"temperature": 0.0, **body}}
    arguments = {
        "backend": {
            "kind": "openai_http",
            "target": url,
            "request_format": "/v1/completions",
            "extras": extras,
        },
        "tokenizer": {"kind": "hf_auto", "model": str(options.model.resolve())},
        "data": load.data(options, folder),
        "profile": {"kind": "concurrent", "streams": load.clients, "warmup": load.clients},
        "constraint": {"kind": "max_requests", "count": (1 + options.requests) * load.clients},
        "seed": {"kind": "static", "value": 1000 * load.turn + load.clients},
        "output": {"kind": "json", "path": str(report)},
    }
    command = [options.guidellm, "run", "--disable-console"]
    for name, value in arguments.items():
        command += [f"--{name}", json.dumps(value)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}  # the tokenizer is in a folder
    done = subprocess.run(  # noqa: S603 - our own command
        command, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode or not report.exists():
        found = f"exit code {done.returncode}:\n{done.stderr[-2000:]}"
        sys.exit(f"expected a report of guidellm, found {found}")
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    metrics: dict[str, Any] = benchmark["metrics"]
    return metrics


def header(servers: list[str]) -> str:
    """Return the head of the table: TTFT is the time to first token, ITL inter-token latency."""
    columns = " | ".join(f"{server}: tok/s, × plain, TTFT, ITL" for server in servers)
    return f"| prompts, clients | {columns} |\n|---|{'---|' * len(servers)}"


def row(name: str, rounds: list[dict[str, dict[str, Any]]]) -> str:
    """Return a row of the table, with a cell for each server."""
    cells = [cell([(each[server], each[PLAIN]) for each in rounds]) for server in rounds[0]]
    return f"| {name} | {' | '.join(cells)} |"


def cell(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """Return a cell of the table, with medians over rounds.

    The cell has the output tokens per second of all clients, their ratio to those of plain
    decoding, and the medians over requests of the time to first token and the inter-token latency.

    Args:
        pairs: metrics of a server and of plain decoding, per round.
    """
    total = sum(own["request_totals"]["total"] for own, _ in pairs)
    answered = sum(own["request_totals"]["successful"] for own, _ in pairs)
    failed = "" if answered == total else f", {total - answered} of {total} failed"
    speeds = [(speed(own), speed(plain)) for own, plain in pairs]
    if not all(own and plain for own, plain in speeds):
        return f"–{failed}"
    own_metrics = [own for own, _ in pairs]
    ttft = median(own["time_to_first_token_ms"]["successful"]["median"] for own in own_metrics)
    itl = median(own["inter_token_latency_ms"]["successful"]["median"] for own in own_metrics)
    rate = median(own for own, _ in speeds)
    ratio = median(own / plain for own, plain in speeds)
    return f"{rate:.1f}, {ratio:.2f}, {ttft:.0f} ms, {itl:.1f} ms{failed}"


def speed(metrics: dict[str, Any]) -> float:
    """Return the mean number of output tokens per second in GuideLLM's metrics."""
    return float(metrics["output_tokens_per_second"]["successful"]["mean"])


if __name__ == "__main__":
    main()
