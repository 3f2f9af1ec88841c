"""Seconds of a draft token's LM head for a large vocabulary: whole, and in two stages.

    python benchmarks/two_stage_head.py                # 151,936 tokens, 896 values, 1,187 clusters
    python benchmarks/two_stage_head.py --weights int4

Chains of draft tokens are computed in one call of the kernels, by a program of the LM head alone.
The rows are random and measure speed only. Whole head and two stages take turns; figures are
medians of the seconds of a chain, divided by its tokens. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np

from pronk.base.arrays import BFLOAT16, FLOAT32
from pronk.cache.blocks import BlockTable
from pronk.drafting.shared.token_clusters import cluster_means, cluster_rows
from pronk.kernels.threads import set_threads
from pronk.lab.bench.machine import describe_hardware
from pronk.models.forward_batch import BatchEntry
from pronk.models.kernels import load_kernels
from pronk.models.layer_executor import ChainJob, HeadClusters, draft_chain
from pronk.models.linear import Linear, WeightLayout, choose_linear
from pronk.models.program import Program
from pronk.sampling.tree import TokenTree

_TOKENS = 8  # draft tokens of a chain


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--num-clusters", type=int, default=1187)
    parser.add_argument("--num-best", type=int, default=32)
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    set_threads(options.threads, 1)
    by = load_kernels("auto")
    build = choose_linear(by, options.weights)
    rows = np.random.default_rng(0).standard_normal((options.vocab, options.hidden), FLOAT32)
    began = perf_counter()
    clusters = cluster_rows(rows, options.num_clusters)
    seconds = {"clustering": perf_counter() - began}

    def pack(weight: Any) -> Linear:
        return build(weight.astype(BFLOAT16), None, WeightLayout(head=True))

    whole = pack(rows)
    centroids = pack(cluster_means(rows, clusters))
    linears = [whole.take_outputs(members) for members in clusters]
    second = HeadClusters(_program(linears[0]), linears, clusters, options.num_best)
    chains = {"whole": (whole, None), "two stages": (centroids, second)}
    programs = {name: _program(head) for name, (head, _) in chains.items()}
    found: dict[str, list[float]] = {name: [] for name in chains}
    for _ in range(options.rounds + 1):
        for name, (head, stage) in chains.items():
            began = perf_counter()
            _draft(programs[name], head, stage, options.hidden)
            found[name].append((perf_counter() - began) / _TOKENS)
    for name, times in found.items():
        seconds[name] = statistics.median(times[1:])  # the first round allocates memory
    print(f"{options.vocab} tokens, {options.hidden} values, {options.weights}")
    print(f"clusters: {seconds['clustering']:.1f} s, once")
    for name in chains:
        print(f"{name:12} {1000 * seconds[name]:.3f} ms a draft token")
    hardware = describe_hardware("cpu")
    print(json.dumps({"options": vars(options), "seconds": seconds, "hardware": hardware}))


def _program(head: Linear) -> Program:
    program = Program(head.kernels, head.in_features, BFLOAT16)
    program.linear(head, to="logits", only_logits_rows=True)
    return program


def _draft(program: Program, head: Linear, stage: HeadClusters | None, hidden: int) -> None:
    entry = BatchEntry(BlockTable(), TokenTree.chain([1]), range(1))
    stream = np.ones((1, hidden), BFLOAT16)
    greedy = SimpleNamespace(seed=0, temperature=0.0)
    sampler: Any = SimpleNamespace(stateless_sampler=greedy, context=[1])
    job = ChainJob(entry, sampler, _TOKENS, lambda _: True)
    draft_chain(program, stream, job, vocab_size=head.out_features, ids=stage)


if __name__ == "__main__":
    main()
