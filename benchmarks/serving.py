"""Our server beside others, under load: plain, guessing, `transformers serve`, llama-cpp-python's.

    pronk inflate big --layers 24
    pip install 'transformers[serving]' accelerate 'llama-cpp-python[server]'
    python benchmarks/serving.py --model big --markdown docs/report-serving.md

All of them hold the same weights in bfloat16, on the same threads, and wait while another is asked: one client, the
same prompts, in turns within each level and round. Closed loops of 1 to 32 clients come first, then open ones, at
shares of the requests a second that plain decoding reached with the most clients.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import httpx

from pronk.bench.peers.engines.checkpoint import ArrayCheckpoint
from pronk.bench.peers.engines.gguf_file import write_gguf as write_tensors

BIN = Path(sys.executable).parent
PORTS = {"pronk": 8300, "llama": 8301, "transformers": 8302}
PLAIN, GUESSING = "plain", "guessing"
OPEN = 8  # requests of an open loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder of pronk inflate")
    parser.add_argument("--drafter", default="", help="who guesses; by default the server's own choice")
    parser.add_argument("--levels", default="1,2,4,8,16,32")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--asks", type=int, default=1, help="requests of each client of a closed loop, in a row")
    parser.add_argument("--shares", default="0.4,0.8", help="of what plain decoding can do, that open loops ask for")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--without", default="", help="peers to leave out: llama, transformers")
    parser.add_argument("--markdown", type=Path, help="where the tables go")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        names = [name for name in PORTS if name not in options.without.split(",")]
        for name in names:
            stack.enter_context(served(name, options.model.resolve(), options.threads, folder))
        servers = [PLAIN, GUESSING, *(name for name in names if name != "pronk")]
        lines, most = header(servers), 0.0
        print(lines, flush=True)
        for level in map(int, options.levels.split(",")):
            count = max(2, level) * options.asks
            found = bench(options, servers, folder, ["--concurrency", str(level)], count)
            lines, most = lines + row(found, servers), found[PLAIN]["requests_per_second"]["median"]
            print(row(found, servers), end="", flush=True)
        for share in filter(None, options.shares.split(",")):
            found = bench(options, servers, folder, ["--rate", f"{most * float(share):.3f}"], OPEN)
            lines += row(found, servers)
            print(row(found, servers), end="", flush=True)
    if options.markdown:
        options.markdown.write_text(lines)


@contextmanager
def served(name: str, model: Path, threads: int, folder: Path) -> Iterator[None]:
    """A server, from its first answer on."""
    port = str(PORTS[name])
    # transformers lists what is in a cache of downloads, which has to be there.
    hub = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(folder)}
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **hub}
    command = {
        "pronk": [BIN / "pronk", "serve", "--model", str(model), "--threads", str(threads)],
        "llama": [sys.executable, "-m", "llama_cpp.server", "--model", str(folder / "model.gguf"), "--n_ctx", "8192"],
        "transformers": [BIN / "transformers", "serve", str(model), "--continuous-batching"],
    }[name] + ["--port", port]
    if name == "llama":
        write_gguf(model, folder / "model.gguf")
        command += ["--n_threads", str(threads), "--n_threads_batch", str(threads), "--interrupt_requests", "False"]
    if name == "transformers":
        command += ["--device", "cpu", "--dtype", "bfloat16", "--model-timeout", "100000"]
        command += ["--cb-num-blocks", "512", "--cb-max-batch-tokens", "512"]
    log = (folder / f"{name}.log").open("wb")
    process = subprocess.Popen([*map(str, command)], env=environment, stdout=log, stderr=log)  # noqa: S603 - ours
    try:
        while not answers(f"http://127.0.0.1:{port}"):
            if process.poll() is not None:
                sys.exit(f"{name}: expected a server, found one that has ended:\n{Path(log.name).read_text()[-2000:]}")
            time.sleep(0.5)
        yield
    finally:
        process.kill()
        process.wait()
        log.close()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def write_gguf(model: Path, path: Path) -> None:
    """The same weights for llama.cpp, with the tokenizer, which its server needs."""
    described = json.loads((model / "tokenizer.json").read_text())
    names = {number: text for text, number in described["model"]["vocab"].items()}
    special = {each["id"]: each["content"] for each in described["added_tokens"]}
    size = json.loads((model / "config.json").read_text())["vocab_size"]

    class Writer(gguf.GGUFWriter):
        def add_tokenizer_model(self, model: str) -> None:  # noqa: ARG002 - the peers' own file has no tokenizer
            super().add_tokenizer_model("gpt2")
            self.add_tokenizer_pre("gpt-2")
            self.add_token_list([special.get(i, names.get(i, f"<unused {i}>")) for i in range(size)])
            self.add_token_types([3 if i in special else 1 for i in range(size)])
            merges = described["model"]["merges"]
            self.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
            self.add_add_bos_token(False)

    with patch.object(gguf, "GGUFWriter", Writer):
        write_tensors(ArrayCheckpoint(model), path, "bfloat16")


def bench(
    options: argparse.Namespace, servers: list[str], folder: Path, level: list[str], requests: int
) -> dict[str, Any]:
    """One level, by `pronk bench --server`: the figures of each server."""
    where = folder / "load.json"
    command = [str(BIN / "pronk"), "bench", "--endpoint", "completions", "--ignore-eos", "--unique"]
    for name in servers:
        command += ["--server", f"{name}=http://127.0.0.1:{PORTS.get(name, PORTS['pronk'])}"]
    if "transformers" in servers:
        command += ["--server-model", f"transformers={options.model.resolve()}"]
    command += ["--extra-body", PLAIN + '={"drafter": "autoregressive"}']
    if options.drafter:
        command += ["--extra-body", f"{GUESSING}={json.dumps({'drafter': options.drafter})}"]
    command += ["--max-tokens", str(options.tokens), "--repeats", str(options.rounds), "--requests", str(requests)]
    command += [*level, "--temperature", "0", "--timeout", "3600", "--warmup", "1", "--json", str(where)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603 - our own
    return {row["server"]: row for row in json.loads(where.read_text())["figures"]}


def header(servers: list[str]) -> str:
    return (
        "| load | " + " | ".join(f"{name}: tok/s, × plain, TTFT" for name in servers) + " | S |\n"
        "|---|" + "---|" * (len(servers) + 1) + "\n"
    )


def row(found: dict[str, Any], servers: list[str]) -> str:
    """Of a table: throughput, over that of plain decoding, the median time to the first text; of guessing also S."""
    level = found[PLAIN]["level"]
    load = f"{level['value']:g} " + ("clients" if level["loop"] == "closed" else "requests/s")
    return f"| {load} | " + " | ".join(cell(found[name]) for name in servers) + f" | {found[GUESSING]['S']:.2f} |\n"


def cell(row: dict[str, Any]) -> str:
    if not row["answered"] or row["ratio"] is None:
        return "–"
    speed, ratio = row["tokens_per_second"], row["ratio"]
    failed = "" if row["answered"] == row["sent"] else f", {row['answered']} of {row['sent']} answered"
    return f"{speed['median']:.1f}, {ratio['median']:.2f} ± {ratio['spread']:.2f}, {row['ttft']['p50']:.1f} s{failed}"


if __name__ == "__main__":
    main()
