"""Kangaroo's chains against a reference without caches, and the rows that are computed."""

from typing import Any

import pytest

from covering import covering
from drafting.drafting import Turns, assert_no_blocks, decode, plain_output, text
from drafting.helpers import context
from drafting.kernel_calls import Calls
from drafting.trees import TreeDrafter, off_chain
from engine.cases import total
from lab.drafters.exits import (
    OPTIONS,
    PROMPTS,
    WINDOWS,
    Slow,
    flat,
    kangaroo_of,
    named,
    slow_chain,
    watched,
)
from lab.drafters.trained_kangaroo import calm_decoder, calm_module
from pronk.base.arrays import Array
from pronk.drafting import make_drafter
from pronk.drafting.step_costs import StepCosts
from pronk.lab.drafters.modules.kangaroo import ADAPTERS
from pronk.models.cost_model import CostCurve
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import DraftToken, Sampler
from tiny_models import GivenTimes, make_engine, make_request

# Kind of the adapter, windows of the layers, and threshold of the confidence.
CHAINS: list[tuple[str, tuple[int, ...] | None, float]] = [
    ("attention", None, 0),
    ("attention", None, 0.6),
    ("attention", WINDOWS, 0),
    ("transformer", None, 0.5),
    ("head", None, 0.5),
    ("mlp", WINDOWS, 0),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("chain", "options"), covering(CHAINS, [*OPTIONS], strength=1), ids=str)
def test_chains_equal_a_reference_without_caches(
    chain: tuple[str, tuple[int, ...] | None, float], options: str
) -> None:
    adapter, windows, eta = chain
    decoder = calm_decoder(windows=windows or (None,) * 4)
    engine, drafter = watched(decoder, named(decoder, 2, adapter, num_tokens=5, eta=eta))
    slow = Slow(calm_module(windows=windows or (None,) * 4), drafter)
    lengths = set[int]()
    for request in decode(engine, drafter, PROMPTS[:3], max_tokens=14, **OPTIONS[options]):
        for asked in drafter.of(request):
            most = min(5, asked.depth, asked.nodes)
            assert list(asked.tree.tokens[1:]) == slow_chain(slow, request, asked.tokens, most, eta)
            assert asked.tree.parents == tuple(range(-1, len(asked.tree) - 1))
            lengths.add(asked.tree.num_draft_tokens if most == 5 else 5)
        assert request.stats.accepted > 0
    assert lengths == {5} if eta == 0 else len(lengths) > 1


