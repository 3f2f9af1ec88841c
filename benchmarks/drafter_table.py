"""One table of every method for one real model: training, tokens per forward pass by task, speed.

    python benchmarks/drafter_table.py MODEL.gguf --prompts spec_bench.jsonl --heads RUNS --out OUT

``--heads`` is a folder with trained drafters, ``RUNS/KIND/export`` or ``RUNS/KIND``, where KIND is
one of ``TRAINED``. All methods decode each prompt in turn, and must generate the same tokens. Times
are those of ``priced.py``, unless ``--wall`` is set, without the time of the first token.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from policy import (
    PLAIN,
    Prompt,
    Run,
    describe_estimate,
    make_parser,
    measure_all,
    open_model,
    read_prompts,
    speed,
    write_report,
)
from safetensors import safe_open

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
    """A drafter, for a row of the table."""

    name: str
    spec: str  # name and options of the drafter
    folder: Path | None = None  # folder of the trained drafter

    @property
    def parameters(self) -> float:
        """Millions of trained parameters."""
        if self.folder is None:
            return 0.0
        total = 0
        for file in self.folder.glob("*.safetensors"):
            with safe_open(file, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    # A quantized matrix has its shape beside its codes and scales.
                    if name.endswith(".weight_shape"):
                        total += math.prod(tensors.get_tensor(name).tolist())
                    elif name.endswith((".weight_packed", ".weight_scale")):
                        continue
                    elif name not in {"d2t", "t2d"}:  # maps of the draft vocabulary
                        total += math.prod(tensors.get_slice(name).get_shape())
        return total / 1e6

    @property
    def training(self) -> str:
        """Number of training tokens, and duration and device of the training, from the card."""
        card = "" if self.folder is None else (self.folder / "README.md").read_text()
        time = re.search(r"([\d.]+ minutes on \w+)", card)
        tokens = re.search(r"([\d.]+ [MB]) tokens in", card)
        return ", ".join(found[1] for found in (tokens, time) if found)


def find_methods(heads: Path | None) -> list[Method]:
    """Return all methods; a trained drafter needs a folder in ``heads``."""
    methods = [Method(spec.partition("(")[0], spec) for spec in WITHOUT_MODEL]
    for name in TRAINED:
        for folder in () if heads is None else (heads / name / "export", heads / name):
            if (folder / "README.md").is_file():
                methods.append(Method(name, f"{name}(model={str(folder)!r})", folder))
                break
    return [*methods, Method("auto", "auto")]


def per_pass(runs: Sequence[Run]) -> float:
    """Return the mean number of tokens per forward pass."""
    num_steps = sum(run.steps for run in runs)
    return sum(run.tokens for run in runs) / max(1, num_steps)


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
            places = [place for place, prompt in enumerate(prompts) if prompt.suite == suite]
            own = [runs[method.spec][place] for place in places]
            plain = [runs[PLAIN][place] for place in places]
            passes[suite] = per_pass(own)
            ratios.append(speed(own) / speed(plain))
        found.append(
            {
                "method": method.name,
                "parameters": method.parameters,
                "training": method.training,
                "tokens per pass": passes,
                "mean": geometric_mean(passes.values()),
                "over plain": geometric_mean(ratios),
            }
        )
    return found


def table(found: Sequence[dict[str, Any]], temperature: float) -> str:
    """Return the rows as a Markdown table."""
    suites = [*found[0]["tokens per pass"]]
    columns = ["method", "M parameters", "training: tokens, duration", *suites]
    columns += ["mean", "× plain", "published, × plain"]
    lines = [
        f"T = {temperature}; tokens per forward pass of the target by task",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for row in found:
        parameters = f"{row['parameters']:.1f}" if row["parameters"] else ""
        cells = [f"`{row['method']}`", parameters, row["training"]]
        cells += [f"{row['tokens per pass'][suite]:.2f}" for suite in suites]
        cells += [f"{row['mean']:.2f}", f"{row['over plain']:.2f}"]
        cells.append(PUBLISHED.get(row["method"], ""))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the measurements, and write the tables."""
    parser = make_parser(__doc__ or "", per_suite=5)
    parser.add_argument("--heads", type=Path, help="folder with trained drafters")
    options = parser.parse_args()
    methods = find_methods(options.heads)
    prompts = read_prompts(options.prompts, options.per_suite)
    llm = open_model(options)
    tables = []
    cells = []
    specs = [PLAIN, *(method.spec for method in methods)]
    for temperature, runs in measure_all(llm, prompts, specs, options):
        found = rows(prompts, runs, methods)
        tables.append(table(found, temperature))
        cells.append({"temperature": temperature, "rows": found})
        print(tables[-1], flush=True)
    more = (
        f"; {len(prompts)} prompts, {options.tokens} tokens each; all methods gave the tokens of "
        "plain decoding"
    )
    more += describe_estimate(options)
    write_report(options.out, "Every method on one model", llm, tables, cells, more)


if __name__ == "__main__":
    main()
