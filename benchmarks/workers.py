"""Gain of several processes: token trees divided among workers, and tensor parallelism.

    python benchmarks/workers.py --model big                          # trees, 1 and 2 processes
    python benchmarks/workers.py --model big --tensor                 # tensor parallelism
    python benchmarks/workers.py --model big --scaling scaling.svg    # simulated trees, 1 to 8

Each process has one thread. The simulation divides the trees of long texts of pronk-tiny among
simulated workers. A step takes as long as its longest part, by the measured costs of forward passes
of --model, plus an exchange. For each number of workers, the best window of lookahead is taken (Fu
et al. 2024, section 5.3 and figure 7): more workers pay for wider windows. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, cast

from pronk import LLM, SamplingParams
from pronk.diagnosis import BandwidthMeter
from pronk.drafting import DraftContext, Outcome, Proposer
from pronk.engine.outputs import Completion
from pronk.kernels.threads import set_threads
from pronk.lab.bench.machine import describe_hardware
from pronk.lab.bench.measure import pass_times
from pronk.models.forward_batch import ForwardBatch
from pronk.models.model_runner import ModelRunner
from pronk.parallel.runner import TreeRunner
from pronk.parallel.tree_partition import count_rows, partition_trees
from pronk.sampling.tree import TokenTree

PROMPTS = (
    'def fibonacci(n):\n    """The n-th Fibonacci number."""\n',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\nimport sys\n\n\ndef main():\n    for name in os.listdir('.'):\n",
)
WORKERS = (1, 2, 3, 4, 6, 8)
WINDOWS = (5, 10, 15, 20, 30)
EXCHANGES = (0.0, 0.001, 0.005, 0.02)
LONG = 512


class Tree(Proposer[None]):
    """Drafter that proposes a random tree of ``nodes`` nodes, of which hardly any is accepted."""

    name = "tree"

    def __init__(self, nodes: int, vocab_size: int) -> None:
        self.nodes = nodes
        self.vocab_size = vocab_size
        dice = random.Random(0)
        self.parents = (-1, *(dice.randrange(max(0, node - 8), node) for node in range(1, nodes)))

    def start(self, prompt: Sequence[int]) -> None:
        """Return no state."""

    def propose(self, contexts: Sequence[DraftContext[None]]) -> list[TokenTree]:
        """Propose a tree of the same shape for each request."""
        trees = list[TokenTree]()
        for context in contexts:
            root = context.tokens[-1]
            tokens = tuple((root + node) % self.vocab_size for node in range(self.nodes))
            trees.append(TokenTree(tokens, self.parents))
        return trees

    def observe(self, outcome: Outcome[None]) -> None:
        """Ignore the result of the verification."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="pronk-tiny", help="a folder or name; default: pronk-tiny"
    )
    parser.add_argument(
        "--kernels", default="auto", help="instruction set, to imitate another processor"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument(
        "--tensor", action="store_true", help="measure tensor parallelism instead of trees"
    )
    parser.add_argument(
        "--scaling", type=Path, metavar="FILE", help="simulate more workers, and draw the result"
    )
    options = parser.parse_args()
    if options.scaling is not None:
        report = scaling(options)
    elif options.tensor:
        report = tensor(options)
    else:
        report = trees(options)
    print(json.dumps({"machine": describe_hardware("cpu"), **report}))


def ask(llm: LLM, prompt: str, tokens: int, drafter: Any) -> Completion:
    """Continue a prompt greedily by a number of tokens."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return llm.generate(prompt, params, drafter=drafter)


def trees(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the time of a step with workers relative to one process, in turn within a run."""
    llm = LLM(
        options.model, workers=options.workers, threads=1, budget="all", kernels=options.kernels
    )
    runner = llm.engine.runner
    assert isinstance(runner, TreeRunner)
    there = [*runner.workers]
    proposers = {"lookahead(10, 5, 10)": "lookahead(window=10, ngram=5, guesses=10)"}
    drafters: dict[str, Any] = {**proposers, "tree of 64": Tree(64, llm.config.vocab_size)}
    found: dict[str, Any] = {}
    for name, drafter in drafters.items():
        times: dict[bool, list[float]] = {False: [], True: []}
        waited = list[float]()
        told = list[float]()
        dealt = list[float]()
        texts = set[tuple[int, str]]()
        for turn in range(options.rounds + 1):
            for shared in (False, True):
                runner.workers[:] = there if shared else []
                passes = runner.num_shared_passes
                before = runner.communication_seconds
                done = ask(llm, PROMPTS[turn % len(PROMPTS)], options.max_tokens, drafter)
                texts.add((turn % len(PROMPTS), done.text))
                seconds, rows = full(done)
                if turn:  # the first round warms up and measures costs
                    times[shared].append(median(seconds))
                if turn and shared:
                    dealt.append((runner.num_shared_passes - passes) / len(done.stats.steps))
                    waited.append(
                        (runner.communication_seconds - before) / done.stats.target_seconds
                    )
                    told.append(max(worker.exchange_seconds for worker in there) / median(seconds))
        assert len(texts) == len({number for number, _ in texts})
        ratios = [
            with_them / alone for alone, with_them in zip(times[False], times[True], strict=True)
        ]
        found[name] = {
            "rows": rows,
            "alone": median(times[False]),
            "ratio": median(ratios),
            "waited": median(waited),
        }
        found[name]["exchange"] = median(told)
        alone = f"alone {1e3 * median(times[False]):6.1f} ms"
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        waiting = f"exchange and waiting {median(waited):.1%}"
        print(
            f"{name:22} {rows:4.0f} rows  {alone}  {options.workers} workers "
            f"{median(ratios):.2f} {spread}  {waiting}, of which exchange {median(told):.1%}  "
            f"split {median(dealt):.0%} of the steps"
        )
    return {"trees": found}


def full(done: Completion) -> tuple[list[float], float]:
    """Return the seconds of a text's large steps, and the median of their numbers of rows.

    The first and last steps of a text are small.
    """
    pairs = [*pairwise(done.stats.steps)]
    most = max(step.rows for _, step in pairs)
    chosen = [(b.target_clock - a.target_clock, b.rows) for a, b in pairs if b.rows >= 0.75 * most]
    return [seconds for seconds, _ in chosen], median([rows for _, rows in chosen])


def tensor(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a plain step of one process and of several, and the memory bandwidth."""
    split = LLM(
        options.model,
        workers=options.workers,
        parallel="tensor",
        threads=1,
        budget="all",
        kernels=options.kernels,
    )
    whole = LLM(options.model, threads=1, budget="all", kernels=options.kernels)
    times: dict[str, list[float]] = {}
    for turn in range(options.rounds + 1):
        for name, llm, threads in (
            ("one, 1 thread", whole, 1),
            (f"one, {options.workers} threads", whole, options.workers),
            (f"split in {options.workers}", split, 1),
        ):
            set_threads(threads, workers=1)
            done = ask(llm, PROMPTS[turn % len(PROMPTS)], options.max_tokens, "autoregressive")
            if turn:
                seconds = [b.target_clock - a.target_clock for a, b in pairwise(done.stats.steps)]
                times.setdefault(name, []).append(median(seconds))
    meter = BandwidthMeter(whole.engine.runner.decoder.kernels)
    speeds = {}
    for threads in (1, options.workers):
        set_threads(threads, workers=1)
        speeds[threads] = meter.measure()
        print(f"memory, {threads} threads: {speeds[threads] / 1e9:.1f} GB/s")
    for name, own in times.items():
        spread = f"({1e3 * min(own):.1f} to {1e3 * max(own):.1f})"
        print(f"{name:16} {1e3 * median(own):7.1f} ms a step {spread}")
    found = {name: median(own) for name, own in times.items()}
    return {
        "tensor": found,
        "bytes_per_second": speeds,
        "parted": [*divergences(whole, split, options.max_tokens)],
    }


def divergences(whole: LLM, split: LLM, tokens: int) -> Iterator[dict[str, Any]]:
    """Yield the first difference between the greedy texts of one process and of several.

    ``place`` is the number of the first token that differs, or ``None``. ``gap`` is the difference
    of the two tokens' log-probabilities in one process. ``rounding`` is the largest difference of
    log-probabilities at earlier tokens.
    """
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=8)
    for number, prompt in enumerate(PROMPTS):
        one = whole.generate(prompt, params)
        other = split.generate(prompt, params)
        assert one.logprobs is not None
        assert other.logprobs is not None
        pairs = zip(one.token_ids, other.token_ids, strict=True)
        different = [index for index, (a, b) in enumerate(pairs) if a != b]
        place = different[0] if different else None
        rounding = 0.0
        for index, token in enumerate(one.token_ids[:place]):
            distance = abs(one.logprobs[index][token] - other.logprobs[index][token])
            rounding = max(rounding, distance)
        gap = None
        where = "equal tokens"
        if place is not None:
            report = one.logprobs[place]
            gap = report[one.token_ids[place]] - report[other.token_ids[place]]
            where = f"differs from token {place} on, by a log-probability of {gap:.3f}"
        print(f"text {number}: {where}; earlier log-probabilities differ by at most {rounding:.3f}")
        yield {"text": number, "place": place, "gap": gap, "rounding": rounding}


def scaling(options: argparse.Namespace) -> dict[str, Any]:
    """Simulate the speed relative to plain decoding by number of workers and exchange time.

    Each speed is that of the best window of lookahead.
    """
    llm = LLM(options.model, threads=1, budget="all", kernels=options.kernels)
    plain = [ask(llm, prompt, options.max_tokens, "autoregressive") for prompt in PROMPTS]
    seconds = list[float]()
    for done in plain:
        for before, after in pairwise(done.stats.steps):
            seconds.append(after.target_clock - before.target_clock)
    one = median(seconds)
    # pronk-tiny has the same trees as its inflated copy. The texts are long, because lookahead uses
    # no window near the end of a text.
    small = LLM(threads=1, budget="all")
    runs = {window: watched(small, window, LONG) for window in WINDOWS}
    cost = step_cost(llm, one)
    speeds: dict[float, dict[int, tuple[float, int]]] = {}
    for exchange in EXCHANGES:
        for workers in WORKERS:
            extra = [0.0] + [exchange] * (workers - 1)
            by_window = list[tuple[float, int]]()
            for window, (steps, tokens) in runs.items():
                total = sum(span(trees, cost, extra) for trees in steps)
                by_window.append((one * tokens / total, window))
            speeds.setdefault(exchange, {})[workers] = max(by_window)
        own = speeds[exchange].items()
        line = "  ".join(f"{n}: {speed:.2f} (W {window})" for n, (speed, window) in own)
        print(f"exchange {1e3 * exchange:4.0f} ms   {line}")
    draw(speeds, options.scaling, llm.kernels)
    print(f"drawn in {options.scaling}")
    report = dict[str, dict[str, tuple[float, int]]]()
    for exchange, by_workers in speeds.items():
        report[str(exchange)] = {str(n): best for n, best in by_workers.items()}
    return {"scaling": report}


def watched(llm: LLM, window: int, tokens: int) -> tuple[list[list[TokenTree]], int]:
    """Decode texts with lookahead; return each step's trees, and the number of tokens.

    The first token of each text does not count.
    """
    steps: list[list[TokenTree]] = []
    forward: Callable[..., Any] = ModelRunner.forward

    def watch(batch: ForwardBatch, *more: Any) -> Any:
        if all(len(entry.logits_nodes) == len(entry.tree) for entry in batch.entries):
            steps.append([entry.tree for entry in batch.entries])
        return forward(llm.engine.runner, batch, *more)

    llm.engine.runner.forward = watch  # type: ignore[method-assign]
    try:
        drafter = f"lookahead(window={window}, ngram=5, guesses={window})"
        done = [ask(llm, prompt, tokens, drafter) for prompt in PROMPTS]
    finally:
        del llm.engine.runner.forward
    return steps, sum(len(each.token_ids) - 1 for each in done)


def step_cost(llm: LLM, one: float) -> Callable[[int], float]:
    """Return a function from a number of rows to the seconds of a forward pass.

    The seconds are measured up to 128 rows, and interpolated linearly; those of one row are
    ``one``.
    """
    sizes = (2, 4, 8, 16, 32, 64, 128)
    seen = [*pass_times(llm, llm.request_factory.encode_prompt(PROMPTS[0]), sizes, rounds=2)]
    found = {rows: [each.seconds for each in seen if each.rows == rows] for rows in sizes}
    points = [(1, one), *((rows, median(seconds)) for rows, seconds in found.items() if seconds)]
    print("  ".join(f"{rows}: {1e3 * seconds:.1f} ms" for rows, seconds in points))

    def cost(rows: int) -> float:
        for (a, low), (b, high) in pairwise(points):
            if rows <= b:
                return low + (high - low) * (rows - a) / (b - a)
        (a, low), (b, high) = points[-2:]
        return high + (high - low) * (rows - b) / (b - a)

    return cost


def span(trees: Sequence[TokenTree], cost: Callable[[int], float], extra: Sequence[float]) -> float:
    """Return the seconds of a step: those of the slowest process, with its exchange.

    ``extra`` has the seconds of the exchange with each process, 0 for the driver.
    """
    shards = partition_trees(trees, [cost] * len(extra), extra)
    pairs = zip(shards, extra, strict=True)
    return max(cost(count_rows(shard)) + exchange for shard, exchange in pairs if shard)


def draw(speeds: dict[float, dict[int, tuple[float, int]]], path: Path, kernels: str) -> None:
    """Draw the speeds by number of workers as an SVG file, with a line for each exchange time."""
    import matplotlib as mpl  # noqa: PLC0415 - an optional package, used for --scaling only

    mpl.use("svg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for exchange, each in speeds.items():
        places = [*each]
        axes.plot(places, [each[n][0] for n in places], marker="o", label=f"{1e3 * exchange:g} ms")
        if not exchange:
            for n in places:
                axes.annotate(
                    f"W {each[n][1]}",
                    (n, each[n][0]),
                    (0, 6),
                    textcoords="offset points",
                    ha="center",
                )
    most = max(speed for each in speeds.values() for speed, _ in each.values())
    axes.set(
        xlabel="workers",
        ylabel="× plain decoding",
        ylim=(0, 1.15 * most),
        title=f"Lookahead on several workers, simulated ({kernels})",
    )
    axes.legend(title="exchange")
    axes.grid(alpha=0.3)
    figure.savefig(path)
    plt.close(cast(Any, figure))


if __name__ == "__main__":
    main()
