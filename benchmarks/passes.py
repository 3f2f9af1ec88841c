"""Time of forward passes by number of rows, relative to the limits of memory and processor.

    python benchmarks/passes.py                          # smollm2
    python benchmarks/passes.py --model MODEL.gguf --prefill 700 4000
    python benchmarks/passes.py --busy                   # while another process keeps a core busy

All figures of a table come from one run, in which every round measures each of them once:

    bandwidth   bytes per second of reading the packed weights on all threads
    limit       products per second of two 8-bit codes in registers, on all threads
    floor       bytes of one token's weights in the model's file, divided by the bandwidth
    n*          rows beyond which the products take longer than the floor: limit / (weights / floor)
    goal        the time of n rows over that of one row is at most max(1.15, 1.67 n / n*)

Figures are medians, with the 10th and 90th percentiles in brackets. For steps of plain decoding and
of ``auto``, the script prints the number of calls of the compiled libraries, and the time inside
and outside of these calls. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, Self

from pronk import LLM, SamplingParams
from pronk.base.arrays import Array
from pronk.cache.blocks import BlockTable
from pronk.drafting.from_text._growth import find_suffix_library
from pronk.kernels.threads import set_threads
from pronk.lab.bench.machine import describe_hardware
from pronk.models.decoder import forward_weights
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.sampling.tree import TokenTree

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 200
DRAFTERS = ("autoregressive", "auto")  # whose steps are measured
MULTIPLY_ROUNDS = 1 << 22  # about 10 ms on a processor of 2021


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model folder, GGUF file or name; default: smollm2")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--bits", default="auto", help="auto, portable or fast, as for pronk.LLM")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--prefill", type=int, nargs="*", default=[700], help="lengths of prompts in tokens"
    )
    parser.add_argument(
        "--decode", type=int, default=200, help="tokens of decoded texts; 0 measures none"
    )
    parser.add_argument(
        "--busy",
        action="store_true",
        help="measure beside a process that never waits, also with one thread",
    )
    options = parser.parse_args()
    llm = LLM(options.model, kernels=options.kernels, bits=options.bits, threads=options.threads)
    report: dict[str, Any] = {
        "machine": describe_hardware("cpu"),
        "kernels": llm.kernels,
        "bits": llm.bits,
        "threads": options.threads,
    }
    print(f"{llm.path.name}, {llm.kernels}, {llm.bits} bits, {options.threads} threads")
    if options.busy:
        report["busy"] = beside_a_busy_process(llm, options.threads, options.rounds)
    else:
        report["passes"] = by_rows(llm, options.rounds)
        report["prefill"] = [
            prefill(llm, tokens, report["passes"]["limit"]) for tokens in options.prefill
        ]
        if options.decode:
            report["steps"] = {
                drafter: step_times(llm, options.decode, drafter) for drafter in DRAFTERS
            }
    print(json.dumps(report))


def weights(llm: LLM) -> list[Array]:
    """Return the packed weights that a forward pass reads as a whole."""
    return [linear.packed.data for linear in llm.engine.runner.decoder.linears()]


def by_rows(llm: LLM, rounds: int) -> dict[str, Any]:
    """Measure and print the passes over ``ROWS`` rows, and the limits."""
    kernels = llm.engine.runner.decoder.kernels
    if kernels is None:
        sys.exit("passes: expected pronk's kernels, found none on this machine")
    packed = weights(llm)

    def read() -> None:
        for data in packed:
            kernels.read(data)

    works: dict[str, Callable[[], object]] = {
        "read": read,
        "multiply": lambda: kernels.multiply(MULTIPLY_ROUNDS),
    }
    tables = {rows: prepared(llm, rows) for rows in ROWS}
    for rows, (_, entry) in tables.items():
        works[f"{rows}"] = lambda entry=entry: llm.engine.runner.forward(ForwardBatch([entry]))
    took: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            began = perf_counter()
            work()
            took[name].append(perf_counter() - began)
    for block_table, _ in tables.values():
        llm.engine.cache.release(block_table)
    seconds = {name: statistics.median(each) for name, each in took.items()}
    size = sum(data.nbytes for data in packed)
    model = forward_weights(llm.engine.runner.decoder)
    bandwidth = size / seconds["read"]
    limit = kernels.multiply(MULTIPLY_ROUNDS) / seconds["multiply"]
    floor = model.floor_bytes / bandwidth
    free_rows = limit / (model.count / floor)
    in_file = f"{model.floor_bytes / 1e6:.0f} MB in the file"
    in_memory = f"{model.nbytes / 1e6:.0f} MB in memory ({model.nbytes / model.floor_bytes:.3f})"
    print(f"weights     {model.count / 1e6:.0f} M, {in_file}, {in_memory}")
    print(f"bandwidth   {bandwidth / 1e9:.1f} GB/s {spread(took['read'], size / 1e9)}")
    products = limit * seconds["multiply"]
    print(f"limit       {limit / 1e9:.0f} GMAC/s {spread(took['multiply'], products / 1e9)}")
    print(f"floor       {1e3 * floor:.2f} ms, n* = {free_rows:.1f}")
    print(" rows        ms  [10 %, 90 %]       x floor   x 1 row     goal   GMAC/s  of limit")
    for rows in ROWS:
        each = took[f"{rows}"]
        median = seconds[f"{rows}"]
        goal = max(1.15, 1.67 * rows / free_rows)
        rate = model.count * rows / median
        low = 1e3 * quantile(each, 0.1)
        high = 1e3 * quantile(each, 0.9)
        times = f"{1e3 * median:9.2f}  [{low:.2f}, {high:.2f}]"
        ratios = f"{median / floor:9.2f}{median / seconds['1']:10.2f}{goal:9.2f}"
        print(f"{rows:5} {times:28}{ratios}{rate / 1e9:9.0f}{100 * rate / limit:8.0f} %")
    report = {name: {"median": seconds[name], "least": min(each)} for name, each in took.items()}
    return report | {"bandwidth": bandwidth, "limit": limit, "floor": floor, "free_rows": free_rows}


def quantile(values: list[float], share: float) -> float:
    """Return the value below which about a fraction ``share`` of the values lies."""
    return sorted(values)[round(share * (len(values) - 1))]


def spread(seconds: list[float], amount: float) -> str:
    """Return the 10th and 90th percentiles of an amount per second, from its durations, as text."""
    return f"[{amount / quantile(seconds, 0.9):.1f}, {amount / quantile(seconds, 0.1):.1f}]"


def prepared(llm: LLM, rows: int) -> tuple[BlockTable, BatchEntry]:
    """Return a block table with a context, and the entry of ``rows`` rows after it."""
    block_table = BlockTable()
    runner = llm.engine.runner
    llm.engine.cache.prepare(block_table, CONTEXT + rows)
    runner.forward(
        ForwardBatch([BatchEntry(block_table, TokenTree.chain([5] * CONTEXT), range(0), CONTEXT)])
    )
    llm.engine.cache.commit_slots(block_table, range(CONTEXT))
    return block_table, BatchEntry(block_table, TokenTree.chain([7] * rows), range(rows), CONTEXT)


def prefill(llm: LLM, tokens: int, limit: float) -> dict[str, float]:
    """Measure the prefill of ``tokens`` tokens, in chunks of 512 as in the engine."""
    seconds = []
    for _ in range(3):
        block_table = BlockTable()
        llm.engine.cache.prepare(block_table, tokens)
        began = perf_counter()
        for start in range(0, tokens, 512):
            chunk = [5 + i % 7 for i in range(start, min(start + 512, tokens))]
            last = range(len(chunk) - 1, len(chunk))
            entry = BatchEntry(block_table, TokenTree.chain(chunk), last, tokens)
            llm.engine.runner.forward(ForwardBatch([entry]))
            llm.engine.cache.commit_slots(block_table, range(len(chunk)))
        seconds.append(perf_counter() - began)
        llm.engine.cache.release(block_table)
    decoder = llm.engine.runner.decoder
    config = llm.config
    middle = statistics.median(seconds)
    # The LM head multiplies the last row of a chunk only.
    head = config.vocab_size * config.hidden_size
    products = (forward_weights(decoder).count - head) * tokens
    attention = config.num_layers * config.num_heads * config.head_dim * tokens * (tokens + 1)
    rate = (products + attention) / middle
    times = f"{1e3 * middle:.0f} ms [{1e3 * min(seconds):.0f}]"
    share = f"{100 * attention / (products + attention):.0f} % of them attention"
    of_limit = f"{100 * rate / limit:.0f} % of the limit"
    print(f"prefill of {tokens} tokens: {times}, {rate / 1e9:.0f} GMAC/s ({share}), {of_limit}")
    return {"tokens": tokens, "median": middle, "least": min(seconds)}


class LibraryCalls:
    """Counts the calls of the compiled libraries in a ``with`` block, and their seconds.

    The functions of Python that the libraries call in a draft chain count as a part of the call.
    """

    def __init__(self, llm: LLM) -> None:
        self.count = 0
        self.seconds = 0.0
        self._libraries = [llm.engine.runner.decoder.kernels.library, find_suffix_library()]
        self._originals: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        for library in self._libraries:
            functions = {name: each for name, each in vars(library).items() if "pronk_" in name}
            self._originals.append(functions)
            for name, function in functions.items():
                setattr(library, name, partial(self._call, function))
        return self

    def __exit__(self, *_: object) -> None:
        for library, functions in zip(self._libraries, self._originals, strict=True):
            vars(library).update(functions)
        self._originals.clear()

    def _call(self, function: Callable[..., Any], *arguments: object) -> Any:
        self.count += 1
        began = perf_counter()
        result = function(*arguments)
        self.seconds += perf_counter() - began
        return result


def step_times(llm: LLM, tokens: int, drafter: str) -> dict[str, float]:
    """Measure a step's calls of the libraries, and the time inside and outside of these calls.

    Args:
        llm: the model.
        tokens: number of tokens of each of five texts.
        drafter: drafter of the texts.

    Returns:
        Number of calls a step, seconds inside and seconds outside, the medians over the texts.
    """
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    llm.generate("def fibonacci(n):\n", params, drafter=drafter)  # loads and measures drafters
    found: dict[str, list[float]] = {"calls": [], "inside": [], "outside": []}
    for _ in range(5):
        with LibraryCalls(llm) as calls:
            stats = llm.generate("def fibonacci(n):\n", params, drafter=drafter).stats
        found["calls"].append(calls.count / stats.target_steps)
        found["inside"].append(calls.seconds / stats.target_steps)
        found["outside"].append((stats.total_seconds - calls.seconds) / stats.target_steps)
    medians = {name: statistics.median(values) for name, values in found.items()}
    inside = f"{medians['calls']:.1f} library calls of {1e3 * medians['inside']:.3f} ms"
    print(f"a step of {drafter}: {inside}, {1e3 * medians['outside']:.3f} ms outside")
    return medians


def never_wait() -> None:
    """Keep a core busy until the process is killed."""
    while True:
        pass


def beside_a_busy_process(llm: LLM, threads: int, rounds: int) -> dict[str, float]:
    """Measure plain decoding with one thread and with all, beside a process that never waits."""
    other = multiprocessing.get_context("spawn").Process(target=never_wait, daemon=True)
    other.start()
    seconds: dict[int, list[float]] = {1: [], threads: []}
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    try:
        for _ in range(max(3, rounds // 5)):
            for count, took in seconds.items():
                set_threads(count, workers=1)
                done = llm.generate("def fibonacci(n):\n", params, drafter="autoregressive")
                took.append(done.stats.total_seconds)
    finally:
        other.kill()
    one = statistics.median(seconds[1])
    all_of_them = statistics.median(seconds[threads])
    ratio = f"{all_of_them / one:.2f} times as long as one thread"
    print(f"beside a busy process: {threads} threads take {ratio}")
    return {"one": one, "all": all_of_them, "ratio": all_of_them / one}


if __name__ == "__main__":
    main()
