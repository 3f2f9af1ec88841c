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


def test_prices_of_faster_products(priced: Any) -> None:
    """Up to four rows, reading 4 ms of weights takes longer than products of 1 ms a row."""
    seconds = tuple(0.5 + max(4.0, 1.0 * rows) for rows in priced.ROWS)
    here = priced.Prices(seconds, per_token=0.01)
    assert here.with_products(1.0).seconds == pytest.approx(here.seconds)
    other = here.with_products(4.0)
    expected = tuple(0.5 + max(4.0, 0.25 * rows) for rows in priced.ROWS)
    for found, want in zip(other.seconds, expected, strict=True):
        assert found == pytest.approx(want, abs=0.51)  # the rest of one row counts as reading
    assert other.at(16, priced.CONTEXTS[0]) < here.at(8, priced.CONTEXTS[0])
    assert here.with_products(0.5).at(4, 100) > 1.5 * here.at(4, 100)
