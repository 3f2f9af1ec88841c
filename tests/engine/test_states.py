"""Recurrent targets and draft models: texts equal those of plain decoding, and states those of a
fresh reading.
"""

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from covering import covering
from drafting.helpers import within
from engine.cases import (
    DRAFTERS,
    PROMPTS,
    ask,
    assert_same,
    drafter,
    params,
    plain,
    step_until_ended,
    text,
    total,
)
from engine.recurrent import (
    FAIR,
    RECURRENT,
    RIGHT,
    StateWatch,
    draft_spec,
    engine,
    pool_of,
    use_draft_models,
)
from engine.test_equality import decode
from engine.test_interruption import PLACES, burning, interrupt, tracking
from pronk.base.arrays import BFLOAT16, FLOAT32, DType
from pronk.base.errors import PromptError
from pronk.cache.blocks import BlockTable
from pronk.cache.states import StateCounts
from pronk.drafting.from_draft.draft_model import ModelProposer
from pronk.drafting.shared.draft_cache import DraftCache
from pronk.engine.request import Request
from pronk.engine.scoring import score
from pronk.models.cost_model import CostCurve
from pronk.models.program import Program
from pronk.sampling.params import SamplingParams
from pronk.sampling.tree import TokenTree
from tiny_models import (
    VOCAB,
    GivenTimes,
    assert_idle,
    make_engine,
    make_request,
    run,
    run_alone,
    samples,
    text_logits,
    tiny_decoder,
)

DRAFTING = [name for name in DRAFTERS if name != "autoregressive"]
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks of 1": {"prefill_chunk": 1, "max_batch": 3},
    "chunks of 17": {"prefill_chunk": 17},
    "cached": {"share_prefixes": True, "prefill_chunk": 100},
    "one state": {"max_batch": 1, "state_counts": StateCounts(1, 0, 16)},
    "one checkpoint": {
        "share_prefixes": True,
        "max_batch": 2,
        "state_counts": StateCounts(3, 1, 16),
    },
}
SHORT = PROMPTS[:4]


@pytest.fixture(autouse=True)
def _draft_models(monkeypatch: pytest.MonkeyPatch) -> None:
    use_draft_models(monkeypatch)


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("name", "settings", "options", "dtype"),
    covering(
        DRAFTING,
        [*SETTINGS],
        ["greedy", "temperature", "all", "guided", "thinking", "repetitive"],
        [FLOAT32, BFLOAT16],
        strength=1,
    ),
    ids=str,
)
def test_drafters(name: str, settings: str, options: str, dtype: DType) -> None:
    """A second batch has its prompts in the prefix cache, if there is one."""
    want = plain(dtype, options, SHORT, **RECURRENT)
    made = engine(dtype, **SETTINGS[settings])
    for _ in range(1 + ("cached" in settings or "checkpoint" in settings)):
        got = decode(made, [drafter(name, want)], options, SHORT)
        assert_same(got, want)
        assert total(got, "drafted") > 0
        assert not total(got, "preemptions")
    if "cached" in settings:
        assert total(got, "cached_tokens") >= 288


RUNS = ("oracle", "adversarial", "explore", "suffix", "eagle3 tree", draft_spec(FAIR))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", RUNS)
def test_preemption_at_random_steps(name: str) -> None:
    """As after interrupted steps; the states are then read again, or those of checkpoints."""
    want = plain(FLOAT32, "temperature", SHORT, **RECURRENT)
    for shares in (False, True):
        made = engine(share_prefixes=shares, prefill_chunk=40)
        dice = random.Random(name)
        has_states = made.cache.has_states

        def at_random(table: BlockTable, has_states: Any = has_states, dice: Any = dice) -> bool:
            return bool(has_states(table)) and dice.random() > 0.15

        made.cache.has_states = at_random  # type: ignore[method-assign]
        got = decode(made, [drafter(name, want)], "temperature", SHORT)
        assert_same(got, want)
        assert total(got, "preemptions") > 1
        assert total(got, "accepted") > 0 or name in ("suffix", "eagle3 tree")


