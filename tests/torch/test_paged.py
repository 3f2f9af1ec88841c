"""The KV cache of torch: the engine's tests with its layout, and the rows of the kernels."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from cache.test_paged import (  # noqa: F401 - tests, which the fixtures below run with torch
    CONFIG,
    HIDDEN,
    Kind,
    test_a_full_shared_block_is_not_copied,
    test_a_shared_block_is_copied_before_it_is_written,
    test_blocks_of_the_pool,
    test_commit_after_a_resize_or_with_more_kept_outputs,
    test_commit_moves_the_accepted_rows,
    test_commit_of_many_rows,
    test_freed_blocks_are_poisoned_and_no_others,
    test_moves_accept_arrays_that_are_not_contiguous,
    test_random_operations,
    test_shapes_and_sizes_of_pools,
)
from pronk.base.arrays import BFLOAT16, FLOAT32, INT8, DType
from pronk.base.errors import OptionError
from pronk.cache.blocks import BlockTable
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.model_runner import ModelRunner
from pronk.sampling.tree import TokenTree
from pronk.torch.cache import TorchCache
from tiny_models import make_cache, read_kv, text_logits, tiny_decoder

KINDS = {"torch": Kind(False, FLOAT32), "torch, bfloat16": Kind(False, BFLOAT16)}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def packed() -> bool:
    return False


@pytest.mark.parametrize("kv_dtype", [None, INT8], ids=["plain", "8 bits"])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_kernels_and_torch_write_the_same_rows(dtype: DType, kv_dtype: DType | None) -> None:
    found = []
    for packed in (True, False):
        decoder = tiny_decoder(dtype, packed=packed)
        shape: dict[str, Any] = {
            "num_blocks": 8,
            "packed": packed,
            "kv_dtype": kv_dtype if packed else None,
        }
        cache = make_cache(decoder.config, dtype, **shape)
        block_table = BlockTable()
        cache.prepare(block_table, 70)
        entry = BatchEntry(block_table, TokenTree.chain(range(70)), range(70), 70)
        ModelRunner(decoder, cache).forward(ForwardBatch([entry]))
        cache.commit_slots(block_table, range(70))
        found.append([each.astype(np.float32) for each in read_kv(cache, 0, block_table)])
        assert all(each.shape == (2, 70, 16) for each in found[-1])
    near = {"rtol": 0.0, "atol": 1e-5} if dtype == FLOAT32 else {"rtol": 2e-2, "atol": 5e-2}
    for by_kernels, by_torch in zip(*found, strict=True):
        # The codes of torch's rows, of which those in 8 bits differ by rounding: half a step.
        step = 0.0 if kv_dtype is None else np.abs(by_torch).max(-1, keepdims=True) / 127
        assert (
            np.abs(by_kernels - by_torch)
            <= near["atol"] + near["rtol"] * np.abs(by_torch) + 0.51 * step
        ).all()
    assert text_logits(tiny_decoder(dtype), range(70), dtype).shape == (70, 131)


def test_torch_refuses_8_bits() -> None:
    with pytest.raises(
        OptionError,
        match=r"^kv_dtype: expected auto with torch, found int8, which needs pronk's kernels$",
    ):
        make_cache(CONFIG, FLOAT32, packed=False, kv_dtype=INT8)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_torch_stores_numbers_that_are_not_finite_as_zeros(dtype: DType) -> None:
    """Torch multiplies masked values by 0; NaN would spread to the rows of other requests."""
    cache = make_cache(CONFIG, dtype, packed=False)
    assert isinstance(cache, TorchCache)
    cache.save_feature(1, cache)
    block_table = BlockTable()
    cache.prepare(block_table, 3)
    slots = cache.to_index(cache.slots(block_table, 0, 3))
    keys = torch.ones(3, 2, 6).to(cache.keys[0].dtype)
    keys[0, 1, 2] = math.nan
    keys[1, 0, 0] = math.inf
    keys[2] = -math.inf
    cache.write(0, slots, keys, 2 * keys)
    hidden = torch.ones(3, HIDDEN).to(keys.dtype)
    hidden[1, 5] = math.nan
    cache.write_feature(1, slots, hidden)
    cache.commit_slots(block_table, range(3))
    want = keys.isfinite().float().transpose(0, 1).numpy()
    for factor, found in zip((1, 2), read_kv(cache, 0, block_table), strict=True):
        assert found.dtype == dtype
        assert np.array_equal(found, factor * want)
    assert np.array_equal(cache.read_feature(1, block_table, 0, 3), hidden.isfinite().numpy())
