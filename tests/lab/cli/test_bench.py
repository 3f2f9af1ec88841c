"""``pronk bench`` from outside: what goes to which stream and file, exit codes, mistakes told
before measuring.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import pronk.llm
from checkpoints import MakeCheckpoint
from lab.bench.bench_cases import pronk_tiny
from pronk import diagnosis
from pronk.checkpoint.hub.clone_models import tiny_model
from pronk.lab.bench import measure, methods
from pronk.lab.bench.methods import DrafterMethod, Item
from pronk.lab.bench.records import Sample

Run = Callable[..., tuple[int, str, str]]
TINY = tiny_model()
FEW = ("--max-tokens", "6", "--repeats", "1", "--temperature", "0")
COUNT = "one two three one two three one two"


@pytest.fixture
def run(command: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs ``pronk bench``, with shorter measurements of bandwidth and
    forward passes.
    """
    monkeypatch.setattr(diagnosis, "_BUFFER_BYTES", 2**20)
    monkeypatch.setattr(measure, "_ROUNDS", 1)
    monkeypatch.setattr(measure, "ROWS", (1, 4))
    return partial(command, "bench")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Load pronk-tiny once; return the options of every load."""
    asked: list[dict[str, Any]] = []

    def load(model: str | None = None, **options: Any) -> Any:
        asked.append({"model": model} | options)
        return pronk_tiny()

    monkeypatch.setattr(pronk.llm, "LLM", load)
    return asked


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    rows = [{"prompt": COUNT, "id": "count"}, {"turns": ["Hello", "Bye"], "task": "chat"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def interrupt_call(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    original = methods.DrafterMethod.run
    calls = list[int]()

    def count(self: DrafterMethod, items: list[Item]) -> list[Sample]:
        calls.append(1)
        if len(calls) == number:
            raise KeyboardInterrupt
        return original(self, items)

    monkeypatch.setattr(methods.DrafterMethod, "run", count)


def test_tables_document_and_trace(
    run: Run, loaded: list[dict[str, Any]], prompts: Path, tmp_path: Path
) -> None:
    figures = tmp_path / "figures.json"
    trace = tmp_path / "trace.jsonl"
    outputs = ("--json", figures, "--trace", trace, "--markdown", tmp_path / "tables.md")
    code, out, err = run(
        "--prompts", prompts, *FEW, "--drafter", "prompt_lookup(min_ngram=1)", "--seed", 3, *outputs
    )
    assert (code, err) == (0, "")
    assert all(
        word in out for word in ("pronk-tiny", "mine", "chat", "all tasks", "autoregressive")
    )
    assert max(map(len, out.splitlines())) <= 80
    document = json.loads(figures.read_text())
    assert document["format"] == "pronk-bench/2"
    assert not document["interrupted"]
    arguments = document["arguments"]
    asked = {
        "seed": 3,
        "max_tokens": 6,
        "model": ["pronk-tiny"],
        "drafter": ["prompt_lookup(min_ngram=1)"],
    }
    assert asked.items() <= arguments.items()
    assert arguments["prompts"] == [str(prompts)]
    (one,) = document["models"]
    named = [
        (f["task"], f["method"], f["prompts"], f["same"])
        for f in one["figures"]
        if f["method"] != "autoregressive"
    ]
    name = "prompt_lookup(min_ngram=1)"
    assert named[:3] == [("mine", name, 1, 1), ("chat", name, 2, 2), ("all", name, 3, 3)]
    assert [cost["rows"] for cost in one["pass_cost"]] == [1, 4]
    assert [(asked["model"], asked["max_batch"]) for asked in loaded] == [(None, 16)]

    assert "prompt\\_lookup(min\\_ngram=1)" in (tmp_path / "tables.md").read_text()

    loaded.clear()
    again = tmp_path / "again.json"
    assert run("--replay", trace, "--json", again) == (0, out, "")
    assert again.read_bytes() == figures.read_bytes()
    assert not loaded


def test_document_on_standard_output_is_alone_there(
    run: Run, loaded: object, prompts: Path
) -> None:
    code, out, err = run("--prompts", prompts, *FEW, "--json", "-")
    assert code == 0
    assert out.count("\n") == 1
    assert json.loads(out)["models"][0]["name"] == "pronk-tiny"
    assert "all tasks" in err


def test_quick_is_one_short_run_per_prompt(
    run: Run, loaded: object, prompts: Path, tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    code, _, err = run("--quick", "--prompts", prompts, "--max-tokens", 4, "--json", path)
    assert code == 0, err
    assert err.endswith(
        "rough figures of one run per prompt; pronk bench without --quick measures more\n"
    )
    arguments = json.loads(path.read_text())["arguments"]
    assert (arguments["limit"], arguments["temperature"], arguments["repeats"]) == (1, [0.0], 1)
    assert arguments["max_tokens"] == 4  # an option beside --quick counts


def test_batches_and_models_without_chat_template(
    run: Run, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Four conversations in batches of three, on two models, one after the other."""
    path = tmp_path / "talk.jsonl"
    path.write_text("".join(json.dumps({"turns": ["Hi"] * n}) + "\n" for n in (2, 1, 2, 1)))
    models = ("--model", checkpoint("gpt2"), "--model", checkpoint("llama"))
    code, out, _ = run(
        *models, "--prompts", path, *FEW, "--batch", 3, "--kv-memory", "8MiB", "--json", "-"
    )
    assert code == 0
    document = json.loads(out)
    assert [one["name"] for one in document["models"]] == [
        str(checkpoint("gpt2")),
        str(checkpoint("llama")),
    ]
    for one in document["models"]:
        guess = next(f for f in one["figures"] if (f["task"], f["method"]) == ("all", "auto"))
        assert (guess["prompts"], guess["asked"], guess["same"]) == (6, 6, 6)


