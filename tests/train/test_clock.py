"""Time limits of a run and their division; the tests use clocks with given times, so they do not
wait.
"""

import json
import time
from math import inf
from pathlib import Path
from typing import Any

import pytest

from pronk.base.errors import OptionError
from pronk.train.clock import Clock, limit_time
from train.kinds import Start, train


class Stopped(Clock):
    """A clock that always shows ``own`` seconds since the start or the last resumption of the
    run.
    """

    def __init__(self, minutes: float | None, own: float = 0.0) -> None:
        super().__init__(minutes)
        self.own = own

    @property
    def seconds(self) -> float:
        return self.earlier + self.own


def test_time_left() -> None:
    clock = Stopped(2.0, 30.0)
    assert clock.has_limit
    assert (clock.seconds_left(), clock.seconds_left(0.25), clock.seconds_left(0.1)) == (90, 0, -18)
    free = Clock(None)
    assert not free.has_limit
    assert free.seconds_left(0.001) == inf


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    moment = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: moment[0])
    return moment


def test_time_goes_on(now: list[float]) -> None:
    clock = Clock(1.0)
    now[0] = 112.0
    assert (clock.seconds, clock.seconds_left()) == (12.0, 48.0)
    clock.earlier = 7.0
    assert clock.seconds == 19.0


def test_time_of_earlier_parts_is_kept(tmp_path: Path) -> None:
    Clock(1.0).restore(tmp_path)
    Stopped(1.0, 40.0).save(tmp_path)
    clock = Stopped(1.0, 2.0)
    clock.restore(tmp_path)
    assert clock.seconds == 42
    assert json.loads((tmp_path / "clock.json").read_text()).keys() == {"seconds"}


@pytest.mark.parametrize(("seconds", "done"), [(inf, 5), (0.0, 1), (-3.0, 1), (25.0, 3)])
def test_as_much_as_there_is_time_for(now: list[float], seconds: float, done: int) -> None:
    seen = []
    for item in limit_time(seconds, range(5)):
        seen.append(item)
        now[0] += 10
    assert seen == list(range(done))


def test_training_has_the_time_that_the_text_left(start: Start) -> None:
    for name, used, minutes in (("early", 0.0, 9), ("late", 240.0, 5)):
        assert (
            start("lm", name, clock=Stopped(10.0, used), minutes=10.0).schedule.minutes == minutes
        )
    assert start("lm", "free", clock=Stopped(None, 240.0)).schedule.minutes is None
    message = (
        "minutes: expected more than the 10 that the text took, found 10; the text is kept, and "
        "the same command"
    )
    with pytest.raises(OptionError, match=message):
        start("lm", clock=Stopped(10.0, 600.0), minutes=10.0)


def test_a_resumed_run_has_its_earlier_clock(start: Start) -> None:
    first = train(start("lm", clock=Stopped(10.0, 240.0), minutes=10.0), stop_at=3)
    again = start("lm", clock=Stopped(10.0), minutes=10.0)
    assert again.seconds == first.seconds > 0
    assert again.seconds_before == pytest.approx(240)
    assert again.schedule.minutes == pytest.approx(5)
    assert again.clock.seconds == 240 + first.seconds
    # The restart counts, and the limit may change.
    longer = start("lm", clock=Stopped(20.0, 30.0), minutes=20.0)
    assert longer.seconds_before == pytest.approx(270)
    assert longer.schedule.minutes == pytest.approx(18 - 4.5)


def test_no_step_begins_that_would_end_too_late(start: Start) -> None:
    run = start("lm", clock=Stopped(10.0), minutes=10.0)
    limit = 60 * (run.schedule.minutes or 0)
    run.step = 1
    run.seconds = limit - 5
    run.step_seconds = 4.0
    assert not run.is_finished
    run.step_seconds = 6.0
    assert run.is_finished
    free = start("lm", "free", clock=Clock(None))
    free.step = 1
    free.seconds = 1e9
    free.step_seconds = 1e9
    assert not free.is_finished


def test_finished_runs_need_no_time(start: Start) -> None:
    train(start("lm", clock=Stopped(10.0), minutes=10.0))
    assert start("lm", clock=Stopped(10.0, 700.0), minutes=10.0).is_finished


@pytest.mark.parametrize(("minutes", "evaluated"), [(None, [5, 10, 12]), (10.0, [5, 10])])
def test_a_limit_leaves_the_last_evaluation_to_the_finished_model(
    minutes: float | None, evaluated: list[int], start: Start
) -> None:
    run = start("lm", clock=Stopped(minutes), minutes=minutes, evaluate_every=5)
    seen: list[int] = []
    run.train(lambda _: None, lambda news: seen.append(news.step))
    assert (seen, run.step, run.history[-1]["step"]) == (evaluated, 12, 12)


def test_evaluation_reads_what_it_has_time_for(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = start("lm", micro=64).objective
    batches: list[int] = []
    measure = objective.measure

    def counted(inputs: Any, targets: Any) -> Any:
        batches.append(len(inputs))
        return measure(inputs, targets)

    monkeypatch.setattr(objective, "measure", counted)
    whole = objective.evaluate(32)
    all_of_it = sum(batches)
    sets = len(whole)
    batches.clear()
    hasty = objective.evaluate(32, 0.0)
    assert len(batches) == sets < all_of_it
    assert hasty.keys() == whole.keys()
    assert all(0.5 * whole[name] < hasty[name] < 2 * whole[name] for name in whole)
