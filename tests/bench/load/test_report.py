"""What a load test shows: tables on a terminal, the page and its plots."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pronk.bench.load.document import LoadDocument, ServerFacts
from pronk.bench.load.figures import make_figures, sustained_rates
from pronk.bench.load.levels import Level
from pronk.bench.load.records import Call, Targets, Window
from pronk.bench.load.report import write_load_report
from pronk.bench.load.tables import notes, show

LEVELS = (Level("closed", 1), Level("closed", 4), Level("open", 0.5), Level("open", 2))
TARGETS = Targets(ttft=0.4, e2e=5.0)


def calls_of(number: int, level: Level) -> list[Call]:
    """Ten answers of a server; the second is faster, load makes them slower, and one of the first's is refused."""
    slow = (2.0 if number == 0 else 1.0) * (1 + level.value / 4)
    calls = [
        Call("t/1", i, 0.001, 0.1 * slow + i / 100, slow, slow, (slow / 10,) * 8, 9, 20, prompt_tokens=9, steps=10)
        for i in range(10)
    ]
    if number == 0:
        calls[3] = replace(calls[3], error="HTTP 503", reason="<b>busy</b>")
        calls = [replace(call, counted="chunks", steps=None, prompt_tokens=None) for call in calls]
    return calls


def make_document(names: tuple[str, ...] = ("plain", "pronk"), **changes: object) -> LoadDocument:
    figures = []
    for level in LEVELS:
        windows = [
            [Window(name, level, turn, 8.0 + turn + 4 * (number == 0), 0.1, calls_of(number, level)) for turn in (0, 1)]
            for number, name in enumerate(names)
        ]
        figures += [make_figures(own, windows[0], TARGETS) for own in windows]
    document = LoadDocument(
        started="2026-11-22T20:00:00+00:00",
        arguments={"seed": 7, "server": list(names)},
        versions={"pronk": "1"},
        hardware={"processor": "a processor", "cores": 2},
        servers=tuple(
            ServerFacts(name, f"http://{i}/v1", "tiny", ("seed",) * (i == 0)) for i, name in enumerate(names)
        ),
        targets=TARGETS,
        interrupted=False,
        figures=tuple(figures),
        sustained=sustained_rates(figures),
    )
    return replace(document, **changes)  # type: ignore[arg-type]


def shown(document: LoadDocument) -> str:
    file = io.StringIO()
    show(document, Console(file=file, width=80, highlight=False))
    return file.getvalue()


def test_tables_fit_a_terminal() -> None:
    text = shown(make_document())
    assert max(map(len, text.splitlines())) <= 80
    for words in ("4 clients", "0.5 requests/s", "TTFT", "p99", "good/s", "18/20", "20/20", "2.00"):
        assert words in text, words
    assert "plain refuses seed; its requests do without." in text
    assert "plain, 1 client: 2 of 20 requests failed, HTTP 503: <b>busy</b>" in " ".join(text.split())


def test_columns_that_have_nothing_to_say_are_left_out() -> None:
    document = make_document(("one",), targets=Targets(), sustained={})
    figures = tuple(replace(f, S=None, good=None, goodput=None, problems=()) for f in document.figures)
    text = shown(replace(document, figures=figures))
    head = next(line for line in text.splitlines() if "throughput" in line)
    assert not any(column in head for column in ("× first", "good", " S"))


def test_what_has_to_be_known_of_the_figures() -> None:
    document = make_document()
    busy = replace(document, figures=tuple(replace(f, busy=0.8) for f in document.figures[:1]))
    lines = list(notes(busy))
    assert lines[1] == "plain does not say how many tokens it sent: each chunk counts as one (18 answers)."
    assert lines[2].startswith("plain, 1 client: the client itself computed for 80% of the time")
    cut = tuple(replace(f, counted={"length": 3}) for f in document.figures[:1])
    assert (
        "answers cut at --max-tokens count as that many (3 answers)." in list(notes(replace(document, figures=cut)))[1]
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("matplotlib")
    return write_load_report(make_document(), tmp_path_factory.mktemp("page") / "new").read_text(encoding="utf-8")


def test_page_needs_nothing_else(page: str) -> None:
    assert not re.findall(r"<script|<link|@import|(?:src|href)=\"(?!#)[^\"]*\"", page)
    assert page.count("<!doctype html>") == 1
    assert "&lt;b&gt;busy" in page
    assert "<b>busy" not in page
    assert "2026-11-22 20:00:00 UTC" in page


def test_every_plot_is_there_and_described(page: str) -> None:
    svgs = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(svgs) == 5 * 2 + 4  # closed and open loops; the distribution at each of four levels
    for svg in svgs:
        ET.fromstring(svg.replace("xlink:href", "href"))
        assert re.search(r'aria-label="[^"]{20,}"', svg)
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert "plain at 1 client: half within" in page


def test_same_document_same_page(page: str, tmp_path: Path) -> None:
    assert write_load_report(make_document(), tmp_path / "again").read_text(encoding="utf-8") == page


def test_page_of_almost_nothing(tmp_path: Path) -> None:
    """One call that failed, and nothing at all: an interrupt can leave that."""
    pytest.importorskip("matplotlib")
    failed = Call("t/1", 0, 0, e2e=1, error="timed out")
    figures = make_figures([Window("plain", LEVELS[0], 0, 1.0, 0.1, [failed])], [], TARGETS)
    for found in ((figures,), ()):
        document = make_document(("plain",), figures=found, sustained={}, interrupted=True)
        text = write_load_report(document, tmp_path).read_text(encoding="utf-8")
        assert "Interrupted" in text
        assert "Interrupted" in shown(document)
