"""The state of the KV cache never changes a text: used, shared and scattered blocks."""

from collections.abc import Sequence

import numpy as np
import pytest

from covering import covering
from engine.cases import (
    PROMPTS,
    ask,
    assert_same,
    drafter,
    params,
    plain,
    step_until_ended,
    text,
    total,
    watch,
)
from engine.test_equality import DTYPES
from pronk.base.arrays import BFLOAT16, FLOAT32, DType
from pronk.base.errors import CacheFullError
from pronk.cache.blocks import BlockTable
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.models.forward_batch import ForwardBatch
from pronk.models.model_runner import ForwardResult
from pronk.sampling.noise import derive_seed
from pronk.sampling.params import SamplingParams
from tiny_models import make_engine, make_request, run, samples, tiny_decoder


@pytest.mark.few(2)
@DTYPES
@pytest.mark.parametrize("windows", [(None, None), (40, 40)], ids=str)
def test_reused_blocks(windows: tuple[int | None, ...], dtype: DType) -> None:
    """Run requests one after the other in a KV cache for one request; freed blocks are filled
    with NaN.
    """
    want = plain(dtype, "temperature", windows=windows)
    decoder = tiny_decoder(dtype, windows=windows)
    fresh = []
    for index, prompt in enumerate(PROMPTS):
        fresh.append(ask(prompt, params("temperature", index)))
        run(make_engine(decoder, poison=None), fresh[-1:])
    assert_same(fresh, want)
    engine = make_engine(decoder, num_blocks=44)
    for _ in range(2):
        for index in (5, 0, 3, 4, 1, 2):
            request = ask(PROMPTS[index], params("temperature", index), drafter("oracle", want))
            run(engine, [request])
            assert_same([request], [want[index]])
    assert np.isnan(engine.cache.keys[0].astype(np.float32)).all()
    assert np.isnan(engine.cache.values[1].astype(np.float32)).all()


def watch_runs(engine: Engine) -> list[bool]:
    """Record for each text of more than one block that a pass reads whether its blocks are
    consecutive.
    """
    runs = list[bool]()

    def note(batch: ForwardBatch, _: ForwardResult) -> None:
        tables = [entry.block_table for entry in batch.entries]
        runs.extend(block_table.contiguous for block_table in tables if len(block_table.blocks) > 1)

    watch(engine, note)
    return runs


def scatter(engine: Engine) -> list[BlockTable]:
    """Allocate all blocks, release every second one, and return the tables of the others."""
    allocator = engine.cache.allocator
    tables = [BlockTable() for _ in range(allocator.num_blocks)]
    for block_table in tables:
        engine.cache.prepare(block_table, allocator.block_size)
    for block_table in tables[::2]:
        engine.cache.release(block_table)
    return tables[1::2]


def finish_with_taken(
    engine: Engine, requests: Sequence[Request], taken: Sequence[BlockTable]
) -> None:
    """Run requests, then release ``taken``; a further request prevents a reset of the allocator
    until then.
    """
    other = make_request([1], SamplingParams(max_tokens=1000, ignore_eos=True))
    for request in (*requests, other):
        engine.add(request)
    step_until_ended(engine, requests)
    for block_table in taken:
        engine.cache.release(block_table)
    engine.abort(other)


@DTYPES
@pytest.mark.parametrize("windows", [(None, None), (50, 50), (50, None)], ids=str)
def test_scattered_blocks(windows: tuple[int | None, ...], dtype: DType) -> None:
    """The free blocks are every second one, so a text of several blocks is never consecutive."""
    want = plain(dtype, "temperature", windows=windows)
    engine = make_engine(tiny_decoder(dtype, windows=windows), num_blocks=800, max_tree=40)
    taken = scatter(engine)
    runs = watch_runs(engine)
    got = [
        ask(prompt, params("temperature", i), drafter("oracle", want))
        for i, prompt in enumerate(PROMPTS)
    ]
    finish_with_taken(engine, got, taken)
    assert_same(got, want)
    assert total(got, "moved") > 0
    assert len(runs) > 40
    assert not any(runs)


def test_an_empty_cache_gives_consecutive_blocks() -> None:
    engine = make_engine(tiny_decoder())
    runs = watch_runs(engine)
    run(engine, [ask(prompt, params("greedy", i)) for i, prompt in enumerate(PROMPTS)])
    assert len(runs) > 40
    assert all(runs)


