"""Speed of `auto` relative to the best single drafter, by one table of forward-pass costs.

    python benchmarks/policy.py MODEL.gguf --prompts spec_bench.jsonl humaneval.jsonl --out OUT
    python benchmarks/policy.py MODEL.gguf --prompts spec_bench.jsonl --draft DRAFT.gguf
    python benchmarks/policy.py MODEL.gguf --prompts spec_bench.jsonl --wall    # by the wall clock
    python benchmarks/policy.py MODEL.gguf --prompts mbpp.jsonl --sampling top_p=0.9
    python benchmarks/policy.py MODEL.gguf --prompts mbpp.jsonl --kernels avx2    # n* = 4 to 5
    python benchmarks/policy.py MODEL.gguf --prompts mbpp.jsonl --products 4      # an estimate

A file of prompts has one JSON object per line with `turns` (the first one is the prompt) and
optionally `task`; each task of each file is a suite. All configurations decode every prompt in
turn, and must generate the same tokens. Times are those of ``priced.py``, unless ``--wall`` is set,
without the time of the first token. The best single drafter of a suite is chosen on its even
prompts, and compared with `auto` on the odd ones. Brackets have the 90 % interval over resampled
prompts, in the second table the 95 % interval.

*In hindsight* is the speed of `auto` divided by that of the best choice in every step, as in
``pronk.drafting.regret``.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from time import strftime
from typing import Any, NamedTuple

from priced import PricedClock

from pronk import LLM, SamplingParams
from pronk.base.files.results import save_result
from pronk.drafting.regret import Regret
from pronk.kernels.threads import num_threads
from pronk.lab.bench.machine import describe_hardware

PLAIN = "autoregressive"
AUTO = "auto"
# Single drafters. Neither ``suffix`` here nor `auto` remembers earlier outputs, because each prompt
# is decoded at all temperatures.
SINGLE = ("suffix(store_tokens=0)", "prompt_lookup", "recycling", "lookahead")


class Prompt(NamedTuple):
    """A prompt of a suite."""

    suite: str
    number: int  # number in the suite
    text: str


class Run(NamedTuple):
    """Measurements of decoding a prompt, after the first token."""

    tokens: int
    seconds: float
    steps: int
    regret: Regret


def read_prompts(files: Iterable[Path], count: int) -> list[Prompt]:
    """Return ``count`` prompts of each suite, spread over the file."""
    suites: dict[str, list[str]] = {}
    for file in files:
        for line in file.read_text().splitlines():
            row = json.loads(line)
            suites.setdefault(row.get("task", file.stem), []).append(row["turns"][0])
    prompts = list[Prompt]()
    for suite, texts in suites.items():
        for number in range(min(count, len(texts))):
            prompts.append(Prompt(suite, number, texts[number * len(texts) // count]))
    return prompts


def decode(llm: LLM, prompt: Prompt, params: SamplingParams, drafter: str) -> tuple[list[int], Run]:
    """Decode a prompt; return the token ids and the measurements."""
    if llm.tokenizer.chat_template is None:
        done = llm.generate(prompt.text, params, drafter=drafter)
    else:
        done = llm.chat([{"role": "user", "content": prompt.text}], params, drafter=drafter)
    first, *later = done.stats.steps
    seconds = later[-1].clock - first.clock if later else 0.0
    num_tokens = sum(step.tokens for step in later)
    return done.token_ids, Run(num_tokens, seconds, len(later), done.stats.regret)


def measure(
    llm: LLM,
    prompts: Sequence[Prompt],
    drafters: Sequence[str],
    params: SamplingParams,
    shuffled: random.Random,
) -> dict[str, list[Run]]:
    """Decode all prompts, each with all drafters in a random order."""
    runs: dict[str, list[Run]] = {drafter: [] for drafter in drafters}
    for count, prompt in enumerate(prompts, 1):
        texts: dict[str, list[int]] = {}
        for drafter in shuffled.sample(drafters, len(drafters)):
            texts[drafter], run = decode(llm, prompt, params, drafter)
            runs[drafter].append(run)
        if len({tuple(text) for text in texts.values()}) > 1:
            expected = "policy: expected equal tokens of all drafters"
            sys.exit(f"{expected}, found others for {prompt.text[:60]!r}")
        progress = f"\rT = {params.temperature}: {count} of {len(prompts)} prompts"
        print(progress, end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return runs


def speed(runs: Iterable[Run]) -> float:
    """Return the tokens per second of all runs together."""
    kept = [*runs]
    return sum(run.tokens for run in kept) / max(1e-9, sum(run.seconds for run in kept))


def interval(pairs: Sequence[tuple[Run, Run]]) -> tuple[float, float, float]:
    """Return the ratio of two configurations' speeds, and its 90 % interval over prompts."""
    dice = random.Random(0)

    def ratio(chosen: Sequence[tuple[Run, Run]]) -> float:
        return speed(first for first, _ in chosen) / speed(second for _, second in chosen)

    found = sorted(ratio(dice.choices(pairs, k=len(pairs))) for _ in range(1000))
    return ratio(pairs), found[50], found[949]


