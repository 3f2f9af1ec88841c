"""The length of draft chains: the decision against its formula, and whole decodings with made-up costs."""

import random
from typing import Any

import pytest

from drafters.drafting import Pass, bound, decode, plain_output, watch_draft
from drafters.from_draft.drafts import draft_folder
from drafters.helpers import within
from drafters.trees import DraftCase, TreeDrafter
from pronk.drafters import Merged, Proposer
from pronk.drafters.from_draft.draft_model import ModelProposer
from pronk.engine.request import Request
from pronk.sampling.params import SamplingParams
from pronk.speculation.cost_model import CostCurve
from pronk.speculation.draft_length import Backoff, DraftLengthTracker, StepCost
from pronk.speculation.tree import TokenTree
from tiny_models import GivenTimes, make_engine, make_request, run, set_costs, tiny_decoder

RIGHT, FAIR, HOPELESS = 0.0, 0.03, 3.0
TARGET = CostCurve((1, 4, 8, 12, 64), (1.0, 1.0, 1.0, 1.2, 4.0))


def rate(length_tracker: DraftLengthTracker) -> float:
    return (length_tracker.taken + 0.7 * 2) / (length_tracker.offered + 2)


def speed(gains: list[float], step_cost: StepCost) -> float:
    """Return the expected tokens per second of each request with a chain of these gains."""
    rows = step_cost.requests * (1 + len(gains))
    seconds = step_cost.target.at(rows) / step_cost.requests
    seconds += len(gains) * step_cost.draft.at(step_cost.requests) / step_cost.requests
    return (1 + sum(gains)) / seconds


def test_a_chain_continues_if_a_longer_one_is_worth_more() -> None:
    dice, answers = random.Random(0), list[bool]()
    for _ in range(1200):
        draft = dice.choice((0.01, 0.05, 0.2, 0.6))
        step_cost = StepCost(TARGET, CostCurve((1, 64), (draft, dice.choice((1, 4)) * draft)), dice.randint(1, 5))
        length_tracker = DraftLengthTracker(offered=dice.uniform(0, 20))
        length_tracker.taken = length_tracker.offered * dice.random()
        gains, most = list[float](), dice.randint(0, 20)
        for _ in range(min(most, dice.randint(0, 6))):
            gains.append((gains or [1.0])[-1] * dice.random() ** 0.3)
        a, last = rate(length_tracker), (gains or [1.0])[-1]
        longer = [
            [*gains, *(last * a**power for power in range(1, ahead + 1))]
            for ahead in range(1, 9)
            if len(gains) + ahead <= most
        ]
        want = any(speed(each, step_cost) > speed(gains, step_cost) for each in longer)
        assert length_tracker.goes_on(gains, most, step_cost) == want
        answers.append(want)
    assert 0.1 < sum(answers) / len(answers) < 0.9


def test_a_chain_at_its_limit_does_not_go_on() -> None:
    free = StepCost(CostCurve((1, 64), (1.0, 1.0)), CostCurve((1, 64), (0.0, 0.0)), 1)
    assert DraftLengthTracker().goes_on([0.5, 0.4], 3, free)
    assert not DraftLengthTracker().goes_on([0.5, 0.4], 2, free)
    assert not DraftLengthTracker().goes_on([], 0, free)


def test_several_rows_may_pay_if_one_does_not() -> None:
    """The fifth row costs as much as the next three beyond it."""
    steps = CostCurve((1, 4, 5, 8, 64), (1.0, 1.0, 1.3, 1.3, 9.0))
    step_cost, length_tracker = (
        StepCost(steps, CostCurve((1, 64), (0.01, 0.01)), 1),
        DraftLengthTracker(offered=100.0, taken=95.0),
    )
    gains = [0.9, 0.85, 0.8]
    assert speed([*gains, 0.8 * length_tracker.rate], step_cost) < speed(gains, step_cost)
    assert length_tracker.goes_on(gains, 64, step_cost)
    assert not length_tracker.goes_on(gains, 4, step_cost)


