"""Plain decoding, verification and the engine's own time, against the memory floor and transformers, in one run.

    python benchmarks/checkpoint.py /tmp/pronk-1b --tokenizer src/pronk/bundled/pronk-tiny
    python benchmarks/speed.py /tmp/pronk-1b

Everything is interleaved round by round and reported as medians, and as ratios: this is meant for noisy machines.
The floor is the time to read the weights and the keys and values of a step once, at the bandwidth measured in the
same round. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from pronk import LLM, Drafter, SamplingParams, TokenTree, __version__
from pronk.drafters import DraftContext, Outcome

CONSOLE = Console(stderr=True)


@dataclass(frozen=True)
class Chain(Drafter[None]):
    """Proposes a chain of ``length`` tokens that are wrong, to time the verification of ``length + 1`` rows."""

    name = "chain"
    length: int = 7

    def start(self, prompt: Sequence[int]) -> None:
        """No state."""

    def propose(self, contexts: Sequence[DraftContext[None]]) -> list[TokenTree]:
        """The last token again and again."""
        return [TokenTree.chain([context.tokens[-1]] * (self.length + 1)) for context in contexts]

    def observe(self, outcomes: Sequence[Outcome[None]]) -> None:
        """Nothing to learn."""


def step_bytes(llm: LLM, context: int) -> int:
    """Bytes that a decoding step reads: every weight but the embedding's other rows, and the keys and values."""
    c = llm.config
    size = llm.engine.runner.dtype.itemsize
    layer = c.hidden_size * (sum(c.qkv_sizes) + c.num_heads * c.head_dim + c.intermediate_size * (3 if c.gated else 2))
    weights = c.num_layers * layer + c.hidden_size * c.vocab_size
    return weights * size + c.kv_bytes_per_token(size) * context


def measure_bandwidth(buffer: torch.Tensor) -> float:
    """Bytes per second of a parallel reading sum, best of three."""
    best = 0.0
    for _ in range(3):
        began = perf_counter()
        buffer.sum()
        best = max(best, buffer.nbytes / (perf_counter() - began))
    return best


def time_pronk(llm: LLM, prompt: list[int], tokens: int, drafter: Drafter[None] | str) -> tuple[float, float]:
    """Seconds per decoding step, and of those the seconds outside the forward pass."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    first = llm.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True), drafter=drafter).stats
    stats = llm.generate(prompt, params, drafter=drafter).stats
    steps = stats.target_steps - 1
    total = stats.total_seconds - stats.ttft
    forward = stats.target_seconds - first.target_seconds
    return total / steps, max(0.0, total - forward) / steps


def time_transformers(model: torch.nn.Module, prompt: list[int], tokens: int) -> float:
    """Seconds per token of greedy generation after the first token."""
    ids = torch.tensor([prompt])
    seconds = []
    for count in (1, tokens):
        began = perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count
        )
        seconds.append(perf_counter() - began)
    return (seconds[1] - seconds[0]) / (tokens - 1)


def measure(args: argparse.Namespace) -> dict[str, object]:
    """All rounds; seconds as medians."""
    torch.set_num_threads(args.threads)
    llm = LLM(args.model, drafter="autoregressive", dtype=args.dtype)
    peer = AutoModelForCausalLM.from_pretrained(args.model, dtype=llm.engine.runner.dtype).eval()
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(llm.config.vocab_size // 8, (args.context,), generator=generator).tolist()
    buffer = torch.zeros(2**28, dtype=torch.float32)
    tasks: dict[str, Callable[[], object]] = {
        "bandwidth": lambda: measure_bandwidth(buffer),
        "pronk plain": lambda: time_pronk(llm, prompt, args.tokens, "autoregressive"),
        "transformers": lambda: time_transformers(peer, prompt, args.tokens),
        "pronk 8 rows": lambda: time_pronk(llm, prompt, args.tokens, Chain(7)),
        "pronk 16 rows": lambda: time_pronk(llm, prompt, args.tokens, Chain(15)),
    }
    results: dict[str, list[object]] = {name: [] for name in tasks}
    for number in range(args.rounds + 1):
        for name, task in tasks.items():
            with CONSOLE.status(f"round {number}/{args.rounds}: {name}"):
                value = task()
            # The first round warms up: pages, caches, thread pools.
            if number:
                results[name].append(value)
    return summarize(results, step_bytes(llm, args.context + args.tokens // 2), args)


def summarize(results: dict[str, list[object]], bytes_read: int, args: argparse.Namespace) -> dict[str, object]:
    """Medians of seconds, and ratios taken within each round before their median."""
    bandwidth = [float(value) for value in results["bandwidth"]]  # type: ignore[arg-type]
    floor = [bytes_read / value for value in bandwidth]
    plain = [value[0] for value in results["pronk plain"]]  # type: ignore[index]
    own = [value[1] for value in results["pronk plain"]]  # type: ignore[index]
    peer = [float(value) for value in results["transformers"]]  # type: ignore[arg-type]
    rows = {n: [value[0] for value in results[f"pronk {n} rows"]] for n in (8, 16)}  # type: ignore[index]

    def ratio(a: list[float], b: list[float]) -> float:
        return statistics.median(x / y for x, y in zip(a, b, strict=True))

    return {
        "bandwidth_gb_s": statistics.median(bandwidth) / 1e9,
        "floor_ms": statistics.median(floor) * 1e3,
        "plain_ms": statistics.median(plain) * 1e3,
        "transformers_ms": statistics.median(peer) * 1e3,
        "verify_8_ms": statistics.median(rows[8]) * 1e3,
        "verify_16_ms": statistics.median(rows[16]) * 1e3,
        "plain_over_floor": ratio(plain, floor),
        "speedup_over_transformers": ratio(peer, plain),
        "verify_8_over_1": ratio(rows[8], plain),
        "verify_16_over_1": ratio(rows[16], plain),
        "engine_share": ratio(own, plain),
        "model": Path(args.model).name,
        "context": args.context,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "threads": args.threads,
        "dtype": args.dtype,
        "versions": {"pronk": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "machine": platform.processor() or platform.machine(),
    }


def show(figures: dict[str, object]) -> None:
    """A table of what was measured beside what is promised."""
    table = Table(title=f"{figures['model']}, {figures['dtype']}, {figures['threads']} threads")
    for column in ("figure", "measured", "promise"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    promises = {
        "plain_over_floor": "≤ 1.30",
        "speedup_over_transformers": "≥ 1.50",
        "verify_8_over_1": "≤ 1.35",
        "engine_share": "≤ 0.05",
    }
    for name, value in figures.items():
        if isinstance(value, float):
            table.add_row(name, f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}", promises.get(name, ""))
    CONSOLE.print(table)


def main() -> None:
    """Read the arguments, measure, show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    figures = measure(parser.parse_args())
    show(figures)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
