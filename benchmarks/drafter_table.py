"""One table of every method for one real model: training, tokens per forward pass by task, speed.

    python benchmarks/drafter_table.py MODEL.gguf --prompts spec_bench.jsonl --heads RUNS --out
    results/drafters

``--heads`` is a folder with trained drafters, ``RUNS/KIND/export`` or ``RUNS/KIND``, where KIND is
one of ``TRAINED``. All methods decode all prompts, interleaved, and must give the same tokens.
Times are those of ``priced.py``, unless ``--wall``; they leave out the first token.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from policy import PLAIN, Prompt, Run, make_parser, measure_all, read_prompts, speed, write_report
from safetensors import safe_open

from pronk import LLM

TRAINED = ("draft_model", "kangaroo", "glide", "medusa", "multi_token", "eagle3", "mtp")
# Speedups over plain decoding that the methods' authors publish, with their models and GPUs.
PUBLISHED = {
    "lookahead": "1.5 to 2.3 (Fu et al. 2024)",
    "prompt_lookup": "2 to 4 where the prompt is repeated (Saxena 2023)",
    "kangaroo": "up to 1.7 (Liu et al. 2024)",
    "glide": "up to 2.2, 2.6 with CAPE (Du et al. 2024)",
    "medusa": "2.2 to 3.6 (Cai et al. 2024)",
    "multi_token": "up to 3 (Gloeckle et al. 2024)",
    "eagle3": "up to 6.5 (Li et al. 2025)",
    "mtp": "1.8 (DeepSeek-V3)",
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
                for name in tensors.keys():  # noqa: SIM118
                    # of a quantized matrix, beside its codes and scales
                    if name.endswith(".weight_shape"):
                        total += math.prod(tensors.get_tensor(name).tolist())
                    elif name not in {"d2t", "t2d"} and not name.endswith(
                        (".weight_packed", ".weight_scale")
                    ):
                        total += math.prod(tensors.get_slice(name).get_shape())
        return total / 1e6

    @property
    def training(self) -> str:
        """Duration and device of the training, and the tokens trained on, from the card."""
        card = "" if self.folder is None else (self.folder / "README.md").read_text()
        time = re.search(r"([\d.]+ minutes on \w+)", card)
        tokens = re.search(r"([\d.]+ [MB]) tokens in", card)
        return ", ".join(found[1] for found in (tokens, time) if found)


def find_methods(heads: Path | None) -> list[Method]:
    """Return all methods; trained ones need a folder in ``heads``."""
    methods = [Method(spec.partition("(")[0], spec) for spec in WITHOUT_MODEL]
    for name in TRAINED:
        for folder in () if heads is None else (heads / name / "export", heads / name):
            if (folder / "README.md").is_file():
                methods.append(Method(name, f"{name}(model={str(folder)!r})", folder))
                break
    return [*methods, Method("auto", "auto")]


def per_pass(runs: Sequence[Run]) -> float:
    """Return tokens per forward pass."""
    return sum(run.tokens for run in runs) / max(1, sum(run.steps for run in runs))


def rows(
    prompts: Sequence[Prompt], runs: dict[str, list[Run]], methods: Sequence[Method]
) -> list[dict[str, Any]]:
    """Return a row for each method: figures by suite, and their geometric means."""
    suites = list(dict.fromkeys(prompt.suite for prompt in prompts))
    found = []
    for method in methods:
        passes = dict[str, float]()
        ratios = list[float]()
        for suite in suites:
            own, plain = (
                [
                    run
                    for run, prompt in zip(runs[spec], prompts, strict=True)
                    if prompt.suite == suite
                ]
                for spec in (method.spec, PLAIN)
            )
            passes[suite] = per_pass(own)
            ratios.append(speed(own) / speed(plain))
        found.append(
            {
                "method": method.name,
                "parameters": method.parameters,
                "training": method.training,
                "tokens per pass": passes,
                "mean": math.exp(sum(map(math.log, passes.values())) / len(passes)),
                "over plain": math.exp(sum(map(math.log, ratios)) / len(ratios)),
            }
        )
    return found


def table(found: Sequence[dict[str, Any]], temperature: float) -> str:
    """Return the rows as Markdown."""
    suites = [*found[0]["tokens per pass"]]
    columns = [
        "method",
        "M parameters",
        "training: tokens, duration",
        *suites,
        "mean",
        "× plain",
        "published, × plain",
    ]
    lines = [
        f"T = {temperature}; tokens per forward pass of the target by task",
        "",
        f"| {' | '.join(columns)} |",
    ]
    lines.append("|---" * len(columns) + "|")
    for row in found:
        cells = [f"`{row['method']}`", f"{row['parameters']:.1f}" if row["parameters"] else ""]
        cells += [row["training"]]
        cells += [f"{row['tokens per pass'][suite]:.2f}" for suite in suites]
        cells += [
            f"{row['mean']:.2f}",
            f"{row['over plain']:.2f}",
            PUBLISHED.get(row["method"], ""),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the tables."""
    parser = make_parser(__doc__ or "", per_suite=5)
    parser.add_argument("--heads", type=Path, help="folder with trained drafters")
    options = parser.parse_args()
    methods = find_methods(options.heads)
    prompts = read_prompts(options.prompts, options.per_suite)
    llm = LLM(options.model, drafter=PLAIN)
    tables = []
    cells = []
    for temperature, runs in measure_all(
        llm, prompts, [PLAIN, *(method.spec for method in methods)], options
    ):
        found = rows(prompts, runs, methods)
        tables.append(table(found, temperature))
        cells.append({"temperature": temperature, "rows": found})
        print(tables[-1], flush=True)
    more = (
        f"; {len(prompts)} prompts, {options.tokens} tokens each; all methods gave the tokens of "
        "plain decoding"
    )
    write_report(options.out, "Every method on one model", llm, tables, cells, more)


if __name__ == "__main__":
    main()
