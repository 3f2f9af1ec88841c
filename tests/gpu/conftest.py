"""Fixtures of the tests of the GPU runner."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from gpu.quick_interpreter import quick_interpreter
from pronk.gpu import gemm
from pronk.gpu.launch import UPCASTS


@pytest.fixture(scope="package", autouse=True)
def _interpreter() -> Iterator[None]:
    with quick_interpreter() if UPCASTS else nullcontext():
        yield


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a tile have 16 rows in Triton's interpreter, which takes a third of the time.

    The order of sums is the same.
    """
    if UPCASTS:
        monkeypatch.setattr(gemm, "TILE_ROWS", 16)
