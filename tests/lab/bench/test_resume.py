"""A benchmark continued from its trace has the figures of one that was not interrupted."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from lab.bench.bench_cases import pronk_tiny
from lab.bench.test_run import OPTIONS, TASKS, measured, plan, quick  # noqa: F401 - a fixture
from pronk.base.errors import OptionError
from pronk.lab.bench import run
from pronk.lab.bench.figures import summarize
from pronk.lab.bench.prompts import Prompt
from pronk.lab.bench.records import (
    End,
    Finished,
    Model,
    Sample,
    Start,
    Trace,
    read_trace,
    write_trace,
)
from pronk.lab.bench.run import remaining, resumable_records

ARGUMENTS = {"seed": 7, "device": "cpu"}


def outputs(trace: Trace) -> list[tuple[object, ...]]:
    return [
        (s.task, s.id, s.method, s.temperature, s.repeat, s.tokens)
        for s in trace.records
        if isinstance(s, Sample)
    ]


@cache
def whole_run() -> Trace:
    return measured(plan("prompt_lookup"))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "cut", [1, 9, 25, *(pytest.param(cut, marks=pytest.mark.slow) for cut in (4, 15, 40))]
)
def test_a_continued_benchmark_has_the_same_outputs(cut: int, tmp_path: Path) -> None:
    whole = whole_run()
    path = tmp_path / "trace.jsonl"
    write_trace(path, whole.records[:cut])
    trace = Trace(resumable_records(read_trace(path), ARGUMENTS, path))
    run.run({"tiny": lambda _: pronk_tiny()}, plan("prompt_lookup"), trace, ARGUMENTS)
    assert sorted(outputs(trace), key=str) == sorted(outputs(whole), key=str)
    models = summarize(trace.records).models
    assert [model.name for model in models] == ["tiny"]
    figures = {
        (f.task, f.method, f.temperature): (f.S, f.tokens, f.prompts, f.same)
        for f in models[0].figures
    }
    expected = {(f.task, f.method, f.temperature): (f.S, f.tokens, f.prompts, f.same)
                for f in summarize(whole.records).models[0].figures}  # fmt: skip
    assert figures == expected


def test_a_finished_benchmark_loads_no_model() -> None:
    whole = measured(plan())
    trace = Trace(resumable_records(whole.records, ARGUMENTS, Path("t")))
    run.run({"tiny": lambda _: pytest.fail("loaded")}, plan(), trace, ARGUMENTS)
    assert outputs(trace) == outputs(whole)


def test_other_options_are_refused() -> None:
    trace = measured(plan())
    resumable_records(trace.records, {**ARGUMENTS, "minutes": 5, "resume": True}, Path("t"))
    with pytest.raises(
        OptionError,
        match=r"^resume: expected the options of t, found others: limit, seed; use another",
    ):
        resumable_records(trace.records, {"seed": 8, "limit": 2, "device": "cpu"}, Path("t"))


def test_another_machine_is_refused() -> None:
    records = measured(plan()).records
    start = records[0]
    assert isinstance(start, Start)
    for other in (replace(start, versions={"pronk": "0"}), replace(start, hardware={})):
        with pytest.raises(
            OptionError, match=r"^resume: expected the machine and the versions of t, found others"
        ):
            resumable_records([other, *records[1:]], ARGUMENTS, Path("t"))


def test_remaining_prompts() -> None:
    prompts = [Prompt(f"p{i}", "code", text="x") for i in range(3)]
    model = next(record for record in measured(plan()).records if isinstance(record, Model))
    records = [replace(model, name="a"), Finished("code", "p0", ("p0",)), replace(model, name="b"),
               Finished("code", "p1", ("p1",)), End(interrupted=True)]  # fmt: skip
    assert remaining({"code": prompts}, records, "a") == {"code": prompts[1:]}
    assert remaining({"code": prompts}, records, "b") == {"code": [prompts[0], prompts[2]]}
    assert remaining({"code": prompts}, records, "c") == {"code": prompts}


def test_a_time_limit_ends_after_a_prompt_of_every_task() -> None:
    tasks = {
        name: [replace(p, id=f"{p.id} {i}") for i in range(3) for p in prompts]
        for name, prompts in TASKS.items()
    }
    limited = measured(plan(tasks=tasks, minutes=0.0))  # the first prompt is always measured
    assert [record.task for record in limited.records if isinstance(record, Finished)] == ["code"]
    whole = measured(plan(tasks=tasks))
    order = [record.task for record in whole.records if isinstance(record, Finished)]
    assert order == ["code", "chat"] * 3
    assert OPTIONS.minutes is None
