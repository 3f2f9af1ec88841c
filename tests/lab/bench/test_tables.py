"""Tables: every figure fits into 80 columns, long names are folded, and missing values are
dashes.
"""

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from pronk.lab.bench.document import (
    ALL,
    SOUND,
    Document,
    Failure,
    Figures,
    Latency,
    ModelResult,
    PassCost,
    Range,
    Split,
)
from pronk.lab.bench.render import show, to_markdown
from pronk.lab.bench.tables import describe

METHODS = (
    "autoregressive",
    "prompt_lookup",
    "lookahead(window=5, ngram=4, guesses=5)",
    "openvino_prompt_lookup",
    "transformers_prompt_lookup",
)
FULL: dict[str, Any] = {
    "prompts": 164,
    "asked": 164,
    "tokens": 20992,
    "tokens_per_second": Range(1234.56, 7.0),
    "speedup": Range(2.345, 0.118),
    "decode_speedup": Range(3.456, 0.1),
    "over_floor": 14.567,
    "S": 2.718,
    "alpha": 0.618,
    "cost_coefficient": 0.0456,
    "expected_speedup": 1.618,
    "ttft": Range(0.2345, 0.01),
    "itl": Latency(0.0321, 0.05, 0.4567),
    "split": Split(0.12, 0.70, 0.18),
    "peak_memory": 3 * 2**30,
    "same": 162,
    "compared": 164,
    "near_ties": 2,
    "repeated": 1.0,
    "degenerated": 9,
}
# Expected cells of :data:`FULL` in the two tables, speed-ups and costs.
GAIN = ["2.35±0.12", "2.72", "0.62", "100%"]
COST = ["1234.6", "14.57", "234", "32.1", "457", "0.046", "1.62", "3.46", "12/18", "3.00"]


def make(method: str = "x", task: str = ALL, temperature: float = 0.0, **more: Any) -> Figures:
    return Figures(task, method, "pronk", temperature, **({"prompts": 1, "asked": 1} | more))


def document(*figures: Figures, interrupted: bool = False, **more: Any) -> Document:
    values: dict[str, Any] = {
        "inflated": None,
        "bandwidth": None,
        "pass_cost": (),
        "peers": {},
        "skipped": (),
    } | more
    one = ModelResult(
        "models/one",
        9_669_440,
        19_338_880,
        2048,
        "bfloat16",
        2048,
        (),
        kernels="avx2",
        figures=figures,
        **values,
    )
    hardware = {"threads": 2, "processor": "Some CPU"}
    return Document(
        "2026-11-20T10:00:00+00:00",
        {},
        {},
        hardware,
        degenerate_above=0.5,
        interrupted=interrupted,
        models=(one,),
    )


def shown(of: Document, width: int = 80) -> str:
    file = io.StringIO()
    show(of, Console(file=file, width=width, highlight=False))
    return file.getvalue()


def rows_of(text: str, name: str) -> list[list[str]]:
    """Return, for each line that begins with a method's name, the cells after the name."""
    return [line.split()[1:] for line in text.splitlines() if line.split()[:1] == [name]]


@pytest.mark.parametrize(
    "temperatures", [(0.0,), (0.0, 0.8), (0.0, 0.8, 1.2), (0.0, 0.3, 0.8, 1.0)]
)
def test_figures_are_complete_and_long_names_are_folded(temperatures: tuple[float, ...]) -> None:
    tasks = ("humaneval", "gsm8k", ALL, SOUND)
    of = document(
        *[make(m, task, t, **FULL) for task in tasks for t in temperatures for m in METHODS]
    )
    text = shown(of)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    body = text.split("× plain: ")[0]
    assert (
        body.count(GAIN[0]) == body.count(GAIN[3]) == len(tasks) * len(METHODS) * len(temperatures)
    )
    for cell in COST:
        assert len(re.findall(rf"(?<= ){re.escape(cell)}(?= |$)", body, re.MULTILINE)) == len(
            METHODS
        ) * len(temperatures)
    # A folded name continues in the lines below its figures.
    names = "".join(
        re.split(r" {2,}(?=\d)| (?=\d+\.\d+[ ±])", line)[0].replace(" ", "")
        for line in body.splitlines()
    )
    for method in METHODS:
        tables = -(-len(temperatures) // 2) * len(tasks) + len(temperatures)
        assert names.count(method.replace(" ", "")) >= tables, method


def test_cells_of_a_row() -> None:
    of = document(*[make("drafter", task, t, **FULL) for task in ("code", ALL) for t in (0.0, 0.8)])
    text = shown(of)
    rows = rows_of(text, "drafter")
    assert rows[:2] == [[*GAIN, *GAIN, "324/328*", "164"]] * 2
    assert rows[2:] == [COST] * 2
    lines = [line.strip() for line in text.splitlines()]
    assert (
        lines.index("code")
        < lines.index("all tasks")
        < lines.index("T = 0")
        < lines.index("T = 0.8")
    )
    assert "T = 0    S    α loops   T = 0.8    S    α loops" in text


def test_missing_values_are_dashes() -> None:
    peer = make("peer", speedup=Range(1.0, 0.0), repeated=0.25, tokens_per_second=Range(5.0, 0.1))
    (gain, cost) = rows_of(shown(document(peer)), "peer")
    assert gain == ["1.00±0.00", "–", "–", "25%", "1"]  # no count of equal outputs
    assert cost == ["5.0", *["–"] * 9]


def test_a_method_that_failed_everywhere_is_listed() -> None:
    failed = tuple(Failure(f"code/{i}", "no package" if i else "out of luck") for i in range(7))
    text = shown(document(make("good", **FULL), make("peer", prompts=0, asked=7, failures=failed)))
    assert rows_of(text, "peer") == [["–"] * 4 + ["0/7"]]
    assert "failed:\n  peer, code/0: out of luck\n  peer, code/1 and 5 more: no package\n" in text


def test_the_number_of_prompts_is_the_least_of_all_temperatures() -> None:
    text = shown(
        document(make("x", prompts=3, asked=4), make("x", temperature=0.8, prompts=4, asked=4))
    )
    assert rows_of(text, "x")[0][-1] == "3/4"


def test_an_interrupted_temperature() -> None:
    """Method ``a`` finished both temperatures, ``b`` only the first: the second temperature of
    ``b`` is dashes.
    """
    reached = [make("a", temperature=t, **FULL) for t in (0.0, 0.8)]
    text = shown(document(*reached, make("b", **FULL), interrupted=True))
    assert rows_of(text, "b")[0] == [*GAIN, *["–"] * 4, "162/164*", "164"]
    assert text.startswith("Interrupted")


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([(5, 5, 0)], "5/5"),
        ([(4, 5, 1)], "4/5*"),
        ([(3, 5, 1)], "3/5"),
        ([(4, 5, 1), (5, 5, 0)], "9/10*"),
        ([(4, 5, 1), (4, 5, 0)], "8/10"),
        ([(0, 5, 0)], "0/5"),
    ],
)
def test_a_star_marks_differences_that_are_all_near_ties(
    counts: list[tuple[int, int, int]], expected: str
) -> None:
    figures = [
        make("x", temperature=float(t), same=same, compared=compared, near_ties=ties)
        for t, (same, compared, ties) in enumerate(counts)
    ]
    assert rows_of(shown(document(*figures)), "x")[0][-2] == expected


