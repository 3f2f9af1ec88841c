"""A draft model beside its target: shared weights, memory of both KV caches, errors while
loading.
"""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import MakeCheckpoint
from drafting.drafting import decode
from drafting.from_draft.drafts import draft_folder
from drafting.helpers import within
from pronk.base.arrays import BFLOAT16, FLOAT32
from pronk.base.errors import CheckpointError, OptionError
from pronk.cache.paged import PagedCache
from pronk.drafting import Proposer, make_drafter
from pronk.drafting.from_draft.draft_model import ModelProposer
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from tiny_models import make_engine, tiny_decoder

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPT = "for i in range(10):"


@pytest.fixture
def model(checkpoint: MakeCheckpoint) -> str:
    return str(checkpoint("llama"))


@pytest.fixture
def draft(checkpoint: MakeCheckpoint) -> str:
    """Return a draft model of the target's vocabulary with fewer layers."""
    return f"draft_model(model={str(checkpoint('llama', num_hidden_layers=1, seed=5))!r})"


def pool_of(drafter: Proposer[Any]) -> PagedCache:
    assert isinstance(drafter, ModelProposer)
    return drafter.draft.runner.cache


def total_bytes(*pools: PagedCache) -> int:
    """Return the size of the blocks of the pools."""
    return sum(pool.allocator.num_blocks * pool.block_size * pool.bytes_per_token for pool in pools)


def test_drafters_share_a_model_while_one_of_them_exists() -> None:
    engine = make_engine(tiny_decoder())
    folder = draft_folder(0.03)
    one = make_drafter(f"draft_model(model={folder!r})").bind(engine.target)
    other = make_drafter(f"threshold(draft_model(model={folder!r}, num_tokens=9))").bind(
        engine.target
    )
    third = make_drafter(f"draft_model(model={folder!r}, dtype='bfloat16')").bind(engine.target)
    (inner,) = within(other, ModelProposer)
    assert inner.draft is one.draft
    assert third.draft is not one.draft
    assert len(engine.target.loaded_models) == 2
    decode(engine, one, [[1, 2, 3]])
    decode(engine, other, [[1, 2, 3]])
    del one, third
    gc.collect()
    assert [*engine.target.loaded_models] == [inner.draft]
    del other, inner
    gc.collect()
    assert len(engine.target.loaded_models) == 0


def test_both_caches_stay_within_the_memory(model: str, draft: str) -> None:
    alone = LLM(model, drafter="autoregressive", kv_memory="2MB", threads=1)
    llm = LLM(model, drafter=draft, kv_memory="2MB", threads=1, budget="all")
    (pool,) = [pool_of(each) for each in [llm.get_proposer(None)]]
    for cache in (llm.engine.cache, pool):
        assert cache.values[0].shape[1] == cache.num_slots
        assert cache.keys[0].size == cache.values[0].size
    assert llm.engine.cache.allocator.num_blocks == pool.allocator.num_blocks
    assert 1_900_000 < total_bytes(llm.engine.cache, pool) <= 2_000_000
    assert total_bytes(alone.engine.cache) <= 2_000_000
    assert alone.engine.cache.allocator.num_blocks > pool.allocator.num_blocks
    result = llm.generate(PROMPT, PARAMS)
    assert result.token_ids == alone.generate(PROMPT, PARAMS).token_ids
    assert result.stats.drafted > 0


