"""The plot of real models, on results of the form that ``benchmarks/real.py`` writes."""

import json
import re
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scripts import ROOT, load_script

KEY = ("group", "temperature", "method")
METHODS = (
    "autoregressive",
    "auto",
    "llama_server",
    "llama_server_ngram_simple",
    "llama_server_ngram_mod",
    "openvino",
    "openvino_prompt_lookup",
)


@pytest.fixture(scope="module")
def plots() -> ModuleType:
    return load_script("tools/docs/plots.py")


def row(method: str, temperature: float, speed: float, equal: int) -> dict[str, Any]:
    """Return a row of a method with 12 prompts."""
    made = {"model": "some-1b-q4_k_m.gguf", "group": "all", "temperature": temperature}
    made |= {"method": method, "prompts": 12, "speed": speed, "first_token": 0.25}
    made |= {"processor": "X", "threads": 2, "kernels": "avx2", "date": "2026-11-30"}
    made["speedup_after_first"] = speed / 40
    if method not in ("autoregressive", "llama_server", "openvino"):
        made |= {"compared": 12, "equal": equal}
    return made


def write(folder: Path, plots: ModuleType, rows: list[dict[str, Any]]) -> None:
    (folder / f"{plots.REAL}.json").write_text(json.dumps(rows))


def texts(svg: str) -> list[str]:
    """Return the texts of an SVG file in order."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_engines_of_a_model(plots: ModuleType, tmp_path: Path) -> None:
    rows = [row(method, 0.0, 40.0 + place, 12) for place, method in enumerate(METHODS)]
    rows += [row(method, 0.7, 30.0, 12) for method in METHODS[:3]]
    rows[4]["equal"] = 11  # of llama_server_ngram_mod
    rows[6] = {"prompts": 0} | {name: rows[6][name] for name in ("model", *KEY)}  # it failed
    write(tmp_path, plots, rows)
    svg = plots.real(tmp_path)
    shown = texts(svg)[5:-1]
    assert shown == [
        "some-1b",
        *("pronk", "41", "0.25 s", "✓ all 24"),  # both temperatures
        *("pronk, plain", "40", "0.25 s"),
        *("llama.cpp", "44", "0.25 s", "23 of 24"),  # the fastest mode; texts of both modes
        *("OpenVINO", "45", "0.25 s"),  # no drafted text to compare
    ]
    assert texts(svg)[-1] == "X, 2 threads; 2026-11-30; 12 prompts, T = 0; benchmarks/real.py"


def test_an_engine_that_cannot_read_the_file(plots: ModuleType, tmp_path: Path) -> None:
    rows = [row(method, 0.0, 40.0, 12) for method in METHODS[:2]]
    rows.append({**row("openvino", 0.0, 0.0, 0), "prompts": 0, "error": "unknown type"})
    del rows[-1]["speed"]
    write(tmp_path, plots, rows)
    assert texts(plots.real(tmp_path))[-5:-1] == [
        *("llama.cpp", "not measured"),
        *("OpenVINO", "cannot read this file"),
    ]


def test_texts_stay_in_their_columns(plots: ModuleType, tmp_path: Path) -> None:
    """With the longest values; 7 pixels are the mean width of a digit of this size."""
    rows = [row(method, 0.0, 123.4, 119) for method in METHODS]
    for each in rows:
        each |= {"first_token": 10.25, "prompts": 120}
        if "compared" in each:
            each["compared"] = 120
    write(tmp_path, plots, rows)
    found = re.findall(
        r'<text class="(\w+)" x="([\d.]+)" y="(\d+)"([^>]*)>([^<]*)<', plots.real(tmp_path)
    )
    lines: dict[str, list[tuple[float, float]]] = {}
    for _, x, y, rest, text in found:
        width = 7.0 * len(text)
        left = float(x) - width if "end" in rest else float(x)
        lines.setdefault(y, []).append((left, left + width))
    assert max(len(spans) for spans in lines.values()) == 4
    for spans in lines.values():
        for (_, end), (begin, _) in pairwise(spans):
            assert end <= begin
        assert spans[-1][1] <= plots.WIDTH


def test_the_table_of_the_same_results(
    plots: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "docs"))
    blocks = load_script("tools/docs/blocks.py")
    monkeypatch.setattr(blocks, "RESULTS", tmp_path)
    groups = ("all", "chat", "code", "copy")
    rows = [
        {**row(method, 0.0, 40.0 + place, 12), "group": group}
        for group in groups
        for place, method in enumerate(METHODS)
    ]
    for each in rows:
        if each["group"] == "copy":  # no such prompt was measured
            del each["speed"], each["speedup_after_first"]
            each["prompts"] = 0
    write(tmp_path, plots, rows)  # interrupted before T = 0.7
    table = blocks.speedups("auto")
    assert "| × llama.cpp | × OpenVINO |" in table
    assert table.splitlines()[-1] == "| some-1b | 12 | 1.02 | 1.02 | – | 1.02 | – | 0.93 | 0.89 |"
