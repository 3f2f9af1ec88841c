"""``benchmarks/papers/multi_token.py``: its tasks, resuming, statistics, and each command on
tiny models.
"""

import importlib
import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Load = Callable[[str], Any]  # imports a module of the benchmark
SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "papers"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


def evaluate(words: list[str], terms: int) -> Any:
    """Return the value of an expression, by a parser of its own and polynomials of NumPy;
    consumes ``words``.
    """
    word = words.pop(0)
    if word != "(":
        rest = [words.pop(0) for _ in range(terms - 1)]
        return np.array([int(word), *map(int, rest)])
    if words[0] == "-":
        words.pop(0)
        value = -evaluate(words, terms)
    else:
        left = evaluate(words, terms)
        operator = words.pop(0)
        right = evaluate(words, terms)
        if operator == "+":
            value = left + right
        elif operator == "*":
            value = np.convolve(left, right)[:terms]
        else:
            value = np.zeros(terms, int)
            power = np.array([1])
            for coefficient in left:
                term = coefficient * power[:terms]
                value[: len(term)] += term
                power = np.convolve(power, right)[:terms]
    assert words.pop(0) == ")"
    return value % 7


@pytest.mark.parametrize(("terms", "pauses"), [(1, 0), (2, 0), (3, 5)])
def test_answers_of_polynomials(terms: int, pauses: int, load: Load) -> None:
    task = load("multi_token_tasks").Polynomials(terms=terms, pauses=pauses)
    for number in range(200):
        text = task.make(random.Random(number), test=True, group=1 + number % 10)
        words = [task.words[token] for token in text.ids]
        question = words[: words.index("=")]
        assert question[len(question) - pauses :] == ["<pause>"] * pauses
        assert sum(word in "-+*o" for word in question[: len(question) - pauses]) == text.group
        left = question[: len(question) - pauses]
        assert [*map(int, words[-terms - 1 : -1])] == evaluate(left, terms).tolist()
        assert not left
        assert [words[mark] for mark in text.marks] == words[-terms - 1 : -1]


def test_training_expressions_are_in_domain_and_fit(load: Load) -> None:
    tasks = load("multi_token_tasks")
    task = tasks.Polynomials(terms=3, in_domain=4, pauses=5)
    texts = [task.make(random.Random(number), test=False) for number in range(500)]
    assert {text.group for text in texts} == {1, 2, 3, 4}
    assert max(len(text.ids) for text in texts) == task.length + 1
    inputs, targets = task.batch(7, 3)
    assert inputs.shape == targets.shape == (3, task.length)
    for row in range(3):
        text = task.make(random.Random(f"0/{7 + row}"), test=False)
        assert inputs[row, : len(text.ids) - 1].tolist() == text.ids[:-1]
        with_loss = [place for place in range(task.length) if targets[row, place] != tasks.IGNORED]
        assert [place + 1 for place in with_loss] == text.marks
        assert [int(targets[row, place]) for place in with_loss] == [
            text.ids[mark] for mark in text.marks
        ]


@pytest.mark.parametrize("characters", [2, 4])
def test_marked_tokens_of_stories_follow_from_the_first_mention(
    characters: int, load: Load
) -> None:
    task = load("multi_token_tasks").Stories(new_names=0.0, characters=characters)
    names = 16  # tokens 1 to 16 begin a name, 17 to 32 end one
    unusual = 0
    animals = dict[int, set[str]]()
    for number in range(100):
        text = task.make(random.Random(number), test=True)
        first: dict[int, int] = {}
        for place in (place for place, token in enumerate(text.ids) if names < token <= 2 * names):
            name = text.ids[place - 1]
            assert 1 <= name <= names
            assert (place in text.marks) == (name in first)
            assert first.setdefault(name, text.ids[place]) == text.ids[place]
            following = task.words[text.ids[place + 1]]
            if (
                following
                in (
                    "cat dog bear fox hare mouse frog duck goat wolf lamb pig hen owl crow mole"
                ).split()
            ):
                animals.setdefault(name, set()).add(following)
        assert len(first) <= characters
        unusual += sum(second != name + names for name, second in first.items())
    assert unusual > 65 * characters  # test names are random pairs
    assert [len(found) for found in animals.values()] == [1] * names, (
        "the first token determines the animal"
    )
    usual = task.make(random.Random(0), test=False)
    assert all(usual.ids[mark] == usual.ids[mark - 1] + names for mark in usual.marks)


def test_intervals_are_those_of_student(load: Load) -> None:
    results = load("multi_token_results")
    found = results.interval([1.0, 2.0, 3.0])
    assert (found.mean, found.count) == (2.0, 3)
    assert found.half == pytest.approx(4.303 / 3**0.5)
    assert results.interval([0.5]).text() == "50.0 ± ?"
    models = [
        {"n": n, "seed": seed, "finished": seed < 3, "a": 1, "value": 10 * n + seed * n}
        for n in (1, 2)
        for seed in range(4)
    ]
    difference = results.paired(models, lambda result: result["value"], "a")[1,][2]
    assert (difference.mean, difference.count) == (11.0, 3)


