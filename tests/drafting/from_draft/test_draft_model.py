"""The draft model's chains against a reference without a cache, and its KV cache."""

import random
from collections.abc import Sequence
from itertools import chain as joined
from typing import Any

import numpy as np
import pytest

from drafting.drafting import (
    Dense,
    abort_one_and_finish,
    assert_no_blocks,
    bound,
    context,
    decode,
    dense,
    kept_rows,
    plain_output,
    sampler_at,
    text,
    watch_draft,
    watched,
)
from drafting.from_draft.drafts import draft_folder
from drafting.helpers import priced, within
from drafting.kernel_calls import burning
from drafting.trees import TreeDrafter, off_chain
from pronk.drafting.combined.merged import Merged
from pronk.drafting.from_draft.draft_model import ModelProposer
from pronk.drafting.shared.draft_cache import DraftCache
from pronk.drafting.shared.draft_runner import MAX_UNREAD, DraftRunner
from pronk.models.cost_model import CostCurve
from pronk.sampling.logits_processors import Penalties
from pronk.sampling.params import SamplingParams
from pronk.sampling.tree import TokenTree
from softmax import softmax
from tiny_models import VOCAB, context_of, make_engine, make_request, run, tiny_decoder

# Noise of draft models whose draft tokens are right always, sometimes and almost never.
RIGHT = 0.0
FAIR = 0.03
WRONG = 0.25
NOISES = pytest.mark.parametrize("noise", [RIGHT, FAIR, WRONG], ids=["right", "fair", "wrong"])
PROMPTS = [[1, 2, 3], [4, 5, 6, 7], list(range(40)), [9]]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"temperature": 0.9},
    "cut": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.5},
}


def spec(noise: float = WRONG, **options: Any) -> str:
    more = "".join(f", {name}={value!r}" for name, value in options.items())
    return f"draft_model(model={draft_folder(noise)!r}{more})"


@pytest.mark.few(3)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("noise", [FAIR, WRONG])
def test_chains_equal_a_reference_without_a_cache(noise: float, options: str) -> None:
    engine, drafter = watched(spec(noise))
    oracle = dense(noise)
    accepted = 0
    for request in decode(engine, drafter, PROMPTS[:3], max_tokens=12, **OPTIONS[options]):
        for asked in drafter.of(request):
            tokens = list(asked.tokens)
            sampler = sampler_at(request, tokens)
            for _ in range(min(7, asked.depth, asked.nodes)):
                tokens.append(sampler.choose(oracle(tokens)))
                sampler.advance(tokens[-1])
            assert asked.tree.tokens == tuple(tokens[len(asked.tokens) - 1 :])
            assert asked.tree.parents == tuple(range(-1, len(asked.tree) - 1))
            accepted += len(asked.path)
        assert len(drafter.of(request)) > 1
    assert accepted > 0 or noise == WRONG


@NOISES
def test_no_token_is_computed_twice(noise: float) -> None:
    """Between two proposals one forward pass reads the bonus token, and the last draft token if all
    were accepted.
    """
    engine, drafter = watched(spec(noise, num_tokens=4))
    passes = watch_draft(drafter.inner.draft)
    (request,) = decode(engine, drafter, [text(0, 50)], max_tokens=40)
    assert len(set(joined(*(each.texts[0] for each in passes)))) == sum(
        sum(each.rows) for each in passes
    )
    rows = [each.rows for each in passes]
    kinds = set[bool]()
    before = None
    for asked in drafter.of(request):
        count = asked.tree.num_draft_tokens
        if not count:
            continue
        full = before is not None and len(before.path) == before.tree.num_draft_tokens
        first = len(asked.tokens) if before is None else 2 if full else 1
        assert rows[:count] == [[first]] + [[1]] * (count - 1)
        assert all(tuple(asked.tokens) in each.texts[0][-1:] for each in passes[:1])
        del rows[:count], passes[:count]
        kinds |= {full} if before is not None else set()
        before = asked
    assert not rows
    assert kinds == {RIGHT: {True}, FAIR: {True, False}, WRONG: {False}}[noise]
    assert_no_blocks(drafter)


