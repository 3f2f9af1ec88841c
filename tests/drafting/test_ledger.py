"""The choice of drafters and of the length of drafts, with simulated drafters and a simulated
clock.
"""

import gc
import math
import random
import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from drafting.helpers import context
from drafting.simulation import COSTS, VOCAB, ChainSource, Source, World, always, changing
from pronk.base.errors import OptionError
from pronk.drafting import DraftContext
from pronk.drafting.acceptance_stats import RequestAcceptance
from pronk.drafting.ledger import FinishedStep, Ledger, RequestLedger
from pronk.drafting.planned_calls import propose_planned
from pronk.drafting.planner import DraftPlan
from pronk.drafting.step_costs import ChainCosts, StepCosts
from pronk.drafting.tree_union import TreeUnion
from pronk.models.cost_model import CostCurve
from pronk.sampling.tree import TokenTree

UNCOUNTED = 4  # number of first proposals of a drafter whose seconds do not count


def random_source(world: World, number: int, steps: int = 100) -> Source:
    """Return a source with a random price and accuracy, and gains that may lie."""
    dice = world.dice
    seconds = dice.choice((0.001, 0.02, 0.2, 1.0, 4.0))
    right = changing(dice, steps)
    count = dice.randint(1, 8)
    if dice.random() < 0.3:
        source = ChainSource(world, str(number), seconds / 4, right, count)
        source.reading = dice.choice((0.0, 0.01, 0.3))
        return source
    claims = dice.choice(("right", None, changing(dice, steps), always(0.99)))
    return Source(world, str(number), seconds, right, count, claims, spread=dice.choice((1.0, 1.5)))


def random_trace(seed: int) -> World:
    """Decode a batch for some steps; texts, costs, sources and their accuracies are random."""
    dice = random.Random(seed)
    slope = dice.choice((0.01, 0.1, 0.3, 1.0))
    curve = CostCurve(
        dice.choice((0.3, 1.0, 3.0)),
        1.0 - slope * dice.randint(1, 6),
        slope,
        dice.choice((0.0, 0.5)),
    )
    world = World(dice, curve, length=400)
    sources = [random_source(world, number, steps=8) for number in range(dice.randint(1, 3))]
    requests = [
        world.request(sources, place=dice.randint(4, 40)) for _ in range(dice.choice((1, 1, 2, 4)))
    ]
    world.decode(requests, sources, dice.randint(5, 20))
    return world


@pytest.mark.parametrize("first", [0, pytest.param(800, marks=pytest.mark.slow)])
def test_the_bound_of_the_loss_holds_in_every_trace(first: int) -> None:
    drafted = 0
    lossy = 0
    for seed in range(first, first + 800):
        world = random_trace(seed)
        assert world.loss <= world.worst + 1e-9, seed
        drafted += any(world.num_draft_tokens)
        lossy += world.ledger.spent > world.ledger.saved
    assert drafted > 400
    assert lossy > 200


def test_the_bound_of_the_loss_holds_in_long_traces() -> None:
    for seed in range(12):
        world = World(random.Random(seed))
        sources = [random_source(world, number) for number in range(3)]
        for _ in range(3):
            world.decode([world.request(sources)], sources, 200)
        assert world.loss <= world.worst + 1e-9, seed


def test_drafters_that_are_never_right_cost_one_percent() -> None:
    world = World()
    sources = [
        Source(world, str(claims), 0.05, always(0.0), claims=always(claims))
        for claims in (0.3, 0.99)
    ]
    requests = [world.request(sources)]
    world.decode(requests, sources, 2000)
    plain = 2000 * COSTS.at(1)
    assert sum(world.num_draft_tokens) > 0
    trials = len(sources) * UNCOUNTED * 0.05
    assert world.clock.now <= plain * 1.0102 + 2 * world.ledger.longest + trials + world.worst


def interrupt(source: Source, proposals: Sequence[int]) -> None:
    """Let proposals of a drafter, numbered from 1, be interrupted for 20 seconds."""
    propose = source.propose

    def interrupted(contexts: Sequence[DraftContext[Any]]) -> list[TokenTree]:
        trees = propose(contexts)
        if len(source.asked) in proposals:
            source.world.clock.now += 20.0
        return trees

    source.propose = interrupted  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [ChainSource, Source])