def test_suites_and_limits(run: Run, loaded: object, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "x"}\n' * 2)
    suites = ("--data", tmp_path, "--suite", "one", "--suite", "two", "--suite", "one")
    code, out, _ = run(*suites, *FEW, "--limit", 3, "--json", "-", "--drafter", "autoregressive")
    assert code == 0
    found = {f["task"]: f["prompts"] for f in json.loads(out)["models"][0]["figures"]}
    assert found == {"one": 3, "two": 2, "all": 5, "sound": 5}


def test_all_prompts_too_long(run: Run, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("word " * 300 + "\n" + "word " * 400)
    model = ("--model", checkpoint("llama"), "--prompts", path, *FEW)
    code, out, err = run(*model, "--json", tmp_path / "x.json")
    assert code == 2
    assert err.count("\n") == 1
    assert "nothing was measured" in err
    assert "--fit" in err
    assert "skipped, 2 in all" in out
    document = json.loads((tmp_path / "x.json").read_text())
    assert [s["id"] for s in document["models"][0]["skipped"]] == ["long/long_1", "long/long_2"]
    assert (document["models"][0]["figures"], document["models"][0]["bandwidth"]) == ([], None)

    code, out, _ = run(*model, "--fit", "--json", "-")
    assert code == 0
    (one,) = json.loads(out)["models"]
    assert (one["skipped"], one["figures"][0]["prompts"]) == ([], 2)


def test_a_bar_on_a_terminal(
    run: Run, loaded: object, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    code, out, err = run("--prompts", prompts, *FEW, "--json", "-")
    assert code == 0
    assert json.loads(out)
    assert "6/6" in err  # three turns, two methods


def test_an_interrupt_gives_what_was_measured(
    run: Run, loaded: object, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_call(monkeypatch, 2 + 2 + 1)  # after the warm-up and the first prompt
    path = tmp_path / "x.json"
    trace = tmp_path / "x.jsonl"
    code, out, _ = run("--prompts", prompts, *FEW, "--json", path, "--trace", trace)
    assert code == 130
    assert "Interrupted" in out
    document = json.loads(path.read_text())
    assert document["interrupted"]
    assert {f["task"]: f["prompts"] for f in document["models"][0]["figures"]} == {
        "mine": 1,
        "all": 1,
        "sound": 1,
    }

    assert run("--replay", trace, "--json", "-")[1] == path.read_text()
    lines = trace.read_bytes().splitlines(keepends=True)
    trace.write_bytes(b"".join(lines[:-1]) + lines[-1][:9])  # killed while it wrote
    code, out, _ = run("--replay", trace, "--json", "-")
    assert code == 0
    assert json.loads(out) == document


def test_an_interrupt_before_anything_was_measured(
    run: Run, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pronk.llm, "LLM", interrupted)
    path = tmp_path / "x.json"
    code, out, _ = run("--prompts", prompts, *FEW, "--json", path)
    assert (code, out, path.exists()) == (130, "", False)


def assert_mistake(result: tuple[int, str, str], *expected: str) -> None:
    code, out, err = result
    assert (code, out) == (2, ""), err
    assert err.startswith("pronk: error: ")
    assert err.count("\n") == 1, err
    for text in expected:
        assert text in err


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--drafter", "magic"], ["'magic'", "prompt_lookup"]),
        (["--drafter", "prompt_lookup(speed=1)"], ["speed", "max_ngram"]),
        (["--suite", "humaneval"], ["'humaneval'", "--data"]),
        (["--data", ".", "--suite", "humaneval"], ["humaneval", "expected one of bad"]),
        (["--prompts", "bad.jsonl"], ["bad.jsonl, line 2", "'turns'"]),
        (["--prompts", "none.jsonl"], ["none.jsonl"]),
        (["--prompts", "empty.txt"], ["empty.txt", "at least one prompt"]),
        (["--peer", "vllm"], ["'vllm'", "openvino"]),
        (["--peer", "transformers", "--batch", "2"], ["--batch 1, found 2"]),
        (["--peer", "all", "--batch", "2"], ["--batch 1, found 2"]),
        (
            ["--peer", "openvino"],
            ["peer openvino: expected a GGUF file as --model, found a folder", "pronk-tiny"],
        ),
        (
            ["--peer", "transformers", "--model", "a.gguf"],
            ["peer transformers: expected a folder", "a GGUF file, a.gguf"],
        ),
        (
            ["--peer", "all", "--model", "a.gguf", "--model", "."],
            ["peer openvino: expected a GGUF file"],
        ),
        (["--peer-python", "openvino"], ["ENGINE=PATH", "'openvino'"]),
        (["--peer-python", "vllm=bad.jsonl"], ["peer-python", "measured (none), found vllm"]),
        (["--json", "none/x.json"], ["json: expected a file in a folder that exists", "none"]),
        (["--json", "."], ["json", "."]),
        (["--trace", "none/x.jsonl"], ["trace: expected a file", "none"]),
        (["--trace", "."], ["trace"]),
        (["--trace", "-"], ["trace", "-"]),
        (["--markdown", "none/x.md"], ["markdown", "none"]),
        (["--markdown", "-"], ["markdown", "-"]),
        (["--replay", "none.jsonl"], ["none.jsonl"]),
        (["--replay", "bad.jsonl"], ["bad.jsonl, line 1: expected a record"]),
        (["--replay", "empty.txt"], ["empty.txt: expected a trace"]),
        (["--replay", "empty.txt", "--json", "none/x.json"], ["json"]),
        (["--replay", "empty.txt", "--trace", "x.jsonl"], ["replay", "--trace"]),
        (["--replay", "empty.txt", "--max-tokens", "3"], ["replay", "--max-tokens"]),
        (["--replay", "empty.txt", "--drafter", "autoregressive"], ["replay", "--drafter"]),
        (["--replay", "empty.txt", "--threads", "2"], ["replay", "--threads"]),
        (["--json", "x.json", "--trace", "./x.json"], ["different files"]),
        (["--data", "."], ["data", "--suite"]),
        (
            ["--peer", "transformers", "--peer-python", f"openvino={sys.executable}"],
            ["peer-python", "transformers"],
        ),
        (["--limit", "0"], ["limit"]),
        (["--repeats", "0"], ["repeats"]),
        (["--temperature", "-1"], ["temperature"]),
        (["--batch", "2000"], ["batch"]),
        (["--max-tokens", "0"], ["max-tokens"]),
    ],
)
def test_mistakes_are_reported_before_a_model_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], expected: list[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it was loaded")

    monkeypatch.setattr(pronk.llm, "LLM", refuse)
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"prompt": "x"}\n{"turns": "x"}\n')
    Path("empty.txt").write_text("\n")
    assert_mistake(run(*args), *expected)


