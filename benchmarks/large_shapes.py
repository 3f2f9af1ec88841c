"""What to expect of models too large to come with pronk: known shapes with random Q4_K weights.

    python benchmarks/large_shapes.py measure qwen3-8b build/shapes large.json --llama-bench PROGRAM
    python benchmarks/large_shapes.py table large.json

``measure`` writes the file of a shape (see ``shapes.py``), measures it, and adds the figures to a
JSON file. pronk and llama.cpp read the same file, one after the other in each round:

    load      seconds until pronk answers, the file being in memory
    plain     tokens per second of plain decoding
    rows      seconds of a pass over 1 to 16 rows; llama.cpp's are prompts of as many tokens
    prompt    seconds to the first token of 700 and 4,000 tokens; the longer one is measured once
    memory    peak of the process

``table`` prints the figures as Markdown, and what a drafter would gain on these curves. This gain
is *computed*: tokens per step are those that others published for a head of this family, and the
time of a step is that of a pass over the draft tokens and one more row, plus the time of reading
the head's own weights in 4 bits for each draft token. Random weights tell nothing of acceptance.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapes import ROWS, SHAPES, TOKENIZER, TOKENS, Dense, Models, tokenizer_file, write

PROMPT = 16  # tokens before plain decoding
SHORT = 700
LONG = 4000
# What is measured in each round, and the number of tokens of its prompt.
COUNTS = {"bandwidth": 0, "plain": PROMPT, "passes": 0, "prompt": SHORT}
LAYERS = {"qwen3-30b-a3b": 48}  # of models of which a shape has fewer
VOCABULARIES = {"gemma4": 262144, "llama": 128256, "qwen35": 248320}
QWEN3_VOCABULARY = 151936
BYTES_PER_WEIGHT = 4.5 / 8  # of a head in 4 bits with a scale for each 32 weights
DRAFT_VOCABULARY = 32000  # of EAGLE-3 heads


@dataclass(frozen=True)
class Published:
    """Tokens per step that others published for a head.

    Attributes:
        method: name of the method.
        vocab: rows of the head's output matrix; ``None``: the target's.
        drafts: draft tokens of a step, all in a chain.
        tokens: tokens per step, the target's own included.
        source: who published it, and on which texts.
    """

    method: str
    vocab: int | None
    drafts: int
    tokens: float
    source: str


_DSPARK = "DSpark, table 1, T = 1"
_SPEC_BUNDLE = "SpecBundle"
_ANGEL_SLIM = "AngelSlim, mean of its tasks, chain of 3 assumed"
_SPECULATORS = "speculators, issue 1014, chain of 7 assumed"
PUBLISHED: dict[str, tuple[Published, ...]] = {
    "qwen3-1.7b": (Published("EAGLE-3", DRAFT_VOCABULARY, 3, 2.17, _ANGEL_SLIM),),
    "qwen3-4b": (
        Published("EAGLE-3", DRAFT_VOCABULARY, 7, 4.16, f"{_DSPARK}, HumanEval"),
        Published("EAGLE-3", DRAFT_VOCABULARY, 7, 2.39, f"{_DSPARK}, MT-Bench"),
    ),
    "qwen3-8b": (
        Published("EAGLE-3", DRAFT_VOCABULARY, 7, 5.30, f"{_DSPARK}, GSM8K"),
        Published("EAGLE-3", DRAFT_VOCABULARY, 7, 2.66, f"{_DSPARK}, MT-Bench"),
    ),
    "llama-3.1-8b": (
        Published("EAGLE-3", DRAFT_VOCABULARY, 3, 2.55, _SPEC_BUNDLE),
        Published("EAGLE-3", DRAFT_VOCABULARY, 5, 2.85, _SPEC_BUNDLE),
    ),
    "qwen3-30b-a3b": (
        Published("EAGLE-3", DRAFT_VOCABULARY, 3, 2.64, _SPEC_BUNDLE),
        Published("EAGLE-3", DRAFT_VOCABULARY, 5, 3.01, _SPEC_BUNDLE),
    ),
    "qwen3.5-4b": (Published("MTP", None, 7, 4.78, _SPECULATORS),),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("measure")
    command.add_argument("shape", choices=SHAPES)
    command.add_argument("folder", type=Path, help="folder of the files, outside of git")
    command.add_argument("results", type=Path, help="JSON file; other shapes in it are kept")
    command.add_argument("--tokenizer", default=TOKENIZER, help="as in shapes.py")
    command.add_argument("--threads", type=int, default=2)
    command.add_argument("--rounds", type=int, default=2)
    command.add_argument("--llama-bench", type=Path, help="llama.cpp's program")
    command.add_argument(
        "--llama-long", action="store_true", help="llama.cpp reads the longer prompt, too: minutes"
    )
    command = commands.add_parser("table")
    command.add_argument("results", type=Path)
    options = parser.parse_args()
    if options.command == "table":
        print(table(json.loads(options.results.read_text(encoding="utf-8"))))
        return
    path = written(options.shape, options.folder, options.tokenizer)
    found = measure(options, path)
    results = {}
    if options.results.exists():
        results = json.loads(options.results.read_text(encoding="utf-8"))
    results[options.shape] = found
    options.results.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", "utf-8")
    print(table({options.shape: found}))


def vocabulary(shape: Dense) -> int:
    return VOCABULARIES.get(shape.arch, QWEN3_VOCABULARY)


def written(name: str, folder: Path, tokenizer: str) -> Path:
    """Return the file of a shape with its family's number of tokens; write it if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[name]
    path = folder / f"{name}-{vocabulary(shape)}.gguf"
    if not path.exists():
        write(shape, name, path, tokenizer_file(tokenizer), vocabulary(shape))
    return path