@pytest.mark.parametrize("interrupted", [(1,), (2,), (3,), (2, 3), (3, 4), (4,), (5,), (8, 9)])
def test_interrupted_proposals_do_not_end_drafting(
    kind: type[Source], interrupted: tuple[int, ...]
) -> None:
    """Two of the first proposals, or of eight, do not look like the drafter's price."""
    world = World(length=4_000)
    drafter = kind(world, "draft", 0.1, always(0.9), 8)
    interrupt(drafter, interrupted)
    world.decode([world.request([drafter], most=3_900)], [drafter], 400)
    assert len(drafter.asked) > 390


def test_a_faster_step_with_fewer_tokens_does_not_end_drafting() -> None:
    """A drafter may make a step faster by replacing draft tokens of others: it adds none then."""
    world = World(curve=COSTS._replace(start=0.0, slope=0.6))
    sources = [
        Source(world, "copy", 0.01, always(0.5), 8, claims=always(0.6)),
        Source(world, "good", 0.01, always(0.95), 2),
    ]
    world.decode([world.request(sources)], sources, 500)
    records = world.ledger.drafters
    assert all(record.expected > 0.0 for record in records.values())
    assert len(sources[1].asked) > 300


class Boaster(ChainSource):
    """A drafter that takes 60 times as long as it says."""

    def chain_costs(self, context: DraftContext[Any], costs: StepCosts) -> ChainCosts:
        return ChainCosts(self.seconds / 60)


def test_wrong_costs_of_a_drafter_lose_no_more_than_right_ones() -> None:
    world = World()
    boaster = Boaster(world, "boaster", 0.5, always(0.3))
    requests = [world.request([boaster])]
    world.decode(requests, [boaster], 2000)
    plain = (len(requests[0].tokens) - 4) * COSTS.at(1)
    first = UNCOUNTED * 4 * 0.5
    assert boaster.asked
    assert world.clock.now <= plain * 1.0102 + 2 * world.ledger.longest + first + 4 * 0.5


@pytest.mark.parametrize("costs", [0.3, ChainCosts(-1.0)])
def test_costs_that_are_none_are_an_error_of_the_drafter(costs: Any) -> None:
    drafter = chain_drafter(costs)
    ledger = RequestLedger()
    ledger.begin()
    ledger.set_costs(PLAIN, 10.0)
    asked = context(None, [1], 9, 9, vocab=VOCAB, ledger=ledger)
    with pytest.raises(
        OptionError, match=r"draft: expected chain_costs\(\) to return ChainCosts of"
    ):
        ledger.plan(drafter, asked, TreeUnion(PLAIN))


@pytest.mark.parametrize(
    ("proposed", "message"),
    [
        (None, "expected propose.. to return a list of TokenTrees, found NoneType; return one"),
        ([], "one for each of 1 contexts, found 0"),
        ([[1, 2]], r"found one with list; TokenTree.chain\(\[last token, …\]\) makes one"),
    ],
)
def test_proposals_that_are_no_trees_are_an_error_of_the_drafter(
    proposed: Any, message: str
) -> None:
    world = World()
    source = Source(world, "odd", 0.1, always(0.9))
    source.propose = lambda contexts: proposed  # type: ignore[method-assign]
    request = world.request([source])
    with pytest.raises(OptionError, match=message):
        world.decode([request], [source])


def test_a_cheap_and_accurate_source_displaces_an_expensive_one() -> None:
    world = World()
    sources = [
        Source(world, "copy", 0.01, always(0.98), 8),
        Source(world, "draft", 0.6, always(0.9)),
    ]
    world.decode([world.request(sources)], sources, 300)
    assert len(sources[0].asked) > 295
    assert len(sources[1].asked) < 15


