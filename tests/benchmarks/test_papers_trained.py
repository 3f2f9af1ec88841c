"""``benchmarks/papers/kangaroo.py`` and ``glide.py`` with the trained drafters of the clone."""

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pronk.checkpoint.hub.clone_models import clone_model, tiny_model

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "papers"
Run = Callable[..., tuple[str, dict[str, dict[str, float]]]]


def folder(kind: str) -> str:
    found = clone_model(f"pronk-tiny-{kind}")
    assert found is not None
    return str(found)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a script with two prompts, and returns its tables and its figures
    by drafter.
    """
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.syspath_prepend(str(SCRIPTS.parent))
    rows = [
        {"task": task, "turns": [text]}
        for task, text in (("qa", "def fib(n):"), ("rag", "Count to nine."))
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def call(script: str, **patches: object) -> tuple[str, dict[str, dict[str, float]]]:
        module = importlib.import_module(script)
        words = [f"{script}.py", str(tiny_model())]
        words += [
            "--prompts",
            str(tmp_path / "p.jsonl"),
            "--per-suite",
            "1",
            "--wall",
            "--tokens",
            "24",
        ]
        arguments = patches.pop("arguments")
        assert isinstance(arguments, list)
        for name, value in patches.items():
            monkeypatch.setattr(module, name, value)
        monkeypatch.setattr(
            sys, "argv", [*words, "--temperatures", "0", "--out", str(tmp_path / "out"), *arguments]
        )
        module.main()
        (cell,) = json.loads((tmp_path / "out.json").read_text())["cells"]
        return (tmp_path / "out.md").read_text(), cell["drafters"]

    return call


def test_tokens_per_pass_relative_to_another_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """S relative to a baseline counts all tokens and passes, and no time."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.syspath_prepend(str(SCRIPTS.parent))
    measuring = importlib.import_module("measuring")
    policy = importlib.import_module("policy")
    prompts = [policy.Prompt("qa", number, "") for number in range(2)]

    def runs(seconds: float, *counts: tuple[int, int]) -> list[object]:
        return [policy.Run(tokens, seconds, steps, policy.Regret()) for tokens, steps in counts]

    measured = {
        "baseline": runs(1.0, (60, 40), (60, 20)),
        "twice": runs(9.0, (60, 20), (60, 10)),
        "mixed": runs(9.0, (60, 20), (60, 20)),
    }
    results = measuring.Results(prompts, measured, 0.0)
    assert results.passes_over("baseline", "baseline") == "1.00 [1.00, 1.00]"
    assert results.passes_over("twice", "baseline") == "2.00 [2.00, 2.00]"
    assert results.passes_over("mixed", "baseline") == "1.50 [1.00, 2.00]"


@pytest.mark.slow  # runs a whole benchmark
def test_kangaroo(run: Run, tmp_path: Path) -> None:
    store = str(tiny_model() / "datastore")
    export = tmp_path / "run" / "export"
    shutil.copytree(folder("kangaroo"), export)
    arguments = [
        f"--kangaroo=exit 2={folder('kangaroo')}",
        "--medusa",
        folder("medusa"),
        "--datastore",
        store,
    ]
    arguments.append(f"--kangaroo=a run={export}")
    text, found = run("kangaroo", ETAS=(0.0, 0.6), GAMMAS=(4, 6), arguments=arguments)
    for title in (
        "Table 1: Spec-Bench",
        "Figure 3a, table 2: exits and adapters",
        "Figure 3b: the threshold",
    ):
        assert f"## {title}, T = 0.0" in text
    assert "| CR, × plain | qa | rag |" in text
    exits = text[text.index("## Figure 3a") : text.index("## Figure 3b")].splitlines()
    assert [line.split(" | ")[4] for line in exits[4:6]] == ["1.00 [1.00, 1.00]"] * 2
    assert "| Kangaroo, the paper's | 1.87, 1.43 | 2.05, 1.52 |" in text
    assert str(Path(store).parent) not in text + json.dumps(found)
    fixed, dynamic = (
        found[f"kangaroo(model='pronk-tiny-kangaroo', eta={eta}, num_tokens=6)"]["per_pass"]
        for eta in (0.0, 0.6)
    )
    assert fixed >= dynamic > 1.0
    assert found["kangaroo(model='run/export', eta=0.0, num_tokens=6)"]["per_pass"] == fixed
    assert found["medusa(model='pronk-tiny-medusa')"]["per_pass"] > 1.0
    assert "retrieval(datastore='datastore')" in found


@pytest.mark.slow  # runs a whole benchmark
def test_glide(run: Run) -> None:
    arguments = [
        "--glide",
        folder("glide"),
        "--vanilla",
        folder("vanilla"),
        "--medusa",
        folder("medusa"),
    ]
    arguments += ["--variant", f"the same={folder('glide')}"]
    text, found = run("glide", BATCHES=(1, 2), ROUNDS=1, arguments=arguments)
    for title in (
        "Figure 6, and the ablation of CAPE",
        "Table 3: the time of drafting",
        "Table 4: batches",
        "Figures 7 to 9, table 2: variants",
    ):
        assert f"## {title}, T = 0.0" in text
    assert "| beam of 8 | " in text
    variants = text[text.index("## Figures 7 to 9") :]
    assert (
        variants.split("| GLIDE | ")[1].splitlines()[0]
        == variants.split("| the same | ")[1].splitlines()[0]
    )
    glide = "glide(model='pronk-tiny-glide', num_tokens=5)"
    assert 1.0 < found[glide]["per_pass"] <= found[f"cape({glide})"]["per_pass"]
    assert f"cape({glide}, sizes=4)" in found
    assert f"beam({glide}, width=8, num_tokens=5)" in found
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith(("| 1 |", "| 2 |"))]
    assert [float(row[-1].rstrip(" |")) for row in rows] == [1.96, 1.95]
    assert all(float(cell) > 0 for row in rows for cell in row[1:4])


def test_glide_stops_at_other_tokens(run: Run) -> None:
    check = importlib.import_module("glide").check_equal
    check([[1, 2], (1, 2), [1, 2]])
    with pytest.raises(SystemExit, match="expected equal tokens"):
        check([[1, 2], [1, 3]])
