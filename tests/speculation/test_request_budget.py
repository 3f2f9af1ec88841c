"""Request budgets: bounds of the cost of draft tokens, in simulated histories and with a simulated clock."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from pronk.drafters import DraftContext, Outcome, Proposer
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.execution.model_runner import ForwardJob, ForwardResult
from pronk.sampling.params import SamplingParams
from pronk.speculation.cost_model import CostModel
from pronk.speculation.node_selection import select_paying_nodes
from pronk.speculation.proposer import Capabilities
from pronk.speculation.request_budget import RequestBudget, SharedBudget
from pronk.speculation.tree import TokenTree
from tiny_models import Clock, make_engine, make_request, run, tiny_decoder


def test_gains_may_be_spent_again_and_little_more() -> None:
    shared_budget = SharedBudget()
    request_budget = RequestBudget(shared_budget)
    assert request_budget.left == pytest.approx(4.25)
    request_budget.settle(0.0, 0.5, 3)
    assert (request_budget.credit, shared_budget.left) == pytest.approx((2.5, 8.01))
    for _ in range(9):
        request_budget.settle(0.0, 0.5, 0)
    assert request_budget.credit == 0.0
    assert request_budget.own == 0.0
    assert request_budget.drawn == pytest.approx(4.5 - 2.5 - 0.25)
    assert shared_budget.left == pytest.approx(8.0 - request_budget.drawn + 0.01 * 10)
    assert request_budget.may_ask
    request_budget.settle(0.0, 2.5, 0)
    assert not request_budget.may_ask  # the request may draw no more, although the shared budget has some left
    assert shared_budget.left > 3.0


def test_drawn_budget_is_repaid_first() -> None:
    shared_budget = SharedBudget()
    one, other = RequestBudget(shared_budget), RequestBudget(shared_budget)
    one.settle(0.0, 1.75, 0)
    assert shared_budget.left == pytest.approx(6.51)
    assert (one.left, other.left) == pytest.approx((2.51, 4.25))
    one.settle(0.0, 0.0, 1)
    assert (one.credit, one.drawn, shared_budget.left) == pytest.approx((0.0, 0.5, 7.52))
    one.settle(0.0, 0.0, 2)
    assert (one.credit, one.drawn, shared_budget.left) == pytest.approx((1.5, 0.0, 8.03))


def test_credit_is_bounded() -> None:
    request_budget = RequestBudget(SharedBudget())
    for _ in range(100):
        request_budget.settle(0.0, 0.0, 5)
    assert request_budget.credit == 8.0


def test_the_first_proposal_is_charged_later() -> None:
    """It is charged in parts with later proposals, except for the first of all requests."""
    shared_budget = SharedBudget()
    RequestBudget(shared_budget).settle(100.0, 0.0, 1)
    assert shared_budget.left == 8.01
    request_budget = RequestBudget(shared_budget)
    request_budget.settle(4.5, 0.0, 0)
    assert request_budget.invested == pytest.approx(4.0)
    assert request_budget.may_ask
    request_budget.settle(0.1, 0.0, 1)
    assert request_budget.invested == pytest.approx(3.5)
    assert request_budget.credit + request_budget.own + shared_budget.left == pytest.approx(8.25 - 0.5 + 1 - 0.6 + 0.03)
    left = shared_budget.left + request_budget.credit
    request_budget.close()
    assert shared_budget.left == pytest.approx(left - 3.5)


def test_an_expensive_drafter_waits_for_its_budget() -> None:
    shared_budget = SharedBudget()
    request_budget, asked = RequestBudget(shared_budget), list[int]()
    for step in range(2000):
        if request_budget.may_ask:
            asked.append(step)
            request_budget.settle(1.5, 0.0, 0)
        else:
            request_budget.settle(0.0, 0.0, 0)
    late = [after - before for before, after in pairwise(asked[-5:])]
    assert all(149 <= each < 160 for each in late)
    assert 1.5 * len(asked) <= 4.25 + 0.01 * 2000 + 1.5


Truth = Callable[[int, random.Random], float]


@dataclass
class World:
    """A simulated machine, drafter and text, and the seconds with and without draft tokens.

    ``right(made, dice)`` is the probability that a draft token after ``made`` tokens is right; ``claims`` is its gain.
    """

    dice: random.Random
    memory: float
    compute: float
    asking: float
    right: Truth
    claims: float
    noisy: bool = True
    load: float = 1.0
    seconds: float = 0.0
    plain: float = 0.0
    most_expensive: float = 0.0
    worst: float = -math.inf  # largest loss of a request beyond 1 % per step, without its 2 most expensive steps

    def takes(self, rows: int) -> float:
        return self.load * max(self.memory, self.compute * rows)

    def measured(self, rows: int) -> float:
        """Return the measured seconds; if ``noisy``, one forward pass in twenty takes twice as long."""
        noise = self.dice.lognormvariate(0.0, 0.03) * (2.0 if self.dice.random() < 0.05 else 1.0)
        return self.takes(rows) * (noise if self.noisy else 1.0)

    def request(self, times: CostModel, shared_budget: SharedBudget, tokens: int) -> None:
        """Decode one request as :class:`~pronk.speculation.speculator.Speculator` does."""
        request_budget, made, steps, saved = RequestBudget(shared_budget), 0, list[float](), 0
        times.learn(100, 0, self.measured(100))
        while made < tokens:
            if self.noisy and self.dice.random() < 0.005:
                self.load = self.dice.choice((1.0, 1.5, 2.0, 0.7))
            costs, draft_tokens, asking = times.costs(100), 0, 0.0
            if costs is not None and request_budget.may_ask:
                asking = self.asking * self.dice.uniform(0.5, 1.5)
                gains = [self.claims**depth for depth in range(16)]
                left = request_budget.left * costs.at(1) - asking
                most = sum(costs.at(1 + rows) - costs.at(1) <= left for rows in range(1, 16))
                (tree,) = select_paying_nodes([TokenTree.chain(range(16), gain=gains)], 1, costs, most=[most])
                draft_tokens = tree.num_draft_tokens
            accepted = 0
            while accepted < draft_tokens and self.dice.random() < self.right(made, self.dice):
                accepted += 1
            times.learn(1 + draft_tokens, 100, self.measured(1 + draft_tokens))
            took, made = asking + self.takes(1 + draft_tokens), made + 1 + accepted
            self.seconds, self.plain = self.seconds + took, self.plain + (1 + accepted) * self.takes(1)
            steps.append(took / self.takes(1) - 1.0)
            saved += accepted
            costs = times.costs(100)
            if costs is not None:
                step = costs.at(1)
                request_budget.settle(asking / step, (costs.at(1 + draft_tokens) - step) / step, accepted)
        request_budget.close()
        self.most_expensive += sum(sorted(steps)[-2:])
        self.worst = max(self.worst, sum(sorted(steps)[:-2]) - saved - 0.01 * len(steps))


DRAFTERS: dict[str, tuple[Truth, float]] = {
    "never right": (lambda _, __: 0.02, 0.3),
    "sure and wrong": (lambda _, __: 0.02, 0.99),
    "right for 50 tokens": (lambda made, _: 0.95 if made < 50 else 0.02, 0.95),
    "now so, now so": (lambda made, _: 0.9 if made // 20 % 2 else 0.05, 0.8),
    "slow": (lambda _, __: 0.6, 0.6),
    "good": (lambda _, __: 0.8, 0.8),
}


def world(name: str, seed: int, *, noisy: bool) -> World:
    dice = random.Random(seed)
    asking = dice.choice((0.3, 1.0)) if name == "slow" else dice.choice((0.0005, 0.003, 0.02, 0.1))
    right, claims = DRAFTERS[name]
    return World(dice, dice.uniform(0.02, 0.1), dice.uniform(0.001, 0.03), asking, right, claims, noisy)


def lost(name: str, seed: int, *, noisy: bool, requests: int, tokens: int) -> tuple[World, float]:
    """Return a world after ``requests`` requests, and its loss against plain decoding in plain steps."""
    made, times, shared_budget = world(name, seed, noisy=noisy), CostModel(), SharedBudget()
    for _ in range(requests):
        made.request(times, shared_budget, tokens)
    return made, (made.seconds - made.plain) / made.takes(1)


def check_bound(name: str, seed: int) -> None:
    """Check the bounds of :class:`RequestBudget`, without disturbances."""
    requests, tokens = 4, 200
    made, loss = lost(name, seed, noisy=False, requests=requests, tokens=tokens)
    assert loss <= 8.0 + 0.01 * requests * tokens + 0.25 * requests + made.most_expensive + 1e-9
    assert made.worst <= 4.25 + 0.02  # the cost curve ignores changes below 2 %


def check_share(name: str, seed: int) -> None:
    """Check a loss of at most 3 % plus the most expensive steps, with disturbances and changing load."""
    made, _ = lost(name, seed, noisy=True, requests=4, tokens=256)
    assert made.seconds <= 1.03 * made.plain + made.most_expensive * made.takes(1) * 2.0


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_bound_holds(name: str) -> None:
    for seed in range(25):
        check_bound(name, seed)
        check_share(name, 1000 + seed)


def test_plain_passes_are_measured_again_if_rows_seem_free() -> None:
    """The load changes during the only plain passes, and all later steps have draft tokens."""
    check_share("now so, now so", 20_099)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_bound_holds_in_many_histories(name: str) -> None:
    for seed in range(1000):
        check_bound(name, 10_000 + seed)
        check_share(name, 20_000 + seed)


def test_good_drafters_are_not_restricted() -> None:
    gains = [lost("good", seed, noisy=True, requests=4, tokens=256)[0] for seed in range(30)]
    ratios = sorted(each.seconds / each.plain for each in gains if each.asking < 0.1 * each.memory)
    assert ratios[len(ratios) // 2] < 0.65


class Sure(Proposer[None]):
    """A drafter with high gains and wrong draft tokens, whose proposals take time."""

    name = "sure"

    def __init__(self, clock: Clock, asking: float) -> None:
        self.clock, self.asking = clock, asking

    def start(self, prompt: Sequence[int]) -> None:
        """Return no state."""

    def propose(self, contexts: Sequence[DraftContext[None]]) -> list[TokenTree]:
        self.clock.now += self.asking
        gains = [1.0, 0.99, 0.98, 0.97, 0.96]
        return [TokenTree.chain([context.tokens[-1], 7, 8, 9, 10], gain=gains) for context in contexts]

    def observe(self, outcome: Outcome[None]) -> None:
        """Ignore the outcome."""


def timed(clock: Clock, **options: Any) -> Engine:
    """Return an engine whose forward passes of ``n`` rows take ``0.008 + 0.002 * n`` seconds."""
    engine = make_engine(tiny_decoder(), clock=clock, **options)
    forward = engine.runner.forward

    def took(jobs: Sequence[ForwardJob], collect: frozenset[int] = frozenset()) -> ForwardResult:
        result = forward(jobs, collect)
        clock.now += 0.008 + 0.002 * sum(len(job.segment.tree) for job in jobs)
        return result

    engine.runner.forward = took  # type: ignore[method-assign]
    return engine


def decoded(count: int, asking: float, *, budget: bool, draft: bool = True) -> tuple[float, list[Request]]:
    clock = Clock()
    engine = timed(clock, budget=budget)
    drafter = Sure(clock, asking) if draft else None
    prompts = [[1 + index, 2, 3] for index in range(count)]
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    made = [make_request(prompt, params, *([drafter] if drafter else [])) for prompt in prompts]
    run(engine, made)
    return clock.now, made


@pytest.mark.parametrize("asking", [0.0, 0.004, 0.1])
@pytest.mark.parametrize("count", [1, 3, 16])
def test_a_drafter_that_is_wrong_costs_next_to_nothing(count: int, asking: float) -> None:
    plain, want = decoded(count, 0.0, budget=True, draft=False)
    free, _ = decoded(count, asking, budget=False)
    seconds, got = decoded(count, asking, budget=True)
    assert [each.output for each in got] == [each.output for each in want]
    assert sum(each.stats.drafted for each in got) > 0 or asking == 0.1
    assert free > 1.2 * plain
    steps = 150 * count
    assert (
        plain
        < seconds
        <= plain * (1.0 + (8.0 + 0.01 * steps + 0.25 * count) / steps) + 2 * count * (asking + 4 * 0.002)
    )


class Attentive(Sure):
    """A drafter that takes time to learn from logits."""

    name = "attentive"
    capabilities = Capabilities(logits=True)
    observed = 0

    def observe(self, outcome: Outcome[None]) -> None:
        if outcome.logits is not None:
            self.observed += 1
            self.clock.now += 0.005


def test_a_drafter_without_budget_does_not_observe_steps() -> None:
    """Otherwise observing every step would cost more than drafting."""
    plain, _ = decoded(1, 0.0, budget=True, draft=False)
    clock = Clock()
    drafter, engine = Attentive(clock, 0.0), timed(clock, budget=True)
    request = make_request([1, 2, 3], SamplingParams(max_tokens=150, ignore_eos=True), drafter)
    run(engine, [request])
    assert request.stats.drafted > 0
    assert 5 < drafter.observed < 40
    assert clock.now < plain * (1.0 + 12.0 / 150)


def test_counts_are_reproducible_with_the_clock() -> None:
    runs = [decoded(3, 0.001, budget=True) for _ in range(2)]
    (once, one), (again, other) = runs
    assert once == again
    assert [each.stats.steps for each in one] == [each.stats.steps for each in other]


def test_pauses_of_a_self_budgeting_drafter_grow() -> None:
    """Deciding on each step would use up the budget before any proposal."""
    shared_budget = SharedBudget()
    request_budget, waits = RequestBudget(shared_budget), list[int]()
    for _ in range(5):
        while request_budget.may_choose:
            request_budget.settle(0.05, 0.0, 0)
        assert request_budget.resting
        waits.append(0)
        while not request_budget.may_choose:
            request_budget.settle(0.0, 0.0, 0)
            waits[-1] += 1
    assert waits == pytest.approx([100, 200, 400, 400, 400], abs=6)


def test_a_gain_resets_the_pauses() -> None:
    request_budget = RequestBudget(SharedBudget(), own=0.0, again=2.0)
    request_budget.settle(0.0, 4.1, 0)
    assert (request_budget.resting, request_budget.may_choose, request_budget.again) == (True, False, 4.0)
    request_budget.settle(0.0, 0.0, 9)
    assert (request_budget.resting, request_budget.drawn, request_budget.again) == (False, 0.0, 0.5)
    request_budget.settle(0.0, 8.0 + request_budget.credit, 0)
    assert (request_budget.resting, request_budget.again) == (True, 1.0)


def test_one_request_may_spend_little_of_the_shared_gains() -> None:
    """A drafter that was right for ten texts is tried on the eleventh; its loss is bounded."""
    shared_budget = SharedBudget()
    for _ in range(10):
        request_budget = RequestBudget(shared_budget)
        for _ in range(10):
            request_budget.settle(0.0, 0.1, 3)
        request_budget.close()
    assert shared_budget.left == 64.0
    request_budget = RequestBudget(shared_budget)
    assert request_budget.left == pytest.approx(4.25)
    lost = steps = 0
    while request_budget.left > 0.0:
        request_budget.settle(0.0, 0.1, 0)
        lost, steps = lost + 0.1, steps + 1
    assert lost <= 4.25 + 0.01 * steps + 0.1
    assert shared_budget.left > 59.0
