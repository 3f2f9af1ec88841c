"""``pronk advise``: tables and sentences, numbers for programs; an interrupt keeps what is known."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pronk import CacheFullError
from pronk.advise import advice
from pronk.testing import tiny_checkpoint

AT_HAND = {"auto", "suffix(store_tokens=0)", "prompt_lookup", "recycling", "lookahead"}


@pytest.fixture
def run(command: Any, tmp_path: Path) -> Any:
    model, prompts = tiny_checkpoint(tmp_path / "model"), tmp_path / "mine.jsonl"
    texts = ["the cat and the dog and the cat", "def add(a, b):", "x " * 2000]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    options = ("--model", model, "--prompts", prompts, "--max-tokens", 24, "--minutes", 0.01)
    return partial(command, "advise", *options)


def test_tables_and_sentences(run: Any) -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    assert all(len(line) <= 80 for line in out.splitlines())
    for word in ("Times as fast as plain decoding", "kangaroo", "Drafter: ", "Memory: ", "pronk serve --model"):
        assert word in out


def test_numbers(run: Any) -> None:
    code, out, _ = run("--json", "--temperature", 0.8, "--minutes", 0.1, "--drafter", "suffix(max_match=3)")
    assert code == 0
    found = json.loads(out)
    facts = found["facts"]
    assert {each["drafter"] for each in facts["raced"]} == AT_HAND | {"suffix(max_match=3)"}
    assert {each["kind"] for each in facts["trainable"]} == {"draft", "kangaroo", "glide", "medusa", "heads"}
    assert facts["texts"] == 3
    assert not facts["interrupted"]
    for each in facts["raced"]:
        assert 0 < each["times"]["low"] <= each["times"]["middle"] <= each["times"]["high"]
    passes = facts["passes"]
    assert list(passes["seconds"]) == ["1", "2", "4", "8", "16", "32"]
    assert min(passes[name] for name in ("floor", "teach", "learn")) > 0
    assert "1" in passes["threads"]
    assert {each["weights"] for each in facts["rounded"]} | set(facts["unrounded"]) == {"int8", "int4"}
    assert found["command"].startswith("pronk serve --model ")
    assert len(found["advice"]) >= 4


def test_pronk_tiny_is_tried_with_all_its_drafters(command: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "mine.txt"
    prompts.write_text("def add(a, b):\n")
    code, out, _ = command("advise", "--prompts", prompts, "--max-tokens", 16, "--minutes", 0.01, "--json")
    assert code == 0
    facts = json.loads(out)["facts"]
    trained = {"draft_model", "cape(draft_model)", "kangaroo", "glide", "medusa", "multi_token"}
    assert {each["drafter"] for each in facts["raced"]} == AT_HAND | trained
    assert facts["trainable"] == []
    assert facts["texts"] == 1
    assert all(each["times"]["low"] < each["times"]["high"] for each in facts["raced"])  # of one prompt, by its turns


def test_an_interrupt_keeps_what_is_known(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(advice, "measure_passes", interrupted)
    code, out, err = run()
    assert code == 130
    assert "Drafter: " in out
    assert "Threads: " not in out
    assert "it ended early; that is what was known by then" in err
    monkeypatch.setattr(advice.Race, "run", interrupted)
    code, out, _ = run()
    assert (code, out) == (130, "")


def test_what_fails_late_loses_nothing(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        msg = "no room"
        raise CacheFullError(msg)

    monkeypatch.setattr(advice, "measure_passes", fails)
    code, out, err = run()
    assert code == 2
    assert "Drafter: " in out
    assert "no room" in err


def test_texts_that_fill_the_context_are_judged(command: Any, tmp_path: Path) -> None:
    model, prompts = tiny_checkpoint(tmp_path / "model", context=64), tmp_path / "mine.txt"
    prompts.write_text("abcdefghijklmnopqrstuvwxyz" * 9 + "\n")
    code, out, err = command(
        "advise", "--model", model, "--prompts", prompts, "--max-tokens", 16, "--minutes", 0.2, "--json"
    )
    assert (code, err) == (0, "")
    facts = json.loads(out)["facts"]
    assert [each["weights"] for each in facts["rounded"]] == ["int8", "int4"], facts["unrounded"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--drafter", "nobody"), "unknown drafter 'nobody'"),
        (("--prompts", "missing.jsonl"), "prompts: expected a file at missing.jsonl, found none"),
        (("--minutes", "0"), "minutes: expected a finite number above 0"),
        (("--max-tokens", "600"), "prompts: expected one that leaves room for a text in 512 tokens"),
        (("--drafter", "draft_model(model='gone')"), "gone"),
    ],
)
def test_mistakes(run: Any, options: tuple[str, ...], message: str) -> None:
    code, out, err = run(*options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