def test_memory_for_less_than_a_block_of_both_is_refused(model: str, draft: str) -> None:
    one = LLM(model, drafter="autoregressive", threads=1).engine.cache.bytes_per_token * 32
    LLM(model, drafter="autoregressive", kv_memory=one, threads=1)
    with pytest.raises(OptionError, match=r"kv_memory: expected at least \d+ bytes") as caught:
        LLM(model, drafter=draft, kv_memory=one, threads=1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("memory", ["2MB", None], ids=["tight", "enough"])
def test_a_draft_model_is_added_beside_a_stream_if_memory_allows(
    model: str, draft: str, memory: str | None
) -> None:
    """With tight memory the request is refused until the stream has ended; the stream goes on in
    both cases.
    """
    llm = LLM(
        model,
        drafter="autoregressive",
        threads=1,
        **({} if memory is None else {"kv_memory": memory}),
    )
    want = llm.generate(PROMPT, PARAMS).token_ids
    stream = llm.stream(PROMPT, PARAMS)
    got = [next(stream).token_id]
    if memory is None:
        assert llm.generate(PROMPT, PARAMS, drafter=draft).token_ids == want
    else:
        with pytest.raises(
            OptionError, match="expected no running request while a draft model is added"
        ) as caught:
            llm.generate("def", PARAMS, drafter=draft)
        assert "\n" not in str(caught.value)
    got += [piece.token_id for piece in stream]
    assert got == want
    assert llm.generate(PROMPT, PARAMS, drafter=draft).token_ids == want


def test_memory_of_a_freed_draft_model_serves_another_one(
    model: str, checkpoint: MakeCheckpoint
) -> None:
    llm = LLM(model, drafter="autoregressive", kv_memory="2MB", threads=1)
    for seed in (5, 6, 7):
        options = make_drafter(
            f"draft_model(model={str(checkpoint('llama', num_hidden_layers=1, seed=seed))!r})"
        )
        drafter = options.bind(llm.engine.target)
        llm.generate(PROMPT, PARAMS, drafter=drafter)
        assert len(llm.engine.target.loaded_models) == 1
        (live,) = llm.engine.target.loaded_models
        assert 1_800_000 < total_bytes(llm.engine.cache, live.runner.cache) <= 2_000_000
        del drafter, live
        gc.collect()
    assert not llm.engine.target.loaded_models


def test_paths_without_a_model_are_refused(model: str, tmp_path: Path) -> None:
    llm = LLM(model, drafter="autoregressive", threads=1)
    file = tmp_path / "file"
    file.write_text("x")
    for place, expected in (
        (tmp_path / "none", "no such folder"),
        (file, "found the file"),
        (tmp_path, "config.json"),
    ):
        for spec in (
            f"draft_model(model={str(place)!r})",
            f"merged(draft_model(model={str(place)!r}), suffix)",
        ):
            with pytest.raises(CheckpointError, match=expected) as caught:
                llm.generate("x", PARAMS, drafter=spec)
            assert "\n" not in str(caught.value)
            assert str(place) in str(caught.value)
    assert llm.generate("x", PARAMS).token_ids


def test_dtype_of_the_draft_model(model: str, draft: str) -> None:
    """The default is the checkpoint's dtype, independent of the target's."""
    spec = draft.removesuffix(")")
    llm = LLM(model, drafter=spec + ", dtype='bfloat16')", threads=1)
    assert pool_of(llm.get_proposer(None)).dtype == BFLOAT16
    assert llm.engine.cache.dtype == FLOAT32
    low = LLM(model, dtype="bfloat16", drafter=draft, threads=1)
    assert pool_of(low.get_proposer(None)).dtype == FLOAT32


def test_int8_weights() -> None:
    """A quarter of the memory of float32, nearly the same draft tokens, the same text."""
    size = {}
    values = {}
    accepted = {}
    for weights in ("plain", "int8"):
        engine = make_engine(tiny_decoder())
        drafter = make_drafter(
            f"draft_model(model={draft_folder(0.0)!r}, weights={weights!r})"
        ).bind(engine.target)
        assert isinstance(drafter, ModelProposer)
        out = drafter.draft.runner.decoder.layers[0].out
        size[weights] = out.packed.data.nbytes
        values[weights] = out.packed.unpack()
        requests = decode(engine, drafter, [[1, 2, 3], [4, 5, 6, 7], [9]])
        accepted[weights] = sum(request.stats.accepted for request in requests)
    assert size["int8"] < 0.3 * size["plain"]
    assert not np.array_equal(values["int8"], values["plain"])
    assert np.allclose(
        values["int8"], values["plain"], atol=float(np.abs(values["plain"]).max()) / 250, rtol=0.0
    )
    assert 0.5 * accepted["plain"] < accepted["int8"] <= accepted["plain"]
