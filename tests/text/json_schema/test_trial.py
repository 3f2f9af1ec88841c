"""Grammars that are compiled on trial in a child process: what its ends mean."""

import pytest

from pronk.base.errors import GuideError
from pronk.text.json_schema import trial

HARMLESS = 'start: "x"\n'
TOO_SLOW = "guide: expected one that is compiled within .* s, found one that takes longer"


@pytest.mark.parametrize(("grammar", "accepted"), [(HARMLESS, True), ("start: nowhere\n", False)])
def test_the_child_says_whether_llguidance_accepts_a_grammar(grammar: str, accepted: bool) -> None:
    assert trial.try_in_child(grammar) is accepted


def test_a_grammar_beyond_the_processor_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MAX_SECONDS", 0.0)
    with pytest.raises(GuideError, match=TOO_SLOW):
        trial.try_in_child(HARMLESS)


def test_a_killed_child_refuses_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit of the child alone decides, even if it is below the limit of processor
    time.
    """
    monkeypatch.setattr(trial, "TIMEOUT", 0.0)
    monkeypatch.setattr(trial, "MAX_SECONDS", 1000.0)
    with pytest.raises(GuideError, match=TOO_SLOW):
        trial.try_in_child(HARMLESS)


def test_a_crashed_child_refuses_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial.sys, "executable", "false")
    with pytest.raises(GuideError, match="found chains of rules or references that are too long"):
        trial.try_in_child(HARMLESS)