@pytest.mark.parametrize(
    ("length", "want"),
    [(511, [512]), (512, [512, 1]), (1023, [512, 512]), (1030, [512, 512, 7])],
    ids=str,
)
def test_the_first_proposal_reads_the_prompt_in_chunks(length: int, want: list[int]) -> None:
    engine, drafter = watched(spec(num_tokens=1))
    passes = watch_draft(drafter.inner.draft)
    decode(engine, drafter, [text(1, length)], max_tokens=6)
    rows = [each.rows[0] for each in passes]
    assert rows[: len(want)] == want
    assert set(rows[len(want) :]) <= {1, 2}


def test_requests_share_forward_passes() -> None:
    """A step takes one forward pass for each token of the longest chain."""
    engine, drafter = watched(spec(FAIR, num_tokens=3))
    passes = watch_draft(drafter.inner.draft)
    requests = decode(engine, drafter, [text(2, 7), text(3, 30), text(4, 2)], max_tokens=20)
    steps = max(len(drafter.of(request)) for request in requests)
    assert len(passes) <= 3 * steps
    assert len(passes[0].rows) == 3
    assert len(passes[0].rows) + len(passes[1].rows) + len(passes[2].rows) == 9
    assert sum(len(each.rows) for each in passes) == sum(
        note.tree.num_draft_tokens for request in requests for note in drafter.of(request)
    )


def assert_fresh(draft: DraftRunner, cache: DraftCache, oracle: Dense, held: Sequence[int]) -> None:
    """Check that a request's ``cache`` has the bits of a cache that has just read ``held``."""
    assert cache.tokens == list(held)
    assert cache.block_table.length == len(held)
    assert cache.tree is None
    for got, want in zip(
        kept_rows(draft.runner, cache.block_table), oracle.rows(held), strict=True
    ):
        assert np.array_equal(got, want)


@NOISES
def test_the_cache_equals_one_that_has_just_read_the_text(noise: float) -> None:
    """Earlier proposals, rejections and other drafters' draft tokens leave no trace."""
    drafter = bound(spec(noise, num_tokens=4))
    draft = drafter.draft
    dice = random.Random(1)
    watch_draft(draft)
    tokens = text(5, 20)
    state = drafter.start(tokens)
    for number in range(25):
        (tree,) = drafter.propose([context(drafter, tokens, state=state)])
        assert tree.num_draft_tokens == 4
        assert_fresh(draft, state, dense(noise), [*tokens, *tree.tokens[1:-1]])
        # Accepted draft tokens, then tokens of another drafter and the bonus token.
        new = [
            *tree.tokens[1 : 1 + dice.randint(0, 4)],
            *(dice.randrange(VOCAB) for _ in range(dice.randint(1, 3))),
        ]
        if number % 2:
            draft_tokens = [*new[:2], dice.randrange(VOCAB)]
            drafter.propose(
                [context(drafter, [*tokens, *draft_tokens], state=state, drafted=len(draft_tokens))]
            )
        tokens = [*tokens, *new]
    drafter.stop(state)
    assert_no_blocks(drafter)


WITH_CACHES = {
    "chain": spec(FAIR),
    "threshold": f"threshold({spec(FAIR)})",
}
# costs of a target that is so slow that every draft token pays
SLOW_TARGET = CostCurve(1e3, 1.0, 0.0)


def cache_of(state: Any) -> DraftCache:
    """Return the draft model's cache in the state of a drafter, which may wrap the draft model."""
    while isinstance(state, tuple):
        state = state[0]
    return state


