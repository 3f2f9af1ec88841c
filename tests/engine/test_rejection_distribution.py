"""The rejection rule in the engine: distribution of strings over seeds, replay of every choice,
planted defects.

Tokens depend on the draft tokens, so the references are the model's exact distribution and a plain
rejection rule at every position. Sampled draft tokens and the block rule are in
``test_sampled_drafts.py``.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from chi_square import p_value_of
from drafting.trees import DraftCase, Growing, TreeDrafter, random_trees
from engine import cases
from engine.cases import PROMPTS, ask, assert_same, drafter, params, plain, total, watch
from pronk.base.arrays import FLOAT32, Array
from pronk.cache.blocks import BlockTable
from pronk.drafting import Drafter, Merged, PromptLookup, Proposer, Recycling, Suffix
from pronk.engine.request import Request
from pronk.engine.request_step import OutputProcessor
from pronk.models.decoder import Decoder
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.model_runner import ForwardResult
from pronk.sampling.logits_processors import TokenContext
from pronk.sampling.noise import rejection_noise, rejection_uniform
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.sampling.tree import TokenTree
from sampling.test_sampler import BAD_WORDS, ENDS, scores_of
from softmax import log_softmax, softmax
from tiny_models import context_of, make_engine, make_request, run, tiny_decoder

String = tuple[int, ...]


def bushy(case: DraftCase) -> TokenTree:
    """Return a tree of depth 2 with nearly all tokens, so that most accepted tokens are off the
    main chain.

    Siblings are sorted: in a random order, defects that favour the first sibling would cancel.
    """
    tree = Growing([case.root])
    dice = case.dice
    for first in sorted(dice.sample(range(case.vocab), min(case.vocab - 1, 9))):
        for second in sorted(dice.sample(range(case.vocab), 5)):
            tree.chain(0, [first, second])
    return tree.done()


def proposers(vocab: int) -> dict[str, Drafter]:
    return {
        "prompt_lookup": PromptLookup(min_ngram=1, num_tokens=8, num_chains=4),
        "random": TreeDrafter(random_trees, vocab=vocab),
        "bushy": TreeDrafter(bushy, vocab=vocab),
        "recycling": Recycling(num_nodes=8, top_k=3),
        "shared": Merged((Recycling(shared=True), Suffix())),
    }


def logits_of(decoder: Decoder, text: Sequence[int], prompt: int) -> Array:
    """Return logits ``[len(text), vocab]`` of one forward pass."""
    engine = make_engine(decoder)
    block_table = BlockTable()
    engine.cache.prepare(block_table, len(text))
    entry = BatchEntry(block_table, TokenTree.chain(text), range(len(text)), prompt)
    return engine.runner.forward(ForwardBatch([entry])).logits[0][:]


# Admission of a request takes time for each running request, so batches are small.
SMALL = 5
SAMPLES = 800
BATCH = 25
PROMPT = (0, 3, 1, 4, 3, 1, 2, 3, 1, 0, 3, 1)
# The first of 4 tokens comes from prefill without draft tokens.
DRAW = SamplingParams(rule="rejection", temperature=2.0, max_tokens=4)
OPTIONS = {
    "temperature": DRAW,
    "colder": replace(DRAW, temperature=1.6),
    "shaped": replace(
        DRAW, top_p=0.9, presence_penalty=0.8, repetition_penalty=1.2, logit_bias={2: 0.7}
    ),
}


@cache
def distribution_of(name: str) -> Array:
    """Return the exact distribution of the first three tokens, by plain logits processors."""
    decoder = tiny_decoder(vocab=SMALL)
    joint = np.ones((SMALL,) * 3)
    for output in ((), *product(range(SMALL)), *product(range(SMALL), repeat=2)):
        made = Sampler(OPTIONS[name], 0, TokenContext(PROMPT), SMALL)
        for token in output:
            made.advance(token)
        logits = logits_of(decoder, [*PROMPT, *output], len(PROMPT))[-1]
        after = softmax(scores_of(logits, made))
        joint[output] *= after.reshape(-1, *[1] * (2 - len(output)))
    return joint


def draw(proposer: str, options: str, samples: int = SAMPLES) -> list[Request]:
    engine = make_engine(tiny_decoder(vocab=SMALL), max_batch=BATCH, num_blocks=16 * BATCH)
    by = proposers(SMALL)[proposer].bind(engine.target)
    asked = [
        make_request(PROMPT, replace(OPTIONS[options], seed=seed), by, vocab=SMALL)
        for seed in range(samples)
    ]
    run(engine, asked)
    return asked


drawn = cache(draw)


def p_value(strings: Sequence[Request], distribution: Array) -> float:
    cells = {cell: float(distribution[cell]) for cell in product(range(SMALL), repeat=3)}
    return p_value_of([tuple(request.output[:3]) for request in strings], cells, least_cells=16)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("proposer", "options"),
    [
        ("prompt_lookup", "shaped"),
        pytest.param("random", "temperature", marks=pytest.mark.slow),
        pytest.param("bushy", "temperature", marks=pytest.mark.slow),
        ("bushy", "shaped"),
        pytest.param("recycling", "colder", marks=pytest.mark.slow),
        pytest.param("shared", "temperature", marks=pytest.mark.slow),
    ],
)
def test_strings_have_the_distribution_of_the_model(proposer: str, options: str) -> None:
    strings = drawn(proposer, options)
    assert p_value(strings, distribution_of(options)) > 1e-4
    assert SAMPLES / 5 < total(strings, "accepted") < total(strings, "drafted") / 2
    assert total(strings, "moved") > 0
    assert total(strings, "target_steps") < 0.95 * total(strings, "generated_tokens")


def test_the_distribution_of_other_options_is_detected() -> None:
    assert p_value(drawn("bushy", "temperature"), distribution_of("colder")) < 1e-4


VOCAB = 18
TEXTS = tuple(
    tuple(random.Random(length).choices(range(VOCAB), k=length)) for length in (1, 16, 77, 505)
)
REPLAYED: list[dict[str, Any]] = [
    {"temperature": 2.5, "min_tokens": 30},
    {"temperature": 3.0, "top_k": 9, "min_p": 0.02, "min_tokens": 25},
    {"temperature": 3.0, "top_p": 0.8, "min_tokens": 15},
    cases.OPTIONS["penalties"] | {"temperature": 2.0, "min_tokens": 25},
    {
        "temperature": 1.3,
        "min_tokens": 12,
        "bad_words": ["given as tokens"],
        "logit_bias": {3: 1.0, 6: 3.0, 8: 2.0},
    },
]


def slow_choice(made: Sampler, logits: Array, draft_tokens: Sequence[int]) -> int:
    p = softmax(scores_of(logits, made))
    place = len(made.context)
    for trial, draft in enumerate(draft_tokens):
        if rejection_uniform(made.trial_seed, place, trial) < p[draft] / p.sum():
            return draft
        p[draft] = 0.0
    with np.errstate(divide="ignore"):
        return int(
            (np.log(p) + rejection_noise(made.trial_seed, place, np.arange(len(p)))).argmax()
        )


def request(
    text: Sequence[int], options: SamplingParams, proposer: Proposer[Any] | None = None
) -> Request:
    bad = BAD_WORDS if options.bad_words else ()
    return make_request(text, options, proposer, stop_token_ids=ENDS, bad_words=bad, vocab=VOCAB)


def replay(done: Request, passes: Sequence[tuple[int, TokenTree]], decoder: Decoder) -> int:
    """Repeat every choice by the plain rule on logits of plain decoding; return the number of
    accepted draft tokens.
    """
    made = request(done.prompt, done.params).sampler
    logits = logits_of(decoder, done.tokens, len(done.prompt))
    text = done.tokens
    accepted = 0
    logprobs = log_softmax(logits)
    for length, tree in passes:
        if length + len(tree) < len(done.prompt):
            continue  # prefill
        node = len(tree) - 1 if length < len(done.prompt) - 1 else 0
        while len(made.context) < len(text):
            place = len(made.context)
            draft_tokens = [
                tree.tokens[i] for i, parent in enumerate(tree.parents) if parent == node
            ]
            token = slow_choice(made, logits[place - 1], draft_tokens)
            assert token == text[place]
            logprob = done.result.logprobs[place - len(done.prompt)][token]
            assert logprob == pytest.approx(float(logprobs[place - 1, token]), abs=1e-4)
            made.advance(token)
            if token not in draft_tokens:
                break
            node = next(
                i
                for i, parent in enumerate(tree.parents)
                if parent == node and tree.tokens[i] == token
            )
            accepted += 1
    assert context_of(made) == text
    return accepted


@pytest.mark.parametrize(
    "options",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in REPLAYED[:3]), *REPLAYED[3:]],
    ids=str,
)
def test_mixed_batches(options: dict[str, Any]) -> None:
    """Requests with ``coupled`` and with ``rejection`` share a batch, and each has its own rule's
    result.
    """
    decoder = tiny_decoder(vocab=VOCAB)
    engine = make_engine(decoder)
    passes = dict[int, list[tuple[int, TokenTree]]]()

    def note(batch: ForwardBatch, _: ForwardResult) -> None:
        for table, tree in ((entry.block_table, entry.tree) for entry in batch.entries):
            passes.setdefault(id(table), []).append((table.length, tree))

    watch(engine, note)
    base = SamplingParams(max_tokens=30, logprobs=1, **options)
    bound = [each.bind(engine.target) for each in proposers(VOCAB).values()]
    asked = [
        request(text, replace(base, seed=index, rule=rule), proposer)
        for index, (text, proposer) in enumerate(product(TEXTS, bound))
        for rule in ("coupled", "rejection")
    ]
    run(engine, asked)
    coupled = [each for each in asked if not each.params.rejects]
    rejecting = [each for each in asked if each.params.rejects]
    replayed = [replay(each, passes[id(each.block_table)], decoder) for each in rejecting]
    alone = [request(each.prompt, each.params) for each in coupled]
    run(make_engine(decoder), alone)
    assert_same(coupled, alone)
    assert total(coupled, "moved") > 0
    assert sum(replayed) > 40
    assert total(rejecting, "moved") > 0
    assert any(one.output != other.output for one, other in zip(coupled, rejecting, strict=True))


def test_accepted_rows_that_are_not_moved_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def unmoved(
        output_processor: OutputProcessor, request: Request, offsets: Sequence[int]
    ) -> None:
        request.stats.moved += sum(offset != place for place, offset in enumerate(offsets))
        output_processor.cache.commit_slots(request.block_table, range(len(offsets)))

    monkeypatch.setattr(OutputProcessor, "_commit_slots", unmoved)
    with pytest.raises(AssertionError) as caught:
        test_mixed_batches(REPLAYED[0])
    assert caught.traceback[-1].name == "replay"


@pytest.mark.parametrize("options", ["greedy", "repetition"])
def test_greedy_texts_are_equal_under_all_rules(options: str) -> None:
    want = plain(FLOAT32, options)
    for name, rule in product(("prompt_lookup", "oracle"), ("rejection", "block")):
        given = [replace(params(options, i), rule=rule) for i in range(len(PROMPTS))]
        got = [
            ask(prompt, each, drafter(name, want))
            for prompt, each in zip(PROMPTS, given, strict=True)
        ]
        run(make_engine(tiny_decoder()), got)
        assert_same(got, want)
    assert total(got, "moved") > 0
