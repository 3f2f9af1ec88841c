"""The rule of drafting, against all choices: subsets of draft tokens, lengths of chains."""

import math
import random
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest

from pronk.drafting.planner import DrafterEstimate, DraftPlan, plan, select_nodes, stays_whole
from pronk.drafting.step_costs import ChainCosts, ExpectedStep, StepCosts
from pronk.drafting.trie import Trie
from pronk.models.cost_model import CostCurve
from pronk.sampling.tree import TokenTree

# Seconds: up to 4 rows cost as much as one; each further row costs a quarter.
CURVE = CostCurve(1.0, 0.0, 0.25)


def random_tree(dice: random.Random, size: int) -> TokenTree:
    trie = Trie(0)
    while len(trie) <= size:
        parent = dice.randrange(len(trie))
        trie.add(parent, dice.randrange(50), trie.gains[parent] * dice.random(), ("x", 0))
    return trie.tree(size)


def random_curve(dice: random.Random) -> CostCurve:
    slope = dice.choice((0.02, 0.1, 0.3, 1.0))
    return CostCurve(
        dice.uniform(0.5, 2.0),
        dice.uniform(-1.0, 1.0) if slope < 1.0 else 0.0,
        slope,
        dice.random(),
    )


def value(
    expected: float, requests: int, nodes: int, prompts: int, curve: CostCurve, drafting: float
) -> float:
    """Return tokens per second; ``nodes`` cost what they add to a pass with ``prompts`` prompt
    rows.
    """
    added = curve.at(prompts + requests + nodes) - curve.at(prompts + requests)
    return (requests + expected) / (curve.at(requests) + added + drafting)


def sum_of_gains(trees: list[TokenTree]) -> float:
    return sum(sum((tree.gain or ())[1:]) for tree in trees)


def num_drafts(trees: list[TokenTree]) -> int:
    return sum(tree.num_draft_tokens for tree in trees)


@pytest.mark.parametrize("prompts", [0, 3, 40])
@pytest.mark.parametrize("drafting", [0.0, 0.5])
def test_no_subset_is_worth_more(prompts: int, drafting: float) -> None:
    dice = random.Random(prompts)
    kept = 0
    for _ in range(60):
        trees = [random_tree(dice, dice.randrange(5)) for _ in range(dice.randint(1, 2))]
        requests = len(trees) + dice.randrange(4)
        curve = random_curve(dice)
        nodes = [
            (number, node) for number, tree in enumerate(trees) for node in range(1, len(tree))
        ]
        best = 0.0
        for count in range(len(nodes) + 1):
            for chosen in combinations(nodes, count):
                gain = sum((trees[number].gain or ())[node] for number, node in chosen)
                best = max(best, value(gain, requests, count, prompts, curve, drafting))
        costs = StepCosts(curve, requests)
        cut = select_nodes(trees, costs, prompt_rows=prompts, drafting=drafting)
        kept += 0 < num_drafts(cut) < len(nodes)
        assert value(
            sum_of_gains(cut), requests, num_drafts(cut), prompts, curve, drafting
        ) == pytest.approx(best)
    assert kept > 5


def test_no_affordable_subset_is_worth_more() -> None:
    dice = random.Random(7)
    limited = 0
    for _ in range(100):
        trees = [random_tree(dice, dice.randint(1, 4)) for _ in range(2)]
        curve = random_curve(dice)
        prompts = dice.choice((0, 5))
        allowance = dice.random()
        nodes = [
            (number, node) for number, tree in enumerate(trees) for node in range(1, len(tree))
        ]
        best = 0.0
        for count in range(len(nodes) + 1):
            if curve.at(prompts + 2 + count) - curve.at(prompts + 2) > allowance:
                continue
            for chosen in combinations(nodes, count):
                gain = sum((trees[number].gain or ())[node] for number, node in chosen)
                best = max(best, value(gain, 2, count, prompts, curve, 0.0))
        costs = StepCosts(curve, 2)
        cut = select_nodes(trees, costs, prompt_rows=prompts, allowance=allowance)
        rows = prompts + 2 + num_drafts(cut)
        assert curve.at(rows) - curve.at(prompts + 2) <= allowance + 1e-9
        assert value(sum_of_gains(cut), 2, num_drafts(cut), prompts, curve, 0.0) == pytest.approx(
            best
        )
        limited += num_drafts(cut) < num_drafts(select_nodes(trees, costs, prompt_rows=prompts))
    assert limited > 10


