"""States of short convolutions in the KV cache of torch: the engine's tests."""

from typing import Any

import pytest

from cache.test_states import (  # noqa: F401 - tests, which the fixtures below run with torch
    test_a_shared_block_is_copied_before_it_is_written,
    test_commit_moves_states,
    test_freed_blocks_are_poisoned,
    test_sizes,
)
from pronk.base.arrays import FLOAT32


@pytest.fixture
def options() -> dict[str, Any]:
    return {"dtype": FLOAT32, "packed": False}
