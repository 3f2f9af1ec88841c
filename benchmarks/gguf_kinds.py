"""Speed of matrix products with each kind of GGUF blocks, by number of rows.

    python benchmarks/gguf_kinds.py                      # all kinds that the kernels pack
    python benchmarks/gguf_kinds.py --kind Q4_K --kind IQ2_XS --rows 1 16

A kind has several matrices of random blocks, together larger than the caches, which are multiplied
one after the other. In each round every kind is measured once; figures are the fastest rounds.
Columns: bits per weight in memory, bytes of weights per second at one row, and for each number of
rows the milliseconds of a matrix, and the speed per weight relative to Q4_K.
"""

from __future__ import annotations

import argparse
from time import perf_counter

import numpy as np

from pronk.base.arrays import Array
from pronk.checkpoint.gguf.blocks import PACKED_BLOCKS, TENSOR_TYPES, BlockMatrix, BlockRows
from pronk.kernels.library import Kernels
from pronk.kernels.threads import set_threads
from pronk.lab.bench.machine import describe_hardware
from pronk.models.kernels import load_kernels
from pronk.models.linear import Linear, WeightLayout

BASE = "Q4_K"  # kind that speeds are compared with
WORKING_SET = 1 << 26  # bytes of all matrices of a kind, more than the caches hold
FINITE = 0xBF  # mask without the highest bit of a float16 exponent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", action="append", choices=sorted(PACKED_BLOCKS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 128])
    parser.add_argument("--outputs", type=int, default=4096)
    parser.add_argument("--inputs", type=int, default=4096)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    set_threads(options.threads, 1)
    kernels = load_kernels(options.kernels)
    kinds = [BASE, *(kind for kind in options.kind or sorted(PACKED_BLOCKS) if kind != BASE)]
    shape = (options.outputs, options.inputs)
    matrices = {kind: make_matrices(kernels, kind, shape) for kind in kinds}
    random = np.random.default_rng(0)
    x = random.normal(size=(max(options.rows), options.inputs)).astype(np.float32)
    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(options.rounds):
        for rows in options.rows:
            for kind in kinds:
                times = seconds.setdefault((kind, rows), [])
                times.append(time_products(matrices[kind], x[:rows]))
    print(f"{kernels.name}, {options.threads} threads, {describe_hardware('cpu')}")
    headings = [f"{rows} rows: ms | × {BASE}" for rows in options.rows]
    print("| kind | bits | GB/s |", " | ".join(headings), "|")
    print("| --- " + "| --: " * (2 + 2 * len(headings)) + "|")
    for kind in kinds:
        num_bytes = matrices[kind][0].packed.nbytes
        cells = [f"{8 * num_bytes / (shape[0] * shape[1]):.2f}"]
        cells.append(f"{num_bytes / min(seconds[kind, options.rows[0]]) / 1e9:.1f}")
        for rows in options.rows:
            best = min(seconds[kind, rows])
            cells += [f"{1e3 * best:.2f}", f"{min(seconds[BASE, rows]) / best:.2f}"]
        print(f"| {kind} |", " | ".join(cells), "|")


def make_matrices(by: Kernels, kind: str, shape: tuple[int, int]) -> list[Linear]:
    """Return matrices of random blocks of a kind, which together exceed the caches."""
    type_ = next(each for each in TENSOR_TYPES.values() if each.name == kind)
    outputs, inputs = shape
    row_bytes = inputs // type_.values * type_.size
    count = -(-WORKING_SET // (outputs * row_bytes))
    random = np.random.default_rng(0)
    linears = []
    for _ in range(count):
        stored = random.integers(256, size=(outputs, row_bytes), dtype=np.uint8) & FINITE
        matrix = BlockMatrix(kind, inputs, (BlockRows(stored),))
        linears.append(Linear(by, matrix, None, WeightLayout(), None))
    return linears


def time_products(linears: list[Linear], x: Array) -> float:
    """Return the seconds per matrix of multiplying rows by all matrices."""
    start = perf_counter()
    for linear in linears:
        linear.logits(x)
    return (perf_counter() - start) / len(linears)


if __name__ == "__main__":
    main()