def test_what_is_kept_is_a_tree_with_the_root() -> None:
    dice = random.Random(1)
    for _ in range(50):
        tree = random_tree(dice, 9)
        (cut,) = select_nodes([tree], StepCosts(random_curve(dice)))
        assert cut.tokens[0] == tree.tokens[0]
        assert cut.gain == (
            1.0,
            *sorted((tree.gain or ())[1:], reverse=True)[: cut.num_draft_tokens],
        ) or (
            sorted(cut.gain or (), reverse=True)
            == sorted(tree.gain or (), reverse=True)[: len(cut)]
        )


def test_a_prompt_in_the_same_pass_makes_no_draft_token_cheaper() -> None:
    """A row that is free in a small forward pass is not free beside a prompt."""
    tree = TokenTree.chain([1, 2, 3, 4, 5], gain=[1.0, 0.9, 0.6, 0.3, 0.1])
    even = StepCosts(CostCurve(1.0, 0.5, 0.5))
    assert select_nodes([tree], even, prompt_rows=500) == select_nodes([tree], even)
    expensive = StepCosts(CostCurve(1.0, -3.0, 1.0))
    assert select_nodes([tree], expensive)[0].num_draft_tokens == 3
    assert select_nodes([tree], expensive, prompt_rows=500)[0].num_draft_tokens == 0


def test_improbable_draft_tokens_stay_only_if_they_are_free() -> None:
    improbable = TokenTree.chain([1, 2, 3, 4, 5], gain=[1.0, 1e-6, 1e-7, 1e-8, 1e-9])
    counts = [
        select_nodes([improbable], StepCosts(curve))[0].num_draft_tokens
        for curve in (CostCurve(1.0, 0.0, 1.0), CostCurve(1.0, 1.0, 0.0), CURVE)
    ]
    assert counts == [0, 4, 3]


def test_drafting_that_has_taken_time_makes_further_rows_worth_more() -> None:
    tree = TokenTree.chain(range(9), gain=[0.8**depth for depth in range(9)])
    kept = [
        select_nodes([tree], StepCosts(CURVE), drafting=seconds)[0].num_draft_tokens
        for seconds in (0.0, 1.0, 5.0)
    ]
    assert kept == sorted(kept)
    assert kept[0] < kept[-1]


def test_of_equal_gains_the_parents_comes_first() -> None:
    chain = TokenTree.chain([1, 2, 3, 4], gain=[1.0, 0.5, 0.5, 0.5])
    assert select_nodes([chain], StepCosts(CostCurve(1.0, -1.0, 1.0))) == [chain.keep([0, 1])]


def test_nodes_without_gains_stay() -> None:
    plain = TokenTree.chain([1, 2, 3, 4])
    window = TokenTree((1, 2, 3), (-1, 0, 0), (True, True, False), gain=(1.0, 1e-9, 0.0))
    expensive = StepCosts(CostCurve(1.0, -639.0, 640.0), 4)
    assert select_nodes([plain, window], expensive) == [plain, window.keep([2])]


def test_whole_trees_stay() -> None:
    trees = [TokenTree.chain([1, 2, 3], gain=[1.0, 1e-9, 1e-9]) for _ in range(2)]
    expensive = StepCosts(CostCurve(1.0, -639.0, 640.0), 2)
    cut = TokenTree.chain([1], gain=[1.0])
    assert select_nodes(trees, expensive) == [cut, cut]
    assert select_nodes(trees, expensive, whole=[False, True]) == [cut, trees[1]]
    assert select_nodes(trees, None, whole=[True, False]) == [trees[0], cut]


