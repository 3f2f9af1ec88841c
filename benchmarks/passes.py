"""Time of forward passes by rows, relative to the memory floor, and beside a busy process.

    python benchmarks/passes.py                          pronk-tiny
    python benchmarks/passes.py --model big --prefill 500
    python benchmarks/passes.py --busy                   while another process keeps one core busy

The floor is the time to read the same packed weights once with the same threads, interleaved with the forward passes.
Figures are medians, with the minimum in brackets. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from pronk import LLM, SamplingParams
from pronk.bench.machine import describe_hardware
from pronk.execution.attention import Segment
from pronk.execution.model_runner import ForwardJob
from pronk.kv_cache.blocks import BlockTable
from pronk.models.linear import KernelLinear
from pronk.speculation.tree import TokenTree

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder; by default pronk-tiny")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--prefill", type=int, default=500, help="length of the prompt in tokens")
    parser.add_argument(
        "--busy", action="store_true", help="measure beside a process that never waits, also with one thread"
    )
    options = parser.parse_args()
    llm = LLM(options.model, kernels=options.kernels)
    torch.set_num_threads(options.threads)
    report: dict[str, Any] = {
        "machine": describe_hardware(torch.device("cpu")),
        "kernels": llm.kernels,
        "threads": options.threads,
    }
    print(f"{llm.path.name}, {llm.kernels}, {options.threads} threads")
    if options.busy:
        report["busy"] = beside_a_busy_process(llm, options.threads, options.rounds)
    else:
        report["passes"] = by_rows(llm, options.rounds)
        report["prefill"] = prefill(llm, options.prefill)
        report["outside"] = outside(llm)
    print(json.dumps(report))


def weights(llm: LLM) -> list[torch.Tensor]:
    return [module.packed.data for module in llm.engine.runner.decoder.modules() if isinstance(module, KernelLinear)]


def by_rows(llm: LLM, rounds: int) -> dict[str, Any]:
    packed, kernels = weights(llm), llm.engine.runner.decoder.kernels
    if kernels is None:
        sys.exit("passes: expected pronk's kernels, found none on this machine")

    def read() -> None:
        for tensor in packed:
            kernels.read(tensor)

    works: dict[str, Callable[[], object]] = {"floor": read}
    tables = {rows: prepared(llm, rows) for rows in ROWS}
    for rows, (_, jobs) in tables.items():
        works[f"{rows} rows"] = lambda jobs=jobs: llm.engine.runner.forward(jobs)
    took: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            began = perf_counter()
            work()
            took[name].append(perf_counter() - began)
    for block_table, _ in tables.values():
        llm.engine.cache.release(block_table)
    floor, one = (statistics.median(took[name]) for name in ("floor", "1 rows"))
    size = sum(tensor.nbytes for tensor in packed)
    print(f"{size / 1e6:.0f} MB of weights, read at {size / floor / 1e9:.1f} GB/s")
    for name, seconds in took.items():
        middle, least = statistics.median(seconds), min(seconds)
        print(
            f"{name:>8} {1e3 * middle:8.3f} ms [{1e3 * least:.3f}] {middle / floor:5.2f} × floor{middle / one:6.2f} × 1"
        )
    return {name: {"median": statistics.median(each), "least": min(each)} for name, each in took.items()}


def prepared(llm: LLM, rows: int) -> tuple[BlockTable, list[ForwardJob]]:
    """Return a block table with a context, and the jobs of a forward pass over ``rows`` rows after it."""
    block_table, runner = BlockTable(), llm.engine.runner
    llm.engine.cache.prepare(block_table, CONTEXT + rows)
    runner.forward([ForwardJob(Segment(block_table, TokenTree.chain([5] * CONTEXT)), range(0), CONTEXT)])
    llm.engine.cache.commit(block_table, range(CONTEXT))
    return block_table, [ForwardJob(Segment(block_table, TokenTree.chain([7] * rows)), range(rows), CONTEXT)]


def prefill(llm: LLM, tokens: int) -> dict[str, float]:
    """Measure the prefill of ``tokens`` tokens, in chunks of 512 as in the engine."""
    seconds = []
    for _ in range(5):
        block_table = BlockTable()
        llm.engine.cache.prepare(block_table, tokens)
        began = perf_counter()
        for start in range(0, tokens, 512):
            chunk = [5 + i % 7 for i in range(start, min(start + 512, tokens))]
            llm.engine.runner.forward(
                [ForwardJob(Segment(block_table, TokenTree.chain(chunk)), range(len(chunk) - 1, len(chunk)), tokens)]
            )
            llm.engine.cache.commit(block_table, range(len(chunk)))
        seconds.append(perf_counter() - began)
        llm.engine.cache.release(block_table)
    parameters = sum(tensor.numel() for tensor in weights(llm))
    middle = statistics.median(seconds)
    print(f"prefill of {tokens} tokens: {1e3 * middle:.1f} ms, {2e-9 * parameters * tokens / middle:.0f} GFLOP/s")
    return {"tokens": tokens, "median": middle, "least": min(seconds)}


def outside(llm: LLM) -> dict[str, float]:
    """Measure the time of a plain step inside and outside the call into the kernels."""
    runs = []
    for _ in range(5):
        inside = [0.0]
        kernels = llm.engine.runner.decoder.kernels
        library, original = kernels.library, kernels.library.pronk_run

        def timed(*arguments: object, original: Any = original, inside: list[float] = inside) -> int:
            began = perf_counter()
            code = original(*arguments)
            inside[0] += perf_counter() - began
            return code

        library.pronk_run = timed
        try:
            params = SamplingParams(max_tokens=200, ignore_eos=True)
            stats = llm.generate("def fibonacci(n):\n", params, drafter="autoregressive").stats
        finally:
            library.pronk_run = original
        runs.append(((stats.total_seconds - inside[0]) / stats.target_steps, inside[0] / stats.target_steps))
    step, kernel = (statistics.median(column) for column in zip(*runs, strict=True))
    print(f"a step of plain decoding: {1e3 * kernel:.3f} ms in the kernels, {1e3 * step:.3f} ms outside")
    return {"outside": step, "kernels": kernel}


def never_wait() -> None:
    while True:
        pass


def beside_a_busy_process(llm: LLM, threads: int, rounds: int) -> dict[str, float]:
    other = multiprocessing.get_context("spawn").Process(target=never_wait, daemon=True)
    other.start()
    seconds: dict[int, list[float]] = {1: [], threads: []}
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    try:
        for _ in range(max(3, rounds // 5)):
            for count, took in seconds.items():
                torch.set_num_threads(count)
                took.append(llm.generate("def fibonacci(n):\n", params, drafter="autoregressive").stats.total_seconds)
    finally:
        other.kill()
    one, all_of_them = (statistics.median(took) for took in seconds.values())
    print(f"beside a busy process: {threads} threads take {all_of_them / one:.2f} times as long as one thread")
    return {"one": one, "all": all_of_them, "ratio": all_of_them / one}


if __name__ == "__main__":
    main()
