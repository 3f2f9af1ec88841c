"""Removed commands and options end with exit code 2 and a line that names the replacement."""

import re
from collections.abc import Callable

import pytest

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("words", "replacement"),
    [
        (["advise", "--model", "x", "--prompts", "y"], "pronk explain"),
        (["advise", "--help"], "pronk bench"),
        (["inflate", "big", "--layers", 24], "benchmarks/inflate.py"),
        (["bench", "--server", "http://localhost:8000", "--rate", 1], "GuideLLM, as in docs/benchmarks.md"),
        (["bench", "--rate", 1, "--goodput", "ttft=2000"], "guidellm run"),
        (["bench", "--peer", "all", "--peer-source", "x"], "--model model.gguf --peer all"),
        (["--traceback", "bench", "--limit", 1, "--server=x=http://localhost:8000"], "guidellm run"),
    ],
)
def test_replacement(command: Run, words: list[object], replacement: str) -> None:
    code, out, err = command(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.match(r"pronk: error: pronk (advise|inflate|bench --(server|rate|peer-source)): removed; use ", err)
    assert replacement in err


def test_help_does_not_show_them(command: Run) -> None:
    assert not {"advise", "inflate"} & set(command("--help")[1].split())
    assert "--server" not in command("bench", "--help")[1]


@pytest.mark.parametrize("words", [["generate", "advise", "--foo"], ["bench", "--foo", "--server-x"]])
def test_other_words_are_not_removed(command: Run, words: list[str]) -> None:
    assert "No such option: --foo" in command(*words)[2]
