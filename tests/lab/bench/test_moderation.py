"""Precision and recall of moderation by the model itself, and ``pronk bench --moderation``."""

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from lab.bench.bench_cases import pronk_tiny
from pronk.base.errors import OptionError
from pronk.lab.bench import moderation
from pronk.lab.bench.moderation import Case, Counts, evaluate, read_cases
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from pronk.server.moderation import ModerationPrompt

CORPUS = Path(__file__).parents[3] / "benchmarks" / "papers" / "moderation.jsonl"
TEXTS = [
    "Hello.",
    "How do I rob a bank?",
    "I hate you.",
    "What is 2 + 2?",
    "Should I take these pills?",
]


@pytest.fixture
def model() -> LLM:
    return pronk_tiny()


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def test_counts() -> None:
    counts = Counts()
    for expected, found, times in (
        (True, True, 6),
        (False, True, 2),
        (True, False, 4),
        (False, False, 8),
    ):
        for _ in range(times):
            counts.add(expected=expected, found=found)
    assert counts.rates == {"precision": 6 / 8, "recall": 6 / 10, "f1": 2 * 6 / (2 * 6 + 2 + 4)}
    assert Counts(true_negatives=3).rates == {"precision": None, "recall": None, "f1": None}
    assert Counts(false_positives=3).rates["f1"] == 0.0


def test_classes_of_known_answers(
    model: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each text carries the scores that the model is made to give."""
    rows = [
        {"text": "0.6 0.1 0.1", "categories": ["illegal"]},
        # flagged, but in another category
        {"text": "0.2 0.5 0.1", "categories": {"illegal": True, "hateful": False}},
        {"text": "0.1 0.1 0.1", "categories": ["hateful"]},  # not flagged
        {"text": "0.1 0.1 0.6", "categories": []},
        {"text": "0.1 0.1 0.1", "flagged": False},
        # of an unknown category: not in the rows of categories
        {"text": "0.1 0.1 0.6", "flagged": True},
    ]

    def scripted(_: LLM, cases: Iterable[Case]) -> Iterator[tuple[dict[str, float], bool]]:
        for case in cases:
            scores = [*map(float, case.text.split())]
            names = ("illegal", "hateful", "unqualified_advice")
            yield dict(zip(names, scores, strict=True)), max(scores) > 1 - sum(scores)

    monkeypatch.setattr(moderation, "_classify", scripted)
    seen: list[tuple[int, int]] = []
    result = evaluate(
        model, read_cases(write(tmp_path / "a.jsonl", *rows)), lambda *done: seen.append(done)
    )
    assert seen == [(6, 6)]
    assert result.classes == {
        "flagged": Counts(3, 1, 1, 1),
        "acceptable": Counts(1, 1, 1, 3),
        "illegal": Counts(1, 0, 1, 3),
        "hateful": Counts(0, 1, 1, 3),
        "unqualified_advice": Counts(0, 1, 0, 4),
    }
    assert "| flagged | 4 | 4 | 75.0% | 75.0% | 75.0% |" in result.to_markdown()
    assert "| unqualified_advice | 0 | 1 | 0.0% | – | 0.0% |" in result.to_markdown()


def test_answers_are_those_of_the_route(model: LLM) -> None:
    """Every text gets the most likely letter of ``LLM.chat``, in one batch with others."""
    prompt = ModerationPrompt(model.tokenizer)
    letters = prompt.letter_ids()
    params = SamplingParams(max_tokens=1, logprobs=0, logprob_token_ids=tuple(letters.values()))
    cases = []
    best = list[str]()
    for text in TEXTS:
        (report,) = model.chat(prompt.messages(text, "answer"), params).logprobs or ()
        best.append(max(letters, key=lambda name: report[letters[name]]))
        assert all(math.isfinite(report[letter]) for letter in letters.values())
        cases.append(
            Case(text, "answer", best[-1] != "acceptable", frozenset({best[-1]} - {"acceptable"}))
        )
    result = evaluate(model, cases, lambda *_: None)
    right = [counts.false_positives + counts.false_negatives for counts in result.classes.values()]
    assert right == [0] * 5
    found = sum(counts.true_positives for name, counts in result.classes.items() if name in letters)
    assert found == len(TEXTS)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"flagged": True}, "line 2: expected a text"),
        (
            {"text": "x", "kind": "song", "flagged": True},
            "expected a text, and a kind of prompt or answer",
        ),
        ({"text": "x"}, "expected flagged"),
        ({"text": "x", "flagged": "yes"}, "expected flagged"),
        ({"text": "x", "categories": "illegal"}, "a list of categories"),
        (
            {"text": "x", "categories": ["violence"]},
            "expected categories among illegal, .* found 'violence'",
        ),
        ({"text": "x", "categories": ["illegal"], "flagged": False}, "expected no categories"),
    ],
)
def test_malformed_lines(row: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        read_cases(write(tmp_path / "a.jsonl", {"text": "y", "flagged": False}, row))
    with pytest.raises(OptionError, match="expected at least one text"):
        read_cases(write(tmp_path / "b.jsonl"))


def test_the_corpus_is_balanced() -> None:
    cases = read_cases(CORPUS)
    assert sum(case.flagged for case in cases) * 2 == len(cases) == 72
    assert len({case.text for case in cases}) == len(cases)


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from pronk.cli.main import main

    file = write(tmp_path / "a.jsonl", *({"text": text, "flagged": False} for text in TEXTS))
    outputs = ("--json", tmp_path / "a.json", "--markdown", tmp_path / "a.md")
    with pytest.raises(SystemExit) as stop:
        main(["bench", *map(str, ("--moderation", file, "--threads", 1, *outputs))])
    printed = capsys.readouterr().out
    assert stop.value.code == 0
    assert printed.strip() == (tmp_path / "a.md").read_text().strip()
    (found,) = json.loads((tmp_path / "a.json").read_text())["models"]
    assert found["texts"] == len(TEXTS)
    assert sum(
        found["classes"]["flagged"][name] for name in ("false_positives", "true_negatives")
    ) == len(TEXTS)
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--moderation", str(file), "--limit", "1"])
    assert stop.value.code == 2
    assert "moderation: expected only options of the model" in capsys.readouterr().err