def test_an_expensive_source_is_used_if_the_cheap_one_has_nothing() -> None:
    world = World()
    sources = [Source(world, "copy", 0.01, always(0.0)), Source(world, "draft", 0.6, always(0.9))]
    requests = [world.request(sources)]
    world.decode(requests, sources, 300)
    assert len(sources[1].asked) > 285
    assert (len(requests[0].tokens) - 4) / world.clock.now > 1.4


@pytest.mark.parametrize("right", [0.0, 0.3, 0.6, 0.9])
def test_draft_rows_that_need_other_experts_are_verified_only_if_they_pay(right: float) -> None:
    """A draft token costs 0.79 of a plain step. In a dense model, where it costs 0.1, all but the
    first source pay.
    """
    speeds = list[float]()
    counts = list[int]()
    for curve in (COSTS._replace(experts=0.9, overlap=0.125), COSTS):
        world = World(curve=curve)
        source = Source(world, "copy", 0.01, always(right))
        request = world.request([source])
        world.decode([request], [source], 1500)
        speeds.append((len(request.tokens) - 4) / world.clock.now)
        counts.append(sum(world.num_draft_tokens))
    assert speeds[0] > 0.98
    assert (counts[0] > 1000) == (right > 0.8)
    assert counts[1] > 1000 or right < 0.2
    assert speeds[1] > speeds[0] or right < 0.2


def test_unprofitable_sources_are_asked_rarely() -> None:
    world = World()
    sources = [Source(world, str(seconds), seconds, always(0.1)) for seconds in (0.2, 0.6, 3.0)]
    world.decode([world.request(sources)], sources, 3000)
    for source in sources:
        # Each has a third of 1 % of the time, and proposals before their price is known.
        assert 1 <= len(source.asked) <= 0.01 * world.clock.now / 3 / source.seconds + 8
        assert source.asked[-1] > 1500


def settled(source: Source, change: int, *, wanted: bool) -> int:
    """Return the steps after ``change`` until the source is used (``wanted``) or dropped for 10
    steps.
    """
    for step in range(change, change + 110):
        asked = sum(step <= each < step + 10 for each in source.asked)
        if (asked >= 8) if wanted else (asked <= 2):
            return step - change
    return 110