def test_requests_share_the_costs_of_a_forward_pass() -> None:
    draft = CostCurve((1, 4, 64), (0.5, 0.5, 8.0))
    assert StepCost(TARGET, draft, 1).seconds(3) == pytest.approx(1.0 + 3 * 0.5)
    assert StepCost(TARGET, draft, 4).seconds(2) == pytest.approx((1.2 + 2 * 0.5) / 4)
    assert StepCost(TARGET, draft, 1).seconds(7, passes=2) == pytest.approx(1.0 + 2 * 0.5)


def test_recent_draft_tokens_count_most() -> None:
    length_tracker = DraftLengthTracker()
    assert length_tracker.rate == pytest.approx(0.7)
    offered = taken = 0.0
    for draft_tokens, accepted in ((4, 4), (4, 0), (5, 2), (1, 1), (3, 3)):
        length_tracker.learn(draft_tokens, accepted)
        offered, taken = 0.9 * offered + min(draft_tokens, accepted + 1), 0.9 * taken + accepted
        assert (length_tracker.offered, length_tracker.taken) == pytest.approx((offered, taken))
        assert length_tracker.rate == pytest.approx((taken + 1.4) / (offered + 2))
    for _ in range(100):
        length_tracker.learn(3, 0)
    assert length_tracker.rate < 0.15
    for _ in range(100):
        length_tracker.learn(3, 3)
    assert length_tracker.rate > 0.9


def test_pauses_grow_while_tries_fail() -> None:
    """A try after 4 steps without draft tokens, then after twice as many each time, up to 64."""
    length_tracker, waits = DraftLengthTracker(), list[int]()
    for _ in range(7):
        wait = 0
        while not length_tracker.tries:
            length_tracker.learn(0, 0)
            wait += 1
        waits.append(wait)
        length_tracker.learn(2, 0)
        assert not length_tracker.tries
    assert waits == [4, 8, 16, 32, 64, 64, 64]
    for _ in range(64):
        length_tracker.learn(0, 0)
    length_tracker.learn(2, 1)
    assert length_tracker.patience == 4
    length_tracker.learn(2, 0)  # not a try after a pause
    assert length_tracker.patience == 4


def wrong_token(case: DraftCase) -> TokenTree:
    """A draft token that is almost never right."""
    return TokenTree.chain([case.root, 77])


def decode_at_cost(
    spec: str,
    cost: float,
    *,
    budget: bool = True,
    beside: Proposer[Any] | None = None,
    max_tokens: int = 120,
) -> tuple[Request, list[Pass]]:
    """Decode a text with made-up costs."""
    engine = make_engine(tiny_decoder(), budget=budget)
    set_costs(engine, TARGET)
    drafter = bound(spec, engine)
    if beside is not None:
        drafter = Merged((drafter, beside)).bind(engine.target)
    model = within(drafter, ModelProposer)[0]
    model.draft.runner.cost_model = GivenTimes(CostCurve((1, 64), (cost, cost)))
    passes = watch_draft(model.draft)
    request = make_request([1, 2, 3], SamplingParams(max_tokens=max_tokens, seed=1), drafter)
    run(engine, [request])
    assert request.output == plain_output(request.prompt, request.params)
    return request, passes


def model(noise: float, **options: Any) -> str:
    more = "".join(f", {name}={value}" for name, value in options.items())
    return f"draft_model(model={draft_folder(noise)!r}{more})"


