"""EAGLE-3 and MTP in the engine: proposals against the formulas, equal texts, equal acceptance
after cache hits.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from covering import covering
from drafting.drafting import (
    Asked,
    Watched,
    assert_no_blocks,
    assert_plain,
    context,
    decode,
    paths,
    plain_output,
    sampler_at,
    text,
)
from drafting.from_target.trained_eagle import (
    Form,
    Reference,
    bigram_decoder,
    bigram_module,
    copying_folder,
    copying_form,
    copying_head,
    decoder_with_table,
    random_head,
    spec,
    write_head,
)
from drafting.helpers import CHECKPOINTS, priced, within
from engine.cases import step_until_ended, total
from engine.test_rejection_distribution import (
    BATCH,
    OPTIONS,
    PROMPT,
    SMALL,
    distribution_of,
    p_value,
)
from pronk.base.arrays import BFLOAT16, FLOAT32, DType
from pronk.cache.budget import KVBudget
from pronk.cache.paged import PagedCache
from pronk.drafting import Proposer, make_drafter
from pronk.drafting.from_target._eagle_runner import EagleRunner
from pronk.drafting.from_target.eagle3 import Eagle3Proposer
from pronk.drafting.shared.chain import Chain
from pronk.drafting.target import Target
from pronk.engine.engine import Engine
from pronk.engine.options import BatchOptions
from pronk.engine.request import Request
from pronk.models.cost_model import CostCurve
from pronk.models.decoder import Decoder
from pronk.models.model_runner import ModelRunner
from pronk.sampling.params import Rule, SamplingParams
from softmax import softmax
from tiny_models import GivenTimes, make_engine, make_request, run, samples, tiny_decoder

KINDS = ("eagle3", "mtp")
PROMPTS = [[1, 2, 3], [5], text(7, 40), text(8, 77)]
SHAPES = {"chain": "", "tree": ", num_tokens=3, num_nodes=10, beam=3"}
EACH = pytest.mark.parametrize(
    ("kind", "shape"), [(kind, shape) for kind in KINDS for shape in SHAPES]
)


def copying(kind: str, shape: str = "chain") -> str:
    """Return the specification of a head that is right for most tokens of
    :func:`bigram_decoder`.
    """
    return f"{kind}(model={copying_folder(kind)!r}{SHAPES[shape]})"


def bound(made: str, decoder: Decoder, **options: Any) -> tuple[Engine, Proposer[Any]]:
    engine = make_engine(decoder, **options)
    return engine, make_drafter(made).bind(engine.target)


@cache
def reference(kind: str) -> Reference:
    return Reference(copying_head(bigram_module(), copying_form(kind), noise=0.02), bigram_module())


def check_chain(kind: str, request: Request, asked: Asked, most: int) -> None:
    """Compare draft tokens with those that the formulas give, drawn with the request's noise."""
    drafted = list[int]()
    sampler = sampler_at(request, asked.tokens)
    most = 0 if len(asked.tokens) == 1 else most  # a text of one token has no row
    for token in asked.tree.tokens[1:]:
        logits = reference(kind).logits(asked.tokens, drafted).astype(np.float32)
        assert token == sampler.choose(logits)
        drafted.append(token)
        sampler.advance(token)
    assert len(drafted) == min(most, asked.depth, asked.nodes)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 6, "repetition_penalty": 1.2}],
    ids=["greedy", "seeded", "recommended"],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompts", [PROMPTS[:3], PROMPTS[2:3]], ids=["batch", "alone"])