def test_the_heading() -> None:
    of = document(
        make("x", **FULL),
        bandwidth=Range(4.2e10, 1.1e9),
        pass_cost=(PassCost(1, 0.01, 1.0), PassCost(8, 0.012, 1.2)),
        inflated={"source": "tiny", "parameters": 15_700_000},
    )
    text = " ".join(shown(of).split())
    # The floor is the time to read the weights once: 19,338,880 bytes at 42 GB/s.
    machine = (
        "models/one",
        "9.7 M parameters",
        "bfloat16",
        "kernels avx2",
        "2 threads",
        "Some CPU",
    )
    for part in (*machine, "42 ± 1 GB/s", "floor 0.46 ms", "8: 1.20"):
        assert part in text
    assert (
        "Real acceptance, simulated size: the function is that of tiny (15.7 M parameters)" in text
    )


@pytest.mark.parametrize(("ratio", "noise"), [(0.77, True), (0.96, False), (1.2, False)])
def test_impossible_times_of_forward_passes_are_called_noise(ratio: float, *, noise: bool) -> None:
    costs = (PassCost(1, 0.01, 1.0), PassCost(2, 0.01 * ratio, ratio))
    text = " ".join(shown(document(make("x", **FULL), pass_cost=costs)).split())
    assert f"2: {ratio:.2f}" in text
    assert ("these times are noise" in text) == noise


def test_the_column_of_workers() -> None:
    one = document(make("own", **FULL, waited=0.0123), make("peer", **FULL))
    text = shown(replace(one, arguments={"workers": 2, "parallel": "tree"}))
    assert [rows_of(text, name)[-1] for name in ("own", "peer")] == [[*COST, "1.2"], [*COST, "–"]]
    assert "2 workers (tree), threads of each: 2" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    alone = shown(document(make("own", **FULL)))
    assert rows_of(alone, "own")[-1] == COST
    assert "workers: share of the time" in " ".join(text.split())
    assert "workers" not in alone


def test_nothing_measured() -> None:
    skipped = tuple(Failure(f"code/{i}", "3000 tokens") for i in range(2))
    text = shown(document(skipped=skipped))
    assert "skipped, 2 in all:" in text
    assert "code/1: 3000 tokens" in text
    assert "T =" not in text


def test_markup_in_names_is_text() -> None:
    text = shown(
        document(make("x[bold]", "[red]task", **FULL), skipped=(Failure("[b]id[/b]", "[/]"),))
    )
    assert all(name in text for name in ("x[bold]", "[red]task", "[b]id[/b]: [/]"))


def test_markdown_has_the_same_cells() -> None:
    names = ("a|b", "prompt_lookup")
    of = document(
        *[make(m, task, **FULL) for task in ("code", ALL) for m in names],
        skipped=(Failure("a", "b|c"),),
    )
    tables = [
        [re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()]
        for block in to_markdown(of).split("\n\n")
        if block.startswith("|")
    ]
    assert [len(table) for table in tables] == [2 + 4, 2 + 2]
    assert all(len(row) == len(table[0]) for table in tables for row in table)
    cells = [[cell.strip() for cell in row] for table in tables for row in table]
    assert cells[2] == ["code", "a\\|b", *GAIN, "162/164\\*", "164"]
    assert cells[3][:2] == ["", "prompt\\_lookup"]
    assert cells[-1] == ["", "prompt\\_lookup", *COST]


def test_descriptions_of_weights() -> None:
    of = document()
    (plain,) = of.models
    for kept in ({"weights": "bfloat16", "weight_bits": 16.1}, {}):  # older traces lack both fields
        assert "bfloat16 · kernels" in describe(replace(plain, **kept), of)
    rounded = replace(plain, weights="int4 in groups of 32", weight_bits=5.0, pass_bytes=6_100_000)
    assert (
        "bfloat16 · int4 in groups of 32: 5.00 bits a weight, 6.1 MB a forward pass · kernels"
        in describe(rounded, of)
    )
    rounded = replace(rounded, kv_dtype="int8")
    assert (
        "int4 in groups of 32: 5.00 bits a weight, cache int8, 6.1 MB a forward pass · kernels"
        in describe(rounded, of)
    )
