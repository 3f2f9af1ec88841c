"""``benchmarks/head_limits.py``: its figures of known texts, and its record of a random head."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from drafting.from_target.trained_eagle import write_random_head
from pronk import LLM, SamplingParams
from pronk.checkpoint.hub.clone_models import tiny_model

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("head_limits")


def test_figures_of_a_known_text(limits: Any) -> None:
    positions = [
        limits.Position((5, 6), (5, 9)),  # both draft tokens are right
        limits.Position((6, 1), (6, 2)),  # the first one is right
        limits.Position((9, 7), (9, 7)),  # the text's token is the second choice
        limits.Position((9, 9), (9, 4)),  # the text's token is not in the draft vocabulary
    ]
    text = limits.Text([3, 5, 6, 7, 8], [True, True, True, False, False], positions)
    cells = limits.summary([text], {3, 5, 6, 7, 9}, 2)
    assert cells[:2] == ["4", "25.0% (50.0%)"]
    assert cells[2:7] == ["0.500", "0.750", "0.750", "0.750", "0.750"]
    # the last position has no second token to compare with
    assert cells[7:10] == ["0.67", "0.50", "2.00"]
    assert cells[10] == "0.50: 1.00, 0.00"


def test_every_position_is_recorded(limits: Any, tmp_path: Path) -> None:
    folder = tiny_model()
    assert folder is not None
    llm = LLM(str(folder), drafter="autoregressive", budget="all", threads=1)
    head = write_random_head(llm, tmp_path)
    recorder = limits.Recorder(llm, "eagle3", head, 3)
    prompt = llm.tokenizer.encode("def fibonacci(n):")
    text = limits.record(llm, recorder, prompt, 12)
    assert text.ids == llm.generate(prompt, SamplingParams(max_tokens=12)).token_ids
    # the engine drafts neither the first nor the last token
    assert len(text.positions) == len(text.ids) - 2 > 5
    for place, position in enumerate(text.positions, 1):
        assert len(position.chain) == min(3, len(text.ids) - 1 - place)
        assert len(set(position.likeliest)) == limits.TOP
        assert position.chain[0] == position.likeliest[0]
        assert {*position.chain, *position.likeliest} <= recorder.draft_ids
