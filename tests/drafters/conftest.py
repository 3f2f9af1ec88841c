"""A guesser that raises costs its request the guesses and nothing else: here no text would show it, so the log does."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_guesser_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """But for those that a test has cleared from the log."""
    yield
    failures = [each.getMessage() for each in caplog.get_records("call") if each.name == "pronk.speculation.speculator"]
    assert not failures
