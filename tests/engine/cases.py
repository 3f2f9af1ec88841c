"""Prompts, sampling options and drafters of the engine's tests, with the results of plain
decoding.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from drafting.from_draft import drafts
from drafting.from_target import random_assistant, trained_eagle
from drafting.trees import TreeDrafter, adversarial, explore_trees, oracle_trees, random_trees
from guides import TOY
from pronk.base.arrays import DType
from pronk.drafting import Drafter, make_drafter
from pronk.drafting.registry import DRAFTERS as REGISTERED
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.models.forward_batch import ForwardBatch
from pronk.models.model_runner import ForwardResult
from pronk.sampling.params import SamplingParams
from tiny_models import SILENT, VOCAB, make_engine, make_request, run, tiny_decoder

ENDS = (7, 90)
SEED = 100


def text(seed: int, length: int) -> list[int]:
    """Return random tokens whose second half repeats the first half."""
    dice = random.Random(seed)
    half = [dice.randrange(VOCAB) for _ in range(-(-length // 2))]
    return (half + half)[:length]


# Lengths: one token, one block, across attention's boundary of 512 keys, across two chunks of
# prefill.
PROMPTS = tuple(tuple(text(seed, length)) for seed, length in enumerate((1, 16, 77, 300, 505, 520)))

# Drafters of the engine that need options; all others are made by their names.
SPECS: dict[str, str] = {
    "prompt_lookup": "prompt_lookup(min_ngram=1, num_tokens=12, num_chains=4)",
    "recycling": "recycling(num_nodes=20, top_k=6)",
    "merged": (
        f"merged(prompt_lookup(min_ngram=1), recycling(shared=True), {drafts.spec()}, num_nodes=20)"
    ),
    "first_of": "first_of(prompt_lookup(max_ngram=3), recycling)",
    **drafts.specs(),
    "eagle3": trained_eagle.spec(num_tokens=4),
    "mtp": trained_eagle.spec("mtp"),
    "gemma4_assistant": random_assistant.spec(),
}
COMPOSED = {
    "auto": f"auto({SPECS['threshold']}, {SPECS['eagle3']})",
    "eagle3 tree": trained_eagle.spec(num_tokens=3, num_nodes=12, beam=3),
    "mtp block": trained_eagle.block_spec(),
    "eagle3 in two stages": trained_eagle.spec(num_tokens=4, num_clusters=20, num_best=6),
    "mtp tree in two stages": trained_eagle.spec(
        "mtp", num_tokens=3, num_nodes=12, beam=3, draft_vocab=120, num_clusters=10, num_best=3
    ),
    "assistant in two stages": random_assistant.spec(clusters=VOCAB, num_tokens=3),
}
DRAFTERS: dict[str, Drafter] = {
    **{
        name: make_drafter(spec)
        for name, spec in ({name: name for name in REGISTERED} | SPECS | COMPOSED).items()
    },
    "random": TreeDrafter(random_trees),
    "oracle": TreeDrafter(oracle_trees(0.7)),
    "adversarial": TreeDrafter(adversarial, stop_token_ids=ENDS),
    "explore": TreeDrafter(explore_trees),
}

# One drafter per prompt, for mixed batches.
MIXED = ("autoregressive", "prompt_lookup", "random", "oracle", "adversarial", "explore")

CORE = (
    "greedy",
    "temperature",
    "top_p",
    "penalties",
    "bias",
    "all",
    "guided",
    "guided all",
    "thinking",
)
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "top_k": {"temperature": 1.2, "top_k": 4},
    "min_p": {"temperature": 1.5, "min_p": 0.05},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
    },
    # as the makers of models recommend
    "recommended": {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
    },
    "repetition": {"repetition_penalty": 1.6},
    "presence": {"temperature": 0.8, "presence_penalty": 1.5},
    "frequency": {"temperature": 0.8, "frequency_penalty": 1.1},
    "bias": {"temperature": 0.8, "logit_bias": {3: 6.0, 50: 4.0, 90: -100.0}},
    "min_tokens": {"temperature": 1.0, "min_tokens": 30, "logit_bias": {7: 5.0}},
    "bad_words": {"bad_words": ["given as tokens"], "logit_bias": {3: 9.0, 5: 8.0}},
    # two tokens, so texts repeat themselves
    "repetitive": {"temperature": 0.7, "logit_bias": {3: 100.0, 5: 100.0}},
    # Three tokens, so texts repeat themselves; the stop strings contain the name of a special
    # token.
    "stop": {
        "temperature": 0.7,
        "logit_bias": {3: 100.0, 5: 100.0, SILENT: 100.0},
        "stop": ["(5)<|11|>(3)<|11|>", "(3)(5)<|11|><|11|>"],
    },
    "all": {
        "temperature": 1.0,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "logit_bias": {3: 3.0, 7: 2.0},
        "min_tokens": 20,
        "bad_words": ["given as tokens"],
    },
}
OPTIONS |= {
    "guided": {"temperature": 0.8, "guide": TOY},
    "guided greedy": {"guide": TOY},
    "guided all": OPTIONS["all"] | {"guide": TOY},
    "thinking": {"temperature": 0.8, "thinking_budget": 4, "logit_bias": {3: 5.0}},
    "thinking all": OPTIONS["all"]
    | {"thinking_budget": 2, "thinking_message": "+-", "logit_bias": {3: 9.0}},
    "guided unforced": OPTIONS["temperature"] | {"guide": TOY, "guide_mode": "plain"},
}
# Token sequences of the bad words: one token, and two likely sequences.
BAD_WORDS = [[11], [3, 3], [3, 5, 3]]


# Expected output of every request: all pairs and triples of the two tokens of repetitive texts, then
# random tokens.
PREDICTION = (3, 3, 3, 5, 3, 5, 5, 5, 3, 3, *text(SEED, 60))


def params(options: str, index: int, max_tokens: int = 40) -> SamplingParams:
    """Return options of request number ``index``, with its own seed."""
    return SamplingParams(
        max_tokens=max_tokens,
        seed=SEED + index,
        logprobs=2,
        prediction=PREDICTION,
        **OPTIONS[options],
    )


def ask(prompt: Sequence[int], options: SamplingParams, drafter: Drafter | None = None) -> Request:
    """Return a request with the stop tokens ``ENDS``."""
    return make_request(
        prompt,
        options,
        drafter,
        stop_token_ids=ENDS,
        bad_words=BAD_WORDS if options.bad_words else (),
    )


@cache
def plain(
    dtype: DType,
    options: str,
    prompts: tuple[tuple[int, ...], ...] = PROMPTS,
    max_tokens: int = 40,
    **variant: Any,
) -> tuple[Request, ...]:
    """Return the finished requests of plain decoding, each alone in a fresh engine."""
    made = []
    for index, prompt in enumerate(prompts):
        made.append(ask(prompt, params(options, index, max_tokens=max_tokens)))
        run(engine_of(dtype, **variant), made[-1:])
    return tuple(made)


def engine_of(
    dtype: DType, *, kv_dtype: DType | None = None, share_prefixes: bool = False, **variant: Any
) -> Engine:
    """Return a fresh engine; ``variant`` are options of the model."""
    return make_engine(
        tiny_decoder(dtype, **variant), kv_dtype=kv_dtype, share_prefixes=share_prefixes
    )


def texts(known: Sequence[Request]) -> dict[tuple[tuple[int, ...], int], list[int]]:
    """Return the texts of finished requests by (prompt, seed), for :class:`TreeDrafter`."""
    return {(tuple(request.prompt), request.seed): request.tokens for request in known}


def drafter(name: str, known: Sequence[Request]) -> Drafter:
    """Return the drafter of a name in :data:`DRAFTERS` or of a specification, with which guests
    test their drafters.

    A :class:`TreeDrafter` gets right tokens from the finished requests ``known``.
    """
    made = DRAFTERS[name] if name in DRAFTERS else make_drafter(name)
    return replace(made, texts=texts(known)) if isinstance(made, TreeDrafter) else made


def total(requests: Sequence[Request], count: str) -> int:
    """Return the sum of one count of :class:`Stats`."""
    return sum(getattr(request.stats, count) for request in requests)


def assert_same(got: Sequence[Request], want: Sequence[Request]) -> None:
    """Check that tokens, texts, finish reasons and the bits of logprobs are equal."""
    for one, other in zip(got, want, strict=True):
        assert (one.prompt, one.seed) == (other.prompt, other.seed)
        assert (one.output, one.result.text) == (other.output, other.result.text)
        assert (one.result.finish_reason, one.result.stop_reason) == (
            other.result.finish_reason,
            other.result.stop_reason,
        )
        assert one.result.logprobs == other.result.logprobs


def assert_not_vacuous(name: str, requests: Sequence[Request]) -> None:
    """Check that draft tokens were verified and, for drafters with right tokens, accepted, also off
    the main chain.
    """
    forced = any(
        request.params.guide and request.params.guide_mode == "forced" for request in requests
    )
    assert (total(requests, "drafted") > 0) == (name != "autoregressive" or forced)
    if forced:
        assert sum(request.stats.sources["grammar"].accepted for request in requests) > 0
    repetitive = requests[0].params.logit_bias in (
        OPTIONS["repetitive"]["logit_bias"],
        OPTIONS["stop"]["logit_bias"],
    )
    if name in ("oracle", "adversarial", "explore") or (
        repetitive and name not in ("autoregressive", "random")
    ):
        assert total(requests, "accepted") > 0
    if name in ("oracle", "adversarial"):
        assert total(requests, "moved") > 0
    assert total(requests, "target_steps") <= total(requests, "generated_tokens")
    if name == "autoregressive" and not forced:
        assert total(requests, "target_steps") == total(requests, "generated_tokens")


def watch(engine: Engine, after: Callable[[ForwardBatch, ForwardResult], None]) -> None:
    """Call ``after(batch, result)`` after every forward pass."""
    forward = engine.runner.forward

    def watched(batch: ForwardBatch, collect: frozenset[int] = frozenset()) -> ForwardResult:
        result = forward(batch, collect)
        after(batch, result)
        return result

    engine.runner.forward = watched  # type: ignore[method-assign]


def step_until_ended(engine: Engine, requests: Sequence[Request]) -> None:
    """Step the engine until all requests have ended."""
    for _ in range(20_000):
        if all(request.ended for request in requests):
            return
        engine.step()
    raise AssertionError("the requests do not end")
