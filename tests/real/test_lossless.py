"""On real models no option changes a greedy text: drafter, batch, chunk, cache, preemption,
workers.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pronk.cache.layout import kv_bytes_per_token
from pronk.engine.request import Request
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from real.questions import QUESTIONS, conversation

TOKENS = 20
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
COPY = """Repeat this code exactly:
def area(width, height):
    return width * height

def volume(width, height, depth):
    return area(width, height) * depth
"""
ASKED = (QUESTIONS[1], QUESTIONS[5], COPY)
FEW_DRAFTERS = ("auto", "suffix", 'draft_model(model="smollm2")')
OTHER_DRAFTERS = ("prompt_lookup", "recycling", "lookahead", "jacobi", "gauss_seidel",
                  "merged(prompt_lookup, recycling)", "first_of(suffix, lookahead)")  # fmt: skip


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    return [llm.chat_ids(conversation(question)) for question in ASKED]


@pytest.fixture(scope="module")
def plain(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [llm.generate(prompt, GREEDY, drafter="autoregressive").token_ids for prompt in prompts]


@pytest.fixture(scope="module")
def accepted() -> Iterator[dict[str, int]]:
    """Count accepted draft tokens by drafter; at the end all drafters have some."""
    counts: dict[str, int] = {}
    yield counts
    assert all(counts.values()), counts


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "drafter",
    [*FEW_DRAFTERS, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHER_DRAFTERS)],
)
def test_drafters(
    drafter: str,
    name: str,
    llm: LLM,
    prompts: list[list[int]],
    plain: list[list[int]],
    accepted: dict[str, int],
) -> None:
    single = llm.generate(prompts[-1], GREEDY, drafter=drafter)
    assert single.token_ids == plain[-1]
    batch = llm.generate(prompts, GREEDY, drafter=drafter)
    assert [completion.token_ids for completion in batch] == plain
    accepted[f"{name}: {drafter}"] = sum(
        completion.stats.accepted for completion in (single, *batch)
    )


@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param("eagle3", marks=pytest.mark.slow),
        pytest.param("eagle3(num_tokens=4, num_nodes=12)", marks=pytest.mark.slow),
        "auto",
    ],
)
def test_the_head_that_comes_with_pronk(
    drafter: str, name: str, llm: LLM, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    """Texts, greedy and sampled, alone and in a batch; the head's draft tokens are accepted."""
    if name != "smollm2":
        pytest.skip("no head for this model comes with pronk")
    sampled = [
        SamplingParams(max_tokens=TOKENS, temperature=0.7, seed=seed)
        for seed in range(len(prompts))
    ]
    want = [
        *plain,
        *(each.token_ids for each in llm.generate(prompts, sampled, drafter="autoregressive")),
    ]
    single = llm.generate(prompts[-1], GREEDY, drafter=drafter)
    batch = llm.generate(
        [*prompts, *prompts], [*[GREEDY] * len(prompts), *sampled], drafter=drafter
    )
    assert single.token_ids == plain[-1]
    assert [completion.token_ids for completion in batch] == want
    accepted = [
        source.accepted
        for each in batch
        for kind, source in each.stats.sources.items()
        if kind == "eagle3"
    ]
    assert sum(accepted) > 10


def test_sampled_texts_do_not_depend_on_the_drafter(llm: LLM, prompts: list[list[int]]) -> None:
    params = [
        SamplingParams(max_tokens=TOKENS, temperature=0.7, top_p=0.9, seed=seed)
        for seed in range(3)
    ]
    want = [
        completion.token_ids
        for completion in llm.generate(prompts, params, drafter="autoregressive")
    ]
    assert len({tuple(ids) for ids in want}) == 3
    found = llm.generate(prompts, params, drafter="suffix")
    assert [completion.token_ids for completion in found] == want


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"prefill_chunk": 16}, marks=pytest.mark.slow),
        {"prefix_cache": True},
        pytest.param({"workers": 2, "threads": 1}, id="workers", marks=pytest.mark.slow),
        pytest.param({"threads": 1}, marks=pytest.mark.slow),
        {"weight_cache": True},
    ],
    ids="-".join,
)
def test_options_of_the_model(
    options: dict[str, Any],
    name: str,
    tmp_path: Path,
    prompts: list[list[int]],
    plain: list[list[int]],
) -> None:
    if options.get("weight_cache"):
        options = {"weight_cache": tmp_path}
    other = LLM(
        name, budget="all", calibration=False, drafter="merged(prompt_lookup, recycling)", **options
    )
    try:
        # the second time with a warm prefix cache
        for _ in range(2 if "prefix_cache" in options else 1):
            found = other.generate(prompts, GREEDY)
            assert [completion.token_ids for completion in found] == plain
        assert sum(completion.stats.accepted for completion in found)
        if "prefix_cache" in options:
            assert sum(completion.stats.cached_tokens for completion in found)
    finally:
        other.close()


def test_preemption(name: str, llm: LLM, prompts: list[list[int]], plain: list[list[int]]) -> None:
    """The cache holds the longest request and little more, so that later ones of higher priority
    preempt it.
    """
    other = LLM(
        name,
        calibration=False,
        drafter="prompt_lookup",
        budget="all",
        kv_memory=_room(llm, prompts),
    )
    proposer = other.get_proposer()
    requests: list[Request] = []
    for prompt in prompts:
        requests += other.request_factory.create_samples(
            other.request_factory.encode_prompt(prompt), GREEDY, proposer
        )
    for priority, request in enumerate(requests):
        request.priority = priority
        other.engine.add(request)
        for _ in range(4):
            other.engine.step()
    while not all(request.ended for request in requests):
        other.engine.step()
    assert [list(request.output) for request in requests] == plain
    assert sum(request.stats.preemptions for request in requests)


def _room(llm: LLM, prompts: list[list[int]]) -> int:
    """Return the bytes of a cache for the longest text, its draft tokens and some blocks."""
    return kv_bytes_per_token(llm.config, llm.engine.cache.kv_dtype) * (
        max(map(len, prompts)) + TOKENS + 48
    )


@pytest.mark.parametrize("kv_dtype", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_quantized_kv_cache(kv_dtype: str, name: str, prompts: list[list[int]]) -> None:
    other = LLM(name, calibration=False, budget="all", kv_dtype=kv_dtype)
    want = [
        other.generate(prompt, GREEDY, drafter="autoregressive").token_ids for prompt in prompts
    ]
    found = other.generate(prompts, GREEDY, drafter="merged(prompt_lookup, recycling)")
    assert [completion.token_ids for completion in found] == want
    assert sum(completion.stats.accepted for completion in found)
