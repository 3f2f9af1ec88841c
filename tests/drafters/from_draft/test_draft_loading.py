"""A draft model beside its target: who shares it, what memory both take, and what happens if it cannot be loaded."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import MakeCheckpoint
from drafters.drafting import decode
from drafters.from_draft.drafts import draft_folder, write_checkpoint
from drafters.helpers import within
from pronk.cli.main import main
from pronk.drafters import Proposer, make_drafter
from pronk.drafters.from_draft.draft_model import ModelProposer
from pronk.errors import CheckpointError, OptionError
from pronk.kv_cache.paged import PagedCache
from pronk.llm import LLM
from pronk.models.linear import KernelLinear
from pronk.sampling.params import SamplingParams
from tiny_models import make_engine, tiny_decoder

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPT = "for i in range(10):"


@pytest.fixture
def model(checkpoint: MakeCheckpoint) -> str:
    return str(checkpoint("llama"))


@pytest.fixture
def draft(checkpoint: MakeCheckpoint) -> str:
    """Of the target's vocabulary, with other weights and fewer layers."""
    return f"draft_model(model={str(checkpoint('llama', num_hidden_layers=1, seed=5))!r})"


def pool_of(drafter: Proposer[Any]) -> PagedCache:
    assert isinstance(drafter, ModelProposer)
    return drafter.draft.runner.cache


def total_bytes(*pools: PagedCache) -> int:
    """What the blocks of the pools take."""
    return sum(pool.allocator.num_blocks * pool.block_size * pool.bytes_per_token for pool in pools)


def test_drafters_share_a_model_as_long_as_one_of_them_is_there() -> None:
    engine = make_engine(tiny_decoder())
    folder = draft_folder(0.03)
    one = make_drafter(f"draft_model(model={folder!r})").bind(engine.target)
    other = make_drafter(f"cape(threshold(draft_model(model={folder!r}, num_tokens=9)))").bind(engine.target)
    third = make_drafter(f"draft_model(model={folder!r}, dtype='bfloat16')").bind(engine.target)
    (inner,) = within(other, ModelProposer)
    assert inner.draft is one.draft
    assert third.draft is not one.draft
    assert len(engine.target.shared_models) == 2
    decode(engine, one, [[1, 2, 3]])
    decode(engine, other, [[1, 2, 3]])
    del one, third
    gc.collect()
    assert [key[1] for key in engine.target.shared_models] == ["auto"]
    del other, inner
    gc.collect()
    assert not engine.target.shared_models


def test_one_drafter_may_guess_for_two_targets() -> None:
    drafter = make_drafter(f"threshold(draft_model(model={draft_folder(0.03)!r}))")
    engines = [make_engine(tiny_decoder()), make_engine(tiny_decoder())]
    one, other = (drafter.bind(engine.target) for engine in engines)
    assert one is not other
    assert one.options == other.options == drafter
    assert one.inner.draft is not other.inner.draft
    for engine, bound in zip(engines, (one, other), strict=True):
        assert decode(engine, bound, [[1, 2, 3], [4, 5]])[0].stats.drafted > 0


def test_both_caches_stay_within_the_memory(model: str, draft: str) -> None:
    alone = LLM(model, drafter="autoregressive", kv_memory="2MB", threads=1)
    llm = LLM(model, drafter=draft, kv_memory="2MB", threads=1, budget="all")
    (pool,) = [pool_of(each) for each in [llm.get_proposer(None)]]
    for cache in (llm.engine.cache, pool):
        assert cache.values[0].shape[1] == cache.num_slots
        assert cache.keys[0].numel() == cache.values[0].numel()
    assert llm.engine.cache.allocator.num_blocks == pool.allocator.num_blocks
    assert 1_900_000 < total_bytes(llm.engine.cache, pool) <= 2_000_000
    assert total_bytes(alone.engine.cache) <= 2_000_000
    assert alone.engine.cache.allocator.num_blocks > pool.allocator.num_blocks
    result = llm.generate(PROMPT, PARAMS)
    assert result.token_ids == alone.generate(PROMPT, PARAMS).token_ids
    assert result.stats.drafted > 0


def test_a_draft_joins_a_model_that_has_been_at_work(model: str, draft: str) -> None:
    llm = LLM(model, drafter="autoregressive", kv_memory="2MB", threads=1, budget="all")
    want = llm.generate(PROMPT, PARAMS).token_ids
    blocks = llm.engine.cache.allocator.num_blocks
    got = llm.generate(PROMPT, PARAMS, drafter=draft)
    assert got.token_ids == want
    assert got.stats.drafted > 0
    assert llm.engine.cache.allocator.num_blocks < blocks
    assert llm.generate(PROMPT, PARAMS).token_ids == want


def test_memory_that_does_not_hold_a_block_of_both(model: str, draft: str) -> None:
    one = LLM(model, drafter="autoregressive", threads=1).engine.cache.bytes_per_token * 32
    LLM(model, drafter="autoregressive", kv_memory=one, threads=1)
    with pytest.raises(OptionError, match=r"kv_memory: expected at least \d+ bytes") as caught:
        LLM(model, drafter=draft, kv_memory=one, threads=1)
    assert "\n" not in str(caught.value)