def test_chains_equal_the_formulas(
    kind: str,
    options: dict[str, Any],
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request alone is drafted in one call of the kernels; requests together, a pass for each
    token of all.
    """
    calls = list[Chain]()
    draft_in_one_call = EagleRunner.draft_in_one_call

    def counted(runner: EagleRunner, chains: Sequence[Chain]) -> None:
        draft_in_one_call(runner, chains)
        calls.extend(chains)

    monkeypatch.setattr(EagleRunner, "draft_in_one_call", counted)
    engine = make_engine(bigram_decoder())
    drafter = Watched(make_drafter(copying(kind)).bind(engine.target))
    requests = decode(engine, drafter, prompts, max_tokens=12, **options)
    assert calls or len(prompts) > 1
    for request in requests:
        for asked in drafter.of(request):
            check_chain(kind, request, asked, 6 if kind == "eagle3" else 3)
    assert total(requests, "accepted") > 0.4 * total(requests, "drafted")


def eagle2_tree(
    kind: str, tokens: Sequence[int], depth: int, width: int
) -> dict[tuple[int, ...], float]:
    """Return the probability of every node that the rule of EAGLE-2 reaches, by path; greedy
    decoding.
    """
    level = {(): 1.0}
    found = dict[tuple[int, ...], float]()
    for _ in range(depth):
        children = dict[tuple[int, ...], float]()
        for path, probability in level.items():
            after = softmax(reference(kind).logits(tokens, path))
            for token in np.argsort(-after, kind="stable")[:width]:
                children[*path, int(token)] = probability * float(after[token])
        found |= children
        level = dict(sorted(children.items(), key=lambda child: -child[1])[:width])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_trees_follow_the_rule_of_eagle2(kind: str) -> None:
    """All nodes that the search reaches are proposed, because ``num_nodes`` is large enough."""
    engine = make_engine(bigram_decoder())
    made = f"{kind}(model={copying_folder(kind)!r}, num_tokens=3, num_nodes=60, beam=3)"
    drafter = Watched(make_drafter(made).bind(engine.target))
    requests = decode(engine, drafter, PROMPTS[:3], max_tokens=24)
    checked = 0
    for request in requests:
        for asked in drafter.of(request)[::2]:  # the slow reference takes most of the time
            if asked.depth >= 3 and len(asked.tokens) > 1:
                assert paths(asked.tree) == set(eagle2_tree(kind, asked.tokens, 3, 3))
                checked += 1
    assert checked > 5
    assert total(requests, "moved") > 0  # accepted nodes off the main chain


TARGETS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": FLOAT32},
    "bfloat16": {"dtype": BFLOAT16},
    "int4": {"dtype": FLOAT32, "weights": "int4"},
    "quantized embedding": {},
}


@pytest.mark.few(11)
@pytest.mark.parametrize(
    ("kind", "shape", "target", "temperature", "rule"),
    covering(
        KINDS, [*SHAPES], [*TARGETS], [0.0, 0.8], ["coupled", "rejection", "block"], strength=3
    ),
)
def test_texts_are_equal_and_draft_tokens_right(
    kind: str, shape: str, target: str, temperature: float, rule: Rule
) -> None:
    check_texts(
        kind,
        shape,
        bigram_decoder(**TARGETS[target]) if TARGETS[target] else decoder_with_table(),
        temperature,
        rule,
    )


def check_texts(kind: str, shape: str, decoder: Decoder, temperature: float, rule: Rule) -> None:
    engine, drafter = bound(copying(kind, shape), decoder)
    options = {"max_tokens": 24, "temperature": temperature, "rule": rule}
    params = [SamplingParams(**options, seed=seed) for seed in range(len(PROMPTS))]
    requests = [
        make_request(prompt, own, drafter) for prompt, own in zip(PROMPTS, params, strict=True)
    ]
    run(engine, requests)
    if rule == "coupled" or temperature == 0:
        assert_plain(engine, requests)
    assert total(requests, "accepted") > 0.15 * total(requests, "generated_tokens")
    assert total(requests, "target_steps") < 0.9 * total(requests, "generated_tokens")
    assert_no_blocks(drafter)


@pytest.mark.parametrize(("shape", "rule"), covering([*SHAPES], ["rejection", "block"], strength=1))
def test_strings_have_the_targets_distribution(shape: str, rule: Rule) -> None:
    """The draft vocabulary lacks a token, so that draft tokens are drawn from a part of the
    vocabulary.
    """
    form = Form(draft=SMALL - 1, vocab=SMALL)
    folder = write_head(random_head(form), CHECKPOINTS / "small-eagle3")
    made = f"eagle3(model={str(folder)!r}{SHAPES[shape]})"
    engine, drafter = bound(made, tiny_decoder(vocab=SMALL), max_batch=BATCH, num_blocks=16 * BATCH)
    given = replace(OPTIONS["shaped"], rule=rule)
    strings = [
        make_request(PROMPT, replace(given, seed=seed), drafter, vocab=SMALL) for seed in range(600)
    ]
    run(engine, strings)
    assert 100 < total(strings, "accepted") < total(strings, "drafted")
    assert p_value(strings, distribution_of("shaped")) > 1e-3


@EACH
def test_acceptance_after_a_prefix_hit(kind: str, shape: str) -> None:
    """The second turn of a conversation has the same proposals, whether its prefix is cached or
    computed again.
    """
    first = text(3, 100)
    found = list[tuple[Any, ...]]()
    for shares in (False, True):
        engine = make_engine(bigram_decoder(), share_prefixes=shares)
        drafter = Watched(make_drafter(copying(kind, shape)).bind(engine.target))
        one = make_request(first, SamplingParams(max_tokens=40, seed=1), drafter)
        run(engine, [one])
        other = make_request(
            [*one.tokens, *text(4, 23)], SamplingParams(max_tokens=40, seed=2), drafter
        )
        run(engine, [other])
        assert_plain(engine, [one, other])
        assert (other.stats.cached_tokens > 100) == shares
        trees = [(asked.tree.tokens, asked.tree.parents) for asked in drafter.of(other)]
        found.append((trees, other.stats.accepted, other.stats.drafted))
    assert found[0] == found[1]
    assert found[0][1] > (0.5 if shape == "chain" else 0.1) * found[0][2]


@EACH
@pytest.mark.parametrize("shares", [False, True])
def test_acceptance_after_a_preemption(kind: str, shape: str, shares: bool) -> None:
    # Which nodes of a tree are left out depends on acceptance counts, so here none is.
    made = copying(kind, shape).replace("num_nodes=10", "num_nodes=60")

    def proposals(urgent: bool) -> tuple[Any, ...]:
        engine = make_engine(bigram_decoder(), max_batch=1, share_prefixes=shares)
        drafter = Watched(make_drafter(made).bind(engine.target))
        low, other = (
            make_request(text(seed, 60), SamplingParams(max_tokens=50), drafter) for seed in (1, 2)
        )
        other.priority = 1
        engine.add(low)
        while low.num_generated < 20:
            engine.step()
        if urgent:
            engine.add(other)
        step_until_ended(engine, [low, other] if urgent else [low])
        assert low.stats.preemptions == urgent
        assert_no_blocks(drafter)
        trees = {tuple(asked.tokens): paths(asked.tree) for asked in drafter.of(low)}
        return low.output, trees, low.stats.accepted

    (plain, once, accepted) = proposals(False)
    (again, twice, accepted_again) = proposals(True)
    assert (
        plain == again == plain_output(text(1, 60), SamplingParams(max_tokens=50), bigram_decoder())
    )
    asked_twice = once.keys() & twice.keys()
    assert {key: once[key] for key in asked_twice} == {key: twice[key] for key in asked_twice}
    assert len(asked_twice) >= 3
    # The step that reads the text again has no draft tokens.
    assert accepted - 7 <= accepted_again
    assert accepted > 20


@EACH
def test_samples_of_one_prompt(kind: str, shape: str) -> None:
    engine, drafter = bound(copying(kind, shape), bigram_decoder(), share_prefixes=True)
    requests = samples(
        text(5, 50), SamplingParams(max_tokens=30, temperature=0.8, seed=3, n=3), drafter
    )
    run(engine, requests)
    assert_plain(engine, requests)
    assert all(request.stats.accepted > 0 for request in requests)


def test_chains_end_where_a_token_does_not_pay() -> None:
    engine, drafter = bound(copying("eagle3"), bigram_decoder())
    (found,) = within(drafter, Eagle3Proposer)
    params = SamplingParams(max_tokens=60)

    def length(curve: CostCurve | None) -> int:
        request = make_request(PROMPTS[2], params)
        engine.add(request)
        while request.num_generated < 3:
            engine.step()
        asked = context(drafter, request.tokens, params=params)
        asked = replace(asked, block_table=request.block_table, plan=priced(curve))
        (tree,) = drafter.propose([asked])
        drafter.stop(asked.state)
        engine.abort(request)
        return tree.num_draft_tokens

    second = GivenTimes(CostCurve(1.0, 1.0, 0.0))  # of a draft token
    found.runner.cost_model = second
    assert length(None) == 6
    assert length(CostCurve(1000.0, 1.0, 0.0)) == 6
    assert length(CostCurve(0.1, 1.0, 0.0)) == 0


@pytest.mark.parametrize("prompts", [PROMPTS[2:3], PROMPTS[2:]], ids=["alone", "batch"])
def test_reading_a_text_is_measured(prompts: list[list[int]]) -> None:
    engine, drafter = bound(copying("eagle3"), bigram_decoder())
    (found,) = within(drafter, Eagle3Proposer)
    decode(engine, drafter, prompts, max_tokens=4)
    assert found.runner.cost_model.prompt_row is not None


def test_the_features_take_memory_while_the_head_exists() -> None:
    decoder = bigram_decoder()
    budget = KVBudget("4MB", 4)
    cache_ = budget.add(decoder.config, FLOAT32, partial(PagedCache, kernels=decoder.kernels))
    engine = Engine(Target(ModelRunner(decoder, cache_), budget=budget), BatchOptions())
    plain = cache_.bytes_per_token
    proposer = make_drafter(copying("eagle3")).bind(engine.target)
    (model,) = proposer.models
    assert isinstance(model, EagleRunner)
    assert cache_.bytes_per_token == plain + 4 * decoder.config.hidden_size
    assert cache_.computed_features == [model.feature]
    del proposer, model
    make_drafter(copying("mtp")).bind(engine.target)
    assert cache_.bytes_per_token == plain + 4 * decoder.config.hidden_size


def test_dtype_of_the_target_decides_the_features() -> None:
    dtype: DType = BFLOAT16
    engine, drafter = bound(copying("eagle3"), bigram_decoder(dtype))
    (model,) = drafter.models
    assert engine.cache.features[model.feature].dtype == dtype  # type: ignore[attr-defined]


COMPANY = {
    "threshold": "threshold({mtp})",
    "auto": "auto({eagle3})",
    "both": "merged({eagle3}, {mtp}, num_nodes=20)",
    "first": "first_of(prompt_lookup(min_ngram=2), {eagle3})",
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", COMPANY)
def test_in_company(name: str, temperature: float) -> None:
    check_company(COMPANY[name].format(eagle3=copying("eagle3"), mtp=copying("mtp")), temperature)


def check_company(spec: str, temperature: float) -> None:
    """Compare the texts of a drafter with those of plain decoding."""
    engine, drafter = bound(spec, bigram_decoder())
    requests = decode(engine, drafter, PROMPTS, max_tokens=30, temperature=temperature)
    assert total(requests, "accepted") > 0.2 * total(requests, "generated_tokens")


@pytest.mark.parametrize("windows", [(24, 24, 24, 24), (24, None, 24, None)], ids=["all", "some"])
@pytest.mark.parametrize("kind", KINDS)
def test_targets_with_a_sliding_window(kind: str, windows: tuple[int | None, ...]) -> None:
    """The features of tokens behind the window are gone; the head sees its rows since then, and
    drafts in each step.
    """
    engine, drafter = bound(spec(kind), tiny_decoder(windows=windows), prefill_chunk=32)
    watched = Watched(drafter)
    requests = decode(engine, watched, [text(7, 75), text(8, 3)], max_tokens=70)
    released = 0
    for request in requests:
        for asked in watched.of(request):
            assert asked.tree.num_draft_tokens == min(
                6 if kind == "eagle3" else 3, asked.depth, asked.nodes
            )
            released += len(asked.tokens) > 64
    assert released > 60
