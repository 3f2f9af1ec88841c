"""Measurements that the scripts of this folder share: several drafters on one model.

All drafters decode each prompt in turn, and must generate the same tokens. Every draft token is
verified (``budget="all"``), as in the papers. Times are those of ``benchmarks/priced.py``, or with
``--wall`` of the wall clock, without the time of the first token.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import correlation
from time import strftime
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

from policy import PLAIN, Prompt, Run, interval, measure_all, read_prompts, write_report

from pronk import LLM
from pronk.lab.bench.machine import describe_hardware

__all__ = [
    "PLAIN",
    "Part",
    "Result",
    "Results",
    "add_folders",
    "add_parts",
    "draw",
    "markdown",
    "ranks",
    "run_parts",
]


class Result(NamedTuple):
    """Figures of a drafter over some prompts."""

    per_pass: float  # S: tokens per forward pass of the target
    # Speed relative to plain decoding, and its 90 % interval over the prompts.
    over_plain: tuple[float, float, float]
    milliseconds: float  # duration of a step

    @property
    def speed(self) -> str:
        """Speed relative to plain decoding with its interval, as text."""
        return _with_interval(self.over_plain)


class Results(NamedTuple):
    """Runs of all drafters at one temperature."""

    prompts: Sequence[Prompt]
    runs: Mapping[str, Sequence[Run]]
    temperature: float

    @property
    def suites(self) -> list[str]:
        """Names of the suites, in the order of the files."""
        return list(dict.fromkeys(prompt.suite for prompt in self.prompts))

    def of(self, spec: str, suite: str | None = None) -> Result:
        """Return the figures of a drafter, over one suite or all prompts."""
        chosen = [i for i, prompt in enumerate(self.prompts) if suite in (None, prompt.suite)]
        own = [self.runs[spec][i] for i in chosen]
        plain = [self.runs[PLAIN][i] for i in chosen]
        steps = max(1, sum(run.steps for run in own))
        return Result(
            sum(run.tokens for run in own) / steps,
            interval([*zip(own, plain, strict=True)]),
            1e3 * sum(run.seconds for run in own) / steps,
        )

    def passes_over(self, spec: str, baseline: str) -> str:
        """Return S of a drafter relative to another's, with its 90 % interval over the prompts.

        Both decode the same prompts, so the interval of the ratio is narrower than those of S.
        """
        own, other = ([_by_steps(run) for run in self.runs[each]] for each in (spec, baseline))
        return _with_interval(interval([*zip(own, other, strict=True)]))


def _by_steps(run: Run) -> Run:
    """Return a run whose time is its number of steps, so that its speed is S."""
    return run._replace(seconds=run.steps)


def _with_interval(ratio: tuple[float, float, float]) -> str:
    """Return a ratio and its interval as text."""
    return "{:.2f} [{:.2f}, {:.2f}]".format(*ratio)


class Part(NamedTuple):
    """A table or figure of a paper."""

    title: str
    specs: Callable[[argparse.Namespace], list[str]]  # returns the drafters to measure
    table: Callable[[Results, argparse.Namespace], str]  # returns the text in Markdown


def add_parts(parser: argparse.ArgumentParser, parts: Mapping[str, Part]) -> None:
    """Add the names of the parts to measure as positional arguments."""
    parser.add_argument("parts", nargs="*", help=f"{', '.join(parts)}; by default all")


def add_folders(
    parser: argparse.ArgumentParser, option: str, text: str, *, required: bool = False
) -> None:
    """Add an option for trained drafters, which may be repeated.

    Its value is a list of pairs (name, folder).
    """

    def pair(words: str) -> tuple[str, str]:
        name, _, folder = words.partition("=")
        return name, folder

    parser.add_argument(
        option,
        action="append",
        type=pair,
        default=[],
        required=required,
        metavar="NAME=FOLDER",
        help=text,
    )


def run_parts(
    parser: argparse.ArgumentParser,
    parts: Mapping[str, Part],
    options: argparse.Namespace,
    title: str,
) -> list[Results]:
    """Measure the drafters of the chosen parts, and print and write the tables.

    Returns:
        The measurements of each temperature.
    """
    if unknown := set(options.parts) - set(parts):
        parser.error(f"expected parts among {', '.join(parts)}, found {', '.join(sorted(unknown))}")
    chosen = [parts[name] for name in options.parts or parts]
    llm, all_results = _measure(options, [spec for part in chosen for spec in part.specs(options)])
    tables = []
    for results in all_results:
        for part in chosen:
            title_line = f"## {part.title}, T = {results.temperature}"
            tables.append(f"{title_line}\n\n{part.table(results, options)}")
            print(tables[-1], end="\n\n", flush=True)
    _write(options, title, llm, tables, all_results)
    return all_results


def _measure(options: argparse.Namespace, specs: Sequence[str]) -> tuple[LLM, list[Results]]:
    """Decode all prompts with plain decoding and all drafters, at each temperature."""
    prompts = read_prompts(options.prompts, options.per_suite)
    llm = LLM(
        options.model, drafter=PLAIN, budget="all", kernels=options.kernels, threads=options.threads
    )
    drafters = list(dict.fromkeys([PLAIN, *specs]))
    measured = measure_all(llm, prompts, drafters, options)
    return llm, [Results(prompts, runs, temperature) for temperature, runs in measured]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table with text in the first column and numbers in the others."""
    lines = [columns, ["---", *["--:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def ranks(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return Spearman's rank correlation of two sequences, which is 1 for the same order.

    Equal numbers share their mean rank.
    """

    def places(values: Sequence[float]) -> list[float]:
        found = list[float]()
        for each in values:
            num_less = sum(other < each for other in values)
            num_equal = sum(other == each for other in values)
            found.append(num_less + num_equal / 2)
        return found

    return correlation(places(ours), places(theirs))


def draw(path: Path, draw_axes: Callable[[Any], None]) -> None:
    """Write an SVG file with one plot; matplotlib must be installed."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional package

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    draw_axes(axes)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def _write(
    options: argparse.Namespace,
    title: str,
    llm: LLM,
    tables: Sequence[str],
    all_results: list[Results],
) -> None:
    """Write the tables and the figures of every drafter, and print one JSON line."""
    cells = list[dict[str, Any]]()
    for results in all_results:
        drafters = {spec: results.of(spec)._asdict() for spec in results.runs}
        cells.append({"temperature": results.temperature, "drafters": drafters})
    prompts = len(all_results[0].prompts)
    clock = "wall clock" if options.wall else "prices of forward passes"
    more = (
        f"; {prompts} prompts, {options.tokens} tokens each; {clock}; all methods gave the tokens "
        "of plain decoding"
    )
    write_report(options.out, title, llm, tables, cells, more)
    machine = describe_hardware("cpu")["processor"]
    date = strftime("%Y-%m")
    report = {"model": llm.path.name, "machine": machine, "date": date, "cells": cells}
    print(json.dumps(report))