@pytest.mark.parametrize("exists", [False, True])
def test_an_unwritable_file_is_reported_before_measuring(
    run: Run, loaded: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    """The check precedes hours of measuring. ``os.access`` is replaced, because root may write
    anywhere.
    """
    path = tmp_path / "x.json"
    if exists:
        path.write_text("")
    refused = path if exists else tmp_path
    monkeypatch.setattr("os.access", lambda asked, mode: mode != os.W_OK or asked != refused)
    assert_mistake(
        run(*FEW, "--limit", 1, "--json", path),
        "json: expected a file that can be written",
        "x.json",
    )
    assert not loaded


def test_no_model(run: Run, tmp_path: Path) -> None:
    assert_mistake(run("--model", tmp_path / "none", *FEW), "none")


def test_help_needs_no_torch() -> None:
    code = """
import sys
from pronk.cli.main import main
try:
    main(["bench", "--help"])
except SystemExit as stop:
    assert not stop.code
sys.exit("torch" in sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert all(option in result.stdout for option in ("--drafter", "--peer", "--json", "--replay"))


def test_a_second_model_that_cannot_be_loaded_leaves_the_first_ones_figures(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    figures = tmp_path / "figures.json"
    models = ("--model", TINY, "--model", tmp_path / "empty")
    code, out, err = run(*models, "--limit", 1, *FEW, "--json", figures)
    assert code == 2
    assert "config.json" in err
    assert "all tasks" in out
    document = json.loads(figures.read_text())
    assert document["interrupted"]
    assert len(document["models"]) == 1