def measure(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Return all figures of a shape."""
    with path.open("rb") as file:
        while file.read(1 << 24):  # the file is in memory before anything is measured
            pass
    models = Models({options.shape: path}, options.threads, LONG + 64)
    took: dict[str, list[Any]] = {kind: [] for kind in COUNTS}
    theirs: list[dict[str, float]] = []
    models.measure(options.shape, "plain", PROMPT)  # warms up
    for _ in range(options.rounds):
        for kind, count in COUNTS.items():
            took[kind].append(models.measure(options.shape, kind, count))
        if options.llama_bench is not None:
            theirs.append(llama_bench(options, path, [SHORT, *ROWS], TOKENS))
    report = {
        "about": models.about[options.shape],
        "took": took,
        "long_prompt": models.measure(options.shape, "prompt", LONG),
        "memory": models.measure(options.shape, "memory"),
        "file_bytes": path.stat().st_size,
        "rounds": options.rounds,
        "threads": options.threads,
    }
    models.close()
    if theirs:
        report["llama.cpp"] = theirs
    if theirs and options.llama_long:
        report["llama.cpp long_prompt"] = llama_bench(options, path, [LONG], 0)[str(LONG)]
    return report


def llama_bench(
    options: argparse.Namespace, path: Path, prompts: Sequence[int], tokens: int
) -> dict[str, float]:
    """Return llama.cpp's seconds of prompts, by length, and of a token (``"plain"``).

    The first prompt is long, so that it needs no warm-up, and warms up for the others.
    """
    words = [str(options.llama_bench), "-m", str(path), "-t", str(options.threads), "-r", "1"]
    words += ["-p", ",".join(str(each) for each in prompts), "-n", str(tokens), "-fa", "1"]
    words.append("--no-warmup")
    done = subprocess.run([*words, "-o", "json"], capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        sys.exit(f"--llama-bench: expected exit status 0, found {done.returncode}; run {words}")
    seconds: dict[str, float] = {}
    for run in json.loads(done.stdout):
        if run["n_gen"]:
            seconds["plain"] = run["avg_ns"] / 1e9 / run["n_gen"]
        else:
            seconds[str(run["n_prompt"])] = run["avg_ns"] / 1e9
    return seconds


def middle(values: Sequence[float]) -> float:
    return statistics.median(values)


def row_seconds(found: dict[str, Any]) -> dict[int, float]:
    """Return the seconds of a pass by its number of rows."""
    return {
        rows: middle([one_round[number][0] for one_round in found["took"]["passes"]])
        for number, rows in enumerate(ROWS)
    }


def seconds_of(rows: int, curve: dict[int, float]) -> float:
    """Return the seconds of a pass over any number of rows, linear between measured numbers."""
    below = max(each for each in curve if each <= rows)
    above = min(each for each in curve if each >= rows)
    if below == above:
        return curve[below]
    part = (rows - below) / (above - below)
    return curve[below] + part * (curve[above] - curve[below])


def head_seconds(shape: Dense, published: Published, bandwidth: float) -> float:
    """Return the seconds of reading a head's weights once.

    An EAGLE-3 head has 15 d² weights, of which 3 d² are read once a step: they are left out. An MTP
    head is a layer of the model and the projection of its two inputs.
    """
    outputs = shape.hidden * (published.vocab or vocabulary(shape))
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim * shape.hidden
    weights = outputs + attention + 3 * shape.width * shape.hidden + 2 * shape.hidden**2
    if published.method == "EAGLE-3":
        weights = outputs + 12 * shape.hidden**2
    return weights * BYTES_PER_WEIGHT / bandwidth


def table(results: dict[str, Any]) -> str:
    """Return Markdown: speed and memory of each shape, then computed gains."""
    about = next(iter(results.values()))["about"]
    lines = [f"{about['processor']}, {about['kernels']}. Speeds of llama.cpp in brackets.", ""]
    titles = ("shape", "file", "load", "memory", "tokens/s", "1 / 2 / 4 / 8 / 16 rows, ms")
    prompts = ("prompt of 700, s", "of 4,000, s")
    lines += [f"| {' | '.join(titles + prompts)} |", "|---|--:|--:|--:|--:|---|--:|--:|"]
    lines += [speed_row(name, found) for name, found in results.items()]
    lines += [
        "",
        "| shape | head | draft tokens | tokens per step, published | source | gain, computed |",
        "|---|---|--:|--:|---|--:|",
    ]
    for name, found in results.items():
        lines += [gain_row(name, found, each) for each in PUBLISHED.get(name, ())]
    return "\n".join(lines)


def speed_row(name: str, found: dict[str, Any]) -> str:
    took = found["took"]
    curve = " / ".join(f"{1e3 * each:.0f}" for each in row_seconds(found).values())
    rate = f"{1 / middle(took['plain']):.1f}"
    short = f"{middle(took['prompt']):.1f}"
    long = f"{found['long_prompt']:.0f}"
    if "llama.cpp" in found:
        theirs = {
            key: middle([each[key] for each in found["llama.cpp"]]) for key in found["llama.cpp"][0]
        }
        rate += f" ({1 / theirs['plain']:.1f})"
        curve += f" ({' / '.join(f'{1e3 * theirs[str(rows)]:.0f}' for rows in ROWS)})"
        short += f" ({theirs[str(SHORT)]:.1f})"
    if "llama.cpp long_prompt" in found:
        long += f" ({found['llama.cpp long_prompt']:.0f})"
    label = name
    if name in LAYERS:
        label += f", {SHAPES[name].layers} of {LAYERS[name]} layers"
    memory = "–" if found["memory"] is None else f"{found['memory'] / 1e9:.1f} GB"
    cells = [
        label,
        f"{found['file_bytes'] / 1e9:.1f} GB",
        f"{found['about']['load_seconds']:.1f} s",
        memory,
        rate,
        curve,
        short,
        long,
    ]
    return f"| {' | '.join(cells)} |"


def gain_row(name: str, found: dict[str, Any], published: Published) -> str:
    curve = row_seconds(found)
    bandwidth = middle(found["took"]["bandwidth"])
    drafting = published.drafts * head_seconds(SHAPES[name], published, bandwidth)
    step = seconds_of(published.drafts + 1, curve) + drafting
    gain = published.tokens * middle(found["took"]["plain"]) / step
    cells = [
        name,
        published.method,
        str(published.drafts),
        f"{published.tokens:.2f}",
        published.source,
        f"{gain:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
