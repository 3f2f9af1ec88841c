"""Prompt cache on disk: the engine's tests with the lab's drafters."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from engine import test_prompt_cache as prompt_cache
from engine.cases import OPTIONS
from engine.test_prompt_cache import Server, disk_tokens, servers
from lab.drafters.cases import DRAFTERS, spec
from lab.drafters.test_shared_pool import WITH_POOLS
from pronk.base.arrays import BFLOAT16, FLOAT32, DType


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    yield from servers(tmp_path, monkeypatch)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "dtype", [pytest.param(FLOAT32, marks=pytest.mark.slow), BFLOAT16], ids=str
)
@pytest.mark.parametrize(
    "name",
    [
        name if name in WITH_POOLS else pytest.param(name, marks=pytest.mark.slow)
        for name in DRAFTERS
    ],
)
def test_drafters_propose_as_after_a_fresh_prompt(name: str, dtype: DType, server: Server) -> None:
    prompt_cache.test_drafters_propose_as_after_a_fresh_prompt(spec(name), dtype, server)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "dtype"), [*product(DRAFTERS, OPTIONS, (FLOAT32, BFLOAT16))], ids=str
)
def test_equality_matrix(name: str, options: str, dtype: DType, server: Server) -> None:
    prompt_cache.test_equality_matrix(spec(name), options, dtype, server)


def test_kept_features_belong_to_the_blocks(server: Server) -> None:
    """A self-draft model and heads of a layer do not need features of every token, so they may use
    all blocks.
    """
    names = ("autoregressive", "eagle3", "mtp", "multi_token", "kangaroo")
    found = disk_tokens(server, [spec(name) if name in DRAFTERS else name for name in names])
    assert {name for (name, again), tokens in found.items() if not again and tokens} <= {
        "multi_token",
        "kangaroo",
    }
    assert all(tokens == 160 for (_, again), tokens in found.items() if again)
