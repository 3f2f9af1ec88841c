"""``benchmarks/repetition.py``: its figures of known texts."""

import importlib
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def repetition(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("repetition")


@pytest.mark.parametrize(
    ("tokens", "loops"),
    [
        ([*range(200)], False),
        ([1, 2, 3] * 8, True),
        ([1, 2, 3] * 7, False),  # 21 tokens
        ([*range(50), *[9] * 24], True),
        ([*range(60)] * 4, True),
        ([*range(60)] * 3, False),
        ([*range(70)] * 4, False),  # longer copies
        ([], False),
    ],
)
def test_loops(repetition: Any, tokens: list[int], loops: bool) -> None:
    assert repetition.is_loop(tokens) is loops


def test_sequences_of_four_tokens(repetition: Any) -> None:
    assert repetition.count_sequences([1, 2, 3, 4, 5])[2, 3, 4, 5] == 1
    assert repetition.share_of_repeats([1] * 7) == 0.75
    assert (
        repetition.share_of_repeats([1, 2, 3]) == 0.0
        or repetition.share_of_repeats([1, 2, 3]) == 1.0
    )
