"""Full garbage collections wait until no large body is in memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pronk.base import SMALL_JOB
from pronk.server import garbage
from pronk.server.garbage import Bodies, calm_collections

LARGE, SMALL = SMALL_JOB + 1, SMALL_JOB


@contextmanager
def counted_collections() -> Iterator[list[int]]:
    """Yield the generations of the collections so far."""
    generations: list[int] = []

    def count(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    gc.callbacks.append(count)
    try:
        yield generations
    finally:
        gc.callbacks.remove(count)


@pytest.fixture(autouse=True)
def always_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_DUE", 0)


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        pytest.param(LARGE, SMALL, [2], id="a small body ends beside a large one"),
        pytest.param(LARGE, LARGE, [2], id="one of two large bodies ends"),
        pytest.param(SMALL, LARGE, [2, 2], id="the only large body ends"),
    ],
)
def test_collections_wait_for_large_bodies(outer: int, inner: int, expected: list[int]) -> None:
    bodies = Bodies()
    with counted_collections() as generations:
        gc.disable()
        try:
            with bodies.hold(outer), bodies.hold(inner):
                pass
        finally:
            gc.enable()
    assert generations == expected


def test_a_failed_request_holds_its_body_no_longer() -> None:
    bodies = Bodies()
    with pytest.raises(ValueError, match="failed"), bodies.hold(LARGE):
        raise ValueError("failed")
    with counted_collections() as generations, bodies.hold(SMALL):
        pass
    assert 2 in generations


def test_garbage_that_is_not_due_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_DUE", 10**9)
    with counted_collections() as generations, Bodies().hold(LARGE):
        pass
    assert 2 not in generations


def test_python_collects_by_its_own_rule_afterwards() -> None:
    before = gc.get_threshold()
    frozen = gc.get_freeze_count()
    with calm_collections():
        assert gc.get_threshold()[:2] == before[:2]
        assert gc.get_threshold()[2] > 1000
        assert gc.get_freeze_count() > frozen
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
