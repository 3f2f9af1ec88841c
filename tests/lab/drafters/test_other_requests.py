"""Other requests are aborted, fail, preempt and are preempted: the engine's tests with the lab's
drafters.
"""

import pytest

from engine import test_other_requests as other_requests
from lab.drafters.cases import DRAFTERS, spec

NAMES = [
    name if name == "kangaroo" else pytest.param(name, marks=pytest.mark.slow) for name in DRAFTERS
]


@pytest.mark.parametrize("options", [pytest.param("greedy", marks=pytest.mark.slow), "all"])
@pytest.mark.parametrize("name", NAMES)
def test_other_requests_that_are_aborted_or_fail(name: str, options: str) -> None:
    other_requests.test_other_requests_that_are_aborted_or_fail(spec(name), options)
