"""Tokens per forward pass, acceptance and speed of trained drafters on code, sums, chat and prose.

    python benchmarks/trained_drafters.py --data EVAL kangaroo medusa "cape(glide)"
    python benchmarks/trained_drafters.py --data EVAL --budget auto "exit 6: kangaroo(model='D')"

The script prints a Markdown table per temperature, and one JSON document on the last line. A row is
a drafter, and a group of columns a suite: S, tokens per forward pass; α, acceptance rate of the
first draft token; and CTAR(2), or the speed relative to plain decoding with ``--budget auto``. The
tokens of every output are compared with those of plain decoding.

``--data`` is a folder with humaneval.jsonl, gsm8k.jsonl, spec_bench.jsonl (its task mt_bench is the
suite chat) and long_context.jsonl.gz (passages of a novel, cut to ``--prose`` characters).
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from safetensors import safe_open

from pronk import LLM, SamplingParams
from pronk.base.errors import PronkError
from pronk.checkpoint.hub.clone_models import tiny_model
from pronk.drafting import Proposer, make_drafter
from pronk.engine.stats import Stats, StepStats
from pronk.lab.bench.metrics import ctar_curve, repeated_ngrams

SUITES = ("code", "sums", "chat", "prose")


@dataclass
class Tally:
    """Sums of a drafter over the prompts of a suite."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    passes: list[StepStats] = field(default_factory=list)
    loops: list[float] = field(default_factory=list)
    different: int = 0

    def add(self, out: Any, plain: Any) -> None:
        """Add the statistics of an output, and compare its tokens with those of plain decoding."""
        self.tokens += out.stats.generated_tokens
        self.steps += out.stats.target_steps
        self.passes += out.stats.steps
        self.loops.append(repeated_ngrams(out.token_ids))
        self.different += out.token_ids != plain.token_ids

    @property
    def alpha(self) -> float | None:
        """Acceptance rate of the first draft token; ``None`` without draft tokens."""
        rates = Stats(steps=self.passes).acceptance
        return rates[0] if rates else None


def prompts(data: Path, llm: LLM, limit: int, characters: int) -> dict[str, list[list[int]]]:
    """Return the token ids of at most ``limit`` prompts of each suite, with at most 512 tokens."""

    def lines(name: str) -> Iterator[dict[str, Any]]:
        opened = gzip.open if name.endswith(".gz") else open
        with opened(data / name, "rt", encoding="utf-8") as file:
            yield from map(json.loads, file)

    encode = llm.tokenizer.encode
    codes = [row.get("prompt") or row["turns"][0] for row in lines("humaneval.jsonl")]
    sums = [row["turns"][0] for row in lines("gsm8k.jsonl")]
    chat_rows = [row for row in lines("spec_bench.jsonl") if row["task"] == "mt_bench"]
    chats = [[{"role": "user", "content": row["turns"][0]}] for row in chat_rows]
    novels = [row["turns"][0] for row in lines("long_context.jsonl.gz")]
    passages = [_passage(text, characters) for text in novels]
    found = {
        "code": [encode(text) for text in codes],
        "sums": [encode(f"Question: {text}\nAnswer:") for text in sums],
        "chat": [llm.chat_ids(messages) for messages in chats],
        "prose": [encode(text) for text in passages],
    }
    return {name: [ids for ids in found[name] if len(ids) <= 512][:limit] for name in SUITES}