KINDS = {
    "draft_model": "{}",
    "threshold": "threshold({})",
    "cape": "cape({})",
    "staged": "staged({}, autoregressive)",
    "beam": "beam({})",
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_draft_models_without_accepted_tokens_are_tried_rarely(kind: str) -> None:
    request, passes = decode_at_cost(kind.format(model(HOPELESS)), 0.3)
    assert request.stats.accepted < 6
    assert len(passes) < 0.5 * len(request.output)
    late = [step.drafted for step in request.stats.steps][-60:]
    assert sum(count > 0 for count in late) <= 4
    assert any(step.drafted for step in request.stats.steps)


def test_right_draft_models_make_long_chains() -> None:
    request, passes = decode_at_cost(model(RIGHT, num_tokens=20), 0.02)
    depths = [step.depth for step in request.stats.steps[1:-1]]
    assert request.stats.step_compression > 6
    assert max(depths) >= 7
    expensive, fewer = decode_at_cost(model(RIGHT, num_tokens=20), 0.6)
    assert len(fewer) < len(passes)
    assert expensive.stats.drafted < request.stats.drafted


def test_a_draft_model_as_expensive_as_the_target_is_left_out() -> None:
    request, passes = decode_at_cost(model(RIGHT), 1.0)
    assert len(passes) < 0.3 * len(request.output)


@pytest.mark.parametrize("noise", [RIGHT, HOPELESS])
def test_without_a_budget_every_step_has_draft_tokens(noise: float) -> None:
    request, passes = decode_at_cost(model(noise), 5.0, budget=False, max_tokens=40)
    left = 40 - 1
    for step in request.stats.steps[1:]:
        assert step.drafted == min(7, left - 1)
        left -= step.tokens
    assert len(passes) == request.stats.drafted > 20


def test_steps_with_draft_tokens_of_another_drafter_count_for_pauses() -> None:
    request, passes = decode_at_cost(model(HOPELESS), 0.3, beside=TreeDrafter(wrong_token), max_tokens=100)
    assert all(step.drafted for step in request.stats.steps[1:-1])
    asked = [each.texts[0][-1] for each in passes]
    assert max(map(len, asked)) > 60  # not only at the beginning
    assert len(passes) < 0.5 * len(request.output)


def test_costs_are_known_after_a_forward_pass() -> None:
    engine = make_engine(tiny_decoder())
    drafter = bound(model(FAIR), engine)
    assert isinstance(drafter, ModelProposer)
    assert drafter.draft.costs(0, 1) is None
    decode(engine, drafter, [[1, 2, 3]])
    costs = drafter.draft.costs(0, 1)
    assert costs is not None
    assert costs.at(1) > 0


def test_no_draft_tokens_while_the_targets_costs_are_unknown() -> None:
    engine = make_engine(tiny_decoder(), budget=True)
    set_costs(engine, None)
    drafter = bound(model(RIGHT), engine)
    assert isinstance(drafter, ModelProposer)
    passes = watch_draft(drafter.draft)
    (request,) = decode(engine, drafter, [[1, 2, 3]])
    assert request.stats.drafted == 0
    assert not passes


def test_the_first_chain_is_complete() -> None:
    """The draft's unmeasured forward passes count as free."""
    engine = make_engine(tiny_decoder(), costs=TARGET)
    (request,) = decode(engine, bound(model(HOPELESS), engine), [[1, 2, 3]])
    assert next(step.drafted for step in request.stats.steps if step.drafted) == 7


def test_the_back_off_grows_while_no_draft_tokens_are_kept() -> None:
    rest, bare, own = Backoff(), TokenTree.chain([1]), TokenTree((1, 2), (-1, 0), origin=(("", 0), ("heads", 5)))
    other = TokenTree((1, 2), (-1, 0), origin=(("", 0), ("lookup", 0)))
    for steps in (2, 4, 8, 16, 32, 32):
        rest.learn(bare, {"heads"}, guessed=True)
        assert rest.steps == steps
        for left in reversed(range(steps)):
            rest.learn(bare, {"heads"}, guessed=True)
            assert rest.steps == left
    rest.learn(other, {"heads"}, guessed=True)
    rest.learn(bare, {"heads"}, guessed=False)
    assert rest.steps == 0
    rest.learn(own, {"heads"}, guessed=True)
    rest.learn(bare, {"heads"}, guessed=True)
    assert rest.steps == 2