@pytest.mark.parametrize("eta", [0, 0.6])
@pytest.mark.parametrize("calm", [0.0, 0.15, 0.6])
def test_rows_of_drafting_and_of_the_target(
    calm: float, eta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafting computes a row in the first layers once, and the target computes it in all layers
    once.

    A row is computed in the KV slot that follows those of its prefix.
    """
    decoder = calm_decoder(calm=calm)
    engine, drafter = watched(decoder, named(decoder, num_tokens=4, eta=eta))
    rows = Calls(engine.cache, monkeypatch)
    beside = kangaroo_of(drafter).early_exit.module
    assert beside is not None
    own = Calls(beside.pool, monkeypatch)
    request = make_request(
        text(0, 50), SamplingParams(max_tokens=40, seed=0, temperature=0.7), drafter
    )
    engine.add(request)
    slots = list[int]()
    own_slots = list[int]()
    while request.result.finish_reason is None:
        before = len(rows.calls)
        proposals = len(drafter.of(request))
        engine.step()
        if not drafter.of(request):
            continue
        if request.result.finish_reason is None:
            slots = engine.cache.slots(request.block_table, 0, 100).tolist()
            own_slots = beside.pool.slots(request.speculation.state.block_table, 0, 100).tolist()
        # Drafting k tokens takes k forward passes of one row through layers 0 and 1. The target's
        # pass computes all layers for all 1 + k rows.
        drafted = sum(asked.tree.num_draft_tokens for asked in drafter.of(request)[proposals:])
        step = [(layer, len(where)) for layer, where in rows.calls[before:]]
        assert step == drafted * [(0, 1), (1, 1)] + [(layer, 1 + drafted) for layer in range(4)]
    texts = {tuple(request.tokens[:length]) for length in range(1, len(request.tokens))}
    drafts_read = set[tuple[int, ...]]()  # texts that ran through the first layers to draft a token
    for asked in drafter.of(request):
        for node in range(len(asked.tree)):
            texts.add((*asked.tokens, *asked.tree.tokens[1 : node + 1]))
            drafts_read |= {(*asked.tokens, *asked.tree.tokens[1:node])} if node else set()
    for layer in range(4):
        for place in range(len(request.tokens) + 4):
            computed = [*texts, *drafts_read] if layer < 2 else [*texts]
            assert rows.count(layer, slots[place]) == sum(
                len(each) == place + 1 for each in computed
            )
    reach = max(map(len, drafts_read))
    earlier = {each for each in texts if len(each) < reach}
    prefixes = {one[: len(each)] for each in earlier for one in drafts_read}
    adapted = drafts_read | (earlier & prefixes)
    for place in range(len(request.tokens)):
        assert own.count(0, own_slots[place]) == sum(len(each) == place + 1 for each in adapted)
    assert request.stats.accepted > 0
    assert calm == 0 or request.stats.accepted < request.stats.drafted
    assert_no_blocks(drafter)


def test_draft_tokens_are_right_if_the_later_layers_add_nothing() -> None:
    decoder = calm_decoder(calm=0.0)
    engine, drafter = watched(decoder, named(decoder, 1, noise=0.0, num_tokens=4, eta=0))
    (request,) = decode(engine, drafter, [[1, 2, 3]], max_tokens=21)
    assert request.stats.accepted == request.stats.drafted == 16
    assert [step.tokens for step in request.stats.steps] == [1, 5, 5, 5, 5]


def test_requests_share_forward_passes() -> None:
    decoder = calm_decoder()
    engine, drafter = watched(decoder, named(decoder, num_tokens=3, eta=0))
    begin = kangaroo_of(drafter).early_exit.runner.run_first_layers
    passes = list[int]()

    def counted(batch: Any, layers: int) -> list[Array]:
        passes.append(len(batch.entries))
        return begin(batch, layers)

    kangaroo_of(drafter).early_exit.runner.run_first_layers = counted  # type: ignore[method-assign]
    requests = decode(engine, drafter, [text(2, 7), text(3, 30), text(4, 2)], max_tokens=20)
    steps = max(len(drafter.of(request)) for request in requests)
    assert len(passes) <= 3 * steps
    assert passes[:3] == [3, 3, 3]
    assert sum(passes) == sum(
        note.tree.num_draft_tokens for request in requests for note in drafter.of(request)
    )


def test_accepted_draft_tokens_of_another_drafter_are_not_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are off the main chain, so their KV rows move; Kangaroo's next chain continues from
    these rows.
    """
    decoder = calm_decoder()
    params = SamplingParams(max_tokens=30, seed=0)
    texts = {((1, 2, 3), 0): [1, 2, 3, *plain_output([1, 2, 3], params, decoder)]}
    engine, inner = watched(decoder, named(decoder, num_tokens=3, eta=0))
    turns = Turns(TreeDrafter(off_chain, texts), inner)
    rows = Calls(engine.cache, monkeypatch)
    (request,) = decode(engine, turns, [[1, 2, 3]])
    assert request.stats.moved > 0
    assert sum(len(asked.path) for asked in inner.of(request)) > 0
    # Layer 0 computes one row for each of Kangaroo's tokens. All layers compute the target's
    # passes, one per step.
    first, last = ([slots for layer, slots in rows.calls if layer == each] for each in (0, 3))
    assert len(last) == len(request.stats.steps)
    assert (
        len(first) - len(last)
        == sum(asked.tree.num_draft_tokens for asked in inner.of(request))
        > 0
    )
    assert sum(map(len, first)) - sum(map(len, last)) == len(first) - len(last)
    slow = Slow(calm_module(), inner)
    for asked in inner.of(request):
        want = slow_chain(slow, request, asked.tokens, min(3, asked.depth, asked.nodes), 0)
        assert list(asked.tree.tokens[1:]) == want


def test_a_prompt_longer_than_a_chunk() -> None:
    decoder = calm_decoder()
    engine, drafter = watched(decoder, named(decoder, eta=0))
    requests = decode(engine, drafter, [text(0, 1100), text(1, 530)], max_tokens=12)
    slow = Slow(calm_module(), drafter)
    for request in requests:
        for asked in drafter.of(request)[:2]:
            want = slow_chain(slow, request, asked.tokens, min(6, asked.depth), 0)
            assert list(asked.tree.tokens[1:]) == want
    assert total(requests, "accepted") > 0


def test_a_wrapper_decides_the_end_of_the_chain() -> None:
    """``threshold`` replaces Kangaroo's limits ``eta`` and ``num_tokens``."""
    decoder = calm_decoder(calm=0.1)
    strict = named(decoder, 3, eta=1.0, num_tokens=2)
    engine, alone = watched(decoder, strict)
    (request,) = decode(engine, alone, [[1, 2, 3]])
    assert {asked.tree.num_draft_tokens for asked in alone.of(request)} <= {0, 1}
    engine, within = watched(decoder, f"threshold({strict}, max_tokens=7)")
    (request,) = decode(engine, within, [[1, 2, 3]])
    assert max(asked.tree.num_draft_tokens for asked in within.of(request)) > 2


def test_no_draft_tokens_without_free_blocks() -> None:
    decoder = calm_decoder()
    for blocks in (0, 2, 3):
        engine, drafter = watched(decoder, named(decoder))
        beside = kangaroo_of(drafter).early_exit.module
        assert beside is not None
        beside.pool.resize(blocks)
        one, other = decode(engine, drafter, [text(7, 20), text(8, 20)], max_tokens=20)
        assert bool(one.stats.drafted) == (blocks == 3)
        assert drafter.of(other)[0].tree.num_draft_tokens == 0
        assert_no_blocks(drafter)


def test_no_draft_token_if_no_token_can_be_chosen() -> None:
    """Every third call of ``draft_token`` returns ``None``, which ends the chain."""
    decoder = calm_decoder()
    engine, drafter = watched(decoder, named(decoder, eta=0))
    draft_token = Sampler.draft_token
    drafted = list[bool]()

    def sometimes(self: Sampler, *args: Any, **more: Any) -> DraftToken | None:
        drafted.append(len(drafted) % 3 != 2)
        return draft_token(self, *args, **more) if drafted[-1] else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "draft_token", sometimes)
        (request,) = decode(engine, drafter, [[1, 2, 3]])
    asked = [each for each in drafter.of(request) if min(each.depth, each.nodes) > 2]
    assert {each.tree.num_draft_tokens for each in asked} == {2}
    assert request.stats.accepted > 0


