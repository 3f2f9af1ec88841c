"""Check after every test that no proposer failed: only the log shows it, because the text stays the
same.
"""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_proposer_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail the test if the log has an error of a proposer; tests that cause such errors clear the
    log.
    """
    yield
    failures = [
        each.getMessage()
        for each in caplog.get_records("call")
        if each.name == "pronk.engine.speculator"
    ]
    assert not failures