def compare(prompts: Sequence[Prompt], runs: dict[str, list[Run]]) -> list[dict[str, Any]]:
    """Return a row of figures for each suite."""
    rows = []
    suites = list(dict.fromkeys(prompt.suite for prompt in prompts))
    for suite in suites:
        own = [index for index, prompt in enumerate(prompts) if prompt.suite == suite]
        even = [index for index in own if prompts[index].number % 2 == 0]
        odd = [index for index in own if prompts[index].number % 2 == 1]
        single = [each for each in runs if not each.startswith("auto")]
        best = max(single, key=lambda each: speed(runs[each][i] for i in even))
        both = even + odd
        regret = Regret()
        for index in both:
            regret.add(runs[AUTO][index].regret)
        num_tokens = sum(runs[AUTO][i].tokens for i in both)
        num_steps = sum(runs[AUTO][i].steps for i in both)
        rows.append(
            {
                "suite": suite,
                "prompts": len(both),
                "plain": speed(runs[PLAIN][i] for i in both),
                "auto over plain": interval([(runs[AUTO][i], runs[PLAIN][i]) for i in both]),
                "best": best,
                "best over plain": interval([(runs[best][i], runs[PLAIN][i]) for i in odd]),
                "auto over best": interval([(runs[AUTO][i], runs[best][i]) for i in odd]),
                "in hindsight": regret.against_steps,
                "tokens per pass": num_tokens / num_steps,
            }
        )
    return rows