@pytest.mark.parametrize(
    ("has_probs", "rejects", "bypass_budget", "expected"),
    [
        (True, True, False, True),
        (True, False, False, False),
        (False, True, False, False),
        (False, False, True, True),
    ],
)
def test_trees_that_may_not_be_cut(
    has_probs: bool, rejects: bool, bypass_budget: bool, expected: bool
) -> None:
    probs = (None, np.ones(3, np.float32) / 3) if has_probs else None
    tree = TokenTree((1, 2), (-1, 0), probs=probs)
    assert stays_whole(tree, rejects=rejects, bypass_budget=bypass_budget) is expected


def test_while_costs_are_unknown_only_nodes_without_gains_stay() -> None:
    plain = TokenTree.chain([1, 2, 3])
    sure = TokenTree.chain([1, 2, 3], gain=[1.0, 1.0, 1.0])
    assert select_nodes([plain, sure], None) == [plain, TokenTree.chain([1], gain=[1.0])]


@pytest.mark.parametrize("requests", [1, 2, 5])
def test_costs_are_a_requests_part_if_all_choose_alike(requests: int) -> None:
    dice = random.Random(requests)
    for _ in range(50):
        costs = StepCosts(random_curve(dice), requests)
        gains = sorted((dice.random() for _ in range(8)), reverse=True)
        choices = [
            ExpectedStep(1 + sum(gains[:count]), costs.curve.at(requests * (1 + count)) / requests)
            for count in range(9)
        ]
        best = costs.best(dice.sample(gains, 8))
        assert best.token_seconds == pytest.approx(min(each.token_seconds for each in choices))
        assert any(best == pytest.approx(each) for each in choices)
    plain = StepCosts(CURVE, requests).plain()
    assert plain == StepCosts(CURVE, requests).best(())
    assert plain == (1.0, pytest.approx(CURVE.at(requests) / requests))


def best_chain(
    costs: StepCosts, chain: ChainCosts, gains: Sequence[float], rate: float, most: int
) -> ExpectedStep:
    """Return the best of all longer chains, by its formula."""
    last = (gains or [1.0])[-1]
    choices = list[ExpectedStep]()
    for ahead in range(1, most - len(gains) + 1):
        length = len(gains) + ahead
        seconds = costs.pass_seconds(length) + length * chain.token
        tokens = 1.0 + sum(gains) + sum(last * rate**power for power in range(1, ahead + 1))
        choices.append(ExpectedStep(tokens, seconds))
    return min(choices, key=lambda choice: choice.token_seconds, default=ExpectedStep(1e-9, 1.0))


def test_a_chain_continues_if_a_longer_one_is_faster() -> None:
    dice = random.Random(0)
    answers = list[bool]()
    for _ in range(1000):
        slope = dice.choice((0.02, 0.1, 0.3))
        curve = CostCurve(1.0, 1.0 - slope * dice.randint(1, 5), slope)
        costs = StepCosts(curve, dice.randint(1, 5))
        chain = ChainCosts(dice.choice((0.01, 0.05, 0.2, 0.6)) / costs.num_requests)
        rate = dice.uniform(0.05, 0.95)
        most = dice.randint(1, 12)
        gains = list[float]()
        for _ in range(min(most, dice.randrange(6))):
            gains.append((gains or [1.0])[-1] * dice.random() ** 0.3)
        longer = best_chain(costs, chain, gains, rate, most)
        now = costs.pass_seconds(len(gains)) + len(gains) * chain.token
        want = longer.token_seconds < now / (1.0 + sum(gains))
        assert DraftPlan("pays", costs).extends(gains, chain, rate, most) == want
        answers.append(want)
    assert 0.1 < sum(answers) / len(answers) < 0.9


def test_several_rows_may_pay_if_one_does_not() -> None:
    """The second row needs half of the experts of the first, and each further row half as many."""
    planned = DraftPlan("pays", StepCosts(CostCurve(1.0, 0.0, 0.0, experts=1.0, overlap=0.5)))
    chain = ChainCosts(0.0)
    assert not planned.extends([], chain, 0.45, 1)
    assert planned.extends([], chain, 0.45, 1) < planned.extends([], chain, 0.6, 1)
    assert not planned.extends([0.45], chain, 0.45, 2)
    assert planned.extends([0.45], chain, 0.99, 9)


