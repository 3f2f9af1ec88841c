r"""Tables and figures of lookahead decoding (Fu et al. 2024) on one model, beside the paper's.

    python benchmarks/papers/lookahead.py MODEL.gguf --prompts spec_bench.jsonl humaneval.jsonl
    python benchmarks/papers/lookahead.py MODEL.gguf fit table3 --prompts spec_bench.jsonl
    python benchmarks/papers/lookahead.py MODEL.gguf table6 --prompts spec_bench.jsonl \
        --medusa RUNS/medusa --draft DRAFT.gguf

The named parts, by default all, are measured in one run:

    fit       figure 4, equations 5 and 7: S, tokens per forward pass, by W and N, with α and f
              fitted to S; and a plot
    table3    S and speed without one of the two branches
    sweep     speed by W, N and G
    figure8   S, speed and time of a step by W, with N = 5
    defaults  the paper's sizes (table 4) beside pronk's, and a window that is filled at once
              beside one that grows
    table6    lookahead beside Medusa, a draft model, Jacobi and Gauss-Seidel decoding

Windows have at most 128 rows; larger ones are refused. ``measuring.py`` describes the measurement.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from measuring import PLAIN, Part, Results, add_parts, draw, markdown, ranks, run_parts
from policy import make_parser

# Parameters α and f of equation 7 in figure 4b.
PAPER_ALPHA = 0.425
PAPER_F = 3.106
# Windows W in figure 4a, by N.
WINDOWS = {3: (1, 2, 4, 8, 16, 30), 4: (1, 2, 4, 8, 16, 20), 5: (1, 2, 4, 8, 15)}

# Rows of table 3: N, W, G, whether candidates also come from the prompt, speed relative to plain
# decoding, and S.
TABLE3 = (
    (10, 1, 3, True, 1.36, 1.45),
    (5, 1, 10, True, 1.36, 1.51),
    (5, 1, 30, False, 1.04, 1.12),
    (5, 1, 30, True, 1.46, 1.59),
    (5, 30, 1, False, 1.61, 1.79),
    (5, 15, 15, False, 1.78, 1.96),
    (5, 15, 15, True, 1.88, 2.05),
)
LOOKUP = "prompt_lookup(num_tokens=10, num_chains=1)"
LOOKUP_SPEED = 1.44
LOOKUP_S = 1.55
SWEEP = {"window": (1, 2, 5, 15), "ngram": (3, 4, 5), "guesses": (1, 5, 15)}
FIGURE8 = (1, 2, 3, 5, 7, 10, 15)
SIZES = {"34B": (7, 5), "13B": (10, 5), "7B": (15, 5)}  # W and N by model in table 4; G = W


def lookahead(window: int, ngram: int, guesses: int | None = None, more: str = "") -> str:
    """Return the specification of lookahead with W, N and G; without ``guesses``, G = W."""
    guesses = window if guesses is None else guesses
    return f"lookahead(window={window}, ngram={ngram}, guesses={guesses}{more})"


WITHOUT_PROMPT = ", use_prompt=False"


def expected_best(alpha: float, gamma: int, b: int) -> float:
    """Return the expected tokens per step of the best of ``b`` chains of ``γ`` tokens (equation 5).

    The number is ``(γ + 1) - Σ_{i=1..γ} (1 - α^i)^b``. The chains are independent, so that
    ``(1 - α^i)^b`` is the probability that the first ``i`` tokens of no chain are accepted.
    """
    return gamma + 1 - math.fsum((1 - alpha**i) ** b for i in range(1, gamma + 1))


def expected_lookahead(alpha: float, f: float, window: int, ngram: int) -> float:
    """Return the expected tokens per step of lookahead, ``(f - 1 + E) / f`` (equation 7).

    One step in ``f`` finds n-grams. ``E`` is equation 5 with ``b = W = G`` and ``γ = N - 1``.
    """
    return (f - 1 + expected_best(alpha, ngram - 1, window)) / f


class Fit(NamedTuple):
    """Parameters of equation 7 that fit measured S best by least squares."""

    alpha: float
    f: float
    unexplained: float  # fraction of the variance of S that the equation does not explain


def fit(points: Sequence[tuple[int, int, float]]) -> Fit:
    """Fit α and f to points ``(W, N, S)``.

    For a given α, ``S - 1 = (E - 1) / f`` is linear in ``1 / f``. α is searched in steps of 0.001.
    """

    def best(alpha: float) -> Fit:
        gains = [expected_best(alpha, ngram - 1, window) - 1 for window, ngram, _ in points]
        pairs = [(gain, s) for gain, (_, _, s) in zip(gains, points, strict=True)]
        slope = sum(gain * (s - 1) for gain, s in pairs) / sum(gain**2 for gain in gains)
        slope = min(1.0, max(slope, 1e-6))  # f is at least 1
        error = sum((s - 1 - slope * gain) ** 2 for gain, s in pairs)
        mean = fmean(s for _, s in pairs)
        variance = sum((s - mean) ** 2 for _, s in pairs)
        return Fit(alpha, 1 / slope, error / variance)

    fits = [best(step / 1000) for step in range(1, 1000)]
    return min(fits, key=lambda each: each.unexplained)


def points_of(results: Results) -> list[tuple[int, int, float]]:
    """Return the measured points (W, N, S) of figure 4a."""
    points = list[tuple[int, int, float]]()
    for ngram, windows in WINDOWS.items():
        for window in windows:
            spec = lookahead(window, ngram, more=WITHOUT_PROMPT)
            points.append((window, ngram, results.of(spec).per_pass))
    return points


def fit_table(results: Results) -> str:
    """Return a table of S by W and N, measured and by equation 7."""
    points = points_of(results)
    found = fit(points)
    rows = list[list[object]]()
    for window, ngram, s in points:
        fitted = expected_lookahead(found.alpha, found.f, window, ngram)
        paper = expected_lookahead(PAPER_ALPHA, PAPER_F, window, ngram)
        sizes = [ngram, window, 2 * window * (ngram - 1)]
        rows.append([*sizes, f"{s:.2f}", f"{fitted:.2f}", f"{paper:.2f}"])
    columns = ["N", "W = G", "(W + G)(N - 1)", "S", "equation 7, fitted", "equation 7, paper's"]
    text = (
        f"α = {found.alpha:.3f} and f = {found.f:.3f} leave {found.unexplained:.0%} of the "
        f"variance of S unexplained. The paper: α = {PAPER_ALPHA}, f = {PAPER_F}."
    )
    return f"{text}\n\n{markdown(columns, rows)}"


def draw_fit(results: Results, path: Path) -> None:
    """Draw figure 4: measured S by the tokens of a step, and equation 7.

    The equation is drawn with the fitted and with the paper's parameters.
    """
    points = points_of(results)
    alpha, f, _ = fit(points)

    def axes_of(axes: Any) -> None:
        for number, (ngram, windows) in enumerate(WINDOWS.items()):
            color = f"C{number}"
            x = [2 * window * (ngram - 1) for window in windows]
            measured = [s for _, own, s in points if own == ngram]
            axes.plot(x, measured, "o", color=color, label=f"N = {ngram}")
            for style, one, two in (("-", alpha, f), ("--", PAPER_ALPHA, PAPER_F)):
                curve = [expected_lookahead(one, two, window, ngram) for window in windows]
                axes.plot(x, curve, style, color=color)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens computed per step, (W + G)(N - 1), G = W")
        axes.set_ylabel("S; lines: equation 7 fitted, dashed: the paper's")

    draw(path, axes_of)


def ablation_specs() -> list[str]:
    """Return the drafters of table 3."""
    specs = [LOOKUP]
    for ngram, window, guesses, use_prompt, *_ in TABLE3:
        specs.append(lookahead(window, ngram, guesses, f", use_prompt={use_prompt}"))
    return specs


def ablation_table(results: Results) -> str:
    """Return table 3: S and speed with and without each branch."""
    paper = [("prompt lookup", True, LOOKUP_SPEED, LOOKUP_S)]
    paper += [(f"({n}, {w}, {g})", use, speed, s) for n, w, g, use, speed, s in TABLE3]
    found = [results.of(spec) for spec in ablation_specs()]
    rows = list[list[object]]()
    for (name, use_prompt, speed, s), ours in zip(paper, found, strict=True):
        reference = "yes" if use_prompt else "no"
        own = f"{ours.per_pass:.2f}"
        rows.append([name, reference, own, f"{s:.2f}", ours.speed, f"{speed:.2f}"])
    order = ranks([each.per_pass for each in found], [row[3] for row in paper])
    columns = ["(N, W, G)", "prompt as reference", "S", "paper's S"]
    columns += ["× plain [90 %]", "paper's × plain"]
    return markdown(columns, rows) + f"\n\nRank correlation of S with the paper's: {order:.2f}."


def sweep_specs() -> list[str]:
    """Return the drafters of all combinations in ``SWEEP``."""
    return [
        lookahead(window, ngram, guesses)
        for window in SWEEP["window"]
        for ngram in SWEEP["ngram"]
        for guesses in SWEEP["guesses"]
    ]


def sweep_table(results: Results) -> str:
    """Return a table of speeds with a row for each N and W and a column for each G."""
    rows = []
    for ngram in SWEEP["ngram"]:
        for window in SWEEP["window"]:
            found = [results.of(lookahead(window, ngram, guesses)) for guesses in SWEEP["guesses"]]
            cells = [f"{each.over_plain[0]:.2f} ({each.per_pass:.2f})" for each in found]
            rows.append([ngram, window, *cells])
    best = max(sweep_specs(), key=lambda spec: results.of(spec).over_plain[0])
    columns = ["N", "W", *(f"G = {guesses}" for guesses in SWEEP["guesses"])]
    head = f"× plain (S). Fastest: `{best}`, {results.of(best).speed}."
    return f"{head}\n\n{markdown(columns, rows)}"


def figure8_table(results: Results) -> str:
    """Return figure 8 as a table: S, speed and time of a step by W, with N = 5 and G = W."""
    plain = results.of(PLAIN).milliseconds
    rows = []
    for window in FIGURE8:
        found = results.of(lookahead(window, 5))
        steps = [f"{found.milliseconds:.2f}", f"{found.milliseconds / plain:.2f}"]
        rows.append([window, f"{found.per_pass:.2f}", found.speed, *steps])
    text = f"A step of plain decoding takes {plain:.2f} ms.\n\n"
    return text + markdown(["W = G", "S", "× plain [90 %]", "step, ms", "step / plain"], rows)


def default_specs() -> dict[str, str]:
    """Return the drafters of the part ``defaults`` by the names of their rows."""
    sizes = {f"paper, for {model}: ({n}, {w}, {w})": (w, n) for model, (w, n) in SIZES.items()}
    sizes |= {"ours: (4, 15, 15)": (15, 4), "ours: (4, 5, 5)": (5, 4)}
    specs = {name: lookahead(window, ngram) for name, (window, ngram) in sizes.items()}
    for name, (window, ngram) in sizes.items():
        specs[f"{name}, filled at once"] = lookahead(window, ngram, more=", warm_up='random'")
    specs["ours: auto"] = "lookahead"
    return specs


def defaults_table(results: Results) -> str:
    """Return a table of the paper's sizes beside pronk's."""
    found = {name: results.of(spec) for name, spec in default_specs().items()}
    rows = [
        [name, f"{each.per_pass:.2f}", each.speed, f"{each.milliseconds:.2f}"]
        for name, each in found.items()
    ]
    return markdown(["(N, W, G)", "S", "× plain [90 %]", "step, ms"], rows)


def joint_specs(options: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """Return the drafter and the paper's speeds of each row of table 6, by name.

    The paper's speeds are those of Vicuna-7B on MT-Bench and on HumanEval.
    """
    named = {
        "plain decoding": (PLAIN, "1.0, 1.0"),
        "lookahead, (5, 15, 15)": (lookahead(15, 5), "1.7, 2.1"),
        "lookahead, our default": ("lookahead", ""),
        "Jacobi, 64 tokens": ("jacobi(num_tokens=64)", "0.4, 0.7 (the whole output)"),
        "Gauss-Seidel, 5 tokens": ("gauss_seidel(num_tokens=5)", "1.1, 1.1"),
        "Gauss-Seidel, 16 tokens": ("gauss_seidel(num_tokens=16)", "1.1, 1.1"),
    }
    if options.medusa:
        named["Medusa"] = (f"medusa(model='{options.medusa}')", "2.3, 2.5")
    if options.draft:
        named["draft model"] = (f"draft_model(model='{options.draft}')", "0.7, 0.8 (1.1 B)")
    return named


def joint_table(results: Results, options: argparse.Namespace) -> str:
    """Return table 6: S and speed of each method by suite."""
    rows = []
    for name, (spec, paper) in joint_specs(options).items():
        found = [results.of(spec, suite) for suite in results.suites]
        cells = [f"{each.per_pass:.2f}, {each.over_plain[0]:.2f}" for each in found]
        total = results.of(spec)
        rows.append([name, *cells, f"{total.per_pass:.2f}", total.speed, paper])
    columns = ["S, × plain", *results.suites, "all, S", "all, × plain [90 %]", "paper's × plain"]
    return markdown(columns, rows)


def fit_specs() -> list[str]:
    """Return the drafters of figure 4a."""
    return [lookahead(w, n, more=WITHOUT_PROMPT) for n, windows in WINDOWS.items() for w in windows]


PARTS = {
    "fit": Part(
        "Figure 4, equations 5 and 7", lambda _: fit_specs(), lambda results, _: fit_table(results)
    ),
    "table3": Part(
        "Table 3", lambda _: ablation_specs(), lambda results, _: ablation_table(results)
    ),
    "sweep": Part(
        "Speed by W, N and G", lambda _: sweep_specs(), lambda results, _: sweep_table(results)
    ),
    "figure8": Part(
        "Figure 8, N = 5",
        lambda _: [lookahead(w, 5) for w in FIGURE8],
        lambda results, _: figure8_table(results),
    ),
    "defaults": Part(
        "Table 4: sizes, and the first window",
        lambda _: [*default_specs().values()],
        lambda results, _: defaults_table(results),
    ),
    "table6": Part(
        "Table 6", lambda options: [spec for spec, _ in joint_specs(options).values()], joint_table
    ),
}


def main() -> None:
    """Run the measurements, and write the tables."""
    parser = make_parser(__doc__ or "", per_suite=4)
    add_parts(parser, PARTS)
    parser.add_argument("--medusa", help="trained Medusa heads, for table 6")
    parser.add_argument("--draft", help="a draft model, for table 6")
    options = parser.parse_intermixed_args()
    all_results = run_parts(parser, PARTS, options, "Lookahead decoding: the paper's tables")
    if options.out and "fit" in (options.parts or PARTS):
        draw_fit(all_results[0], Path(f"{options.out}.svg"))


if __name__ == "__main__":
    main()
