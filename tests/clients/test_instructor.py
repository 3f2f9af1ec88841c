"""instructor at its newest version, in the modes that force the form of the answer."""

import pytest

from clients.conftest import Install
from server.serving import KEY

pytestmark = pytest.mark.slow


def test_instructor(installed: Install, url: str) -> None:
    found = installed("instructor").ask("instructor_client.py", url, KEY)
    partial = found.pop("partial")
    for mode, (city, degrees) in found.items():
        assert city in ("Paris", "Oslo"), mode
        assert -50 <= degrees <= 50, mode
    assert len(partial) > 1
    assert [*partial[-1].values()] == found["JSON_SCHEMA"]
