r"""Tables of the survey *How to make LLMs go fast* on one model, beside the survey's.

    python benchmarks/papers/survey.py MODEL.gguf --draft DRAFT.gguf
    python benchmarks/papers/survey.py MODEL.gguf batches rows forced

The named parts, by default all, are measured one after another:

    threshold  threshold decoding beside 1, 8 and 16 draft tokens, on the survey's three prompts:
               S, draft tokens per pass, speed, and the speed of each quarter of the text
    batches    one token for 1, 5 and 10 sequences of 20 tokens, in one batch
    rows       the duration of a forward pass by its number of rows
    forced     guided generation of the survey's form: how many tokens the grammar writes alone

All draft tokens are verified. Times are by the wall clock, and need a quiet machine; the other
figures do not. Every drafter must generate the tokens of plain decoding.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from measuring import PLAIN, markdown
from policy import write_report

from pronk import LLM, Completion, Guide, SamplingParams
from pronk.base import count_text
from pronk.cache.blocks import BlockTable
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.sampling.tree import TokenTree

# The survey's prompts, and its tokens per second with threshold decoding and with n draft tokens.
PROMPTS = {
    "What is a tensor in machine learning?": (2.01, 1.40, 1.92, 1.36),
    "Index: A B C": (1.90, 1.32, 1.49, 0.97),
    "The digits of Pi are 3.14159": (0.84, 0.85, 0.42, 0.27),
}
LENGTHS = (1, 8, 16)  # numbers of draft tokens beside threshold decoding
QUARTERS = 4
BATCHES = (1, 5, 10)
PAPER_MILLISECONDS = (70, 220, 400)  # of one token for the batches, with GPT-2
BATCH_TOKENS = 20  # tokens of each sequence of a batch
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
ROUNDS = 9  # rounds of batches and rows, of which the median counts
# The form of the survey's example. Its integers have no bounds; a small model writes digits until
# the limit of tokens then. The complete answer had 41 tokens, of which the model chose 11.
FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "armor": {"enum": ["leather", "chainmail", "plate"]},
        "weapon": {"enum": ["sword", "axe", "mace", "spear", "bow", "crossbow"]},
        "strength": {"type": "integer", "minimum": 0, "maximum": 9999},
    },
    "required": ["name", "age", "armor", "weapon", "strength"],
    "additionalProperties": False,
}
FORM_PROMPT = "Give me a character description"
PAPER_FORM = (41, 11)
FORM_SEEDS = 8


class Part(NamedTuple):
    """A table of the survey."""

    title: str
    text: Callable[[LLM, argparse.Namespace], str]  # measures, and returns Markdown


def threshold_text(llm: LLM, options: argparse.Namespace) -> str:
    """Return the table of threshold decoding and of fixed numbers of draft tokens."""
    model = f"model={str(options.draft)!r}"
    specs = {"plain decoding": PLAIN, "threshold": f"threshold(draft_model({model}))"}
    for length in LENGTHS:
        specs[count_text(length, "draft token")] = f"draft_model({model}, num_tokens={length})"
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    tables = list[str]()
    for prompt, papers in PROMPTS.items():
        rows = list[list[object]]()
        plain: Completion | None = None
        for name, spec in specs.items():
            llm.generate(prompt, SamplingParams(max_tokens=8), drafter=spec)  # loads the drafter
            done = llm.generate(prompt, params, drafter=spec)
            plain = plain or done
            if done.token_ids != plain.token_ids:
                msg = f"survey: expected the tokens of plain decoding with {spec}, found others"
                raise SystemExit(msg)
            rows.append([name, *step_figures(done, plain)])
        for row, paper in zip(rows, (None, *papers), strict=True):
            row.append("" if paper is None else f"{paper / papers[1]:.2f}")
        columns = ["drafter", "S", "draft tokens per pass", "× plain", "× plain by quarter"]
        columns.append("the survey's tokens/s, × 1 draft token")
        tables.append(f"*{prompt}*\n\n{markdown(columns, rows)}")
    return "\n\n".join(tables)


def step_figures(done: Completion, plain: Completion) -> list[str]:
    """Return S, draft tokens per pass, speed, and the speed of each quarter of the text."""
    steps = done.stats.steps[1:]
    tokens = sum(step.tokens for step in steps)
    drafted = sum(step.drafted for step in steps)
    own = marks(done)
    base = marks(plain)
    quarters = list[str]()
    for (start, end), (plain_start, plain_end) in zip(pairwise(own), pairwise(base), strict=True):
        quarters.append(f"{(plain_end - plain_start) / max(1e-9, end - start):.2f}")
    speed = (base[-1] - base[0]) / (own[-1] - own[0])
    per_pass = f"{tokens / len(steps):.2f}"
    return [per_pass, f"{drafted / len(steps):.1f}", f"{speed:.2f}", ", ".join(quarters)]


def marks(done: Completion) -> list[float]:
    """Return the times after the first token and after each quarter of the others, in seconds.

    Tokens of one step are complete at equal distances of time.
    """
    times = [done.stats.steps[0].clock]
    for before, step in pairwise(done.stats.steps):
        share = (step.clock - before.clock) / max(1, step.tokens)
        times += [before.clock + share * (index + 1) for index in range(step.tokens)]
    last = len(times) - 1
    return [times[last * quarter // QUARTERS] for quarter in range(QUARTERS + 1)]


def batch_text(llm: LLM, _: argparse.Namespace) -> str:
    """Return the table of one token for several sequences in one batch."""
    sequences = [
        [16 + (7919 * row + 31 * i) % 4000 for i in range(BATCH_TOKENS)] for row in range(10)
    ]
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    rows = list[list[object]]()
    first = 0.0
    for count, paper in zip(BATCHES, PAPER_MILLISECONDS, strict=True):
        took = list[float]()
        for _round in range(ROUNDS):
            began = perf_counter()
            llm.generate(sequences[:count], params, drafter=PLAIN)
            took.append(1e3 * (perf_counter() - began))
        own = median(took)
        first = first or own
        ratio = paper / PAPER_MILLISECONDS[0]
        rows.append([count, f"{own:.1f}", f"{own / first:.2f}", paper, f"{ratio:.2f}"])
    columns = ["sequences", "ms", "× one sequence", "the survey's ms", "× one sequence"]
    return markdown(columns, rows)


def row_text(llm: LLM, _: argparse.Namespace) -> str:
    """Return the table of the durations of forward passes by their numbers of rows."""
    runner = llm.engine.runner
    table = BlockTable()
    context = 100
    runner.cache.prepare(table, context + ROWS[-1])
    chain = TokenTree.chain([5] * context)
    runner.forward(ForwardBatch([BatchEntry(table, chain, range(0), context)]))
    runner.cache.commit_slots(table, range(context))
    took: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _round in range(ROUNDS):
        for rows in ROWS:
            entry = BatchEntry(table, TokenTree.chain([7] * rows), range(rows), context)
            began = perf_counter()
            runner.forward(ForwardBatch([entry]))
            took[rows].append(1e3 * (perf_counter() - began))
    runner.cache.release(table)
    base = median(took[1])
    cells = [
        [rows, f"{median(took[rows]):.2f}", f"{median(took[rows]) / base:.2f}"] for rows in ROWS
    ]
    return markdown(["rows", "ms", "× one row"], cells)


def form_text(llm: LLM, _: argparse.Namespace) -> str:
    """Return the table of the tokens that the grammar writes alone, for some seeds."""
    rows = list[list[object]]()
    total = 0
    total_own = 0
    for seed in range(FORM_SEEDS):
        guide = Guide(json=FORM)
        params = SamplingParams(
            max_tokens=160, temperature=0.8, seed=seed, guide=guide, guide_mode="jump"
        )
        chat = [{"role": "user", "content": FORM_PROMPT}]
        done = llm.chat(chat, params, drafter=PLAIN)
        written = len(done.token_ids)
        own = written - done.stats.jumped
        json.loads(done.text)
        rows.append([seed, written, own, f"{1 - own / written:.0%}", f"`{done.text[:60]}`"])
        total += written
        total_own += own
    tokens, chosen = PAPER_FORM
    rows.append(["all", total, total_own, f"{1 - total_own / total:.0%}", ""])
    rows.append(["the survey's", tokens, chosen, f"{1 - chosen / tokens:.0%}", ""])
    return markdown(["seed", "tokens", "chosen by the model", "by the grammar", "answer"], rows)


PARTS = {
    "threshold": Part("Threshold decoding", threshold_text),
    "batches": Part("One token for several sequences", batch_text),
    "rows": Part("Duration of a forward pass by rows", row_text),
    "forced": Part("Guided generation: forced tokens", form_text),
}


def main(words: Sequence[str] | None = None) -> None:
    """Measure the chosen parts, and write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)}; by default all")
    parser.add_argument("--draft", type=Path, help="draft model, for the part `threshold`")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", help="file name without ending, for .md and .json")
    options = parser.parse_intermixed_args(words)
    names = options.parts or [*PARTS]
    if unknown := set(names) - set(PARTS):
        parser.error(f"expected parts among {', '.join(PARTS)}, found {', '.join(sorted(unknown))}")
    if "threshold" in names and options.draft is None:
        parser.error("threshold: expected --draft MODEL, found none")
    llm = LLM(
        options.model,
        drafter=PLAIN,
        budget="all",
        max_batch=max(BATCHES),
        prefix_cache=False,
        threads=options.threads,
    )
    tables = list[str]()
    cells = list[dict[str, Any]]()
    for name in names:
        text = PARTS[name].text(llm, options)
        tables.append(f"## {PARTS[name].title}\n\n{text}")
        cells.append({"part": name, "table": text})
        print(tables[-1], end="\n\n", flush=True)
    write_report(options.out, "How to make LLMs go fast: the survey's tables", llm, tables, cells)


if __name__ == "__main__":
    main()