def test_a_stopped_model_goes_on_to_the_same_result(load: Load, tmp_path: Path) -> None:
    models = load("multi_token_models")
    tasks = load("multi_token_tasks")
    cell = models.Cell(
        "tiny", models.Heads(2), tasks.Stories(new_names=1.0), 6, 2, evaluations=3, count=2
    )
    whole = models.train_cell(tmp_path / "whole", cell, lambda: False, lambda _: None)
    asked = iter([False, False, False, False, True, True, True, True])
    part = models.train_cell(tmp_path / "parts", cell, lambda: next(asked, True), lambda _: None)
    assert 0 < part["step"] < 6
    assert not part["finished"]
    rest = models.train_cell(tmp_path / "parts", cell, lambda: False, lambda _: None)
    assert rest["finished"]
    assert rest["curve"] == whole["curve"]
    assert rest["cpu_seconds"] > part["cpu_seconds"]
    said: list[str] = []
    assert models.train_cell(tmp_path / "parts", cell, lambda: False, said.append) == rest
    assert said == []
    deep = models.Cell("tiny", models.Heads(4), tasks.Stories(), 6, 2)
    assert models.train_cell(tmp_path / "parts", deep, lambda: False, said.append) is None
    assert "skipped, layers: expected at least 5" in said[0]