@pytest.mark.parametrize("name", ["oracle", "explore", draft_spec(FAIR)])
def test_states_equal_those_of_a_fresh_reading(name: str) -> None:
    """After each step of each request, for the tokens that the state has taken over."""
    want = plain(FLOAT32, "temperature", SHORT, **RECURRENT)
    made = engine(prefill_chunk=50, share_prefixes=True)
    watch = StateWatch(made)
    for _ in range(2):
        proposer = drafter(name, want).bind(made.target)
        got = [ask(prompt, params("temperature", i), proposer) for i, prompt in enumerate(SHORT)]
        for request in got:
            made.add(request)
        while not all(request.ended for request in got):
            watch.step()
        assert_same(got, want)
    assert total(got, "cached_tokens") > 0
    assert watch.check() > 20


TURN = tuple(text(3, 90))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["autoregressive", "oracle", draft_spec(FAIR)])
def test_abort_and_resume_at_every_token(name: str) -> None:
    """The text so far is the prompt of a new request, whose prefix may be cached."""
    options = SamplingParams(max_tokens=36, logprobs=2)
    want = run_alone(tiny_decoder(FLOAT32, **RECURRENT), TURN, options)
    made = engine(share_prefixes=True)
    proposer = drafter(name, [want]).bind(made.target)
    found = list[int]()
    for count in range(1, 36):
        request = make_request(TURN, options, proposer)
        made.add(request)
        while request.num_generated < count:
            made.step()
        made.abort(request)
        if request.ended:
            break
        resumed = make_request(request.tokens, SamplingParams(max_tokens=request.num_remaining))
        run(made, [resumed])
        assert resumed.tokens == want.tokens
        found.append(resumed.stats.cached_tokens)
    assert found[0] == 80
    assert found[-1] >= 112


def test_prefix_hits_at_each_place() -> None:
    """The second prompt is a beginning of the first text, cut around the ends of blocks."""
    decoder = tiny_decoder(FLOAT32, **RECURRENT)
    first = run_alone(decoder, TURN, SamplingParams(max_tokens=60))
    hits = list[int]()
    for shift in (-1, 0, 1):
        made = engine(share_prefixes=True, state_counts=StateCounts(2, 12, 40))
        proposer = drafter("oracle", [first]).bind(made.target)
        for end in range(16, len(first.tokens), 16):
            again = make_request(TURN, SamplingParams(max_tokens=60), proposer)
            again.branch_positions = (40, 71)
            run(made, [again])
            assert again.output == first.output
            prompt = [*first.tokens[: end + shift], 5, 9]
            options = SamplingParams(max_tokens=8, logprobs=2)
            got = make_request(prompt, options, proposer)
            run(made, [got])
            assert_same([got], [run_alone(decoder, prompt, options)])
            hits.append(got.stats.cached_tokens)
    assert {32, 64, 80} <= {*hits}


