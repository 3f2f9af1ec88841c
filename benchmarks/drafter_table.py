"""One table of every method for one real model: training, tokens per forward pass by task, speed.

    python benchmarks/drafter_table.py MODEL.gguf --prompts spec_bench.jsonl --heads RUNS --out results/drafters

``--heads`` is a folder with trained drafters, ``RUNS/KIND/export`` or ``RUNS/KIND``, for KIND in eagle3, mtp, medusa,
multi_token, kangaroo, glide and draft_model. All methods decode all prompts, interleaved, and must give the same
tokens. Times are those of ``priced.py``, unless ``--wall``; they leave out the first token.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from time import strftime
from typing import Any, NamedTuple

from policy import PLAIN, Prompt, Run, decode, measure, read_prompts, speed
from priced import PricedClock
from safetensors import safe_open

from pronk import LLM, SamplingParams
from pronk.bench.machine import describe_hardware

# Published speedups over plain decoding, with the models and GPUs of the papers.
PUBLISHED = {
    "lookahead": "1.5 to 2.3 (Fu et al. 2024)",
    "prompt_lookup": "2 to 4 where the prompt is repeated (Saxena 2023)",
    "suffix": "up to 5.3, agents (Oliaro et al. 2024)",
    "recycling": "about 2 (Luo et al. 2024)",
    "draft_model": "2 to 3 (Leviathan et al. 2023)",
    "kangaroo": "up to 1.7 (Liu et al. 2024)",
    "glide": "2.2 to 2.6 with CAPE (Du et al. 2024)",
    "medusa": "2.2, 2.3 to 3.6 with a trained target (Cai et al. 2024)",
    "multi_token": "up to 3 (Gloeckle et al. 2024)",
    "eagle3": "3.0 to 6.5 (Li et al. 2025)",
    "mtp": "1.8 (DeepSeek-V3, 2024)",
}
WITHOUT_MODEL = ("lookahead", "prompt_lookup", "recycling", "suffix(store_tokens=0)")


class Method(NamedTuple):
    """A row of the table."""

    name: str  # of the drafter
    spec: str
    folder: Path | None = None  # of the trained drafter

    @property
    def parameters(self) -> float:
        """Millions of trained parameters."""
        if self.folder is None:
            return 0.0
        total = 0
        for file in self.folder.glob("*.safetensors"):
            with safe_open(file, framework="np") as tensors:
                names = [name for name in tensors.keys() if name not in {"d2t", "t2d"}]  # noqa: SIM118
                total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
        return total / 1e6

    @property
    def hours(self) -> float:
        """Hours of training, from the card."""
        card = "" if self.folder is None else (self.folder / "README.md").read_text()
        found = re.search(r"([\d.]+) minutes on", card)
        return float(found[1]) / 60 if found else 0.0


def find_methods(heads: Path | None) -> list[Method]:
    """Return all methods; trained ones need a folder in ``heads``."""
    methods = [Method(spec.partition("(")[0], spec) for spec in WITHOUT_MODEL]
    for name in PUBLISHED:
        for folder in () if heads is None else (heads / name / "export", heads / name):
            if (folder / "README.md").is_file():
                methods.append(Method(name, f"{name}(model={str(folder)!r})", folder))
                break
    return [*methods, Method("auto", "auto")]


def per_pass(runs: Sequence[Run]) -> float:
    """Return tokens per forward pass."""
    return sum(run.tokens for run in runs) / max(1, sum(run.steps for run in runs))


def rows(prompts: Sequence[Prompt], runs: dict[str, list[Run]], methods: Sequence[Method]) -> list[dict[str, Any]]:
    """Return a row for each method: figures by suite, and their geometric means."""
    suites = list(dict.fromkeys(prompt.suite for prompt in prompts))
    found = []
    for method in methods:
        passes, ratios = dict[str, float](), list[float]()
        for suite in suites:
            own, plain = (
                [run for run, prompt in zip(runs[spec], prompts, strict=True) if prompt.suite == suite]
                for spec in (method.spec, PLAIN)
            )
            passes[suite] = per_pass(own)
            ratios.append(speed(own) / speed(plain))
        found.append(
            {
                "method": method.name,
                "parameters": method.parameters,
                "hours": method.hours,
                "tokens per pass": passes,
                "mean": math.exp(sum(map(math.log, passes.values())) / len(passes)),
                "over plain": math.exp(sum(map(math.log, ratios)) / len(ratios)),
            }
        )
    return found


def table(found: Sequence[dict[str, Any]], temperature: float) -> str:
    """Return the rows as Markdown."""
    suites = [*found[0]["tokens per pass"]]
    columns = ["method", "M parameters", "hours of training", *suites, "mean", "× plain", "published, × plain"]
    lines = [f"T = {temperature}; tokens per forward pass of the target by task", "", f"| {' | '.join(columns)} |"]
    lines.append("|---" * len(columns) + "|")
    for row in found:
        cells = [f"`{row['method']}`", f"{row['parameters']:.1f}" if row["parameters"] else ""]
        cells += [f"{row['hours']:.1f}" if row["hours"] else ""]
        cells += [f"{row['tokens per pass'][suite]:.2f}" for suite in suites]
        cells += [f"{row['mean']:.2f}", f"{row['over plain']:.2f}", PUBLISHED.get(row["method"], "")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--heads", type=Path, help="folder with trained drafters")
    parser.add_argument("--per-suite", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--wall", action="store_true", help="use the wall clock")
    parser.add_argument("--prices", type=Path, help="file that keeps the table of costs for later runs")
    parser.add_argument("--out", help="file name without ending, for .md and .json")
    options = parser.parse_args()
    methods, prompts = find_methods(options.heads), read_prompts(options.prompts, options.per_suite)
    specs = [PLAIN, *(method.spec for method in methods)]
    llm, clock = LLM(options.model, drafter=PLAIN), PricedClock(options.prices)
    if not options.wall:
        clock.attach(llm)
    tables, document = [], []
    with clock.installed(only=not options.wall):
        for spec in specs:  # bind, measure prices, prepare
            decode(llm, prompts[0], SamplingParams(max_tokens=16), spec)
        for temperature in options.temperatures:
            params = SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=1)
            found = rows(prompts, measure(llm, prompts, specs, params, random.Random(0)), methods)
            tables.append(table(found, temperature))
            document.append({"temperature": temperature, "rows": found})
            print(tables[-1], flush=True)
    if options.out:
        hardware = describe_hardware("cpu")
        machine = f"{hardware['processor']}, {hardware['threads']} threads, {strftime('%B %Y')}"
        count = f"{len(prompts)} prompts, {options.tokens} tokens each; all methods gave the tokens of plain decoding"
        head = f"# Every method on one model\n\n{llm.path.name}, {llm.kernels}; {machine}; {count}\n\n"
        Path(f"{options.out}.md").write_text(head + "\n\n".join(tables) + "\n")
        Path(f"{options.out}.json").write_text(
            json.dumps({"model": llm.path.name, "machine": machine, "cells": document})
        )


if __name__ == "__main__":
    main()
