"""Sliding windows: blocks that no later token can attend to are released, and no others."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from checkpoints import MakeCheckpoint
from drafting.trees import TreeDrafter, oracle_trees
from engine.cases import text, texts, total
from oracle import dense_logits
from pronk import LLM
from pronk.base.errors import CacheFullError, OptionError
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.sampling.params import SamplingParams
from softmax import log_softmax
from tiny_models import (
    make_engine,
    make_request,
    run,
    run_alone,
    samples,
    tiny_decoder,
    tiny_module,
)

WINDOW = 50
BLOCK = 16
TREE = 9
CHUNK = 32
PROMPTS = (text(1, 300), text(2, 7))
PARAMS = SamplingParams(max_tokens=300, temperature=0.7, seed=3, logprobs=0)


def counts_of_blocks(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """Run the requests; return for each the number of its blocks after each step."""
    counts: list[list[int]] = [[] for _ in requests]
    for request in requests:
        engine.add(request)
    while any(request.result.finish_reason is None for request in requests):
        engine.step()
        for request, held in zip(requests, counts, strict=True):
            if request.result.finish_reason is None:
                held.append(len(request.block_table.blocks))
    return counts


@pytest.mark.few(2)
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("windows", [(WINDOW, WINDOW), (WINDOW, 20)], ids=str)
def test_memory_is_bounded(windows: tuple[int, ...], *, drafts: bool) -> None:
    """The bound depends on the window and the rows of a pass, not on prompt or output."""
    decoder = tiny_decoder(windows=windows)
    want = [make_request(prompt, PARAMS) for prompt in PROMPTS]
    run(make_engine(decoder, poison=None), want)
    engine = make_engine(decoder, block_size=BLOCK, max_tree=TREE, prefill_chunk=CHUNK)
    proposer = TreeDrafter(oracle_trees(0.7), texts(want)) if drafts else None
    requests = [make_request(prompt, PARAMS, proposer) for prompt in PROMPTS]
    counts = counts_of_blocks(engine, requests)
    assert [request.tokens for request in requests] == [request.tokens for request in want]
    assert [request.result.logprobs for request in requests] == [
        request.result.logprobs for request in want
    ]
    assert (total(requests, "moved") > 0) == drafts
    for held in counts:
        assert max(held) <= (WINDOW + CHUNK + TREE) // BLOCK + 2
        # In the second half, the blocks that were reserved for prefill are used up.
        assert max(held[len(held) // 2 :]) <= (WINDOW + (TREE if drafts else 1)) // BLOCK + 2
    assert len(requests[1].tokens) > 5 * WINDOW


def test_a_cache_as_large_as_the_bound_is_enough() -> None:
    decoder = tiny_decoder(windows=(WINDOW, WINDOW))
    want = run_alone(decoder, PROMPTS[0], PARAMS)
    blocks = -(-(WINDOW + CHUNK + TREE) // BLOCK) + 1
    for dice in range(3):
        proposer = TreeDrafter(oracle_trees(0.5), texts([want]), dice=dice)
        engine = make_engine(
            decoder, num_blocks=blocks, block_size=BLOCK, max_tree=TREE, prefill_chunk=CHUNK
        )
        got = make_request(PROMPTS[0], PARAMS, proposer)
        run(engine, [got])
        assert got.tokens == want.tokens
        assert len(got.tokens) > 4 * blocks * BLOCK
    small = make_engine(
        decoder, num_blocks=blocks - 1, block_size=BLOCK, max_tree=TREE, prefill_chunk=CHUNK
    )
    with pytest.raises(CacheFullError):
        small.add(make_request(PROMPTS[0], PARAMS))


def test_a_later_sample_computes_a_prompt_whose_blocks_were_released() -> None:
    decoder = tiny_decoder(windows=(10, 20))
    options = SamplingParams(max_tokens=90, temperature=1.0, seed=1, n=3)
    want = samples(text(5, 40), options)
    for request in want:
        request.parent = None
        run(make_engine(decoder), [request])
    first, _, third = samples(text(5, 40), options)
    second = make_request(text(5, 40), replace(options, max_tokens=50), parent=first)
    engine = make_engine(decoder, max_batch=2)
    run(engine, [first, second, third])
    assert (first.output, third.output) == (want[0].output, want[2].output)


def test_no_block_is_released_if_a_layer_has_no_window() -> None:
    engine = make_engine(tiny_decoder(windows=(20, None)), block_size=BLOCK)
    request = make_request(PROMPTS[0], PARAMS)
    (held,) = counts_of_blocks(engine, [request])
    assert min(held) >= 300 // BLOCK
    assert request.block_table.num_released == 0


@pytest.mark.parametrize(
    "windows", [(1, 1), (2, 9), (16, 16), (50, None), (511, 512), (513, 600)], ids=str
)
def test_windows_equal_a_dense_reference(windows: tuple[int | None, ...]) -> None:
    decoder = tiny_decoder(windows=windows)
    request = make_request(
        text(4, 600), SamplingParams(max_tokens=40, logprobs=1, prompt_logprobs=0)
    )
    run(make_engine(decoder, prefill_chunk=100), [request])
    want = log_softmax(dense_logits(tiny_module(windows=windows), request.tokens))
    reports = [*request.result.prompt_logprobs[1:], *request.result.logprobs]
    assert len(reports) == len(request.tokens) - 1
    for place, report in enumerate(reports):
        assert report is not None
        token = request.tokens[place + 1]
        assert report[token] == pytest.approx(float(want[place, token]), abs=1e-4)
    assert request.output == want[599:-1].argmax(-1).tolist()


@pytest.mark.parametrize(("window", "chunk"), [(40, 40), (5, 16)])
def test_chunks_of_the_window(window: int, chunk: int, checkpoint: MakeCheckpoint) -> None:
    """``prefill_chunk="window"`` prefills one window per forward pass, at least 16 tokens, and
    changes no token.
    """
    folder = checkpoint("mistral", sliding_window=window)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    prompt = [5 + place % 90 for place in range(100)]
    plain, windowed = (LLM(folder, prefill_chunk=size, threads=1) for size in (512, "window"))
    assert windowed.engine.scheduler.prefill_chunk == chunk
    steps = list[int]()
    found = windowed.generate(
        prompt, params, drafter="autoregressive", progress=lambda done, _: steps.append(done)
    )
    assert found.token_ids == plain.generate(prompt, params).token_ids
    assert len(steps) == -(-100 // chunk) + 23  # the last chunk gives the first of the 24 tokens


def test_chunks_of_a_window_that_no_layer_has(checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(
        OptionError, match="prefill_chunk: expected a model with a sliding window, found none"
    ):
        LLM(checkpoint("llama"), prefill_chunk="window")
