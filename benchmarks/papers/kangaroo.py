r"""Tables and figures of Kangaroo (Liu et al. 2024) on one model, beside the paper's.

    python benchmarks/papers/kangaroo.py MODEL.gguf --prompts spec_bench.jsonl \
        --kangaroo exit2=RUNS/kangaroo-2
    python benchmarks/papers/kangaroo.py MODEL.gguf table1 --prompts spec_bench.jsonl \
        --kangaroo exit2=RUNS/kangaroo-2 --medusa RUNS/medusa --datastore DATASTORE

    table1    CR (tokens per forward pass) and speed of lookahead, Medusa, retrieval and Kangaroo
              on the tasks of Spec-Bench
    figure3a  CR and speed by exit layer, and table 2, by adapter: one --kangaroo NAME=FOLDER for
              each, trained with --exit-layer or --adapter
    figure3b  CR and speed by η, the confidence below which a chain ends, and by γ, the number of
              tokens of the longest chain

The first --kangaroo is that of table 1 and figure 3b. Without --medusa or --datastore, the rows of
Medusa or retrieval are left out. ``pronk train`` trains the adapters and the heads, and
``pronk datastore build`` makes the datastore of ``retrieval``.
"""

from __future__ import annotations

import argparse

from measuring import Part, Result, Results, add_folders, add_parts, markdown, run_parts
from policy import make_parser

# Table 1, Vicuna-7B: CR and speed of Kangaroo by task, and the mean speed of the others. Medusa's
# is that of table 2.
PAPER_KANGAROO = {
    "translation": (1.41, 1.24),
    "qa": (1.87, 1.43),
    "summarization": (1.87, 1.50),
    "math_reasoning": (2.14, 1.61),
    "rag": (2.05, 1.52),
    "mt_bench": (2.22, 1.68),
}
PAPER_MEANS = {"lookahead": 1.29, "Medusa": 1.41, "retrieval": 1.43, "Kangaroo": 1.50}
PAPER_EXITS = "The paper's optimum: layer 2 of 32 (7B), 3 of 40 (13B)."
PAPER_ADAPTERS = (
    "Its adapters, 7B: Kangaroo 1.50 × plain, with a head of its own 1.44, a layer of a "
    "transformer 1.37, an MLP 1.22."
)
ETAS = (0.0, 0.2, 0.4, 0.6, 0.8)
GAMMAS = (4, 6, 8)


def kangaroo(folder: str, eta: float = 0.6, gamma: int = 6) -> str:
    """Return the specification of Kangaroo in a folder, by default with the paper's η and γ."""
    return f"kangaroo(model={folder!r}, eta={eta}, num_tokens={gamma})"


def task_specs(options: argparse.Namespace) -> dict[str, str]:
    """Return the specifications of the drafters of table 1 by name."""
    named = {
        "lookahead": "lookahead(window=15, ngram=5, guesses=15)",
        "lookahead, our default": "lookahead",
    }
    if options.medusa:
        named["Medusa"] = f"medusa(model={options.medusa!r})"
    if options.datastore:
        named["retrieval"] = f"retrieval(datastore={options.datastore!r})"
    folder = options.kangaroo[0][1]
    return named | {"Kangaroo": kangaroo(folder), "Kangaroo, η = 0": kangaroo(folder, 0.0)}


def task_table(results: Results, options: argparse.Namespace) -> str:
    """Return table 1: CR and speed by task, and the mean over all prompts."""
    rows = []
    for name, spec in task_specs(options).items():
        cells = [results.of(spec, suite) for suite in results.suites]
        every = results.of(spec)
        paper = PAPER_MEANS.get(name)
        last = [f"{every.per_pass:.2f}", every.speed, "" if paper is None else f"{paper:.2f}"]
        rows.append([name, *map(short, cells), *last])
    known = [PAPER_KANGAROO.get(suite) for suite in results.suites]
    cells = ["" if each is None else f"{each[0]:.2f}, {each[1]:.2f}" for each in known]
    rows.append(["Kangaroo, the paper's", *cells, "", "", f"{PAPER_MEANS['Kangaroo']:.2f}"])
    return markdown(
        ["CR, × plain", *results.suites, "CR, all", "× plain, all [90 %]", "paper's mean"], rows
    )


def short(result: Result) -> str:
    """Return CR and speed of a drafter as text."""
    return f"{result.per_pass:.2f}, {result.over_plain[0]:.2f}"


def exit_table(results: Results, options: argparse.Namespace) -> str:
    """Return figure 3a, or table 2, as a table: CR and speed of each adapter.

    CR is also shown relative to that of the first adapter.
    """
    rows = []
    baseline = kangaroo(options.kangaroo[0][1], 0.0)
    for name, folder in options.kangaroo:
        dynamic = results.of(kangaroo(folder))
        fixed = results.of(kangaroo(folder, 0.0))
        own = [f"{dynamic.per_pass:.2f}", dynamic.speed]
        over_first = results.passes_over(kangaroo(folder, 0.0), baseline)
        rows.append([name, *own, f"{fixed.per_pass:.2f}", over_first, fixed.speed])
    columns = ["adapter", "CR, η = 0.6", "× plain [90 %]"]
    columns += ["CR, η = 0", "CR / first CR [90 %]", "× plain [90 %]"]
    return f"{markdown(columns, rows)}\n\n{PAPER_EXITS} {PAPER_ADAPTERS}"


def threshold_table(results: Results, options: argparse.Namespace) -> str:
    """Return figure 3b as a table: CR and speed by η and γ."""
    folder = options.kangaroo[0][1]
    rows = []
    for eta in ETAS:
        found = [results.of(kangaroo(folder, eta, gamma)) for gamma in GAMMAS]
        rows.append([f"{eta:.1f}", *map(short, found)])
    pairs = [(eta, gamma) for eta in ETAS for gamma in GAMMAS]
    eta, gamma = max(pairs, key=lambda pair: speed_of(results, folder, *pair))
    paper = "The paper: η = 0.6, γ = 6; CR is largest with η = 0."
    columns = ["η", *(f"γ = {gamma}: CR, × plain" for gamma in GAMMAS)]
    return markdown(columns, rows) + f"\n\nFastest: η = {eta}, γ = {gamma}. {paper}"


def speed_of(results: Results, folder: str, eta: float, gamma: int) -> float:
    """Return the speed of Kangaroo with η and γ relative to plain decoding."""
    return results.of(kangaroo(folder, eta, gamma)).over_plain[0]


PARTS = {
    "table1": Part(
        "Table 1: Spec-Bench", lambda options: [*task_specs(options).values()], task_table
    ),
    "figure3a": Part(
        "Figure 3a, table 2: exits and adapters",
        lambda options: [
            kangaroo(folder, eta) for _, folder in options.kangaroo for eta in (0.6, 0.0)
        ],
        exit_table,
    ),
    "figure3b": Part(
        "Figure 3b: the threshold",
        lambda options: [
            kangaroo(options.kangaroo[0][1], eta, gamma) for eta in ETAS for gamma in GAMMAS
        ],
        threshold_table,
    ),
}


def main() -> None:
    """Run the measurements, and write the tables."""
    parser = make_parser(__doc__ or "", per_suite=4)
    add_parts(parser, PARTS)
    add_folders(parser, "--kangaroo", "trained adapter", required=True)
    parser.add_argument("--medusa", help="folder with trained Medusa heads")
    parser.add_argument("--datastore", help="folder of pronk datastore build")
    run_parts(parser, PARTS, parser.parse_intermixed_args(), "Kangaroo: the paper's tables")


if __name__ == "__main__":
    main()
