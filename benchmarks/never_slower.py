"""Speed of `auto` relative to plain decoding where draft tokens have little chance.

    python benchmarks/never_slower.py MODEL.gguf
    python benchmarks/never_slower.py MODEL.gguf --cases noise batch --rounds 24 --out OUT

Each case decodes the same prompts with `auto` and without a drafter, by turns, on one engine, and
both must generate the same tokens. A round gives the quotient of two times by the wall clock, the
first token included. The table has the median of the rounds with its 95 % interval over resampled
rounds; 1 is as fast as plain decoding, and the goal is at least 0.98 in every case.

| case | prompts and answers |
|---|---|
| noise | random tokens, 96 tokens at temperature 2 |
| one token | a chat prompt, 1 token |
| right, then wrong | a prediction of 50 right tokens and random ones, 96 tokens |
| batch of N | N prompts of random tokens, 48 tokens at temperature 1.5 |
| context of N | N random tokens, 48 tokens at temperature 2 |
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, strftime
from typing import NamedTuple

from pronk import LLM, SamplingParams
from pronk.base.files.results import save_result
from pronk.kernels.threads import num_threads
from pronk.lab.bench.machine import describe_hardware

PLAIN = "autoregressive"
AUTO = "auto"
_CHAT = "Answer with yes or no: is the Moon larger than the Earth?"


class Case(NamedTuple):
    """Prompts of one case as token ids, and the options of their requests."""

    name: str
    prompts: list[list[int]]
    params: SamplingParams


def make_cases(llm: LLM, chosen: Sequence[str]) -> Iterator[Case]:
    """Yield the cases whose names begin with one of ``chosen``; all if it is empty."""
    choose = random.Random(7)
    vocab_size = llm.target.decoder.config.vocab_size
    context = llm.target.decoder.config.context

    def noise(length: int) -> list[int]:
        return [choose.randrange(vocab_size) for _ in range(length)]

    def sampled(temperature: float, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=temperature, max_tokens=max_tokens, seed=5, ignore_eos=True
        )

    makers: dict[str, Callable[[], Case]] = {
        "noise": lambda: Case("noise", [noise(32)], sampled(2.0, 96)),
        "one token": lambda: Case("one token", [_tokens(llm, _CHAT)], sampled(0.0, 1)),
        "right, then wrong": lambda: _right_then_wrong(llm, noise(64)),
    }
    for size in (2, 8, 32):
        makers[f"batch of {size}"] = lambda size=size: Case(  # type: ignore[misc]
            f"batch of {size}", [noise(32) for _ in range(size)], sampled(1.5, 48)
        )
    for length in (100, 1000, 4000):
        if length + 48 < context:
            makers[f"context of {length:,}"] = lambda length=length: Case(  # type: ignore[misc]
                f"context of {length:,}", [noise(length)], sampled(2.0, 48)
            )
    for name, make in makers.items():
        if not chosen or name.startswith(tuple(chosen)):
            yield make()


def _tokens(llm: LLM, text: str) -> list[int]:
    assert llm.target.tokenizer is not None, "expected a model with a tokenizer"
    return llm.target.tokenizer.encode(text)


def _right_then_wrong(llm: LLM, wrong: list[int]) -> Case:
    """Return a case whose prediction has the first 50 tokens of the output, then ``wrong``."""
    prompt = _tokens(llm, "Once upon a time there was a small village by the sea, and in it")
    params = SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=True)
    (plain,) = llm.generate([prompt], params, drafter=PLAIN)
    prediction = llm.target.tokenizer.decode([*plain.token_ids[:50], *wrong])  # type: ignore[union-attr]
    predicted = SamplingParams(
        temperature=0.0, max_tokens=96, ignore_eos=True, prediction=prediction
    )
    return Case("right, then wrong", [prompt], predicted)


def measure(llm: LLM, case: Case, rounds: int) -> list[float]:
    """Return the seconds of plain decoding divided by those of `auto`, one number per round."""
    quotients = list[float]()
    expected: list[list[int]] | None = None
    for number in range(-1, rounds):  # the first round fills caches and measures costs
        seconds = dict[str, float]()
        for drafter in (PLAIN, AUTO) if number % 2 else (AUTO, PLAIN):
            began = perf_counter()
            completions = llm.generate(case.prompts, case.params, drafter=drafter)
            seconds[drafter] = perf_counter() - began
            found = [list(each.token_ids) for each in completions]
            if expected is None:
                expected = found
            if found != expected:
                sys.exit(f"{case.name}: expected the same tokens with {drafter}, found others")
        if number >= 0:
            quotients.append(seconds[PLAIN] / seconds[AUTO])
    return quotients


def interval(numbers: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median over 1,000 resamples."""
    choose = random.Random(1)
    medians = [median(choose.choices(numbers, k=len(numbers))) for _ in range(1000)]
    parts = quantiles(medians, n=40)
    return parts[0], parts[-1]


def table(results: dict[str, list[float]]) -> str:
    """Return the results of all cases as a table in Markdown."""
    lines = ["| case | auto / plain | 95 % interval |", "|---|--:|---|"]
    for name, quotients in results.items():
        low, high = interval(quotients)
        lines.append(f"| {name} | {median(quotients):.3f} | {low:.3f} to {high:.3f} |")
    return "\n".join(lines)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--cases", nargs="+", default=[], help="beginnings of names; default: all")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", help="file name without the ending .md")
    arguments = parser.parse_args()
    llm = LLM(arguments.model, drafter=AUTO, threads=arguments.threads)
    results = dict[str, list[float]]()
    for case in make_cases(llm, arguments.cases):
        results[case.name] = measure(llm, case, arguments.rounds)
        print(table({case.name: results[case.name]}).splitlines()[-1], flush=True)
    if arguments.out:
        processor = describe_hardware("cpu")["processor"]
        heading = f"{processor}, {num_threads()} threads, {strftime('%B %Y')}"
        save_result("out", Path(f"{arguments.out}.md"), f"{heading}\n\n{table(results)}\n")


if __name__ == "__main__":
    main()
