"""Mistakes on the command line: one line, expected and found, the nearest name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from command_line import Command, assert_mistake

# Arguments after which the message has to suggest a name.
MISSPELLED = [
    (["genrate", "x"], "generate"),
    (["generate", "x", "--temprature", 1], "--temperature"),
    (["generate", "x", "--drafter", "eagel3"], "eagle3"),
    (["generate", "x", "--drafter", "Prompt-Lookup"], "prompt_lookup"),
    (["generate", "x", "--drafter", "suffix(stor_tokens=0)"], "store_tokens"),
    (["generate", "x", "--weights", "int5"], "int4"),
    (["generate", "x", "--kv-dtype", "int9"], "int8"),
    (["generate", "x", "--dtype", "bfloat61"], "bfloat16"),
    (["generate", "x", "--kernels", "avx3"], "avx2"),
    (["generate", "x", "--rule", "couple"], "coupled"),
    (["generate", "x", "--parallel", "tre"], "tree"),
    (["generate", "x", "--budget", "al"], "all"),
    (["generate", "x", "--regex", "a", "--guide-mode", "forcd"], "forced"),
    (["pull", "smolm2"], "smollm2"),
    (["rm", "smolm2"], "smollm2"),
]
# Arguments with a value of the wrong kind, or out of range.
WRONG = [
    (["generate", "x", "--max-tokens", "12x"], "--max-tokens: expected an integer, found '12x'"),
    (["generate", "x", "--temperature", "hot"], "--temperature: expected a number, found 'hot'"),
    (["generate", "x", "--threads", 0], "--threads: expected an integer in 1..4096, found 0"),
    (
        ["generate", "x", "--top-p", 0],
        "--top-p: expected a number above 0 and at most 1, found 0.0",
    ),
    (["generate", "x", "--n", 5000], "--n: expected an integer in 1..1024, found 5000"),
    (
        ["generate", "x", "--stop-token-ids", "a"],
        "--stop-token-ids: expected an integer, found 'a'",
    ),
    (["generate", "x", "--seed"], "--seed: expected a value after it, found none"),
    (["generate", "x", "--echo=1"], "--echo: expected no value, found one"),
    (["generate", "x", "y"], "expected no further argument, found y"),
    (["generate", "x", "--logit-bias", 5], "logit_bias: expected ID=VALUE"),
    (["generate", "x", "--kv-memory", "12XB"], "kv_memory: expected a positive number of bytes"),
    (["generate", "x", "--model", "https://example.com/a/b"], "expected a model of huggingface.co"),
    (["pull", "https://huggingface.co/datasets/a/b"], "expected the address of a model"),
]


@pytest.mark.parametrize(("arguments", "near"), MISSPELLED, ids=lambda value: str(value)[:60])
def test_misspelled_names_get_the_nearest(
    command: Command, arguments: list[object], near: str
) -> None:
    known = arguments[0] == "generate" and "--model" not in arguments
    result = command(*arguments, *(["--model", "pronk-tiny"] if known else []))
    assert_mistake(result, "expected", "found", "did you mean")
    suggested = re.search(r"did you mean ([^?]*)\?", result[2])
    assert suggested is not None
    assert near in suggested[1].split(" or ")


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda value: str(value)[:60])
def test_wrong_values_are_named(
    command: Command,
    arguments: list[object],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command(*arguments)
    assert_mistake(result, message)
    assert "Input should" not in result[2]
    assert [*tmp_path.iterdir()] == []
