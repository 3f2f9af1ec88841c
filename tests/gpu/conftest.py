"""Fixtures of the tests of the GPU runner."""

import pytest

from pronk.gpu import gemm
from pronk.gpu.launch import UPCASTS


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a tile have 16 rows in Triton's interpreter, which takes a third of the time.

    The order of sums is the same.
    """
    if UPCASTS:
        monkeypatch.setattr(gemm, "TILE_ROWS", 16)