def test_a_chain_ends_with_the_allowance() -> None:
    planned = DraftPlan("pays", StepCosts(CostCurve(1.0, 1.0, 0.0), 2), allowance=0.21)
    chain = ChainCosts(0.05, prefill=0.05)
    lengths = [count for count in range(9) if planned.extends([0.99] * count, chain, 0.9, 9)]
    assert lengths == [0, 1, 2]  # 0.05 seconds of reading, and three tokens of 0.05


def test_a_pass_of_a_tree_pays_if_the_step_with_it_is_faster() -> None:
    dice = random.Random(3)
    answers = list[bool]()
    for _ in range(300):
        costs = StepCosts(random_curve(dice), dice.randint(1, 3))
        chain = ChainCosts(dice.choice((0.01, 0.1, 0.4)), start=dice.choice((0.0, 0.1)))
        gains = [dice.random() for _ in range(dice.randrange(5))]
        more = [dice.random() / 2 for _ in range(3)]
        passes = dice.randrange(4)
        now, later = costs.best(gains), costs.best(gains + more)
        drafting = chain.start + passes * chain.token
        speeds = (
            now.tokens / (now.seconds + drafting),
            later.tokens / (later.seconds + drafting + chain.token),
        )
        planned = DraftPlan("pays", costs)
        assert planned.another_pass_pays(gains, more, chain, passes) == (speeds[1] > speeds[0])
        answers.append(speeds[1] > speeds[0])
        poor = planned._replace(allowance=drafting + 0.5 * chain.token)
        assert not poor.another_pass_pays(gains, more, chain, passes)
    assert 0.1 < sum(answers) / len(answers) < 0.9


def test_a_drafter_proposes_if_what_it_adds_is_worth_its_seconds() -> None:
    costs = StepCosts(CURVE)
    before = ExpectedStep(2.0, 1.0)  # a token takes half a second
    for seconds, contribution, room, reason in (
        (0.2, 0.5, 1.0, "pays"),
        (0.2, 0.3, 1.0, None),
        (0.2, 0.5, 0.5, None),  # the next token is probably there already
        (0.0, 0.01, 1.0, "pays"),
    ):
        drafter = DrafterEstimate(seconds, contribution)
        assert plan(drafter, costs, math.inf, before=before, room=room).reason == reason
        learning = drafter._replace(may_learn=True)
        found = plan(learning, costs, math.inf, before=before, room=room).reason
        assert found == (reason or "learns")
        assert plan(learning, costs, seconds - 0.01, before=before, room=room).reason is None


def test_a_draft_model_is_judged_beside_the_draft_tokens_before_it() -> None:
    costs = StepCosts(CostCurve(1.0, 1.0, 0.0))
    drafter = DrafterEstimate(0.1, chain=ChainCosts(0.1), rate=0.6)
    for tokens, reason in ((1.0, "pays"), (1.5, "pays"), (2.0, None)):
        before = ExpectedStep(tokens, 1.0)
        assert plan(drafter, costs, math.inf, before=before, max_tokens=8).reason == reason


def test_the_smallest_gain_is_that_of_the_costs_of_a_row() -> None:
    def planned(curve: CostCurve, tokens: float = 1.0) -> DraftPlan:
        return DraftPlan("pays", StepCosts(curve), before=ExpectedStep(tokens, 1.0))

    assert planned(CostCurve(1.0, 0.9, 0.1)).min_gain == pytest.approx(0.1)
    assert planned(CostCurve(1.0, 0.9, 0.1), 3.0).min_gain == pytest.approx(0.3)
    assert [planned(CostCurve(1.0, 0.9, 0.1)).wants(gain, 3) for gain in (0.09, 0.11)] == [
        False,
        True,
    ]
    five_free = planned(CostCurve(1.0, 0.0, 0.2))
    assert [five_free.wants(0.01, count) for count in (3, 4)] == [True, False]
    assert DraftPlan().min_gain == 0.0
    assert DraftPlan().wants(0.0, 99)
