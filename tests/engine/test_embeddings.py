"""Embeddings: transformers' hidden states; the same bits in every batch, with prefix caches and
preemptions.
"""

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from checkpoints import MakeCheckpoint, transformers_hidden
from pronk import LLM, AsyncLLM, OptionError, PromptError, PronkError, SamplingParams
from pronk.base.arrays import Array
from pronk.base.errors import ContextError, DeadlineError, OverloadedError
from pronk.engine.pooling import EmbeddingOptions

TOLERANCE = 1e-4
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt2",
    "gemma2",
    "gemma3_text",
    "granite",
    "olmo2",
    "smollm3",
)
FURTHER = ("granite_swa", "phi3", "ministral3", "mixtral", "qwen3_moe", "gpt_oss", "lfm2")


def tokens(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(300) for _ in range(length)]


def pooled(states: Array, options: EmbeddingOptions) -> Array:
    vector = states.mean(axis=0) if options.pooling == "mean" else states[-1]
    vector = vector[: options.dimensions]
    return vector / np.linalg.norm(vector) if options.normalize else vector


def embed(llm: LLM, texts: list[list[int]], **options: Any) -> Array:
    return llm.embed(texts, **options)


@pytest.mark.few(6)
@pytest.mark.parametrize("kernels", ["auto"])
@pytest.mark.parametrize("family", [*FAMILIES, *FURTHER])
def test_embeddings_equal_transformers(
    family: str, kernels: str, checkpoint: MakeCheckpoint
) -> None:
    """Three texts in one batch, of which one is longer than a chunk of the prompt."""
    folder = checkpoint(family)
    texts = [tokens(70, 1), tokens(9, 2), tokens(1, 3)]
    llm = LLM(folder, threads=1, dtype="float32", kernels=kernels, prefill_chunk=16, max_batch=2)
    states = [transformers_hidden(folder, text) for text in texts]
    assert states[0].std() > 0.3, "hidden states too flat to show anything"
    for options in (
        EmbeddingOptions(),
        EmbeddingOptions("last"),
        EmbeddingOptions("mean", 7),
        EmbeddingOptions("last", 48, normalize=False),
        EmbeddingOptions("mean", normalize=False),
    ):
        found = embed(llm, texts, **vars(options))
        assert found.dtype == np.float32
        assert found.shape == (3, options.dimensions or 48)
        for vector, each in zip(found, states, strict=True):
            assert np.abs(vector - pooled(each, options)).max() < TOLERANCE
        if options.normalize:
            assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-6


TEXTS = [tokens(length, length) for length in (3, 60, 17, 33, 1, 90, 16, 45)]
DRAFTERS = ("prompt_lookup(min_ngram=1)", "recycling")


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_same_bits_beside_running_generations(drafter: str, dtype: str) -> None:
    """The texts keep their tokens too, and drafters that read hidden states in the same passes keep
    their proposals.
    """
    llm = LLM(threads=1, dtype=dtype, budget="all", max_batch=5, prefill_chunk=16)
    pooling = {text_number: ("mean", "last")[text_number % 2] for text_number in range(len(TEXTS))}
    alone = [llm.embed([text], pooling=pooling[number])[0] for number, text in enumerate(TEXTS)]  # type: ignore[arg-type]
    prompts = ["def add(a, b):\n    return a + b\n\ndef add(a, b):\n", "one two one two one"]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    want = [llm.generate(prompt, params, drafter=drafter) for prompt in prompts]
    factory = llm.request_factory
    proposer = llm.get_proposer(drafter)
    texts = [
        factory.create_request(factory.encode_prompt(prompt), params, proposer)
        for prompt in prompts
    ]
    embeddings = [
        factory.create_embeddings([text], EmbeddingOptions(pooling[number]), llm.engine.runner)[0]  # type: ignore[arg-type]
        for number, text in enumerate(TEXTS)
    ]
    llm.engine.run([embeddings[0], *texts, *embeddings[1:]])
    for number, request in enumerate(embeddings):
        assert request.pooler is not None
        found = request.pooler.options.embeddings([request.pooler], llm.config.hidden_size)[0]
        assert found.tobytes() == alone[number].tobytes()
        assert (request.num_generated, request.result.finish_reason, request.stats.draft_error) == (
            0,
            "length",
            None,
        )
    for request, completion in zip(texts, want, strict=True):
        assert tuple(request.output) == tuple(completion.token_ids)
        assert request.stats.accepted == completion.stats.accepted
    assert sum(request.stats.accepted for request in texts) > 0
    assert llm.engine.cache.allocator.num_free == llm.engine.cache.allocator.num_blocks


