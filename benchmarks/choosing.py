"""Speed of ``auto`` relative to the best single drafter of each suite, known in hindsight.

    python benchmarks/inflate.py big --layers 24
    python benchmarks/choosing.py --model big --data SUITES --limit 4
    python benchmarks/choosing.py --data SUITES --limit 16

All methods, plain decoding included, decode every prompt in turn, and the script checks that their
outputs are equal. The speed of a method on a suite is its tokens per second after the first step,
divided by those of plain decoding on the same prompts. Texts that loop (more than half of their
4-grams occurred before) form a suite of their own. ``auto / best`` compares ``auto`` with the
single drafter that is best on the suite. A line below the table has the geometric mean of each
method over the suites, and the ratio of ``auto`` to the best of these means. Brackets have the 90 %
interval over resampled prompts.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean

from pronk import LLM, SamplingParams
from pronk.base.files.results import save_result
from pronk.lab.bench.metrics import repeated_ngrams
from pronk.lab.bench.prompts import Prompt, encode, load_suite

PLAIN = "autoregressive"
AUTO = "auto"
WITHOUT = "auto(bundled=False)"
SINGLE = ("suffix(store_tokens=0)", "prompt_lookup", "recycling", "lookahead")
DRAFTS = ("draft_model", "cape(draft_model)", "threshold(draft_model)")
SUITES = ("humaneval", "gsm8k", "mbpp", "code_edit", "spec_bench")
LOOPS = "texts that loop"


@dataclass
class Measured:
    """Measurements of one prompt.

    Attributes:
        suite: name of the suite, or :data:`LOOPS`.
        seconds: seconds per token after the first step, by method.
        steps: tokens per forward pass, by method.
    """

    suite: str
    seconds: dict[str, float] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)


def measure(
    llm: LLM,
    suite: str,
    prompt: Prompt,
    place: int,
    methods: Sequence[str],
    args: argparse.Namespace,
) -> list[Measured]:
    """Decode one prompt with all methods; return the measurements of each round.

    The order of the methods differs between rounds and prompts; ``place`` is the prompt's number.
    """
    rounds = []
    ids = encode(llm, prompt, chat=False)[-args.most :]
    for number in range(args.rounds):
        shift = (number + place) % len(methods)
        found = Measured(suite)
        texts = set[tuple[int, ...]]()
        for method in (*methods[shift:], *methods[:shift]):
            params = SamplingParams(
                max_tokens=args.max_tokens,
                temperature=args.temperature,
                seed=number,
                ignore_eos=True,
            )
            out = llm.generate(ids, params, drafter=method)
            texts.add(tuple(out.token_ids))
            later = out.stats.generated_tokens - out.stats.steps[0].tokens
            found.seconds[method] = (out.stats.total_seconds - out.stats.ttft) / later
            found.steps[method] = out.stats.step_compression
        assert len(texts) == 1, f"{prompt.id}: the methods gave different texts"
        if repeated_ngrams(texts.pop()) > 0.5:
            found.suite = LOOPS
        rounds.append(found)
    return rounds


def speed(found: Sequence[Measured], method: str) -> float:
    """Return the speed of a method relative to plain decoding, over all tokens."""
    return sum(each.seconds[PLAIN] for each in found) / sum(each.seconds[method] for each in found)


def interval(found: Sequence[Measured], method: str, over: str | None) -> tuple[float, float]:
    """Return the 90 % interval of the speed over resampled prompts."""
    dice = random.Random(0)
    values = []
    for _ in range(500):
        drawn = dice.choices(found, k=len(found))
        values.append(speed(drawn, method) / (speed(drawn, over) if over else 1.0))
    values.sort()
    return values[25], values[474]


def report(found: Sequence[Measured], auto: str, singles: Sequence[str]) -> None:
    """Print the table that compares ``auto`` with single drafters."""
    suites = list(dict.fromkeys(each.suite for each in found))
    print(f"\n| suite | prompts | {auto} | best single | which | auto / best |")
    print("|---|---|---|---|---|---|")
    for suite in suites:
        mine = [each for each in found if each.suite == suite]
        best = max(singles, key=lambda method: speed(mine, method))
        low, high = interval(mine, auto, best)
        ratio = speed(mine, auto) / speed(mine, best)
        speeds = f"{speed(mine, auto):.2f} | {speed(mine, best):.2f} | {best}"
        spread = f"{ratio:.2f} ({low:.2f} to {high:.2f})"
        print(f"| {suite} | {len(mine)} | {speeds} | {spread} |")
    real_suites = [suite for suite in suites if suite != LOOPS] or suites
    overall = dict[str, float]()
    for method in (auto, *singles):
        by_suite = list[float]()
        for suite in real_suites:
            own = [each for each in found if each.suite == suite]
            by_suite.append(speed(own, method))
        overall[method] = geometric_mean(by_suite)
    ordered = sorted(overall, key=lambda method: -overall[method])
    listed = ", ".join(f"{method} {overall[method]:.2f}" for method in ordered)
    best = max(singles, key=overall.__getitem__)
    ratio = overall[auto] / overall[best]
    print(f"\nOver all suites: {listed}. {auto} has {ratio:.2f} of the best single drafter.")


def main() -> None:
    """Run the measurements, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--data", type=Path, required=True, help="folder with the suites")
    parser.add_argument("--suites", nargs="+", default=SUITES)
    parser.add_argument("--limit", type=int, default=4, help="prompts per suite")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument(
        "--most", type=int, default=1024, help="maximum prompt length in tokens, from the end"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", type=Path, help="file for the measurements")
    args = parser.parse_args()
    llm = LLM(args.model, prefix_cache=True)  # a prompt is read once for all methods
    singles = [*SINGLE, *DRAFTS]
    methods = [PLAIN, *singles, AUTO, WITHOUT]
    warm_up = SamplingParams(max_tokens=16, ignore_eos=True)
    for method in methods:
        llm.generate("def f(x):\n    return x", warm_up, drafter=method)
    found: list[Measured] = []
    for suite in args.suites:
        prompts = load_suite(suite, args.data)
        chosen = prompts[:: max(1, len(prompts) // args.limit)][: args.limit]
        for place, prompt in enumerate(chosen):
            found += measure(llm, suite, prompt, place, methods, args)
        print(f"{suite}: {len(chosen)} prompts", flush=True)
        if args.json:
            save_result("json", args.json, json.dumps([vars(each) for each in found]))
    report(found, AUTO, singles)
    report(found, WITHOUT, SINGLE)


if __name__ == "__main__":
    main()
