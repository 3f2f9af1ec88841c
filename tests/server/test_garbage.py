"""Full garbage collections wait until no large body is in memory."""

from __future__ import annotations

import gc

import pytest

from pronk.base import SMALL_JOB
from pronk.server import garbage
from pronk.server.garbage import Bodies, calm_collections

LARGE = SMALL_JOB + 1
SMALL = SMALL_JOB


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the full collections so far, which are recorded in place of being made."""
    found: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: found.append("full"))
    return found


@pytest.fixture(autouse=True)
def always_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_DUE", 0)
    monkeypatch.setattr(garbage, "gc", gc)  # another server of this process may have replaced it


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        pytest.param(LARGE, SMALL, 1, id="a small body ends beside a large one"),
        pytest.param(LARGE, LARGE, 1, id="one of two large bodies ends"),
        pytest.param(SMALL, LARGE, 2, id="the only large body ends"),
    ],
)
def test_collections_wait_for_large_bodies(
    outer: int, inner: int, expected: int, collected: list[str]
) -> None:
    bodies = Bodies()
    with bodies.hold(outer), bodies.hold(inner):
        pass
    assert len(collected) == expected


def test_a_failed_request_holds_its_body_no_longer(collected: list[str]) -> None:
    bodies = Bodies()
    with pytest.raises(ValueError, match="failed"), bodies.hold(LARGE):
        raise ValueError("failed")
    assert len(collected) == 1


def test_garbage_that_is_not_due_stays(
    monkeypatch: pytest.MonkeyPatch, collected: list[str]
) -> None:
    monkeypatch.setattr(garbage, "_DUE", 10**9)
    with Bodies().hold(LARGE):
        pass
    assert collected == []


def test_python_collects_by_its_own_rule_afterwards(
    monkeypatch: pytest.MonkeyPatch, collected: list[str]
) -> None:
    monkeypatch.setattr(gc, "freeze", lambda: collected.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: collected.append("unfreeze"))
    before = gc.get_threshold()
    with calm_collections():
        assert gc.get_threshold()[:2] == before[:2]
        assert gc.get_threshold()[2] > 1000
        assert collected == ["full", "freeze"]
    assert gc.get_threshold() == before
    assert collected == ["full", "freeze", "unfreeze"]