def test_same_bits_after_preemptions() -> None:
    """Requests of high priority take the blocks of half-computed embeddings, which begin again."""
    small = LLM(threads=1, kv_memory="200KB", max_batch=4, prefill_chunk=16)
    large = LLM(threads=1)
    size = small.engine.cache.allocator.num_blocks * small.engine.cache.block_size
    texts = [tokens(size * 3 // 5, seed) for seed in range(4)]
    for pooling in ("mean", "last"):
        requests = small.request_factory.create_embeddings(
            texts, EmbeddingOptions(pooling), small.engine.runner
        )  # type: ignore[arg-type]
        for number, request in enumerate(requests):
            request.priority = number
            small.engine.add(request)
            for _ in range(2):
                small.engine.step()
        while not all(request.ended for request in requests):
            small.engine.step()
        assert sum(request.stats.preemptions for request in requests) > 0
        found = EmbeddingOptions(pooling).embeddings(
            [each.pooler for each in requests], small.config.hidden_size
        )  # type: ignore[arg-type]
        assert found.tobytes() == large.embed(texts, pooling=pooling).tobytes()  # type: ignore[arg-type]


def test_prefix_cache() -> None:
    """The last token alone needs no rows of cached tokens; the mean needs all of them."""
    llm = LLM(threads=1, prefix_cache=True)
    plain = LLM(threads=1)
    text = tokens(200)
    llm.generate(text, SamplingParams(max_tokens=1))
    for pooling, cached in (("mean", False), ("last", True)):
        options = EmbeddingOptions(pooling)  # type: ignore[arg-type]
        (request,) = llm.request_factory.create_embeddings([text], options, llm.engine.runner)
        llm.engine.run([request])
        assert (request.stats.cached_tokens > 100) is cached
        found = options.embeddings([request.pooler], llm.config.hidden_size)
        assert found.tobytes() == plain.embed([text], pooling=pooling).tobytes()  # type: ignore[arg-type]
    fresh = tokens(200, 1)
    llm.embed([fresh])
    assert llm.generate(fresh, SamplingParams(max_tokens=1)).stats.cached_tokens > 100


def test_prompt_cache_on_disk(tmp_path: Any) -> None:
    text = tokens(300)
    first = LLM(threads=1, prompt_cache=tmp_path)
    want = {pooling: first.embed([text], pooling=pooling) for pooling in ("mean", "last")}  # type: ignore[arg-type]
    first.close()
    second = LLM(threads=1, prompt_cache=tmp_path)
    for pooling, vectors in want.items():
        assert second.embed([text], pooling=pooling).tobytes() == vectors.tobytes()  # type: ignore[arg-type]
    second.close()


def test_invalid_texts_and_options(checkpoint: MakeCheckpoint) -> None:
    llm = LLM(checkpoint("llama"), threads=1)
    assert llm.embed([]).shape == (0, 48)
    for texts, error, message in (
        ([[]], PromptError, "prompt: expected at least one token, found none"),
        ([[1], [300]], PromptError, r"prompt: expected token ids in 0..299, found 300"),
        (
            [[1] * 256],
            ContextError,
            r"prompt: expected at most 255 tokens \(context 256\), found 256",
        ),
        (
            "a text",
            PromptError,
            "expected a list of texts or of lists of token ids, found the text 'a text'",
        ),
    ):
        with pytest.raises(error, match=message):
            llm.embed(texts)  # type: ignore[arg-type]
    for options, message in (
        ({"dimensions": 0}, "dimensions: expected an integer in 1..48, found 0"),
        ({"dimensions": 49}, "dimensions: expected an integer in 1..48, found 49"),
        ({"pooling": "cls"}, "pooling: expected one of"),
        ({"normalize": "no"}, "normalize: expected true or false, found 'no'"),
    ):
        with pytest.raises(OptionError, match=message):
            llm.embed([[1]], **options)
    assert llm.embed([[1] * 255]).shape == (1, 48)


def test_hidden_states_that_are_not_finite(checkpoint: MakeCheckpoint) -> None:
    """The other request of the call fails with it, and the engine goes on."""
    llm = LLM(checkpoint("llama"), threads=1)
    want = llm.embed([[1, 2]])
    llm.engine.runner.decoder.embedding[7] = np.nan
    with pytest.raises(PronkError, match="expected finite hidden states, found infinity or NaN"):
        llm.embed([[1, 2], [7, 2]])
    assert llm.embed([[1, 2]]).tobytes() == want.tobytes()


def test_async_embeddings_beside_a_stream(checkpoint: MakeCheckpoint) -> None:
    llm = LLM(checkpoint("llama"), threads=1, max_batch=4)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    want = llm.embed(TEXTS)
    text = llm.generate("a b", params).text

    async def main() -> None:
        async with AsyncLLM(llm, max_requests=20) as served:

            async def stream() -> str:
                return "".join([piece.text async for piece in served.stream("a b", params)])

            streamed, *found = await asyncio.gather(
                stream(), *(served.embed(TEXTS) for _ in range(2))
            )
            assert streamed == text
            assert all(each.tobytes() == want.tobytes() for each in found)
            assert (await served.embed([])).shape == (0, 48)
            # more texts than samples at a time: some wait for the others
            many = await served.embed(TEXTS * 3)
            assert many.tobytes() == 3 * want.tobytes()
            errors = await asyncio.gather(
                *(served.embed(TEXTS) for _ in range(3)), return_exceptions=True
            )
            assert [type(each) for each in errors] == [np.ndarray, np.ndarray, OverloadedError]
            with pytest.raises(DeadlineError):
                await served.embed(TEXTS, deadline=0.0)
            with pytest.raises(PromptError):
                await served.embed([[999]])
            with pytest.raises(OptionError, match="dimensions"):
                await served.embed(TEXTS, dimensions=1000)
            task = asyncio.create_task(served.embed(TEXTS))
            await asyncio.sleep(0)  # the task has begun, and waits for a thread
            assert served.num_requests == len(TEXTS)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert served.num_requests == 0
        assert llm.engine.cache.allocator.num_free == llm.engine.cache.allocator.num_blocks

    asyncio.run(main())