def test_plain_steps_where_draft_tokens_do_not_pay() -> None:
    decoder = calm_decoder()
    for dear in (True, False):
        engine, drafter = watched(decoder, named(decoder, eta=0, num_tokens=6), costs=flat(1.0))
        engine.speculator.ledger.saved = 1000.0  # seconds that drafting may lose
        kangaroo_of(drafter).early_exit.cost_model = GivenTimes(flat(100.0 if dear else 0.001))
        (request,) = decode(engine, drafter, [[1, 2, 3]], max_tokens=40)
        counts = [asked.tree.num_draft_tokens for asked in drafter.of(request)]
        assert counts == [] if dear else counts.count(0) <= 1 < len(counts)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_costs_are_those_of_its_forward_passes(adapter: str) -> None:
    """Until draft tokens have been timed, their price is the exit layers' share of the target's
    forward pass.
    """
    decoder = calm_decoder()
    engine = make_engine(decoder)
    drafter = make_drafter(named(decoder, 2, adapter)).bind(engine.target)
    asked = context(None, [1, 2, 3])
    costs = StepCosts(CostCurve(1.0, 0.9, 0.1), 2)
    before = drafter.chain_costs(asked, costs)
    share = 2 / len(decoder.layers)
    assert before.token == pytest.approx(share * 1.1 / 2)  # a pass of two rows, for two requests
    decode(engine, drafter, PROMPTS[:2])
    after = drafter.chain_costs(asked, costs)
    assert 0.0 < after.token < 0.5 * before.token  # the tiny layers take far less than a second
    assert_no_blocks(drafter)
