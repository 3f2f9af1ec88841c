"""How the time of a run is shared out. No test waits: clocks are told what time it is."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from pronk.errors import OptionError
from pronk.train.clock import Clock, within
from pronk.train.lm import LanguageModel
from pronk.train.loop import Trainer
from train.tiny import TINY


class Stopped(Clock):
    """A clock whose own part of the run takes ``own`` seconds, however long it takes."""

    def __init__(self, minutes: float | None, own: float = 0.0) -> None:
        super().__init__(minutes)
        self.own = own

    @property
    def seconds(self) -> float:
        return self._earlier + self.own


def told(minutes: float | None, seconds: float) -> Clock:
    """A clock of so many minutes after so many seconds."""
    return Stopped(minutes, seconds)


def trainer(folder: Path, clock: Clock, **changes: Any) -> Trainer[LanguageModel]:
    options = replace(TINY, **changes)
    return Trainer(folder, options, LanguageModel(folder, options), clock=clock)


def test_time_left() -> None:
    clock = told(2.0, 30.0)
    assert clock.limited
    assert (clock.left(), clock.left(0.25), clock.left(0.1)) == (90, 0, -18)
    free = Clock(None)
    assert not free.limited
    assert free.left(0.001) == inf


def test_time_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = Clock(1.0)
    now[0] = 112.0
    assert (clock.seconds, clock.left()) == (12.0, 48.0)
    clock.resume(7.0)
    assert clock.seconds == 19.0


def test_time_of_earlier_parts_is_kept(tmp_path: Path) -> None:
    Clock(1.0).restore(tmp_path)
    told(1.0, 40.0).save(tmp_path)
    clock = told(1.0, 2.0)
    clock.restore(tmp_path)
    assert clock.seconds == 42
    assert json.loads((tmp_path / "clock.json").read_text()).keys() == {"seconds"}


@pytest.mark.parametrize(("seconds", "done"), [(inf, 5), (0.0, 1), (-3.0, 1), (25.0, 3)])
def test_as_much_as_there_is_time_for(monkeypatch: pytest.MonkeyPatch, seconds: float, done: int) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    seen = []
    for item in within(seconds, range(5)):
        seen.append(item)
        now[0] += 10
    assert seen == list(range(done))


def test_training_has_what_the_text_left(new_run: Callable[[str], Path]) -> None:
    early = trainer(new_run("early"), told(10.0, 0.0), minutes=10.0)
    late = trainer(new_run("late"), told(10.0, 240.0), minutes=10.0)
    free = trainer(new_run("free"), told(None, 240.0))
    assert (early.schedule.minutes, late.schedule.minutes) == (9, 5)
    assert free.schedule.minutes is None


def test_no_time_for_training_is_an_error(new_run: Callable[[str], Path]) -> None:
    with pytest.raises(OptionError) as caught:
        trainer(new_run("run"), told(10.0, 600.0), minutes=10.0)
    expected = (
        "minutes: expected more than the 10.0 that the text took, found 10; the text is kept, and the same command"
    )
    assert str(caught.value).startswith(expected)


def test_a_resumed_run_has_the_clock_that_it_had(new_run: Callable[[str], Path]) -> None:
    folder = new_run("run")
    first = trainer(folder, told(10.0, 240.0), minutes=10.0)
    first.train(lambda _: None, lambda _: None, stop=lambda: first.step == 3)
    again = trainer(folder, Stopped(10.0), minutes=10.0)
    assert again.seconds == first.seconds > 0
    assert again.before == pytest.approx(240)
    assert again.schedule.minutes == pytest.approx(5)
    assert again.clock.seconds == 240 + first.seconds
    # What starting again takes counts, and the limit may be another.
    longer = trainer(folder, Stopped(20.0, own=30.0), minutes=20.0)
    assert longer.before == pytest.approx(270)
    assert longer.schedule.minutes == pytest.approx(18 - 4.5)


def test_no_step_begins_that_would_end_too_late(new_run: Callable[[str], Path]) -> None:
    run = trainer(new_run("run"), told(10.0, 0.0), minutes=10.0)
    limit = 60 * (run.schedule.minutes or 0)
    run.step, run.seconds, run.length_tracker = 1, limit - 5, 4.0
    assert not run.finished
    run.length_tracker = 6.0
    assert run.finished
    free = trainer(new_run("free"), Clock(None))
    free.step, free.seconds, free.length_tracker = 1, 1e9, 1e9
    assert not free.finished


def test_finished_runs_have_no_time_to_lose(new_run: Callable[[str], Path]) -> None:
    folder = new_run("run")
    trainer(folder, told(10.0, 0.0), minutes=10.0).train(lambda _: None, lambda _: None)
    assert trainer(folder, told(10.0, 700.0), minutes=10.0).finished


def test_last_evaluation_is_left_to_the_finished_model(new_run: Callable[[str], Path]) -> None:
    """With a limit; the evaluations on the way are made as ever."""
    for minutes, evaluated in ((None, [5, 10, 12]), (10.0, [5, 10])):
        run = trainer(new_run(f"{minutes}"), told(minutes, 0.0), minutes=minutes, evaluate_every=5)
        seen: list[int] = []
        run.train(lambda _: None, lambda news, seen=seen: seen.append(news.step))  # type: ignore[misc]
        assert (seen, run.step, run.history[-1]["step"]) == (evaluated, 12, 12)


def test_evaluation_reads_what_it_has_time_for(new_run: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    objective = trainer(new_run("run"), Clock(None), micro=64).objective
    batches: list[int] = []
    measure = objective.measure

    def counted(inputs: Any, targets: Any) -> list[float]:
        batches.append(len(inputs))
        return measure(inputs, targets)

    monkeypatch.setattr(objective, "measure", counted)
    whole = objective.evaluate(32)
    all_of_it, sets = sum(batches), len(whole)
    batches.clear()
    hasty = objective.evaluate(32, 0.0)
    assert len(batches) == sets < all_of_it
    assert hasty.keys() == whole.keys()
    assert all(0.5 * whole[name] < hasty[name] < 2 * whole[name] for name in whole)