@pytest.mark.parametrize("counts", [StateCounts(1, 1, 16), StateCounts(4, 6, 60)], ids=str)
def test_samples_of_a_prompt(counts: StateCounts) -> None:
    """They start at a checkpoint of the first sample."""
    options = SamplingParams(max_tokens=20, temperature=0.9, n=4, seed=3, logprobs=2)
    decoder = tiny_decoder(FLOAT32, **RECURRENT)
    separate = samples(TURN, options)
    for each in separate:
        each.parent = None
        run(make_engine(decoder), [each])
    made = engine(share_prefixes=True, max_batch=counts.requests, state_counts=counts)
    got = samples(TURN, options, drafter("oracle", separate).bind(made.target))
    run(made, got)
    assert_same(got, separate)
    assert total(got, "cached_tokens") >= 80 * (counts.checkpoints > 1)
    assert total(got, "accepted") > 0


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("chunk", [16, 19, 512])
def test_samples_start_from_a_copy(chunk: int, shares: bool) -> None:
    """Other samples read the last token of the prompt only, also without a prefix cache."""
    decoder = tiny_decoder(FLOAT32, **RECURRENT)
    for length in (20, 48, 49):
        options = SamplingParams(max_tokens=6, temperature=0.9, n=3, seed=3, logprobs=2)
        separate = samples(TURN[:length], options)
        for each in separate:
            each.parent = None
            run(make_engine(decoder), [each])
        made = engine(share_prefixes=shares, prefill_chunk=chunk)
        got = samples(TURN[:length], options)
        run(made, got)
        assert_same(got, separate)
        assert [each.stats.cached_tokens for each in got] == [0, length - 1, length - 1]
        assert_idle(made)


def test_prompts_again() -> None:
    """The same prompt takes over all full blocks but that of its last token."""
    for length in (31, 32, 33, 48, 49):
        made = engine(share_prefixes=True)
        for cached in (0, (length - 1) // 16 * 16):
            request = make_request(TURN[:length], SamplingParams(max_tokens=1))
            run(made, [request])
            assert request.stats.cached_tokens == cached


def test_prompts_with_a_common_beginning() -> None:
    """A long prompt in one pass leaves checkpoints at ever larger distances."""
    text = [*TURN, *TURN]
    made = engine(share_prefixes=True, state_counts=StateCounts(2, 12, 40))
    hits = dict[int, int]()
    for end in (len(text), 140, 100, 70):
        request = make_request([*text[:end], 7, 7, 7], SamplingParams(max_tokens=1))
        run(made, [request])
        hits[end] = request.stats.cached_tokens
    # The first prompt has checkpoints after 4, 8, 10 and 11 blocks of 16 tokens.
    assert hits == {180: 0, 140: 128, 100: 64, 70: 64}


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rules_do_not_depend_on_how_a_text_is_computed(rule: Any) -> None:
    """Under these rules texts depend on the draft tokens, which are equal here: no chunk is the
    prompt's last token alone, for which there would be draft tokens.
    """
    want = plain(FLOAT32, "temperature", SHORT, **RECURRENT)
    found = list[list[Request]]()
    for settings in ({}, {"prefill_chunk": 17}, {"max_batch": 2, "prefill_chunk": 90}):
        made = engine(**settings)
        proposer = drafter("oracle", want).bind(made.target)
        got = [
            ask(prompt, replace(params("temperature", i), rule=rule), proposer)
            for i, prompt in enumerate(SHORT)
        ]
        run(made, got)
        assert total(got, "accepted") > 0
        found.append(got)
    for others in found[1:]:
        assert_same(others, found[0])


@pytest.mark.few(2)
@pytest.mark.parametrize("place", ["propose", "observe", "compute", "forward", "commit", "choose"])
def test_requests_go_on_after_an_interrupt(place: str) -> None:
    """Between a pass and its commit, or anywhere else in a step."""
    want = plain(FLOAT32, "penalties", **RECURRENT)
    for at in PLACES[place]:
        made = engine(share_prefixes=True)
        proposer = tracking(want)
        requests = [
            ask(prompt, params("penalties", i), proposer) for i, prompt in enumerate(PROMPTS)
        ]
        with burning(made, proposer, place, interrupt(at)), pytest.raises(KeyboardInterrupt):
            run(made, requests)
        aborted = requests.pop(2)
        made.abort(aborted)
        step_until_ended(made, requests)
        for request, other in zip(requests, want[:2] + want[3:], strict=True):
            assert request.output == other.output
            made.abort(request)
        assert_idle(made)


DRAFTS = {
    "chain": draft_spec(FAIR),
    "right chain": draft_spec(RIGHT, num_tokens=9),
    "threshold": f"threshold({draft_spec(FAIR)})",
    "auto": f"auto({draft_spec(FAIR)}, suffix)",
    "merged": f"merged({draft_spec(FAIR)}, recycling, num_nodes=10)",
}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "target", "options", "shares"),
    covering(
        [*DRAFTS],
        ["recurrent", "attention"],
        ["greedy", "temperature", "all", "guided", "repetitive"],
        [False, True],
        strength=1,
    ),
)
def test_recurrent_draft_models(name: str, target: str, options: str, shares: bool) -> None:
    """In batches, where each depth is a pass, and alone, where a chain is one call."""
    check_draft_model(DRAFTS[name], target, options, shares=shares)


