r"""Tokens per forward pass, S, by the length of the answer: tables that need no clock.

    python benchmarks/papers/counts.py MODEL.gguf table3 fit --prompts FILES --state STATE
    python benchmarks/papers/counts.py MODEL.gguf drafts --draft DRAFT.gguf --prompts FILES \
        --state STATE

The named parts are measured one after another:

    table3  lookahead, table 3: S with and without each branch, over the first 48, 96, 192 and 384
            tokens of each answer
    main    of table 3 the rows that decide its question: each branch alone, and both
    fit     lookahead, figure 4, equation 7: α and f with their intervals over the prompts
    drafts  the drafters of a draft model (--draft): chains, threshold, CAPE, a beam, staged
    ctar    Kangaroo, figure 1a: CTAR of each --drafter NAME=SPEC

All draft tokens are verified, and every drafter must generate the tokens of plain decoding. S does
not depend on the speed of the machine, so that the script may run beside other work.

A text that repeats itself flatters drafters that copy. The tables therefore have the share of
repeated 4-grams of the answers, and S over the answers in which this share is at most a quarter.

Each answer is one line of the file ``STATE``. A stopped script continues there. It announces how
long the remaining answers take, and stops after ``--minutes``; the tables then have the prompts
that all drafters of a part have decoded.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from lookahead import (
    PAPER_ALPHA,
    PAPER_F,
    TABLE3,
    WINDOWS,
    Fit,
    ablation_specs,
    fit,
    fit_specs,
    lookahead,
)
from measuring import PLAIN, add_folders, markdown
from policy import Prompt, read_prompts, write_report

from pronk import LLM, SamplingParams
from pronk.lab.bench.metrics import ctar_curve, repeated_ngrams

# As ``ablation_specs`` writes the option.
USE_TEXT = ", use_prompt=True"
WITHOUT_TEXT = ", use_prompt=False"
LENGTHS = (48, 96, 192, 384)
CTAR_DEPTH = 6
LOOPING = 0.25  # share of repeated 4-grams from which an answer counts as one that repeats itself
RESAMPLES = 200  # number of resampled sets of prompts for the intervals of α and f


class Answer(NamedTuple):
    """Steps of a drafter on a prompt, after the first token.

    Attributes:
        suite: suite of the prompt.
        number: number of the prompt in the suite.
        spec: specification of the drafter.
        temperature: temperature of sampling.
        tokens: number of tokens that each step added to the text.
        accepted: number of accepted draft tokens of each step.
        drafted: number of verified draft tokens of each step.
        repeated: share of the text's 4-grams that occurred before in the text.
        text: token ids; empty for other drafters than plain decoding, whose text is equal.
        seconds: time of decoding, for the announcement.
    """

    suite: str
    number: int
    spec: str
    temperature: float
    tokens: list[int]
    accepted: list[int]
    drafted: list[int]
    repeated: float
    text: list[int]
    seconds: float

    def until(self, length: int) -> tuple[int, int]:
        """Return tokens and steps up to the first step that reaches ``length`` tokens."""
        total = 0
        for steps, tokens in enumerate(self.tokens, 1):
            total += tokens
            if total >= length:
                return total, steps
        return total, len(self.tokens)


def per_pass(answers: Sequence[Answer], length: int) -> float:
    """Return S over the first ``length`` tokens of each answer, or NaN without answers."""
    pairs = [answer.until(length) for answer in answers]
    steps = sum(count for _, count in pairs)
    return sum(tokens for tokens, _ in pairs) / steps if steps else float("nan")


class Counts:
    """Answers of one model, and the file that keeps them."""

    def __init__(self, llm: LLM, prompts: Sequence[Prompt], options: argparse.Namespace) -> None:
        self.llm = llm
        self.prompts = prompts
        self.options = options
        self._answers: dict[tuple[str, int, str, float], Answer] = {}
        if options.state.exists():
            for line in options.state.read_text(encoding="utf-8").splitlines():
                self._add(Answer(**json.loads(line)))

    def _add(self, answer: Answer) -> None:
        key = (answer.suite, answer.number, answer.spec, answer.temperature)
        self._answers[key] = answer

    def of(self, prompt: Prompt, spec: str, temperature: float) -> Answer | None:
        """Return the answer of a drafter, or ``None`` if it is not decoded yet."""
        return self._answers.get((prompt.suite, prompt.number, spec, temperature))

    def complete(self, specs: Sequence[str], temperature: float) -> dict[str, list[Answer]]:
        """Return the answers of each drafter on the prompts that all of them have decoded."""
        found: dict[str, list[Answer]] = {spec: [] for spec in specs}
        for prompt in self.prompts:
            answers = [self.of(prompt, spec, temperature) for spec in specs]
            known = [answer for answer in answers if answer is not None]
            if len(known) == len(specs):
                for answer in known:
                    found[answer.spec].append(answer)
        return found

    def decode_all(self, specs: Sequence[str], end: float) -> None:
        """Decode all prompts with all drafters, unless the file has their answers.

        No answer begins after ``end``, a time of ``time.monotonic``. The prompts are the outer
        loop, so that a stopped script has complete prompts.
        """
        cells = [
            (temperature, prompt, spec)
            for temperature in self.options.temperatures
            for prompt in self.prompts
            for spec in dict.fromkeys([PLAIN, *specs])
        ]
        missing = [cell for cell in cells if self.of(cell[1], cell[2], cell[0]) is None]
        took = list[float]()
        for count, (temperature, prompt, spec) in enumerate(missing):
            if time.monotonic() >= end:
                break
            answer = self._decode(prompt, spec, temperature)
            took.append(answer.seconds)
            self._add(answer)
            with self.options.state.open("a", encoding="utf-8") as file:
                file.write(json.dumps(answer._asdict()) + "\n")
            left = fmean(took) * (len(missing) - count - 1) / 60
            print(f"\r{left:.1f} minutes left  ", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)

    def _decode(self, prompt: Prompt, spec: str, temperature: float) -> Answer:
        params = SamplingParams(max_tokens=self.options.tokens, temperature=temperature, seed=1)
        began = time.perf_counter()
        chat = [{"role": "user", "content": prompt.text}]
        done = self.llm.chat(chat, params, drafter=spec)
        seconds = time.perf_counter() - began
        plain = self.of(prompt, PLAIN, temperature)
        text = list(done.token_ids)
        if plain is not None and plain.text != text:
            sys.exit(f"counts: expected the tokens of plain decoding with {spec}, found others")
        steps = done.stats.steps[1:]
        return Answer(
            prompt.suite,
            prompt.number,
            spec,
            temperature,
            [step.tokens for step in steps],
            [step.accepted for step in steps],
            [step.drafted for step in steps],
            repeated_ngrams(text),
            text if plain is None else [],
            seconds,
        )


def length_table(found: dict[str, list[Answer]], names: dict[str, tuple[object, ...]]) -> str:
    """Return a table of S by the length of the answers, over all answers and those without loops.

    Args:
        found: answers of each drafter, on equal prompts.
        names: first cell and last cell (such as the paper's S) of each drafter's row.
    """
    rows = list[list[object]]()
    longest = max(sum(answer.tokens) + 1 for answer in next(iter(found.values())))
    lengths = [length for length in LENGTHS if length <= longest]
    for spec, (name, paper) in names.items():
        answers = found[spec]
        calm = [answer for answer in answers if answer.repeated <= LOOPING]
        cells = [f"{per_pass(answers, length):.2f}" for length in lengths]
        cells.append(f"{per_pass(calm, LENGTHS[-1]):.2f}")
        rows.append([name, *cells, paper])
    columns = ["drafter", *(f"S, {length} tokens" for length in lengths)]
    columns += [f"S, at most {LOOPING:.0%} repeated", "paper's S"]
    return f"{text_facts(next(iter(found.values())))}\n\n{markdown(columns, rows)}"


def text_facts(answers: Sequence[Answer]) -> str:
    """Return a sentence about number, length and repetition of the answers."""
    lengths = [sum(answer.tokens) + 1 for answer in answers]
    calm = sum(answer.repeated <= LOOPING for answer in answers)
    return (
        f"{len(answers)} answers of {fmean(lengths):.0f} tokens on average. "
        f"{fmean(answer.repeated for answer in answers):.0%} of their 4-grams occurred before in "
        f"the answer; in {calm} answers at most {LOOPING:.0%}."
    )


def suite_table(found: dict[str, list[Answer]], names: dict[str, tuple[object, ...]]) -> str:
    """Return a table of S by suite, over whole answers, with the share of repeated 4-grams."""
    first = next(iter(found.values()))
    suites = list(dict.fromkeys(answer.suite for answer in first))
    rows = list[list[object]]()
    shares = list[str]()
    for suite in suites:
        share = fmean(answer.repeated for answer in first if answer.suite == suite)
        shares.append(f"{share:.0%}")
    for spec, (name, _) in names.items():
        groups = [[each for each in found[spec] if each.suite == suite] for suite in suites]
        rows.append([name, *(f"{per_pass(group, LENGTHS[-1]):.2f}" for group in groups)])
    rows.append(["repeated 4-grams", *shares])
    return markdown(["S", *suites], rows)


def both_tables(found: dict[str, list[Answer]], names: dict[str, tuple[object, ...]]) -> str:
    """Return the tables of S by length and by suite."""
    return f"{length_table(found, names)}\n\n{suite_table(found, names)}"


def ablation_names() -> dict[str, tuple[object, ...]]:
    """Return the name and the paper's S of each drafter of table 3."""
    lookup, *specs = ablation_specs()
    named: dict[str, tuple[object, ...]] = {lookup: ("prompt lookup", "1.55")}
    for spec, (n, w, g, use_prompt, _, s) in zip(specs, TABLE3, strict=True):
        text = "with" if use_prompt else "without"
        named[spec] = (f"({n}, {w}, {g}), {text} n-grams of the text", f"{s:.2f}")
    return named


def main_names() -> dict[str, tuple[object, ...]]:
    """Return the rows of table 3 with each branch alone, both branches, and prompt lookup."""
    named = ablation_names()
    lookup = next(iter(named))
    chosen = [lookahead(1, 5, 30, USE_TEXT), lookahead(15, 5, 15, WITHOUT_TEXT)]
    chosen.append(lookahead(15, 5, 15, USE_TEXT))
    return {spec: named[spec] for spec in (lookup, *chosen)}


def fit_text(found: dict[str, list[Answer]]) -> str:
    """Return α and f of equation 7 with 90 % intervals over the prompts, by length of the answers.

    The intervals are those of ``RESAMPLES`` sets of prompts, drawn with replacement.
    """
    specs = fit_specs()
    keys = [*fit_keys()]
    count = len(found[specs[0]])
    rows = list[list[object]]()
    for length in LENGTHS:
        dice = random.Random(0)

        def fitted(chosen: Sequence[int], length: int = length) -> Fit:
            points = list[tuple[int, int, float]]()
            for spec, (window, ngram) in zip(specs, keys, strict=True):
                answers = [found[spec][index] for index in chosen]
                points.append((window, ngram, per_pass(answers, length)))
            return fit(points)

        own = fitted(range(count))
        samples = [fitted(dice.choices(range(count), k=count)) for _ in range(RESAMPLES)]
        alphas = sorted(each.alpha for each in samples)
        fs = sorted(each.f for each in samples)
        low = RESAMPLES // 20
        high = RESAMPLES - low - 1
        rows.append(
            [
                length,
                f"{own.alpha:.3f} [{alphas[low]:.3f}, {alphas[high]:.3f}]",
                f"{own.f:.2f} [{fs[low]:.2f}, {fs[high]:.2f}]",
                f"{own.unexplained:.0%}",
            ]
        )
    rows.append(["the paper's", f"{PAPER_ALPHA}", f"{PAPER_F}", ""])
    fits = markdown(["tokens", "α [90 %]", "f [90 %]", "variance unexplained"], rows)
    cells = list[list[object]]()
    for spec, (window, ngram) in zip(specs, keys, strict=True):
        own_cells = [f"{per_pass(found[spec], length):.2f}" for length in LENGTHS]
        cells.append([ngram, window, 2 * window * (ngram - 1), *own_cells])
    columns = ["N", "W = G", "(W + G)(N - 1)", *(f"S, {length} tokens" for length in LENGTHS)]
    return f"{text_facts(found[specs[0]])}\n\n{fits}\n\n{markdown(columns, cells)}"


def fit_keys() -> Iterator[tuple[int, int]]:
    """Yield W and N of each drafter of ``fit_specs``."""
    for ngram, windows in WINDOWS.items():
        for window in windows:
            yield window, ngram


def draft_names(options: argparse.Namespace) -> dict[str, tuple[object, ...]]:
    """Return the name of each drafter of the draft model."""
    model = f"draft_model(model={str(options.draft)!r})"
    return {
        model: ("draft_model, chains of 7", ""),
        f"threshold({model})": ("threshold", ""),
        f"cape({model})": ("cape, 32 nodes", ""),
        f"beam({model}, width=4)": ("beam of 4", ""),
        f"staged({model}, prompt_lookup)": ("staged, 16 nodes", ""),
    }


def draft_text(found: dict[str, list[Answer]], names: dict[str, tuple[object, ...]]) -> str:
    """Return the tables of S of the draft model's drafters, and their acceptance rates."""
    rows = list[list[object]]()
    for spec, (name, _) in names.items():
        drafted = sum(sum(answer.drafted) for answer in found[spec])
        accepted = sum(sum(answer.accepted) for answer in found[spec])
        steps = sum(len(answer.tokens) for answer in found[spec])
        rows.append([name, f"{drafted / steps:.1f}", f"{accepted / max(1, drafted):.0%}"])
    columns = ["drafter", "draft tokens per pass", "accepted"]
    return f"{both_tables(found, names)}\n\n{markdown(columns, rows)}"


def ctar_text(found: dict[str, list[Answer]], names: dict[str, tuple[object, ...]]) -> str:
    """Return a table of S and CTAR(w): the share of passes with at least w accepted tokens."""
    depths = range(1, CTAR_DEPTH + 1)
    rows = list[list[object]]()
    for spec, (name, _) in names.items():
        accepted = [count for answer in found[spec] for count in answer.accepted]
        curve = ctar_curve(accepted, CTAR_DEPTH)
        drafted = sum(sum(answer.drafted) for answer in found[spec])
        figures = [f"{per_pass(found[spec], LENGTHS[-1]):.2f}", f"{drafted / len(accepted):.1f}"]
        rows.append([name, *figures, *(f"{share:.2f}" for share in curve)])
    facts = text_facts(next(iter(found.values())))
    columns = ["drafter", "S", "draft tokens per pass", *(f"w = {depth}" for depth in depths)]
    return f"{facts}\n\n{markdown(columns, rows)}"


def figures_of(found: dict[str, list[Answer]]) -> dict[str, dict[str, Any]]:
    """Return S by length, S by suite and the draft tokens per pass of each drafter."""
    by_length = dict[str, list[float]]()
    by_suite = dict[str, dict[str, float]]()
    drafted = dict[str, float]()
    for spec, answers in found.items():
        by_length[spec] = [per_pass(answers, length) for length in LENGTHS]
        suites = dict.fromkeys(answer.suite for answer in answers)
        by_suite[spec] = {
            suite: per_pass([each for each in answers if each.suite == suite], LENGTHS[-1])
            for suite in suites
        }
        steps = sum(len(answer.tokens) for answer in answers)
        drafted[spec] = sum(sum(answer.drafted) for answer in answers) / steps
    return {"S": by_length, "S by suite": by_suite, "draft tokens per pass": drafted}


class Part(NamedTuple):
    """A table of the script: its title, the drafters with their names, and the table's text."""

    title: str
    names: Callable[[argparse.Namespace], dict[str, tuple[object, ...]]]
    text: Callable[[dict[str, list[Answer]], dict[str, tuple[object, ...]]], str]


PARTS = {
    "table3": Part("Lookahead, table 3", lambda _: ablation_names(), both_tables),
    "main": Part("Lookahead, main rows of table 3", lambda _: main_names(), both_tables),
    "fit": Part(
        "Lookahead, figure 4 and equation 7",
        lambda _: {spec: (spec, "") for spec in fit_specs()},
        lambda found, _: fit_text(found),
    ),
    "drafts": Part("Drafters of a draft model", draft_names, draft_text),
    "ctar": Part(
        "CTAR by position",
        lambda options: {spec: (name, "") for name, spec in options.drafter},
        ctar_text,
    ),
}


def main() -> None:
    """Decode what is missing, and write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--per-suite", type=int, default=4)
    parser.add_argument("--suites", nargs="+", help="names of the suites; by default all")
    parser.add_argument("--tokens", type=int, default=LENGTHS[-1], help="longest answer")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--state", type=Path, required=True, help="file of answers; continued")
    parser.add_argument("--minutes", type=float, default=60.0, help="time of this call")
    parser.add_argument("--draft", type=Path, help="draft model, for the part `drafts`")
    add_folders(parser, "--drafter", "a drafter of the part `ctar`")
    parser.add_argument("--out", help="file name without ending, for .md and .json")
    options = parser.parse_intermixed_args()
    if "drafts" in options.parts and options.draft is None:
        parser.error("drafts: expected --draft MODEL, found none")
    if "ctar" in options.parts and not options.drafter:
        parser.error("ctar: expected --drafter NAME=SPEC, found none")
    prompts = [
        prompt
        for prompt in read_prompts(options.prompts, options.per_suite)
        if options.suites is None or prompt.suite in options.suites
    ]
    llm = LLM(options.model, drafter=PLAIN, budget="all", threads=options.threads)
    counts = Counts(llm, prompts, options)
    parts = {name: PARTS[name].names(options) for name in options.parts}
    end = time.monotonic() + 60 * options.minutes
    counts.decode_all([spec for names in parts.values() for spec in names], end)
    tables = list[str]()
    cells = list[dict[str, Any]]()
    for temperature in options.temperatures:
        for name, names in parts.items():
            found = counts.complete([*names], temperature)
            if not next(iter(found.values())):
                print(f"{name}: no prompt is complete yet; the same command continues")
                continue
            title = f"## {PARTS[name].title}, T = {temperature}"
            tables.append(f"{title}\n\n{PARTS[name].text(found, names)}")
            print(tables[-1], end="\n\n", flush=True)
            cells.append({"part": name, "temperature": temperature} | figures_of(found))
    more = f"; at most {options.tokens} tokens each; every drafter gave plain decoding's tokens"
    write_report(options.out, "Tokens per forward pass", llm, tables, cells, more)


if __name__ == "__main__":
    main()
