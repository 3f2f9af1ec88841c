"""Tokens per forward pass of drafters that need no training, and of lookahead by its sizes.

    python benchmarks/ablation.py --data SUITES --limit 8 --plot lookahead.svg

Prints three tables in Markdown. The third one is also drawn if matplotlib is installed:

1. tokens per forward pass (S) of every method;
2. S of lookahead with a small window, a small verification branch or both, with and without candidates from the prompt
   (Fu et al. 2024, table 3);
3. S of lookahead by the number of tokens that a step computes (figure 4).

No figure depends on times, because all draft tokens are verified. SUITES is a folder with humaneval.jsonl, gsm8k.jsonl,
code_edit.jsonl and spec_bench.jsonl in the format of docs/benchmarks.md. The default is the suite sample.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from pronk import LLM, SamplingParams
from pronk.bench.metrics import repeated_ngrams
from pronk.bench.prompts import builtin_prompts, drop_middle, encode, group_by_task, load_suite
from pronk.drafters import make_drafter

SUITES = ("humaneval", "gsm8k", "code_edit", "spec_bench")
CHAT = "mt_bench"  # the chat task of Spec-Bench

METHODS = (
    "autoregressive",
    "jacobi",
    "gauss_seidel",
    "lookahead(window=5, ngram=4)",
    "lookahead(window=15, ngram=5)",
    "prompt_lookup",
    "suffix",
    "retrieval",
    "recycling",
    "first_of",
    "merged",
)
# Table 3 of the paper: (N, W, G), and whether candidates come from the prompt as well.
SETTINGS = (
    (10, 1, 3, True),
    (5, 1, 10, True),
    (5, 1, 30, False),
    (5, 1, 30, True),
    (5, 30, 1, False),
    (5, 15, 15, False),
    (5, 15, 15, True),
)
WINDOWS = {3: (1, 2, 4, 8, 16, 30), 4: (1, 2, 4, 8, 16, 20), 5: (1, 2, 4, 8, 15)}


@dataclass
class Counts:
    """Sums over outputs."""

    tokens: int = 0
    steps: int = 0
    rows: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def compression(self) -> float:
        """Mean tokens per forward pass, S."""
        return self.tokens / self.steps


class MethodRunner:
    """Decodes the prompts with a drafter, and compares every output with plain decoding's."""

    def __init__(self, llm: LLM, prompts: dict[str, list[list[int]]], max_tokens: int) -> None:
        self.llm, self.prompts, self.max_tokens = llm, prompts, max_tokens
        self.plain: dict[tuple[str, int, float], list[int]] = {}
        self.loops: dict[tuple[str, float], float] = {}

    def run(self, spec: str, temperature: float) -> dict[str, Counts]:
        """Return the counts of each task, with a new drafter that has stored no output."""
        found, drafter = {}, make_drafter(spec)
        for task, prompts in self.prompts.items():
            counts, loops = Counts(), []
            for number, prompt in enumerate(prompts):
                params = SamplingParams(self.max_tokens, temperature=temperature, seed=number, ignore_eos=True)
                out = self.llm.generate(prompt, params, drafter=drafter)
                same = self.plain.setdefault((task, number, temperature), out.token_ids)
                if same != out.token_ids:
                    message = f"{spec} changed the output of {task} {number} at temperature {temperature}"
                    raise SystemExit(message)
                counts.tokens += out.stats.generated_tokens
                counts.steps += out.stats.target_steps
                counts.rows += sum(step.rows for step in out.stats.steps[1:])
                counts.drafted += out.stats.drafted
                counts.accepted += out.stats.accepted
                loops.append(repeated_ngrams(out.token_ids))
            found[task] = counts
            self.loops[task, temperature] = fmean(loops)
        return found


