"""Compare the speed of checkouts of pronk on one model, in processes that measure in turn.

    git worktree add --detach ../before COMMIT && python ../before/src/pronk/kernels/build.py
    python benchmarks/versions.py ../before . --model MODEL.gguf --prefill 385 --seconds 50

Each round measures the prefill of one prompt and the mean step of plain decoding once in each
checkout. The first checkout is the base of the ratios. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter

# What one process runs. It measures once for each line of its input.
MEASURE = """
import sys
from time import perf_counter
from pronk import LLM, SamplingParams

model, threads, prefill, tokens = sys.argv[1], *map(int, sys.argv[2:])
llm = LLM(model, threads=threads, calibration=False, prefix_cache=False)

def seconds(prompt, count):
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    began = perf_counter()
    llm.generate([prompt], params, drafter="autoregressive")
    return perf_counter() - began

def measure():
    prompt = [100 + 37 * i % 1000 for i in range(prefill)]
    return seconds(prompt, 1), seconds(prompt[:1], tokens) / tokens

measure()
print("ready", flush=True)
for _ in sys.stdin:
    print(*measure(), flush=True)
"""
FIGURES = ("prefill", "step")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT")
    parser.add_argument("--model", required=True, help="a model folder or GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prefill", type=int, default=385, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=40, help="steps of plain decoding")
    parser.add_argument("--seconds", type=float, default=50.0, help="duration of all rounds")
    options = parser.parse_args()
    arguments = [options.model, *map(str, (options.threads, options.prefill, options.tokens))]
    processes = [start(checkout, arguments) for checkout in options.checkouts]
    measured: list[list[tuple[float, ...]]] = [[] for _ in processes]
    end = perf_counter() + options.seconds
    rounds = 0
    while perf_counter() < end:
        for position in range(len(processes)):
            number = (position + rounds) % len(processes)  # each round begins with another one
            measured[number].append(measure(processes[number]))
        rounds += 1
    for process in processes:
        process.communicate()
    report = {
        figure: [
            summary([each[column] for each in own], [each[column] for each in measured[0]])
            for own in measured
        ]
        for column, figure in enumerate(FIGURES)
    }
    for figure, rows in report.items():
        for checkout, row in zip(options.checkouts, rows, strict=True):
            times = "{median:8.2f} ms [{low:.2f}, {high:.2f}], least {least:.2f}".format(**row)
            ratios = "x base {ratio:.3f}, of the least {least_ratio:.3f}".format(**row)
            print(f"{figure:8} {checkout.name:12} {times}; {ratios}")
    print(json.dumps({"model": Path(options.model).name, "rounds": rounds} | report))


def start(checkout: Path, arguments: list[str]) -> subprocess.Popen[str]:
    """Start the process of a checkout, and wait until it has loaded the model."""
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve() / "src")}
    process = subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-c", MEASURE, *arguments],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        sys.exit(f"versions: {checkout} cannot run the model")
    return process


def measure(process: subprocess.Popen[str]) -> tuple[float, ...]:
    """Return the seconds of a prefill and of a step in a process."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(file=process.stdin, flush=True)
    return tuple(float(each) for each in process.stdout.readline().split())


def summary(seconds: list[float], base: list[float]) -> dict[str, float]:
    """Return quantiles in milliseconds, and ratios to the base's seconds of the same rounds."""
    ordered = sorted(1e3 * each for each in seconds)
    last = len(ordered) - 1
    return {
        "median": statistics.median(ordered),
        "low": ordered[round(0.1 * last)],
        "high": ordered[round(0.9 * last)],
        "least": ordered[0],
        "ratio": statistics.median(a / b for a, b in zip(seconds, base, strict=True)),
        "least_ratio": ordered[0] / (1e3 * min(base)),
    }


if __name__ == "__main__":
    main()
