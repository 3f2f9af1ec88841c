"""Turns of tenants change no token of a drafter of the lab."""

import pytest

from engine import test_turns as turns
from lab.drafters.cases import spec


def test_turns_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    turns.test_turns_change_no_token(spec("kangaroo"), monkeypatch)
