"""Cost of drafting on the host by context length: microseconds per step, and bytes of state.

    python benchmarks/drafting.py                     # Markdown table
    python benchmarks/drafting.py --vocab 128256      # logits of another width

No target model runs: instead, the text is given, the standard library of Python in pronk-tiny's
tokens. Each step calls ``propose``, verifies the tree along the text and calls ``observe``. The
logits are random.
"""

from __future__ import annotations

import argparse
import gc
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from pronk import LLM, SamplingParams
from pronk.cache.blocks import BlockTable
from pronk.drafting import DraftContext, Outcome, Proposer, make_drafter
from pronk.drafting.ledger import RequestLedger
from pronk.drafting.planner import DraftPlan
from pronk.drafting.step_costs import StepCosts
from pronk.models.cost_model import CostCurve
from pronk.sampling.logits_processors import TokenContext
from pronk.sampling.sampler import Sampler
from pronk.sampling.tree import TokenTree

SPECS = (
    "prompt_lookup",
    "suffix",
    "retrieval",
    "recycling",
    "jacobi",
    "gauss_seidel",
    "lookahead",
    "lookahead(window=5, ngram=4)",
    "lookahead(window=15, ngram=5)",
    "first_of",
    "merged",
)
LENGTHS = (512, 4096, 32768)
STEPS = 200

# Costs of forward passes for drafters that use costs: 0.04 to 0.08 s for 1 to 16 rows. They do not
# count in the measurement.
COSTS = CostCurve(0.04, 0.8, 0.075)


def library_text(llm: LLM, tokens: int) -> list[int]:
    """Return the first token ids of the standard library's source, with the largest files first."""
    ids: list[int] = []
    files = Path(argparse.__file__).parent.glob("*.py")
    for path in sorted(files, key=lambda file: -file.stat().st_size):
        text = path.read_text(encoding="utf-8", errors="replace")
        ids += llm.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) >= tokens:
            break
    return ids[:tokens]


def accepted(tree: TokenTree, truth: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes of a tree that follow the tokens ``truth``, without the root."""
    node = 0
    path = list[int]()
    for token in truth:
        child = tree.child(node, token)
        if child is None:
            break
        path.append(child)
        node = child
    return tuple(path)


def drive(
    drafter: Proposer[Any], text: Sequence[int], prompt: int, vocab: int
) -> tuple[float, list[float], int, int]:
    """Run a drafter along a text, for ``STEPS`` steps after a prompt of ``prompt`` tokens.

    Returns:
        Seconds of ``start``, seconds of each step, number of draft tokens, number of accepted ones.
    """
    params = SamplingParams(max_tokens=10**6)
    generator = np.random.default_rng(0)
    noise = generator.standard_normal((128, vocab), np.float32)
    costs = StepCosts(COSTS)
    plan = DraftPlan("pays", costs, before=costs.plain())
    ledger = RequestLedger()
    began = perf_counter()
    state = drafter.start(text[:prompt])
    start = perf_counter() - began
    seconds = []
    drafted = 0
    right = 0
    length = prompt
    for _ in range(STEPS):
        sampler = Sampler(params, 0, TokenContext(()), vocab)
        block_table = BlockTable(length=length - 1)
        context = DraftContext(
            state, text[:length], 60, 127, params, sampler, block_table, plan, ledger
        )
        began = perf_counter()
        (tree,) = drafter.propose([context])
        proposed = perf_counter() - began
        path = accepted(tree, text[length : length + 60])
        new = tuple(text[length : length + len(path) + 1])
        logits = noise[: len(tree)].copy()
        for node in (0, *path):
            logits[node, text[length + tree.depths[node]]] = 99.0
        given_logits = logits if drafter.capabilities.logits else None
        outcome = Outcome(state, tree, path, new, length - 1, params, given_logits)
        began = perf_counter()
        ledger.acceptance.propose(drafter.label, (), tree)
        ledger.acceptance.advance(new)
        drafter.observe(outcome)
        seconds.append(proposed + perf_counter() - began)
        length += len(new)
        drafted += tree.num_draft_tokens
        right += len(path)
    return start, seconds, drafted, right


def state_bytes(drafter: Proposer[Any], text: Sequence[int], prompt: int) -> int:
    """Return the number of bytes of a request's state after a prompt of ``prompt`` tokens."""
    gc.collect()
    tracemalloc.start()
    state = drafter.start(text[:prompt])
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del state
    return size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--drafter", action="append", help="repeatable; default: all that need no training"
    )
    parser.add_argument("--vocab", type=int, help="width of the logits; default: pronk-tiny's")
    parser.add_argument(
        "--step", type=float, default=37.0, help="milliseconds of a plain step to compare with"
    )
    arguments = parser.parse_args()
    llm = LLM("pronk-tiny", threads=1)
    text = library_text(llm, LENGTHS[-1] + 60 * (STEPS + 2))
    of_step = f"% of {arguments.step:g} ms"
    print(f"| drafter | context | µs per step | steps/s | {of_step} | start, ms | state, MiB |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for spec in arguments.drafter or SPECS:
        for prompt in LENGTHS:
            drafter = make_drafter(spec)
            drafter = drafter.bind(llm.engine.target)
            size = state_bytes(drafter, text, prompt)
            vocab = arguments.vocab or llm.config.vocab_size
            start, seconds, _, _ = drive(drafter, text, prompt, vocab)
            step = median(seconds)
            share = 100e3 * step / arguments.step
            cells = (
                f"`{spec}`",
                prompt,
                f"{1e6 * step:.0f}",
                f"{1 / step:,.0f}",
                f"{share:.2f}",
                f"{1e3 * start:.1f}",
                f"{size / 2**20:.2f}",
            )
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