@pytest.mark.parametrize(
    ("name", "length"),
    covering(
        ["autoregressive", "prompt_lookup", "adversarial"], [1, 2, 16, 17, 30, 33, 513], strength=1
    ),
)
def test_samples_equal_separate_requests(name: str, length: int) -> None:
    options = SamplingParams(max_tokens=20, temperature=1.0, seed=9, n=4, logprobs=1)
    decoder = tiny_decoder(BFLOAT16)
    prompt = text(length, length)
    want = samples(prompt, options)
    assert [request.seed for request in want] == [derive_seed(9, i) for i in range(4)]
    for request in want:
        request.parent = None
        run(make_engine(decoder), [request])
    assert len({tuple(request.output) for request in want}) == 4
    for settings in ({}, {"max_batch": 1}, {"max_batch": 3, "prefill_chunk": 16}):
        engine = make_engine(decoder, **settings)
        got = samples(prompt, options, drafter(name, want).bind(engine.target))
        run(engine, got)
        assert_same(got, want)


def test_samples_share_their_prompt() -> None:
    """Samples share whole blocks of the prompt; each sample has its own copy of the last block."""
    engine = make_engine(tiny_decoder())
    prompt = text(1, 40)
    group = samples(
        prompt, SamplingParams(max_tokens=30, temperature=1.0, seed=1, n=3, ignore_eos=True)
    )
    for request in group:
        engine.add(request)
    rows: list[list[int]] = []
    watch(engine, lambda batch, _: rows.append([len(entry.tree) for entry in batch.entries]))
    engine.step()
    engine.step()
    assert rows == [[40], [1, 1, 1]]  # one sample computes the prompt
    while any(len(request.output) < 3 for request in group):
        engine.step()
    tables = [request.block_table.blocks for request in group]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert [engine.cache.allocator.references[block] for block in tables[0][:2]] == [3, 3]
    own = [block for block_table in tables for block in block_table[2:]]
    assert len(set(own)) == len(own)
    assert {engine.cache.allocator.references[block] for block in own} == {1}
    free = engine.cache.allocator.num_free
    num_own = len(tables[0]) - 2
    engine.abort(group[0])
    assert [engine.cache.allocator.references[block] for block in tables[1][:2]] == [2, 2]
    assert engine.cache.allocator.num_free == free + num_own
    step_until_ended(engine, group[1:])


def test_a_sample_computes_the_prompt_if_the_first_sample_has_left() -> None:
    options = SamplingParams(max_tokens=12, temperature=1.0, seed=5, n=3, logprobs=0)
    decoder = tiny_decoder()
    prompt = text(3, 50)
    want = samples(prompt, options)
    run(make_engine(decoder), want)
    engine = make_engine(decoder, max_batch=1)
    got = samples(prompt, options)
    for request in got:
        engine.add(request)
    engine.step()
    engine.abort(got[0])
    step_until_ended(engine, got[1:])
    assert_same(got[1:], want[1:])


def test_a_request_that_can_never_fit_is_refused() -> None:
    engine = make_engine(tiny_decoder(), num_blocks=20, max_tree=16)
    fits = make_request(text(0, 200), SamplingParams(max_tokens=320 - 200))
    with pytest.raises(CacheFullError, match=r"at most 320 tokens.*found 336.*kv_memory"):
        engine.add(make_request(text(0, 201), SamplingParams(max_tokens=320 - 200)))
    run(engine, [fits])


@pytest.mark.parametrize(
    ("windows", "pools"), [((None, None), (48, 60, 75, 100)), ((40, 40), (10, 13, 17, 30))], ids=str
)
def test_requests_that_do_not_fit_wait(
    windows: tuple[int | None, ...], pools: tuple[int, ...]
) -> None:
    want = plain(FLOAT32, "temperature", windows=windows)
    for num_blocks in pools:
        engine = make_engine(
            tiny_decoder(windows=windows), num_blocks=num_blocks, max_tree=64, prefill_chunk=32
        )
        got = [
            ask(prompt, params("temperature", i), drafter("adversarial", want))
            for i, prompt in enumerate(PROMPTS)
        ]
        run(engine, got)
        assert_same(got, want)
