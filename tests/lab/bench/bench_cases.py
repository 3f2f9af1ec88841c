"""Shared helpers of the benchmark's tests: hand-made records, fake methods, a model loaded once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from pronk.engine.stats import StepStats
from pronk.lab.bench.document import Document, Figures
from pronk.lab.bench.figures import summarize
from pronk.lab.bench.methods import Item, Method
from pronk.lab.bench.records import PLAIN, Model, Record, Sample, Start
from pronk.llm import LLM

DRAFTER = "prompt_lookup"


@cache
def pronk_tiny() -> LLM:
    """Load the bundled model once."""
    return LLM(kv_memory="128MiB", budget="all")


def start(**more: Any) -> Start:
    values = {
        "arguments": {"seed": 7},
        "versions": {"pronk": "0.1.0"},
        "hardware": {"threads": 1, "processor": "cpu"},
    }
    return Start("2026-11-20T10:00:00+00:00", **(values | more))


def model(*methods: str, **more: Any) -> Model:
    """Return a model of 500 parameters in bfloat16."""
    values: dict[str, Any] = {"parameters": 500, "pass_bytes": 1000, "kv_bytes_per_token": 10}
    return Model(
        "m", dtype="bfloat16", context=100, methods=methods or (PLAIN, DRAFTER), **(values | more)
    )


def sample(
    method: str,
    id: str = "a",  # noqa: A002
    repeat: int = 0,
    tokens: Sequence[int] = (1, 2, 3),
    **more: Any,
) -> Sample:
    """Return a record of one prompt by one method; by default three tokens in one second, task
    ``code``.
    """
    values: dict[str, Any] = {
        "task": "code",
        "engine": "pronk",
        "temperature": 0.0,
        "seed": 1,
        "seconds": 1.0,
        "total_seconds": 1.0,
        "prompt_tokens": 10,
    }
    return Sample(id=id, method=method, repeat=repeat, tokens=tuple(tokens), **(values | more))


def steps(*rows: Sequence[float]) -> tuple[StepStats, ...]:
    """Return steps; a row is ``(rows, drafted, depth, accepted, tokens, draft_clock, target_clock,
    clock)``.
    """
    return tuple(StepStats(*(int(count) for count in row[:5]), *row[5:]) for row in rows)


def document(*records: Record, of: Model | None = None) -> Document:
    return summarize([start(), of or model(), *records])


def figures(found: Document, method: str, task: str = "all", temperature: float = 0.0) -> Figures:
    """Return the only figures of a document for a method, a task and a temperature."""
    (one,) = [
        each
        for each in found.models[0].figures
        if (each.method, each.task, each.temperature) == (method, task, temperature)
    ]
    return one


class Fake(Method):
    """A method that outputs ``answer(item)`` without decoding, and appends ``(name, item)`` to
    ``log``.
    """

    def __init__(
        self,
        name: str,
        answer: Callable[[Item], Sequence[int]],
        log: list[tuple[str, Item]],
        engine: str = "pronk",
    ) -> None:
        self.name = name
        self.engine = engine
        self._answer = answer
        self._log = log

    def run(self, items: Sequence[Item]) -> list[Sample]:
        self._log += [(self.name, item) for item in items]
        return [
            replace(item.sample, seconds=1.0, tokens=tuple(self._answer(item))) for item in items
        ]


class Meter:
    """Replaces the measurement of memory bandwidth by a constant, in bytes per second."""

    nbytes = 0

    def measure(self) -> float:
        return 1e9
