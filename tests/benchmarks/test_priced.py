"""``benchmarks/priced.py``: the clock that gives forward passes fixed durations."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from pronk import LLM, SamplingParams

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("priced")


def test_all_parts_of_a_model_read_the_clock(priced: Any) -> None:
    llm = LLM("pronk-tiny", drafter="autoregressive", threads=1)
    clock = priced.PricedClock()
    clock.attach(llm)
    engine = llm.engine
    for part in (engine.target, engine.runner, engine.output_processor):
        assert part.clock is clock
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    before = clock()
    with clock.installed():
        stats = llm.generate("def add(a, b):", params).stats
    assert len(stats.steps) == 9
    # The passes took their prices, by the clock that the statistics read.
    assert 0 < stats.target_seconds < stats.total_seconds < clock() - before
