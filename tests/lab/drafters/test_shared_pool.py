"""Preemptions and prefix hits: the engine's tests with the lab's drafters."""

import pytest

from engine import test_shared_pool as shared_pool
from engine.test_shared_pool import Pools
from lab.drafters.cases import DRAFTERS, spec

CLOSE = ("lookahead", "kangaroo", "glide")
# Drafters with a KV cache of their own, alone and as parts of others.
ALONE = ("glide", "vanilla", "kangaroo", "multi_token")
WITH_POOLS = (*ALONE, "staged", "cape of kangaroo", "merged with trained")
OPTIONS = pytest.mark.parametrize(
    "options", [pytest.param("greedy", marks=pytest.mark.slow), "all"]
)


@OPTIONS
@pytest.mark.parametrize(
    "name",
    [name if name in CLOSE else pytest.param(name, marks=pytest.mark.slow) for name in DRAFTERS],
)
def test_preempted_requests(name: str, options: str) -> None:
    shared_pool.test_preempted_requests(spec(name), options)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> type[Pools]:
    Pools.install(monkeypatch)
    return Pools


@pytest.mark.few(3)
@pytest.mark.parametrize("name", WITH_POOLS)
def test_preempted_requests_hold_no_block_of_a_drafter(name: str, pools: type[Pools]) -> None:
    shared_pool.test_preempted_requests_hold_no_block_of_a_drafter(spec(name), pools)


@OPTIONS
@pytest.mark.parametrize(
    "name",
    [
        name if name in CLOSE and name != "glide" else pytest.param(name, marks=pytest.mark.slow)
        for name in DRAFTERS
    ],
)
def test_prefix_hits(name: str, options: str) -> None:
    shared_pool.test_prefix_hits(spec(name), options)