@pytest.mark.parametrize(
    ("change", "wanted", "most"),
    [
        pytest.param(360, True, 5, id="copies to code: the draft model is used again"),
        # see the docstring
        pytest.param(480, False, 30, id="code to prose: the draft model is dropped"),
        pytest.param(
            600, False, 5, id="prose to copies: the cheap source displaces the draft model"
        ),
    ],
)
def test_the_choice_follows_a_change_of_the_text(change: int, wanted: bool, most: int) -> None:
    """A source that stops paying is asked for up to 30 steps more: its expected contribution halves
    in 7 steps.
    """
    phases = {"copy": (0.05, 0.05, 0.97), "draft": (0.85, 0.2, 0.85)}
    delays = []
    for seed in range(11):
        world = World(random.Random(seed))
        copy, draft = (
            Source(
                world, name, seconds, lambda step, name=name: phases[name][step // 120 % 3], count
            )  # type: ignore[misc]
            for name, seconds, count in (("copy", 0.02, 8), ("draft", 0.25, 4))
        )
        world.decode([world.request([copy, draft])], [copy, draft], change + 120)
        delays.append(settled(draft, change, wanted=wanted))
    assert sorted(delays)[len(delays) // 2] <= most, delays


def test_decisions_are_reproducible() -> None:
    runs = []
    for _ in range(2):
        world = World(random.Random(5))
        sources = [
            Source(world, "a", 0.1, changing(random.Random(1))),
            ChainSource(world, "b", 0.1, always(0.6)),
        ]
        world.decode([world.request(sources), world.request(sources, 50)], sources, 300)
        runs.append(([source.asked for source in sources], world.clock.now, world.num_draft_tokens))
    assert runs[0] == runs[1]
    assert all(runs[0][0])


def test_a_new_request_uses_what_earlier_ones_have_shown() -> None:
    world = World()
    sources = poor, good = [
        Source(world, "poor", 0.5, always(0.1)),
        Source(world, "good", 0.3, always(0.9)),
    ]
    world.decode([world.request(sources)], sources, 200)
    poor.asked.clear(), good.asked.clear()
    began = world.step
    world.decode([world.request(sources, 300)], sources, 20)
    assert good.asked[:5] == [*range(began, began + 5)]
    assert len(poor.asked) <= 1


@pytest.mark.parametrize("kind", [Source, ChainSource])
def test_the_last_token_of_a_request_has_no_draft_tokens(kind: type[Source]) -> None:
    world = World()
    sources = [kind(world, "good", 0.01, always(1.0), 1)]
    request = world.request(sources, most=10_000)
    world.decode([request], sources, 5)
    sources[0].asked.clear()
    request.most = len(request.tokens) + 1
    world.decode([request], sources)
    assert not sources[0].asked
    request.most = len(request.tokens) + 2
    world.decode([request], sources)
    assert len(sources[0].asked) == 1


@pytest.mark.parametrize(("right", "least", "most"), [(0.95, 900, 1200), (0.0, 1, 60)])
def test_drafters_without_gains_are_judged_by_their_accepted_draft_tokens(
    right: float, least: int, most: int
) -> None:
    world = World()
    sources = [Source(world, "bare", 0.02, always(right), claims=None)]
    world.decode([world.request(sources)], sources, 300)
    assert least <= sum(world.num_draft_tokens) <= most


def test_the_observations_of_a_batch_are_part_of_the_price() -> None:
    world = World()
    sources = [Source(world, "copy", 0.8, always(0.9))]
    requests = [world.request(sources, place) for place in (4, 50, 90, 130)]
    world.decode(requests, sources)  # the first proposal is not charged
    for request in requests:
        request.ledger.begin()
        request.ledger.set_costs(StepCosts(COSTS, 4), 1e6)
    contexts = [world._context(each, each.states[0]) for each in requests]
    unions = [TreeUnion(StepCosts(COSTS, 4)) for _ in requests]
    propose_planned(sources[0], contexts, unions, world.clock)
    for request in requests:
        request.ledger.charge(sources[0], 1.0, request.ledger.charged)  # its observation
    assert world.ledger.drafters["copy"].seconds == pytest.approx(0.8 / 4 + 1.0)


def test_an_interrupted_proposal_counts_as_twice_its_expected_time() -> None:
    world = World()
    source = Source(world, "copy", 0.1, always(0.9))
    request = world.request([source])
    world.decode([request], [source], 20)
    spent = world.ledger.spent
    measured = world.ledger.drafters["copy"]
    expected = measured.seconds
    assert expected > 0.0
    request.ledger.begin()
    request.ledger.set_costs(StepCosts(COSTS), 1e6)
    source.seconds = 50.0
    asked = world._context(request, request.states[0])
    propose_planned(source, [asked], [TreeUnion(StepCosts(COSTS))], world.clock)
    assert measured.durations[-1][0] >= 50.0
    assert world.ledger.spent - spent == pytest.approx(2.0 * expected)


class Chain(Source):
    """A drafter that drafts token by token, with given costs."""

    costs: ChainCosts

    def chain_costs(self, context: Any, costs: StepCosts) -> ChainCosts:
        return self.costs


PLAIN = StepCosts(CostCurve(1.0, 1.0, 0.0))  # rows cost nothing


def chain_drafter(costs: ChainCosts) -> Chain:
    drafter = Chain(World(length=1), "draft", 0.0, always(0.0))
    drafter.costs = costs
    return drafter


def test_a_text_is_read_when_the_steps_without_it_have_missed_as_much() -> None:
    """Reading takes as long as 20 passes; a chain of a new drafter saves about a pass per step."""
    drafter = chain_drafter(ChainCosts(0.1, prefill=20.0))
    ledger = RequestLedger()
    ledger.ledger.drafters["draft"].learned = 1.0  # no time for learning is left

    def proposes_at(max_depth: int) -> int:
        for step in range(100):
            ledger.begin()
            assert not ledger.is_quiet()  # the steps that miss something are counted
            ledger.set_costs(PLAIN, float("inf"))
            asked = context(None, [1], max_depth, 99, vocab=VOCAB, ledger=ledger)
            if ledger.plan(drafter, asked, TreeUnion(PLAIN)).reason is not None:
                return step
        return 100

    chains = [
        (1.0 + sum(0.7**depth for depth in range(1, count + 1)), 1.0 + 0.1 * count)
        for count in range(1, 20)
    ]
    tokens, seconds = max(chains, key=lambda chain: chain[0] / chain[1])
    saved = tokens - seconds
    assert proposes_at(1000) == math.ceil(20.0 / saved) - 1
    assert proposes_at(1000) == math.ceil(20.0 / saved) - 1  # the proposal used up what was missed
    assert proposes_at(10) == 100  # 10 tokens cannot save 20 passes


def test_a_request_is_quiet_until_the_time_allows_what_it_was_refused() -> None:
    drafter = chain_drafter(ChainCosts(5.0))
    ledger = RequestLedger()
    asked = context(None, [1], 9, 9, vocab=VOCAB, ledger=ledger)
    assert not ledger.is_quiet()
    ledger.begin()
    ledger.set_costs(PLAIN, 10.0)
    assert ledger.plan(drafter, asked, TreeUnion(PLAIN)).reason is None
    for elapsed in (0.0, 100.0, 499.0):
        ledger.ledger.elapsed = elapsed
        assert ledger.is_quiet()
    ledger.ledger.elapsed = 501.0  # 1 % of the time covers a draft token
    assert not ledger.is_quiet()
    ledger.begin()
    ledger.set_costs(PLAIN, 10.0)
    assert ledger.plan(drafter, asked, TreeUnion(PLAIN)).reason == "learns"
    assert not ledger.is_quiet()


def test_no_drafter_is_asked_before_the_costs_are_known() -> None:
    ledger = RequestLedger()
    ledger.ledger.begin_step(None, 1)
    assert not ledger.begin_proposals(everything=False, has_guide=False)
    assert not ledger.begin_proposals(everything=False, has_guide=True)
    assert ledger.begin_proposals(everything=True, has_guide=False)
    assert ledger.costs is None
    ledger.ledger.begin_step(PLAIN, 1)
    assert ledger.begin_proposals(everything=False, has_guide=False)
    assert ledger.costs == PLAIN
    assert ledger.begin_proposals(everything=True, has_guide=False)
    assert ledger.costs is None, "draft tokens are wanted whatever they cost"


def test_a_guide_may_force_text_in_a_quiet_request() -> None:
    drafter = chain_drafter(ChainCosts(5.0))
    ledger = RequestLedger()
    asked = context(None, [1], 9, 9, vocab=VOCAB, ledger=ledger)
    ledger.ledger.begin_step(PLAIN, 1)
    assert ledger.begin_proposals(everything=False, has_guide=False)
    assert ledger.plan(drafter, asked, TreeUnion(PLAIN)).reason is None
    assert not ledger.begin_proposals(everything=False, has_guide=False)
    assert ledger.begin_proposals(everything=False, has_guide=True)


def test_the_requests_of_a_step_may_lose_equal_parts() -> None:
    ledger = Ledger(elapsed=800.0)
    ledger.begin_step(PLAIN, 4)
    assert ledger.request_allowance == pytest.approx(ledger.allowance / 4) == pytest.approx(2.0)
    ledger.begin_step(PLAIN, 0)
    assert ledger.request_allowance == ledger.allowance


def test_what_a_step_costs_and_saves() -> None:
    """By the cost model: 2 s without draft tokens, and 1 s for each."""
    ledger = Ledger()
    one = RequestLedger(ledger)
    private = RequestLedger(ledger, RequestAcceptance(private=True))
    ledger.begin_step(StepCosts(CostCurve(1.0, 0.0, 1.0), 2), 2)
    step = FinishedStep(5.5, 0.5, num_decoding=2, num_draft_rows=3, num_saved=2)
    ledger.record_step(step, [one, private])
    assert ledger.elapsed == 6.0
    assert ledger.longest == 5.5
    assert ledger.spent == 3.0
    assert ledger.saved == 2.0
    assert one.regret.seconds == 3.0
    assert private.regret.seconds == 0.0
    ledger.record_step(step._replace(seconds=100.0), [])
    assert ledger.longest == 10.0, "a disturbed pass counts as twice the estimate"
    ledger.record_step(step._replace(seconds=100.0, num_prompt_rows=50), [])
    assert ledger.longest == 10.0, "a pass that reads a prompt says nothing of the others"


def test_a_step_without_costs_or_drafters() -> None:
    ledger = Ledger()
    ledger.begin_step(None, 1)
    ledger.record_step(FinishedStep(1.0, 0.0, num_decoding=1, num_draft_rows=9), [])
    assert (ledger.elapsed, ledger.spent, ledger.longest) == (1.0, 0.0, 0.0)
    ledger.begin_step(PLAIN, 0)
    ledger.record_step(FinishedStep(1.0, 0.0, num_decoding=1, has_drafters=False), [])
    assert ledger.elapsed == 1.0
    ledger.record_step(FinishedStep(1.0, 0.0, num_decoding=0, num_prompt_rows=9), [])
    assert (ledger.elapsed, ledger.spent) == (2.0, 0.0)


def test_all_drafters_share_the_time_for_learning() -> None:
    ledger = Ledger(elapsed=1000.0)
    world = World(length=1)
    drafters = [Source(world, name, 0.0, always(0.0)) for name in ("copy", "draft")]
    for drafter in drafters:
        record = ledger.drafters[drafter.name]
        record.proposer = weakref.ref(drafter)
        record.learned = 1.0
    assert ledger.learning_time(record, 4.0) == pytest.approx(1000.0)  # 1 % for both, 5 s each
    # A drafter that no longer exists keeps what it has used, and no more.
    del drafters[0], drafter
    gc.collect()
    assert ledger.learning_time(record, 8.0) == pytest.approx(1000.0)


def test_planned_drafters_are_live_as_long_as_they_exist() -> None:
    drafter = chain_drafter(ChainCosts(5.0))
    ledger = RequestLedger()
    ledger.begin()
    ledger.set_costs(PLAIN, 10.0)
    other = ledger.ledger.drafters["other"]
    alone = ledger.ledger.learning_time(other, 1.0)
    ledger.plan(drafter, context(None, [1], 9, 9, vocab=VOCAB, ledger=ledger), TreeUnion(PLAIN))
    assert ledger.ledger.learning_time(other, 1.0) == 2 * alone
    del drafter
    gc.collect()
    assert ledger.ledger.learning_time(other, 1.0) == alone


class Outer(Source):
    """A drafter that asks another one through the planner, as ``auto`` inside ``merged`` does."""

    def __init__(self, world: World, inner: Source) -> None:
        super().__init__(world, "outer", 0.0, always(1.0))
        self.inner = inner

    def propose(self, contexts: Sequence[DraftContext[Any]]) -> list[TokenTree]:
        unions = [TreeUnion(each.ledger.costs) for each in contexts]
        propose_planned(self.inner, contexts, unions, self.world.clock)
        self.world.clock.now += 0.25  # its own time
        return [
            union.tree(each.tokens[-1], 31) for each, union in zip(contexts, unions, strict=True)
        ]


def test_the_proposals_of_parts_count_once() -> None:
    world = World(length=100)
    inner = Source(world, "inner", 0.5, always(1.0))
    outer = Outer(world, inner)
    request = world.request([outer])
    request.ledger.ledger.elapsed = 1e6
    costs = StepCosts(CostCurve(10.0, 1.0, 0.0))
    for _ in range(UNCOUNTED + 1):
        spent = request.ledger.ledger.spent
        request.ledger.begin()
        request.ledger.set_costs(costs, 1e6)
        union = TreeUnion(costs)
        asked = context(request.states[0], request.tokens, 9, 9, vocab=VOCAB, ledger=request.ledger)
        propose_planned(outer, [asked], [union], world.clock)
    inside, outside = request.ledger.reports
    assert (inside.drafter, outside.drafter) == ("inner", "outer")
    assert (inside.num_nested, outside.num_nested) == (0, 1)
    assert outside.seconds == 0.75
    assert outside.own_seconds == 0.25
    assert request.ledger.charged == 0.75
    assert request.ledger.ledger.spent - spent == pytest.approx(0.75)
    drafters = request.ledger.ledger.drafters
    assert drafters["outer"].seconds == 0.75, "a proposal takes the time of its parts, too"
    tokens = tuple(world.text[len(request.tokens) :][: inside.tree.num_draft_tokens + 1])
    accepted = inside.tree.num_draft_tokens
    assert accepted > 0
    before = {name: each.added for name, each in drafters.items()}
    request.ledger.end(tokens, accepted, accepted)
    assert request.ledger.regret.saved == pytest.approx(10.0 * accepted - 0.75)
    assert {name: each.added - before[name] for name, each in drafters.items()} == {
        "inner": accepted,
        "outer": accepted,
    }


def test_a_request_whose_sources_were_not_considered_is_not_quiet() -> None:
    """A guide whose forced text fills the proposal does not ask for the drafter beside it."""
    ledger = RequestLedger()
    for _ in range(3):
        ledger.begin()
        ledger.set_costs(StepCosts(COSTS), 10.0)
        assert not ledger.is_quiet()


def test_without_costs_all_drafters_propose() -> None:
    world = World()
    sources = [
        Source(world, str(seconds), seconds, always(0.0), claims=None) for seconds in (0.1, 100.0)
    ]
    request = world.request(sources)
    request.ledger.begin()
    request.ledger.set_costs(None, 0.0)
    asked = context(None, [1], 9, 9, vocab=VOCAB, ledger=request.ledger)
    assert [request.ledger.plan(source, asked, TreeUnion(None)).reason for source in sources] == [
        "all",
        "all",
    ]


def test_a_repeated_call_is_charged_anew() -> None:
    """After an error of one request's drafter, the others are called once more in the step."""
    source = Source(World(length=1), "one", 0.0, always(0.0))
    ledger = RequestLedger()
    ledger.begin()
    ledger.set_costs(StepCosts(COSTS), 1.0)
    ledger.ledger.drafters["one"].num_calls = 5  # the seconds of the first calls do not count
    ledger.ledger.drafters["one"].durations.extend([[1.0], [1.0], [1.0]])
    tree = TokenTree.chain([9, 1], gain=[1.0, 0.6])
    for seconds in (0.3, 0.2):
        ledger.forget_proposals()
        ledger.add(source, DraftPlan("pays"), seconds, tree, TreeUnion(StepCosts(COSTS)), ())
        ledger.charge(source, seconds, ledger.charged)
    ledger.charge_rest(0.25)
    assert ledger.ledger.spent == pytest.approx(0.3 + 0.25)


def test_proposals_are_united_and_the_least_probable_nodes_left_out() -> None:
    world = World(length=1)
    ledger = RequestLedger()
    ledger.begin()
    ledger.set_costs(StepCosts(COSTS), 1.0)
    one, other = (Source(world, name, 0.0, always(0.0)) for name in ("one", "other"))
    pays, learns = DraftPlan("pays"), DraftPlan("learns")
    union = TreeUnion(StepCosts(COSTS))
    assert union.tree(9, 31) == TokenTree.chain([9])
    ledger.add(one, pays, 0.1, TokenTree.chain([9, 1, 2], gain=[1.0, 0.6, 0.3]), union, ())
    assert union.tree(9, 31).tokens == (9, 1, 2)
    ledger.add(other, learns, 0.2, TokenTree.chain([9, 3, 4], gain=[1.0, 0.9, 0.8]), union, ())
    assert union.tree(9, 31).tokens == (9, 1, 2, 3, 4)
    assert union.tree(9, 3).tokens == (9, 1, 3, 4)  # 0.36 and 0.32 after 0.6
    assert [(each.drafter, each.reason, each.seconds) for each in ledger.reports] == [
        ("one", "pays", 0.1),
        ("other", "learns", 0.2),
    ]
    assert ledger.reports[0].before == (1.0, 1.0)
    assert ledger.reports[0].after == ledger.reports[1].before == pytest.approx((1.9, 1.2))
