"""Sliding windows: what has left the window is given back, however long a request runs, and nothing else is."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from drafters.trees import TreeDrafter, oracle_trees
from engine.cases import text, total
from oracle import dense_logits
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.errors import CacheFullError
from pronk.sampling.params import SamplingParams
from tiny_models import make_engine, make_request, run, samples, tiny_decoder

WINDOW, BLOCK, TREE, CHUNK = 50, 16, 9, 32
PROMPTS = (text(1, 300), text(2, 7))
PARAMS = SamplingParams(max_tokens=300, temperature=0.7, seed=3, logprobs=0)


def counts_of_blocks(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """Run the requests; for each, how many blocks it held after each step."""
    counts: list[list[int]] = [[] for _ in requests]
    for request in requests:
        engine.add(request)
    while any(request.finish_reason is None for request in requests):
        engine.step()
        for request, held in zip(requests, counts, strict=True):
            if request.finish_reason is None:
                held.append(len(request.block_table.blocks))
    return counts


@pytest.mark.parametrize("guess", [False, True])
@pytest.mark.parametrize("windows", [(WINDOW, WINDOW), (WINDOW, 20)], ids=str)
def test_memory_is_bounded(windows: tuple[int, ...], *, guess: bool) -> None:
    """By the window, a block, and the rows of a pass: neither by the prompt nor by the output."""
    decoder = tiny_decoder(windows=windows)
    want = [make_request(prompt, PARAMS) for prompt in PROMPTS]
    run(make_engine(decoder, poison=None), want)
    texts = {(tuple(request.prompt), request.seed): request.tokens for request in want}
    engine = make_engine(decoder, block_size=BLOCK, max_tree=TREE, prefill_chunk=CHUNK)
    proposer = TreeDrafter(oracle_trees(0.7), texts) if guess else None
    requests = [make_request(prompt, PARAMS, proposer) for prompt in PROMPTS]
    counts = counts_of_blocks(engine, requests)
    assert [request.tokens for request in requests] == [request.tokens for request in want]
    assert [request.logprobs for request in requests] == [request.logprobs for request in want]
    assert (total(requests, "moved") > 0) == guess
    for held in counts:
        assert max(held) <= (WINDOW + CHUNK + TREE) // BLOCK + 2
        # The places for the whole window were reserved at the start, and are used up by now.
        assert max(held[len(held) // 2 :]) <= (WINDOW + (TREE if guess else 1)) // BLOCK + 2
    assert len(requests[1].tokens) > 5 * WINDOW


def test_a_pool_as_large_as_the_bound_is_enough() -> None:
    """A request runs far beyond the pool's size, in a pool that only just admits it."""
    decoder = tiny_decoder(windows=(WINDOW, WINDOW))
    want = make_request(PROMPTS[0], PARAMS)
    run(make_engine(decoder), [want])
    blocks = -(-(WINDOW + CHUNK + TREE) // BLOCK) + 1
    texts = {(tuple(want.prompt), want.seed): want.tokens}
    for dice in range(3):
        proposer = TreeDrafter(oracle_trees(0.5), texts, dice=dice)
        engine = make_engine(decoder, num_blocks=blocks, block_size=BLOCK, max_tree=TREE, prefill_chunk=CHUNK)
        got = make_request(PROMPTS[0], PARAMS, proposer)
        run(engine, [got])
        assert got.tokens == want.tokens
        assert len(got.tokens) > 4 * blocks * BLOCK
    small = make_engine(decoder, num_blocks=blocks - 1, block_size=BLOCK, max_tree=TREE, prefill_chunk=CHUNK)
    with pytest.raises(CacheFullError):
        small.add(make_request(PROMPTS[0], PARAMS))


def test_a_sample_that_starts_when_the_first_one_has_moved_on() -> None:
    """The prompt that they share is no longer there as a whole, so it is read again."""
    decoder, options = tiny_decoder(windows=(10, 20)), SamplingParams(max_tokens=90, temperature=1.0, seed=1, n=3)
    want = samples(text(5, 40), options)
    for request in want:
        request.parent = None
        run(make_engine(decoder), [request])
    first, _, third = samples(text(5, 40), options)
    second = make_request(text(5, 40), replace(options, max_tokens=50), parent=first)
    engine = make_engine(decoder, max_batch=2)
    run(engine, [first, second, third])
    assert (first.output, third.output) == (want[0].output, want[2].output)


def test_nothing_is_given_back_while_some_layer_sees_everything() -> None:
    engine = make_engine(tiny_decoder(windows=(20, None)), block_size=BLOCK)
    request = make_request(PROMPTS[0], PARAMS)
    (held,) = counts_of_blocks(engine, [request])
    assert min(held) >= 300 // BLOCK
    assert request.block_table.num_released == 0


@pytest.mark.parametrize("windows", [(1, 1), (2, 9), (16, 16), (50, None), (511, 512), (513, 600)], ids=str)
def test_windows_equal_a_dense_reference(windows: tuple[int | None, ...]) -> None:
    """The likeliest token after every prefix, by decoding and by a dense mask, far beyond the window."""
    decoder = tiny_decoder(windows=windows)
    request = make_request(text(4, 600), SamplingParams(max_tokens=40, logprobs=1, prompt_logprobs=0))
    run(make_engine(decoder, prefill_chunk=100), [request])
    want = dense_logits(tiny_decoder(windows=windows, packed=False), request.tokens).log_softmax(-1)
    reports = [*request.prompt_logprobs[1:], *request.logprobs]
    assert len(reports) == len(request.tokens) - 1
    for place, report in enumerate(reports):
        assert report is not None
        token = request.tokens[place + 1]
        assert report[token] == pytest.approx(float(want[place, token]), abs=1e-4)
    assert request.output == want[599:-1].argmax(-1).tolist()
