"""Figures against NumPy and against cases computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from pronk.bench.document import Range
from pronk.bench.load.figures import make_figures, summarize, sustained_rates
from pronk.bench.load.levels import Level
from pronk.bench.load.records import Call, Targets, Window

ONE = Level("closed", 1)


def call(ttft: float = 1.0, last: float = 3.0, tokens: int = 5, **more: object) -> Call:
    return Call("t/1", 0.0, 0.0, ttft, last, last + 0.5, tokens=tokens, **more)  # type: ignore[arg-type]


def window(*calls: Call, seconds: float = 10.0, turn: int = 0, server: str = "a", level: Level = ONE) -> Window:
    return Window(server, level, turn, seconds, 0.5, list(calls))


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(7).lognormal(size=101).tolist()
    found = summarize(values)
    assert found is not None
    assert (found.count, found.mean) == (101, pytest.approx(np.mean(values)))
    expected = [np.percentile(values, p) for p in (50, 90, 95, 99)]
    assert [found.p50, found.p90, found.p95, found.p99] == pytest.approx(expected)


def test_percentiles_by_hand() -> None:
    """Of 0, 1, … 10: the q-th percentile of eleven values is at place q / 10."""
    found = summarize(range(11))
    assert found is not None
    assert (found.mean, found.p50, found.p90, found.p95, found.p99) == pytest.approx((5, 5, 9, 9.5, 9.9))
    assert summarize([]) is None


def test_throughput_is_the_median_of_the_rounds() -> None:
    """Rounds of 10, 5 and 20 s with 2, 3 and 1 answers of 5 tokens: 1, 3 and 0.25 tokens a second."""
    rounds = [
        window(call(), call(), seconds=10),
        window(call(), call(), call(), seconds=5, turn=1),
        window(call(), call(error="HTTP 503", tokens=0), seconds=20, turn=2),
    ]
    base = [window(call(tokens=20), seconds=10, turn=turn) for turn in (0, 1)]  # 2 a second; no third round
    found = make_figures(rounds, base, Targets())
    assert found.tokens_per_second == Range(1.0, 1.375)
    assert found.requests_per_second == Range(0.2, pytest.approx(0.275))
    assert found.ratio == Range(1.0, 0.5)
    assert (found.rounds, found.sent, found.answered, found.seconds, found.tokens) == (3, 7, 6, 35.0, 30)
    assert found.busy == pytest.approx(1.5 / 35)
    assert (found.good, found.goodput, found.prompt_tokens_per_second) == (None, None, None)


def test_latencies_are_of_what_was_answered() -> None:
    calls = [call(1, 3, gaps=(0.5, 1.5)), call(3, 5, 1), call(9, 9, error="timed out", gaps=(7.0,))]
    found = make_figures([window(*calls)], [], Targets())
    assert found.ttft is not None
    assert found.tpot is not None
    assert found.gap is not None
    assert found.e2e is not None
    assert (found.ttft.count, found.ttft.mean, found.e2e.mean) == (2, 2.0, 4.5)
    assert (found.tpot.count, found.tpot.mean) == (1, 0.5)  # (3 - 1) / 4; a single token has no time after it
    assert (found.gap.count, found.gap.mean) == (2, 1.0)
    assert found.ratio is None


def test_goodput_asks_for_all_targets_at_once() -> None:
    calls = [
        call(1.0, 3.0),  # on the edges: TTFT 1, TPOT 0.5, E2E 3.5
        call(1.1, 3.0),  # the first text too late
        call(0.5, 3.0),  # too slow after it
        call(0.1, 3.2, 100),  # the end too late
        call(0.1, 0.1, 1),  # a single token has no time after it
        call(0.1, 0.2, error="HTTP 503"),
    ]
    found = make_figures([window(*calls, seconds=4)], [], Targets(1.0, 0.5, 3.5))
    assert found.good == pytest.approx(2 / 6)
    assert found.goodput == Range(0.5, 0.0)
    assert str(Targets(1.0, None, 3.5)) == "TTFT ≤ 1000 ms, E2E ≤ 3500 ms"


def test_counts_that_only_some_servers_tell() -> None:
    told = call(tokens=6, steps=2, drafted=8, accepted=4, prompt_tokens=10, cached_tokens=3)
    found = make_figures([window(told, told)], [], Targets())
    assert (found.S, found.steps, found.drafted, found.accepted) == (3.0, 4, 16, 8)
    assert (found.prompt_tokens, found.cached_tokens) == (20, 6)
    assert found.prompt_tokens_per_second == Range(2.0, 0.0)
    silent = make_figures([window(told, call(counted="chunks"))], [], Targets())
    assert (silent.S, silent.steps, silent.prompt_tokens) == (None, None, None)
    assert silent.counted == {"usage": 1, "chunks": 1}


def test_problems_by_what_went_wrong() -> None:
    failed = [call(error="HTTP 503", reason=f"busy {i}") for i in range(3)] + [call(error="timed out")]
    found = make_figures([window(*failed)], [], Targets(ttft=1))
    assert [(p.label, p.count, p.reason) for p in found.problems] == [("HTTP 503", 3, "busy 0"), ("timed out", 1, "")]
    assert (found.answered, found.ttft, found.good, found.tokens) == (0, None, 0.0, 0)
    assert json.loads(json.dumps(found.to_dict()))["calls"][0]["reason"] == "busy 0"


def test_lateness_of_the_client() -> None:
    calls = [replace(call(), late=i / 100) for i in range(101)]
    assert make_figures([window(*calls)], [], Targets()).late == pytest.approx(0.99)


def test_the_highest_rate_at_which_nine_of_ten_keep_the_targets() -> None:
    def at(rate: float, good: int, server: str, loop: str = "open") -> Window:
        calls = [call(1.0 if i < good else 9.0) for i in range(10)]
        return window(*calls, server=server, level=Level(loop, rate))  # type: ignore[arg-type]

    windows = [
        *(at(1, 10, "a"), at(2, 9, "a"), at(4, 8, "a"), at(8, 10, "a", "closed")),
        *(at(1, 8, "b"), at(1, 10, "c", "closed")),
    ]
    wanted = [make_figures([each], [], Targets(ttft=2)) for each in windows]
    assert sustained_rates(wanted) == {"a": 2.0, "b": None}
    assert sustained_rates([make_figures([each], [], Targets()) for each in windows]) == {}