@pytest.mark.parametrize("count", [40, 150])
@pytest.mark.parametrize("kind", WITH_CACHES)
def test_a_cache_that_lacks_much_begins_anew_near_the_end_of_the_text(
    kind: str, count: int
) -> None:
    """Its proposals are those of a draft model for which the text begins there."""
    drafter = bound(WITH_CACHES.get(kind, kind))

    def propose(tokens: Sequence[int], state: Any, **more: Any) -> TokenTree:
        asked = context(
            drafter, tokens, state=state, nodes=8, params=SamplingParams(temperature=0.0), **more
        )
        (tree,) = drafter.propose([asked])
        assert tree.num_draft_tokens
        return tree

    tokens = text(3, 20)
    state = drafter.start(tokens)
    propose(tokens, state)  # without a policy, which knows no costs of the draft model yet
    cache = cache_of(state)
    assert cache.start == 0
    tokens = [*tokens, *text(4, count)]
    skipped = len(tokens) - 1 - MAX_UNREAD if count > MAX_UNREAD else 0
    for _ in range(3):
        tree = propose(tokens, state, plan=priced(SLOW_TARGET))
        assert cache.start == skipped
        fresh = propose(tokens[skipped:], drafter.start([]))
        assert (tree.tokens, tree.parents) == (fresh.tokens, fresh.parents)
        tokens = [*tokens, *text(5, 2)]
    propose(tokens, state)
    assert cache.start == skipped  # a cache is used as it is where no policy counts costs
    drafter.stop(state)
    assert cache.start == 0


def test_without_a_policy_the_whole_text_is_read() -> None:
    drafter = bound(spec(FAIR))
    tokens = text(3, 150)
    state = drafter.start(tokens)
    drafter.propose([context(drafter, tokens, state=state)])
    assert (state.start, state.tokens[:150]) == (0, tokens)


def test_accepted_draft_tokens_of_another_drafter_are_read() -> None:
    texts = {
        ((1, 2, 3), 0): [1, 2, 3, *plain_output([1, 2, 3], SamplingParams(max_tokens=30, seed=0))]
    }
    engine = make_engine(tiny_decoder())
    drafter = Merged((TreeDrafter(off_chain, texts), bound(spec(FAIR), engine))).bind(engine.target)
    (request,) = decode(engine, drafter, [[1, 2, 3]])
    assert request.stats.moved > 0
    assert (
        sum(
            each.accepted
            for name, each in request.stats.sources.items()
            if name.startswith("draft_model")
        )
        > 0
    )
    assert_no_blocks(drafter)


def test_draft_tokens_of_the_target_itself_are_all_accepted() -> None:
    for count in (1, 4, 9):
        engine, drafter = watched(spec(RIGHT, num_tokens=count))
        (request,) = decode(engine, drafter, [[1, 2, 3]], max_tokens=1 + 4 * (count + 1))
        assert request.stats.accepted == request.stats.drafted == 4 * count
        assert [step.tokens for step in request.stats.steps] == [1] + 4 * [count + 1]


@pytest.mark.parametrize("limit", ["max_depth", "max_nodes", "num_tokens"])
def test_chains_end_at_the_limits(limit: str) -> None:
    drafter = bound(spec(RIGHT, num_tokens=3 if limit == "num_tokens" else 64))
    limits = {
        "depth": 3 if limit == "max_depth" else 70,
        "nodes": 3 if limit == "max_nodes" else 70,
    }
    passes = watch_draft(drafter.draft)
    (tree,) = drafter.propose([context(drafter, [1, 2, 3], **limits)])
    assert tree.num_draft_tokens == len(passes) == 3


def test_a_chain_ends_at_the_first_token_below_min_confidence() -> None:
    drafter = bound(spec(FAIR, num_tokens=30, min_confidence=0.5))
    oracle = dense(FAIR)
    lengths = set[int]()
    for seed in range(24):
        tokens = text(seed, 12)
        (tree,) = drafter.propose([context(drafter, tokens, depth=40)])
        texts = [[*tokens, *tree.tokens[1:node]] for node in range(1, len(tree))]
        sure = [float(softmax(oracle(each)).max()) for each in texts]
        assert all(share >= 0.5 for share in sure[:-1])
        assert sure[-1] < 0.5
        lengths.add(len(sure))
    assert len(lengths) > 2