def test_a_killed_model_has_a_result_and_goes_on(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = load("multi_token_models")
    tasks = load("multi_token_tasks")
    cell = models.Cell(
        "tiny", models.Heads(2), tasks.Stories(new_names=1.0), 6, 2, evaluations=3, count=2
    )
    whole = models.train_cell(tmp_path / "whole", cell, lambda: False, lambda _: None)

    calls = itertools.count()

    def killed_after_four_steps() -> bool:  # called once before the training, and before each step
        if next(calls) == 5:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        models.train_cell(tmp_path / "killed", cell, killed_after_four_steps, lambda _: None)
    part = models.train_cell(tmp_path / "killed", cell, lambda: True, lambda _: None)
    assert (part["step"], part["finished"]) == (4, False)
    assert part["curve"] == whole["curve"][:2]
    rest = models.train_cell(tmp_path / "killed", cell, lambda: False, lambda _: None)
    assert rest["curve"] == whole["curve"]


def test_models_have_equal_numbers_of_weights(load: Load) -> None:
    models = load("multi_token_models")
    tasks = load("multi_token_tasks")
    for size in ("1M", "3M", "10M"):
        counts = []
        for n in (1, 2):
            cell = models.Cell(size, models.Heads(n), tasks.Stories(), 6, 2)
            options = cell.options()
            module = cell.objective(Path(), options).module
            counts.append(sum(each.numel() for each in module.parameters()))
        assert counts[1] == counts[0] + options.shape.hidden


def run(load: Load, name: str, words: Sequence[str], out: Path) -> tuple[str, dict[str, Any]]:
    command = [name, "--state", str(out / "state"), "--out", str(out / "out"), *words]
    load("multi_token").main(command)
    stem = f"multi-token-{name.replace('_', '-')}"
    text = (out / "out" / f"{stem}.md").read_text(encoding="utf-8")
    return text, json.loads((out / "out" / f"{stem}.json").read_text(encoding="utf-8"))


TINY = "--sizes tiny --steps 4 --seeds 0 1 --texts 2 --test 2 --evaluations 2 --heads 1 2".split()


@pytest.mark.slow  # runs a whole benchmark
def test_induction(load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, document = run(load, "induction", [*TINY, "--new-names", "0.5"], tmp_path)
    assert "| 0.5 | tiny | 2 |" in text
    assert "n = 2 minus n = 1" in text
    assert "| 2 | 0.00 CPU-hours |" in text, "the number of seeds"
    assert "4 models, of which 4 are finished" in text
    assert len(document["results"]) == 4
    assert (tmp_path / "out" / "multi-token-induction.svg").exists()
    assert str(tmp_path) not in json.dumps(document)
    report = tmp_path / "out" / "multi-token-induction.json"
    again = [*TINY, "--new-names", "0.5", "--report", str(report), "--minutes", "0"]
    (tmp_path / "state").rename(tmp_path / "lost")
    table, repeated = run(load, "induction", again, tmp_path)
    assert table == text, "the report alone gives the same table"
    assert repeated["results"] == document["results"]
    for wrong, said in ((tmp_path / "none.json", "found none"), (report, "give the options")):
        with pytest.raises(SystemExit, match="2"):
            load("multi_token").main(
                [
                    "induction",
                    "--state",
                    str(tmp_path / "new"),
                    *again,
                    "--test",
                    "3",
                    "--report",
                    str(wrong),
                ]
            )
        assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_processes_train_the_same_models(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = []
    for count in ("1", "2"):
        words = [*TINY[:-2], "1", "--new-names", "0.5", "--processes", count]
        documents.append(run(load, "induction", words, tmp_path / count)[1])
        assert ("from step 0" in capsys.readouterr().err) == (count == "1"), (
            "with 2, other processes train and say so"
        )
    one, two = (
        [(each["name"], each["curve"]) for each in document["results"]] for document in documents
    )
    assert one == two


@pytest.mark.slow  # runs a whole benchmark
def test_arithmetic_shows_what_is_unfinished(load: Load, tmp_path: Path) -> None:
    text, document = run(load, "arithmetic", [*TINY, "--pauses", "0", "2"], tmp_path)
    assert "| 2 | tiny | 2 |" in text
    assert {result["pauses"] for result in document["results"]} == {0, 2}
    assert all(result["cpu_seconds"] > 0 for result in document["results"])
    state = tmp_path / "state" / "arithmetic"
    files = sorted(state.glob("tiny n=1 pauses=0*/result.json"))
    for file, said in zip(
        files, ("| 1 (1 more stopped at 50%) |", "| 2, stopped at 50%, 50% |"), strict=True
    ):
        result = json.loads(file.read_text(encoding="utf-8")) | {"finished": False, "step": 2}
        file.write_text(json.dumps(result), encoding="utf-8")
        text, _ = run(load, "arithmetic", [*TINY, "--pauses", "0", "--minutes", "0"], tmp_path)
        assert said in text
        assert "| 2 | tiny | 2 |" in text, "models of earlier calls are in the table"
    assert "(unfinished)" in (tmp_path / "out" / "multi-token-arithmetic.svg").read_text(
        encoding="utf-8"
    )


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return options of a tiny run on text."""
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(3)
    nouns = "cat dog bird tree house river stone child".split()
    for number in range(120):
        sentences = [f"The {draw.choice(nouns)} sees the {draw.choice(nouns)}." for _ in range(12)]
        (folder / f"{number}.txt").write_text(" ".join(sentences), encoding="utf-8")
    sizes = "--size tiny --steps 4 --seeds 0 --vocab 270 --batch 256 --text-tokens 1100"
    return [*sizes.split(), "--source", f"{folder}=1"]


@pytest.mark.slow  # runs a whole benchmark
def test_variants(load: Load, words: list[str], tmp_path: Path) -> None:
    text, document = run(load, "variants", words, tmp_path)
    found = {
        " ".join((each["heads"]["kind"], each["heads"]["order"])) for each in document["results"]
    }
    assert {"linear parallel", "linear causal", "transformer parallel"} <= found
    assert "n=4 linear parallel" in text


def test_epochs(load: Load, words: list[str], tmp_path: Path) -> None:
    text, document = run(load, "epochs", [*words, "--epochs", "2", "--heads", "1", "2"], tmp_path)
    assert [line.split(" | ")[:2] for line in text.splitlines() if line.startswith("| 2 |")] == [
        ["| 2", "1"],
        ["| 2", "2"],
    ]
    assert len(document["results"]) == 2


@pytest.mark.slow  # runs a whole benchmark
def test_finetune(
    load: Load, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(load("multi_token_models").SIZES, "tiny", (32, 5, 2))
    source = words[-1]
    text, document = run(
        load, "finetune", [*words, "--tune", source, "--tune-steps", "4"], tmp_path
    )
    assert [line[:9] for line in text.splitlines() if line.startswith(("| 1 |", "| 4 |"))] == [
        "| 1 | 1 |", "| 1 | 4 |", "| 4 | 1 |", "| 4 | 4 |",
    ]  # fmt: skip
    assert len(document["results"]) == 6


def test_batches_and_choice_points(
    load: Load, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(load("multi_token_models").SIZES, "tiny", (32, 5, 2))
    more = ["--batch-sizes", "1", "2", "--tokens", "8", "--rounds", "1"]
    text, document = run(load, "batches", [*words, *more], tmp_path)
    assert [(row["batch"], row["k"]) for row in document["results"]] == [
        (b, k) for b in (1, 2) for k in (1, 2, 3, 4)
    ]
    assert all(row["throughput"] == 1 for row in document["results"] if row["k"] == 1)
    text, document = run(load, "choice_points", words, tmp_path)
    assert "| weight by the count of terms | 2.500 |" in text
    assert document["results"][0]["other tokens"] >= 0


def test_sizes_of_bytes(load: Load, words: list[str], tmp_path: Path) -> None:
    """The loss of bytes is in bits, and linear heads replace no layer."""
    _, _, *rest = words  # --size tiny
    more = ["--sizes", "tiny", "--kind", "linear", "--heads", "1", "2"]
    command = ["sizes", "--state", str(tmp_path / "state"), "--out", str(tmp_path / "out")]
    load("multi_token").main([*command, *rest, *more, "--vocab", "260"])
    text = (tmp_path / "out" / "multi-token-bytes.md").read_text(encoding="utf-8")
    document = json.loads((tmp_path / "out" / "multi-token-bytes.json").read_text())
    assert "| loss, bits per byte |" in text
    plain, ahead = sorted(document["results"], key=lambda result: result["n"])
    assert (plain["n"], ahead["n"]) == (1, 2)
    assert ahead["parameters"] > plain["parameters"]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| tiny | ")]
    assert [row[1] for row in rows] == ["1", "2"]
    bits = float(rows[0][4].split()[0])
    assert 4.0 < bits < 8.5, "an untrained model has 8 bits of 260 tokens"