def check_draft_model(spec: str, target: str, options: str, *, shares: bool) -> None:
    """Decode with a draft model: a batch, then each request alone, twice if prefixes are shared."""
    shape = RECURRENT if target == "recurrent" else {}
    want = plain(FLOAT32, options, SHORT, **shape)
    made = make_engine(tiny_decoder(FLOAT32, **shape), share_prefixes=shares, prefill_chunk=64)
    proposer = drafter(spec, want).bind(made.target)
    got = decode(made, [proposer], options, SHORT)
    assert_same(got, want)
    for _ in range(1 + shares):
        alone = [ask(prompt, params(options, i), proposer) for i, prompt in enumerate(SHORT)]
        for request in alone:
            run(made, [request])
        assert_same(alone, want)
    assert total(alone, "drafted") > 0
    if target == "recurrent" and "auto" not in spec:
        assert total(alone, "accepted") > 0


@pytest.mark.parametrize("at", range(1, 40, 3))
def test_an_interrupt_in_the_passes_of_a_draft_model(at: int) -> None:
    """After a pass of the draft model, the target, or a chain; later draft tokens are as good."""
    want = plain(FLOAT32, "temperature", SHORT, **RECURRENT)
    made = engine(share_prefixes=True)
    proposer = drafter(draft_spec(RIGHT), want).bind(made.target)
    count = 4 if at % 2 else 1
    requests = [ask(p, params("temperature", i), proposer) for i, p in enumerate(SHORT[-count:])]
    with pytest.MonkeyPatch.context() as patch:
        fuse = interrupt(at)
        for name in ("run", "draft_chain"):
            patch.setattr(Program, name, fuse.after(getattr(Program, name)))
        try:
            run(made, requests)
        except KeyboardInterrupt:
            step_until_ended(made, requests)
    for request, prompt in zip(requests, SHORT[-count:], strict=True):
        assert request.stats.draft_error is None
        alone = ask(prompt, request.params)
        run(engine(), [alone])
        assert_same([request], [alone])
        made.abort(request)
    assert total(requests, "accepted") > 0.6 * total(requests, "drafted")
    assert_idle(made)


