"""Fixtures: workers that start in milliseconds."""

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from parallel.forked_workers import ForkedProcess
from pronk.parallel import processes


@pytest.fixture(scope="module")
def forked_workers() -> Iterator[None]:
    """Start the workers of models as forks of one process; see :mod:`parallel.forked_workers`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            processes, "subprocess", SimpleNamespace(Popen=ForkedProcess, PIPE=subprocess.PIPE)
        )
        yield
