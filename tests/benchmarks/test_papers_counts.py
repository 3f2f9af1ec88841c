"""``benchmarks/papers/counts.py``: its figures of known answers, and a run that continues."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pronk.checkpoint.hub.clone_models import clone_model, tiny_model

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "papers"
Run = Callable[..., str]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.syspath_prepend(str(SCRIPTS.parent))
    return importlib.import_module("counts")


def answer(counts: Any, tokens: list[int], **changes: Any) -> Any:
    """Return an answer whose steps added these numbers of tokens."""
    accepted = [count - 1 for count in tokens]
    fields = {"suite": "qa", "number": 0, "spec": "a", "temperature": 0.0, "tokens": tokens}
    fields |= {"accepted": accepted, "drafted": [3] * len(tokens), "repeated": 0.0}
    return counts.Answer(**(fields | {"text": [], "seconds": 1.0} | changes))


def test_tokens_per_pass_over_the_first_tokens(counts: Any) -> None:
    one = answer(counts, [2, 1, 3, 2])
    two = answer(counts, [1, 1])
    assert one.until(3) == (3, 2)
    assert one.until(4) == (6, 3)
    assert one.until(100) == (8, 4)
    assert counts.per_pass([one, two], 3) == (3 + 2) / (2 + 2)
    assert counts.per_pass([one, two], 100) == (8 + 2) / (4 + 2)
    assert counts.per_pass([], 100) != counts.per_pass([], 100), "not a number"


def test_answers_that_repeat_themselves_are_left_out_of_a_column(counts: Any) -> None:
    looping = answer(counts, [4] * 20, repeated=0.3)
    calm = answer(counts, [2] * 40, repeated=0.25)
    text = counts.length_table({"a": [looping, calm]}, {"a": ("name", "1.96")})
    assert "28% of their 4-grams occurred before in the answer; in 1 answers at most 25%" in text
    assert text.splitlines()[-1] == "| name | 2.67 | 2.00 | 1.96 |"


def test_figures_of_the_document(counts: Any) -> None:
    found = {"a": [answer(counts, [2, 2]), answer(counts, [1, 1, 1], suite="rag")]}
    assert counts.figures_of(found) == {
        "S": {"a": [7 / 5] * 4},
        "S by suite": {"a": {"qa": 2.0, "rag": 1.0}},
        "draft tokens per pass": {"a": 3.0},
    }


def test_ctar_of_known_steps(counts: Any) -> None:
    text = counts.ctar_text({"a": [answer(counts, [1, 3, 2, 4])]}, {"a": ("name", "")})
    assert text.splitlines()[-1] == (
        "| name | 2.50 | 3.0 | 0.75 | 0.50 | 0.25 | 0.00 | 0.00 | 0.00 |"
    )


def test_fit_of_answers_that_follow_equation_7(
    counts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts, "RESAMPLES", 2)
    monkeypatch.setattr(counts, "LENGTHS", (9999,))
    lookahead = importlib.import_module("lookahead")
    found = dict[str, list[Any]]()
    for spec, (window, ngram) in zip(counts.fit_specs(), counts.fit_keys(), strict=True):
        expected = lookahead.expected_lookahead(0.3, 2.5, window, ngram)
        further = round(1000 * (expected - 1))
        tokens = [1 + further // 1000 + (step < further % 1000) for step in range(1000)]
        found[spec] = [answer(counts, tokens)]
    row = counts.fit_text(found).splitlines()[4]
    alpha, f = (float(cell.split(" [")[0]) for cell in row.split(" | ")[1:3])
    assert alpha == pytest.approx(0.3, abs=0.01)
    assert f == pytest.approx(2.5, abs=0.05)
    assert row.endswith("| 0% |")


@pytest.fixture
def run(counts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs the script on pronk-tiny and returns its table."""
    row = {"task": "qa", "turns": ["def fib(n):"]}
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")

    def call(*more: str) -> str:
        words = ["counts.py", str(tiny_model()), "ctar", "--prompts", str(tmp_path / "p.jsonl")]
        words += ["--tokens", "16", "--state", str(tmp_path / "state"), "--threads", "1"]
        words += ["--drafter", "suffix=suffix(store_tokens=0)", "--out", str(tmp_path / "out")]
        words += ["--drafter", f"draft=draft_model(model={str(clone_model('pronk-tiny-draft'))!r})"]
        monkeypatch.setattr(sys, "argv", [*words, *more])
        counts.main()
        return (tmp_path / "out.md").read_text()

    return call


def test_a_stopped_run_continues(run: Run, tmp_path: Path, capsys: Any) -> None:
    run("--minutes", "0")
    assert "ctar: no prompt is complete yet" in capsys.readouterr().out
    text = run()
    state = (tmp_path / "state").read_text()
    assert len(state.splitlines()) == 3, "plain decoding and two drafters"
    assert "| suffix | " in text
    assert "1 answers of " in text
    assert str(tmp_path) not in text
    (cell,) = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert max(figures[-1] for figures in cell["S"].values()) > 1.2
    assert run() == text
    assert (tmp_path / "state").read_text() == state


def test_other_tokens_than_those_of_plain_decoding_are_an_error(run: Run, tmp_path: Path) -> None:
    run()
    state = tmp_path / "state"
    plain = json.loads(state.read_text().splitlines()[0])
    plain["text"][0] += 1
    state.write_text(json.dumps(plain) + "\n")
    with pytest.raises(SystemExit, match="expected the tokens of plain decoding with suffix"):
        run()
