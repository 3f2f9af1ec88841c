"""Prefix hits in the KV caches of the lab's drafters: the engine's tests, and windows."""

import pytest

from engine import test_drafters_prefixes as prefixes
from engine.test_drafters_prefixes import FIRST, compare
from engine.test_shared_pool import Pools
from lab.drafters import exits, trained_glide
from lab.drafters.cases import spec
from lab.drafters.test_shared_pool import ALONE, WITH_POOLS
from lab.drafters.trained_kangaroo import calm_decoder
from pronk.base.arrays import BFLOAT16, FLOAT32, DType
from pronk.drafting import make_drafter
from tiny_models import tiny_decoder


@pytest.fixture(autouse=True)
def pools(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of cached tokens of each prefix hit in a drafter's KV cache."""
    Pools.install(monkeypatch)
    return Pools.found


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [pytest.param(FLOAT32, marks=pytest.mark.slow), BFLOAT16])
@pytest.mark.parametrize("name", WITH_POOLS)
def test_draft_tokens_are_equal(name: str, dtype: DType, pools: list[int]) -> None:
    prefixes.test_draft_tokens_are_equal(spec(name), dtype, pools)


def test_glide_of_several_layers(pools: list[int]) -> None:
    """Its rows attend to the target's KV cache, so only rows computed with the whole text may be
    cached.
    """
    made = make_drafter(f"glide(model={trained_glide.glide_folder(layers=2)!r})")
    got = compare(tiny_decoder(), made, pools)
    assert got.stats.accepted > 0
    assert max(pools) >= 112


@pytest.mark.parametrize("windows", [exits.WINDOWS, (None,) * 4], ids=["window", "all"])
def test_a_drafter_with_a_sliding_window_shares_no_prefixes(
    windows: tuple[int | None, ...], pools: list[int]
) -> None:
    decoder = calm_decoder(windows=windows)
    for prompt in (FIRST, FIRST[:5]):
        pools.clear()
        compare(decoder, make_drafter(exits.named(decoder)), pools, prompt, prefill_chunk=32)
        assert any(pools) == (windows[0] is None)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ALONE)
def test_only_committed_text_is_cached(name: str, pools: list[int]) -> None:
    prefixes.test_only_committed_text_is_cached(spec(name), pools)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", WITH_POOLS)
def test_nothing_is_shared_across_salts(name: str, pools: list[int]) -> None:
    prefixes.test_nothing_is_shared_across_salts(spec(name), pools)


@pytest.mark.parametrize("shares", [True, False])
def test_the_draft_model_computes_new_tokens_only(shares: bool) -> None:
    prefixes.test_the_draft_model_computes_new_tokens_only(spec("glide"), shares)


def test_prefix_hits_and_evictions_in_small_caches(pools: list[int]) -> None:
    prefixes.check_small_caches(
        pools, [spec(name) for name in ("kangaroo", "multi_token", "glide")]
    )