def table(
    rows: Sequence[dict[str, Any]], temperature: float, sampling: Sequence[tuple[str, Any]] = ()
) -> str:
    """Return the rows as a Markdown table, below a line with the sampling parameters."""
    columns = ["suite", "prompts", "plain, tokens/s", "`auto` / plain", "tokens per pass"]
    columns += ["in hindsight", "best single drafter", "best / plain", "`auto` / best"]
    further = "".join(f", {name} = {value}" for name, value in sampling)
    lines = [
        f"T = {temperature}{further}",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    ratio_keys = [key for key in rows[0] if " over " in key]
    for row in rows:
        ratios = {key: "{:.3f} [{:.3f}, {:.3f}]".format(*row[key]) for key in ratio_keys}
        hindsight = "" if row["in hindsight"] is None else f"{row['in hindsight']:.2f}"
        cells = [row["suite"], row["prompts"], f"{row['plain']:.1f}", ratios["auto over plain"]]
        cells += [f"{row['tokens per pass']:.2f}", hindsight, f"`{row['best']}`"]
        cells += [ratios["best over plain"], ratios["auto over best"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    means = [geometric_mean(row[key][0] for row in rows) for key in ratio_keys]
    lines.append(f"| geometric mean | | | {means[0]:.3f} | | | | {means[1]:.3f} | {means[2]:.3f} |")
    return "\n".join(lines)


def by_drafter(prompts: Sequence[Prompt], runs: dict[str, list[Run]]) -> str:
    """Return a Markdown table of each drafter's speed relative to plain decoding.

    The speed is the geometric mean over the suites.
    """
    lines = ["| drafter | / plain, geometric mean [95 %] | tokens per pass |", "|---|---|---|"]
    suites: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        suites.setdefault(prompt.suite, []).append(index)

    def mean(own: Sequence[Run], chosen: Iterable[Sequence[int]]) -> float:
        ratios = list[float]()
        for suite in chosen:
            plain_speed = speed(runs[PLAIN][i] for i in suite)
            ratios.append(speed(own[i] for i in suite) / plain_speed)
        return geometric_mean(ratios)

    for drafter, own in runs.items():
        dice = random.Random(0)
        found = list[float]()
        for _ in range(1000):
            resampled = [dice.choices(each, k=len(each)) for each in suites.values()]
            found.append(mean(own, resampled))
        found.sort()
        ratio = f"{mean(own, suites.values()):.3f} [{found[25]:.3f}, {found[974]:.3f}]"
        passes = sum(run.tokens for run in own) / sum(run.steps for run in own)
        lines.append(f"| `{drafter}` | {ratio} | {passes:.2f} |")
    return "\n".join(lines)


def sampling_option(text: str) -> tuple[str, Any]:
    """Return the name and the value of a sampling parameter ``NAME=VALUE``; the value is JSON."""
    name, _, value = text.partition("=")
    return name, json.loads(value)


def make_parser(description: str, per_suite: int) -> argparse.ArgumentParser:
    """Return a parser with the options of :func:`open_model`, :func:`measure_all` and reports."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--per-suite", type=int, default=per_suite)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument(
        "--sampling",
        type=sampling_option,
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="further sampling parameters, such as those that a model's card recommends",
    )
    parser.add_argument("--threads", type=int, help="with 1, passes are priced by processor time")
    parser.add_argument(
        "--kernels", default="auto", help="an instruction set, to compare processors on one machine"
    )
    parser.add_argument("--wall", action="store_true", help="use the wall clock")
    parser.add_argument(
        "--products",
        type=float,
        default=1.0,
        metavar="TIMES",
        help="an estimate for more cores, or slower ones: products take 1 / TIMES of the time here",
    )
    parser.add_argument(
        "--prices", type=Path, help="file that keeps the table of costs for later runs"
    )
    parser.add_argument("--out", help="file name without ending, for .md and .json")
    return parser


def open_model(options: argparse.Namespace) -> LLM:
    """Load the model, which decodes without draft tokens unless a drafter is given."""
    return LLM(options.model, drafter=PLAIN, threads=options.threads, kernels=options.kernels)


def describe_estimate(options: argparse.Namespace) -> str:
    """Return what a report's heading says of estimated times; empty if they are not estimated."""
    if options.products == 1.0:
        return ""
    return f"; estimated: products {options.products:g} times as fast, memory as fast as here"


def measure_all(
    llm: LLM, prompts: Sequence[Prompt], drafters: Sequence[str], options: argparse.Namespace
) -> Iterator[tuple[float, dict[str, list[Run]]]]:
    """Decode all prompts with all drafters; yield each temperature with its runs."""
    clock = PricedClock(options.prices, options.products)
    if not options.wall:
        clock.attach(llm)
    with clock.installed(only=not options.wall):
        for drafter in drafters:  # load drafters, and measure prices
            decode(llm, prompts[0], SamplingParams(max_tokens=16), drafter)
        for temperature in options.temperatures:
            params = SamplingParams(
                max_tokens=options.tokens,
                temperature=temperature,
                seed=1,
                **dict(options.sampling),
            )
            yield temperature, measure(llm, prompts, drafters, params, random.Random(0))


def write_report(
    out: str | None,
    title: str,
    llm: LLM,
    tables: Sequence[str],
    cells: Sequence[Any],
    more: str = "",
) -> None:
    """Write the tables to ``out``.md and the figures to ``out``.json, with model and machine.

    Paths of models in specifications of drafters are cut to the file's name, those of exports of
    ``pronk train`` to the last two folders. Nothing is written if ``out`` is ``None``.
    """
    if out is None:
        return
    count = num_threads()
    threads = "one thread" if count == 1 else f"{count} threads"
    machine = f"{describe_hardware('cpu')['processor']}, {threads}, {strftime('%B %Y')}"
    head = f"# {title}\n\n{llm.path.name}, {llm.kernels}; {machine}{more}\n\n"
    figures = json.dumps({"model": llm.path.name, "machine": machine, "cells": cells})
    for ending, text in (("md", head + "\n\n".join(tables) + "\n"), ("json", figures)):
        short = re.sub(r"((?:model|datastore)=')[^']*?/((?:[^/']+/export|[^/']+)')", r"\1\2", text)
        save_result("out", Path(f"{out}.{ending}"), short)


def main() -> None:
    """Run the measurements, and write the tables."""
    parser = make_parser(__doc__ or "", per_suite=8)
    parser.add_argument(
        "--drafters", nargs="+", default=[*SINGLE], help="single drafters to compare with"
    )
    parser.add_argument("--draft", help="a draft model: added to `auto`, and a single drafter")
    options = parser.parse_args()
    if options.per_suite < 2:
        parser.error(
            "--per-suite: expected at least 2, one prompt to choose by and one to compare on"
        )
    prompts = read_prompts(options.prompts, options.per_suite)
    global AUTO  # noqa: PLW0603 - with --draft, `auto` has the draft model
    drafters = [PLAIN, *options.drafters]
    if options.draft:
        AUTO = f"auto(draft_model(model='{options.draft}'))"
        drafters += [f"draft_model(model='{options.draft}')", "auto"]
    drafters.append(AUTO)
    llm = open_model(options)
    tables = []
    cells = []
    for temperature, runs in measure_all(llm, prompts, drafters, options):
        rows = compare(prompts, runs)
        tables.append(
            table(rows, temperature, options.sampling) + "\n\n" + by_drafter(prompts, runs)
        )
        cells.append({"temperature": temperature, "rows": rows})
        print(tables[-1], flush=True)
    title = "`auto` against the best single drafter"
    write_report(options.out, title, llm, tables, cells, describe_estimate(options))


if __name__ == "__main__":
    main()
