"""Drafters side by side on real text: tokens/s, S, acceptance, and whether the tokens are those of plain decoding.

    python benchmarks/drafting.py                      # the bundled model
    python benchmarks/drafting.py FOLDER --rounds 5

Drafters are interleaved prompt by prompt, after a warm-up; times are medians over rounds and speeds are ratios to plain
decoding of the same prompt in the same round. Greedy output of small models repeats itself, which flatters whoever
copies, so the share of repeated 4-grams and figures at temperature 0.8 stand beside it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from pronk import LLM, SamplingParams

DRAFTERS = ("autoregressive", "prompt_lookup", "prompt_lookup(num_tokens=15, num_chains=4)")
CONSOLE = Console(stderr=True)


def repeated(tokens: list[int]) -> float:
    """Share of a text's 4-grams that have occurred in it before."""
    grams = Counter(tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3))
    total = sum(grams.values())
    return 1 - len(grams) / total if total else 0.0


def measure(llm: LLM, prompts: list[dict[str, str]], params: SamplingParams, rounds: int) -> list[dict[str, Any]]:
    """One row per task and drafter."""
    rows: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for prompt in track(prompts, console=CONSOLE, description=f"temperature {params.temperature}"):
        speeds: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds + 1):
            done = {name: llm.generate(prompt["prompt"], params, drafter=name) for name in DRAFTERS}
            for name, out in done.items():
                speeds[name].append(out.stats.tokens_per_second)
        plain = done[DRAFTERS[0]]
        for name, out in done.items():
            ratios = [fast / slow for fast, slow in zip(speeds[name][1:], speeds[DRAFTERS[0]][1:], strict=True)]
            rows[prompt["task"], name].append(
                {
                    "tokens_per_second": statistics.median(speeds[name][1:]),
                    "speedup": statistics.median(ratios),
                    "S": out.stats.step_compression,
                    "alpha": out.stats.acceptance[0] if out.stats.acceptance else 0.0,
                    "same_tokens": float(out.token_ids == plain.token_ids),
                    "repeated_4grams": repeated(out.token_ids),
                }
            )
    means = []
    for (task, name), values in rows.items():
        mean = {key: statistics.mean(value[key] for value in values) for key in values[0]}
        means.append({"task": task, "drafter": name, "temperature": params.temperature, **mean})
    return means


def show(rows: list[dict[str, Any]]) -> None:
    """The table that people read."""
    table = Table()
    for column in rows[0]:
        table.add_column(column, justify="right" if isinstance(rows[0][column], float) else "left")
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    CONSOLE.print(table)


def main() -> None:
    """Read the arguments, measure, show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model folder; the bundled model by default")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).with_name("prompts.jsonl"))
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    prompts = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    llm = LLM(args.model, threads=args.threads)
    rows: list[dict[str, Any]] = []
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=args.max_tokens, temperature=temperature, seed=7, ignore_eos=True)
        rows += measure(llm, prompts, params, args.rounds)
    show(rows)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