def total(counts: Iterable[Counts]) -> Counts:
    """Return the sums over all tasks."""
    sums = Counts()
    for one in counts:
        for name, value in vars(one).items():
            setattr(sums, name, getattr(sums, name) + value)
    return sums


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table row by row."""
    print(f"| {' | '.join(head)} |\n| --- {'| --: ' * (len(head) - 1)}|")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)
    print()


def methods(runner: MethodRunner) -> Iterable[list[str]]:
    """Yield a row per method: S of each task, greedy / at temperature 0.8."""
    for spec in METHODS:
        greedy, seeded = runner.run(spec, 0.0), runner.run(spec, 0.8)
        both = [(greedy[task], seeded[task]) for task in greedy]
        both.append((total(greedy.values()), total(seeded.values())))
        share = both[-1][0].accepted / max(1, both[-1][0].drafted)
        yield [f"`{spec}`", *(f"{a.compression:.2f} / {b.compression:.2f}" for a, b in both), f"{share:.2f}"]
    loops = [f"{runner.loops[task, 0.0]:.0%} / {runner.loops[task, 0.8]:.0%}" for task in runner.prompts]
    yield ["repeated 4-grams", *loops, "", ""]


def settings(runner: MethodRunner) -> Iterable[list[str]]:
    """Yield the rows of table 3: S over all tasks."""
    lookup = total(runner.run("prompt_lookup(num_tokens=10, num_chains=1)", 0.0).values())
    yield ["prompt lookup", "yes", f"{lookup.compression:.2f}", f"{lookup.rows / lookup.steps:.0f}"]
    for ngram, window, draft_tokens, use_prompt in SETTINGS:
        spec = f"lookahead(window={window}, ngram={ngram}, guesses={draft_tokens}, use_prompt={use_prompt})"
        counts = total(runner.run(spec, 0.0).values())
        rows = f"{counts.rows / counts.steps:.0f}"
        yield [f"({ngram}, {window}, {draft_tokens})", "yes" if use_prompt else "no", f"{counts.compression:.2f}", rows]


def scaling(runner: MethodRunner, points: dict[int, list[tuple[float, float]]]) -> Iterable[list[str]]:
    """Yield the rows of figure 4: S by (W + G)(N - 1), without candidates from the prompt."""
    for ngram, windows in WINDOWS.items():
        for window in windows:
            spec = f"lookahead(window={window}, ngram={ngram}, use_prompt=False)"
            counts = total(runner.run(spec, 0.0).values())
            points.setdefault(ngram, []).append((2.0 * window * (ngram - 1), counts.compression))
        slope, error = line([(math.log2(x), y) for x, y in points[ngram]])
        cells = ", ".join(f"{x:.0f}: {y:.2f}" for x, y in points[ngram])
        yield [str(ngram), cells, f"{slope:.2f}", f"{error:.2f}"]


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit a line to points; return its slope and the unexplained share of the variance."""
    mx, my = fmean(x for x, _ in points), fmean(y for _, y in points)
    slope = sum((x - mx) * (y - my) for x, y in points) / sum((x - mx) ** 2 for x, _ in points)
    left = sum((y - my - slope * (x - mx)) ** 2 for x, y in points)
    return slope, left / sum((y - my) ** 2 for _, y in points)


def plot(points: dict[int, list[tuple[float, float]]], path: Path) -> None:
    """Draw S by tokens per step, on a logarithmic axis."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional package

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for ngram, series in points.items():
        axes.plot(*zip(*series, strict=True), marker="o", label=f"N = {ngram}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens computed per step, (W + G)(N - 1), G = W")
    axes.set_ylabel("S, tokens per forward pass")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the suites")
    parser.add_argument("--limit", type=int, default=8, help="prompts per task")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--plot", type=Path, help="SVG file for the third table")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    llm = LLM(budget="all", threads=args.threads)
    prompts = [prompt for name in SUITES for prompt in load_suite(name, args.data)] if args.data else builtin_prompts()
    room = llm.config.context - args.max_tokens - 1
    tasks = {
        task: [drop_middle(encode(llm, prompt), room) for prompt in chosen]
        for task, chosen in group_by_task(prompts, args.limit).items()
        if not args.data or task in (*SUITES, CHAT)
    }
    runner = MethodRunner(llm, tasks, args.max_tokens)
    table(["method: S greedy / at 0.8", *tasks, "all", "accepted"], methods(runner))
    table(["(N, W, G)", "candidates from the prompt", "S", "rows per pass"], settings(runner))
    points: dict[int, list[tuple[float, float]]] = {}
    table(["N", "tokens per step: S", "S per doubling", "unexplained"], scaling(runner, points))
    if args.plot:
        plot(points, args.plot)


if __name__ == "__main__":
    main()