def _passage(text: str, characters: int) -> str:
    """Return the beginning of a text's second half, from the start of a sentence."""
    middle = text[len(text) // 2 :]
    sentences = re.split(r"(?<=[.!?])\s", middle, maxsplit=1)[-1]
    return sentences[:characters].rsplit(" ", 1)[0]


def parameters(spec: str) -> str:
    """Return the millions of parameters in a drafter's own files, as text."""
    folders = [Path(each) for each in re.findall(r"model='([^']+)'", spec)]
    if not folders:  # drafters of pronk-tiny
        for word in {*re.findall(r"[a-z_]+", spec)}:
            name = "draft" if word == "draft_model" else word.replace("_", "-")
            folders.append(tiny_model().parent / f"pronk-tiny-{name}")
    total = 0
    for folder in folders:
        file = folder / "model.safetensors"
        if file.is_file():
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    total += math.prod(tensors.get_slice(name).get_shape())
    return f"{total / 1e6:.2f}" if total else ""


def measure(
    llm: LLM,
    drafters: dict[str, Proposer[Any]],
    suites: dict[str, list[list[int]]],
    temperature: float,
    args: Any,
) -> dict[str, dict[str, Tally]]:
    """Run all drafters on all prompts.

    With ``--budget auto``, the prompts run one after another; otherwise a suite is a batch.
    """
    made = {label: {suite: Tally() for suite in suites} for label in drafters}
    for suite, texts in suites.items():
        first = SamplingParams(args.max_tokens, temperature=temperature, ignore_eos=True)
        params = [replace(first, seed=seed) for seed in range(len(texts))]
        batches = [[*range(len(texts))]]
        if args.budget == "auto":
            batches = [[number] for number in range(len(texts))]
        for batch in batches:
            best = dict.fromkeys(drafters, float("inf"))
            for repeat in range(args.repeats):
                outputs = {}
                own_texts = [texts[number] for number in batch]
                own_params = [params[number] for number in batch]
                for label, drafter in drafters.items():
                    began = perf_counter()
                    outputs[label] = llm.generate(own_texts, own_params, drafter=drafter)
                    best[label] = min(best[label], perf_counter() - began)
                for label, outs in outputs.items() if not repeat else ():
                    for out, plain in zip(outs, outputs["plain"], strict=True):
                        made[label][suite].add(out, plain)
            for label, seconds in best.items():
                made[label][suite].seconds += seconds
    return made


def table(
    made: dict[str, dict[str, Tally]], specs: dict[str, str], temperature: float, *, timed: bool
) -> str:
    """Return the Markdown table of a temperature; ``timed`` shows speeds instead of CTAR(2)."""
    last_column = "×" if timed else "CTAR(2)"
    heads = [f"temperature {temperature:g}", "M"]
    for suite in SUITES:
        heads += [f"{suite}: S", "α", last_column]
    rows = [f"| {' | '.join(heads)} |", "| --- | --: |" + " --: |" * 3 * len(SUITES)]
    for label, tallies in made.items():
        cells = [label.replace("|", "/"), parameters(specs[label])]
        for suite in SUITES:
            tally = tallies[suite]
            plain = made["plain"][suite]
            alpha = "–" if tally.alpha is None else f"{tally.alpha:.2f}"
            last = f"**{plain.seconds / tally.seconds:.2f}**" if timed else f"{_ctar(tally):.2f}"
            cells += [f"{tally.tokens / tally.steps:.2f}", alpha, last]
        rows.append(f"| {' | '.join(cells)} |")
    loops = [sum(t.loops) / len(t.loops) for t in made["plain"].values()]
    rows.append("| repeated 4-grams | |" + "".join(f" {share:.0%} | | |" for share in loops))
    return "\n".join(rows)


def _ctar(tally: Tally) -> float:
    return ctar_curve([step.accepted for step in tally.passes], 2)[1] if tally.passes else 0.0


def report(made: dict[str, dict[str, Tally]]) -> dict[str, Any]:
    """Return the figures of each drafter and suite as JSON values."""
    found: dict[str, Any] = {}
    for label, tallies in made.items():
        found[label] = {}
        for suite, tally in tallies.items():
            accepted = [step.accepted for step in tally.passes]
            longest = max(1, *(step.depth for step in tally.passes))
            found[label][suite] = {
                "S": tally.tokens / tally.steps,
                "alpha": tally.alpha,
                "ctar": ctar_curve(accepted, longest),
                "ratio": made["plain"][suite].seconds / tally.seconds,
                "different": tally.different,
            }
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the measurements, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "drafters", nargs="+", metavar="DRAFTER", help="a drafter, or 'LABEL: DRAFTER'"
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the suites")
    parser.add_argument("--model", default="pronk-tiny", help="the target; pronk-tiny by default")
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0, 0.8])
    parser.add_argument("--limit", type=int, default=8, help="prompts per suite")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--prose", type=int, default=600, help="characters per passage")
    parser.add_argument(
        "--budget", choices=("all", "auto"), default="all", help="auto also measures speed"
    )
    parser.add_argument("--threads", type=int)
    args = parser.parse_args(arguments)
    specs = {"plain": "autoregressive"}
    for given in args.drafters:
        label, _, spec = given.rpartition(": ")
        specs[label or spec] = spec
    try:
        llm = LLM(args.model, threads=args.threads, budget=args.budget)
        drafters = {label: make_drafter(spec) for label, spec in specs.items()}
        suites = prompts(args.data, llm, args.limit, args.prose)
        for drafter in drafters.values():
            llm.generate("warm up", SamplingParams(max_tokens=8), drafter=drafter)
    except PronkError as error:
        parser.error(str(error))
    figures = {}
    for temperature in args.temperature:
        made = measure(llm, drafters, suites, temperature, args)
        print(table(made, specs, temperature, timed=args.budget == "auto") + "\n", flush=True)
        figures[f"{temperature:g}"] = report(made)
    rows = [row for by_drafter in figures.values() for row in by_drafter.values()]
    different = sum(each["different"] for row in rows for each in row.values())
    print(f"{different} outputs differ from plain decoding's.\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