@pytest.mark.parametrize("updates", [16, 24, 100])
def test_a_draft_model_with_few_updates(updates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that lack them propose nothing in a step; none fails."""
    monkeypatch.setattr("pronk.cache.paged.DEFAULT_COUNTS", StateCounts(3, 1, updates))
    want = plain(FLOAT32, "temperature", SHORT, **RECURRENT)
    for max_tree in (128, 5):
        made = engine(max_tree=max_tree, max_batch=4, state_counts=StateCounts(4, 2, updates))
        got = decode(made, [drafter(draft_spec(RIGHT), want)], "temperature", SHORT)
        assert_same(got, want)
        if max_tree == 5:
            assert total(got, "accepted") > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["chain", "threshold", "auto"])
def test_a_draft_model_that_skips_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With costs of passes, it reads the last tokens of a long prompt only."""
    starts = list[int]()
    begin_at = DraftCache.begin_at

    def begin(cache: DraftCache, start: int) -> None:
        starts.append(start)
        begin_at(cache, start)

    monkeypatch.setattr(DraftCache, "begin_at", begin)
    monkeypatch.setattr("engine.cases.PREDICTION", None)  # so that ``auto`` asks the draft model
    want = plain(FLOAT32, "repetitive", **RECURRENT)
    ticks = itertools.count()
    made = engine(
        costs=CostCurve(1.0, 0.85, 0.01),  # 15 rows are free, so that no step is wide
        share_prefixes=True,
        clock=lambda: next(ticks) * 1e-5,  # decisions must not depend on the machine's speed
    )
    proposer = drafter(DRAFTS[name], want).bind(made.target)
    for each in within(proposer, ModelProposer):
        each.draft.relative_size = 0.001
        each.draft.cost_model = GivenTimes(CostCurve(1e-3, 1e-6, 1e-9))
    for _ in range(2):
        got = decode(made, [proposer], "repetitive")
        assert_same(got, want)
    assert total(got, "accepted") > 0
    assert max(starts) > 300


def test_logits_of_trees_and_prompts() -> None:
    """Trees below a prompt, without a request; logits of all rows of a prompt."""
    decoder = tiny_decoder(FLOAT32, **RECURRENT)
    tree = TokenTree((5, 6, 7, 8, 9), (-1, 0, 0, 2, 1))
    paths = {1: (5, 6), 3: (5, 7, 8), 4: (5, 6, 9)}
    for shares in (False, True):
        made = engine(share_prefixes=shares, prefill_chunk=40)
        for prompt in (TURN, TURN[:40]):
            first, second = made.tree_logits(prompt, [tree, tree])
            assert np.array_equal(first, second)
            for node, path in paths.items():
                expected = text_logits(decoder, [*prompt, *path])
                assert np.array_equal(first[node], expected[-1])
        options = SamplingParams(max_tokens=5, prompt_logprobs=3, logprobs=3)
        got = make_request(TURN, options)
        run(made, [got])
        want = run_alone(decoder, TURN, options)
        assert_same([got], [want])
        assert got.result.prompt_logprobs == want.result.prompt_logprobs
        assert_idle(made)


def test_logits_of_trees_wait_for_a_state() -> None:
    made = engine(max_batch=1, state_counts=StateCounts(1, 1, 16))
    want = run_alone(tiny_decoder(FLOAT32, **RECURRENT), TURN, SamplingParams(max_tokens=9))
    request = make_request(TURN, SamplingParams(max_tokens=9))
    made.add(request)
    made.step()
    (logits,) = made.tree_logits(TURN[:20], [TokenTree.chain([1])])
    assert np.array_equal(logits, text_logits(made.target.decoder, [*TURN[:20], 1])[-1:])
    step_until_ended(made, [request])
    assert request.output == want.output
    made.abort(request)
    assert_idle(made)


def test_options_are_scored_with_the_updates_of_the_pool() -> None:
    """In several trees, after requests have freed their updates; options of one tree are refused if
    they are longer.
    """
    dice = random.Random(0)
    options = [[dice.randrange(VOCAB) for _ in range(dice.randint(1, 17))] for _ in range(60)]
    want = score(engine(), TURN, options)
    counts = StateCounts(3, 1, 17)
    made = engine(max_batch=2, state_counts=counts)
    assert made.max_tree_nodes == 17
    texts = plain(FLOAT32, "greedy", SHORT, **RECURRENT)
    requests = [
        ask(prompt, params("greedy", index), drafter("oracle", texts))
        for index, prompt in enumerate(SHORT[:2])
    ]
    for request in requests:
        made.add(request)
        while request.num_generated < 2:
            made.step()
    assert pool_of(made.cache).num_free_updates < counts.updates
    assert score(made, TURN, options) == want
    step_until_ended(made, requests)
    assert_same(requests, texts[:2])
    with pytest.raises(PromptError, match=r"at most 17 tokens.*, or raise kv_memory"):
        score(made, TURN, [[1] * 18])
    assert_idle(made)