@pytest.mark.parametrize("length", [30, 62, 63, 64, 80])
@pytest.mark.parametrize(("kind", "most"), [("{}", 7)], ids=["draft_model"])
def test_draft_tokens_end_after_the_drafts_last_position(kind: str, most: int, length: int) -> None:
    """``kind`` is the specification around that of the draft model, and ``most`` the depth of its
    trees.
    """
    engine, drafter = watched(
        kind.format(f"draft_model(model={draft_folder(RIGHT, context=64)!r})")
    )
    (draft,) = models_of(drafter.inner)
    passes = watch_draft(draft)
    (request,) = decode(engine, drafter, [text(6, length)], max_tokens=40)
    assert max((len(each) for one in passes for each in joined(*one.texts)), default=0) <= 64
    depths = {len(note.tokens): max(note.tree.depths) for note in drafter.of(request)}
    for held, depth in depths.items():
        assert depth <= max(0, 65 - held)
        if not kind.startswith("staged"):  # whose smaller drafter may find less
            assert depth == min(most, max(0, 65 - held), length + 40 - held - 1)
    assert any(held > 64 for held in depths)
    assert_no_blocks(drafter)


def test_no_draft_tokens_without_free_blocks() -> None:
    """With blocks for one request, the other one decodes plainly until these blocks are free."""
    for blocks in (0, 2, 13):
        engine, drafter = watched(spec(RIGHT))
        drafter.inner.draft.runner.cache.resize(blocks)
        watch_draft(drafter.inner.draft)
        one, other = decode(engine, drafter, [text(7, 20), text(8, 20)], max_tokens=20)
        assert bool(one.stats.drafted) == (blocks == 13)
        assert drafter.of(other)[0].tree.num_draft_tokens == 0
        assert drafter.of(one)[0].tree.num_draft_tokens == (7 if blocks == 13 else 0)
        assert_no_blocks(drafter)


KINDS = {
    "draft_model": spec(FAIR),
    "threshold": f"threshold({spec(FAIR)})",
}


def models_of(drafter: Any) -> list[DraftRunner]:
    return [proposer.draft for proposer in within(drafter, ModelProposer)]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_forward_pass_of_the_draft_changes_no_text(
    kind: str, *, after: bool
) -> None:
    params = SamplingParams(max_tokens=16, seed=1, temperature=0.8, frequency_penalty=0.6)
    for at in (0, 1, 7):
        engine, drafter = watched(KINDS.get(kind, kind))
        drafts = models_of(drafter.inner)
        for draft in drafts:
            watch_draft(draft)
        requests = [make_request(prompt, params, drafter) for prompt in PROMPTS]
        with pytest.raises(KeyboardInterrupt), burning(drafts[-1].runner.cache, at, after=after):
            run(engine, requests)
        abort_one_and_finish(engine, drafter, requests)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sampler_is_unchanged_after_a_proposal(kind: str) -> None:
    """Proposals, complete or interrupted, leave no draft tokens in the sampler's text and
    counts.
    """
    drafter = bound(KINDS.get(kind, kind))
    params = SamplingParams(temperature=0.8, frequency_penalty=0.6)
    for at in (99, 0, 2):
        asked = context(drafter, [1, 2, 3], params=params)
        pool = models_of(drafter)[0].runner.cache
        (penalties,) = asked.sampler.processors
        assert isinstance(penalties, Penalties)
        with burning(pool, at):
            try:
                drafter.propose([asked])
            except KeyboardInterrupt:
                assert at < 99
        assert context_of(asked.sampler) == [1, 2, 3]
        assert not penalties.counts.any()
        drafter.stop(asked.state)