def test_no_draft_joins_while_a_stream_would_lose_its_memory(model: str, draft: str) -> None:
    """One line, and the stream goes on; afterwards the draft is welcome."""
    llm = LLM(model, drafter="autoregressive", kv_memory="2MB", threads=1)
    want = llm.generate(PROMPT, PARAMS).token_ids
    stream = llm.stream(PROMPT, PARAMS)
    got = [next(stream).token_id]
    with pytest.raises(OptionError, match="expected no running request while a draft model is added") as caught:
        llm.generate("def", PARAMS, drafter=draft)
    assert "\n" not in str(caught.value)
    got += [piece.token_id for piece in stream]
    assert got == want
    assert llm.generate(PROMPT, PARAMS, drafter=draft).token_ids == want


def test_a_draft_joins_while_a_stream_is_open_where_there_is_memory(model: str, draft: str) -> None:
    llm = LLM(model, drafter="autoregressive", threads=1)
    want = llm.generate(PROMPT, PARAMS).token_ids
    stream = llm.stream(PROMPT, PARAMS)
    got = [next(stream).token_id]
    assert llm.generate(PROMPT, PARAMS, drafter=draft).token_ids == want
    assert got + [piece.token_id for piece in stream] == want


def test_a_draft_s_memory_serves_another_one_when_it_has_gone(model: str, checkpoint: MakeCheckpoint) -> None:
    llm = LLM(model, drafter="autoregressive", kv_memory="2MB", threads=1)
    for seed in (5, 6, 7):
        options = make_drafter(f"draft_model(model={str(checkpoint('llama', num_hidden_layers=1, seed=seed))!r})")
        drafter = options.bind(llm.engine.target)
        llm.generate(PROMPT, PARAMS, drafter=drafter)
        assert len(llm.engine.target.shared_models) == 1
        (live,) = llm.engine.target.shared_models.values()
        assert 1_800_000 < total_bytes(llm.engine.cache, live.runner.cache) <= 2_000_000
        del drafter, live
        gc.collect()
    assert not llm.engine.target.shared_models


def test_what_is_no_model_is_refused(model: str, tmp_path: Path) -> None:
    llm = LLM(model, drafter="autoregressive", threads=1)
    file = tmp_path / "file"
    file.write_text("x")
    for place, expected in ((tmp_path / "none", "no such folder"), (file, "found a file"), (tmp_path, "config.json")):
        for spec in (f"draft_model(model={str(place)!r})", f"staged(draft_model(model={str(place)!r}), suffix)"):
            with pytest.raises(CheckpointError, match=expected) as caught:
                llm.generate("x", PARAMS, drafter=spec)
            assert "\n" not in str(caught.value)
            assert str(place) in str(caught.value)
    assert llm.generate("x", PARAMS).token_ids


def test_the_command_line_says_in_one_line_that_there_is_no_such_draft(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["generate", "--model", model, "--drafter", "draft_model(model='/nonexistent')", "x"])
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert err.startswith("pronk: error: ")
    assert "/nonexistent" in err
    assert err.count("\n") == 1


def test_dtype_of_the_draft(model: str, draft: str) -> None:
    """By default the checkpoint's, whatever the target has been told."""
    spec = draft.removesuffix(")")
    llm = LLM(model, drafter=spec + ", dtype='bfloat16')", threads=1)
    assert pool_of(llm.get_proposer(None)).dtype == torch.bfloat16
    assert llm.engine.cache.dtype == torch.float32
    low = LLM(model, dtype="bfloat16", drafter=draft, threads=1)
    assert pool_of(low.get_proposer(None)).dtype == torch.float32


def test_weights_of_a_byte() -> None:
    """A quarter of the memory of float32, and nearly the same guesses; the text is what it was."""
    size, values, accepted = {}, {}, {}
    for weights in ("plain", "int8"):
        engine = make_engine(tiny_decoder())
        drafter = make_drafter(f"draft_model(model={draft_folder(0.0)!r}, weights={weights!r})").bind(engine.target)
        assert isinstance(drafter, ModelProposer)
        out = drafter.draft.runner.decoder.layers[0].out
        assert isinstance(out, KernelLinear)
        size[weights], values[weights] = out.packed.data.nbytes, out.packed.unpack()
        requests = decode(engine, drafter, [[1, 2, 3], [4, 5, 6, 7], [9]])
        accepted[weights] = sum(request.stats.accepted for request in requests)
    assert size["int8"] < 0.3 * size["plain"]
    assert not torch.equal(values["int8"], values["plain"])
    assert torch.allclose(values["int8"], values["plain"], atol=float(values["plain"].abs().max()) / 250, rtol=0.0)
    assert 0.5 * accepted["plain"] < accepted["int8"] <= accepted["plain"]


def test_weights_of_a_byte_need_the_kernels() -> None:
    drafter = make_drafter(f"draft_model(model={draft_folder(0.0)!r}, weights='int8')")
    with pytest.raises(OptionError, match="weights: expected a CPU and pronk's kernels for int8, found no kernels"):
        drafter.bind(make_engine(tiny_decoder(packed=False)).target)


def test_a_draft_that_no_kernel_covers_is_computed_by_torch(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "wide", tiny_decoder(heads=1, kv_heads=1, head_dim=514, packed=False))
    engine = make_engine(tiny_decoder())
    said = "draft_model: no kernels for heads of 514 in wide; torch computes the draft instead, slower"
    with pytest.warns(UserWarning, match=f"^{said}$"):
        drafter = make_drafter(f"draft_model(model={str(tmp_path / 'wide')!r})").bind(engine.target)
    (request,) = decode(engine, drafter, [[1, 2, 3]])
    assert request.stats.drafted > 0
