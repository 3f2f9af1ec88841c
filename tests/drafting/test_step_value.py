"""The draft tokens that maximize expected tokens per second, against all subsets."""

import random
from itertools import combinations

import pytest

from pronk.drafting.step_value import ChainPrice, Offer, select_nodes
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
        cut = select_nodes(trees, requests, curve, prompts=prompts, drafting=drafting)
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
        cut = select_nodes(trees, 2, curve, prompts=prompts, allowance=allowance)
        rows = prompts + 2 + num_drafts(cut)
        assert curve.at(rows) - curve.at(prompts + 2) <= allowance + 1e-9
        assert value(sum_of_gains(cut), 2, num_drafts(cut), prompts, curve, 0.0) == pytest.approx(
            best
        )
        limited += num_drafts(cut) < num_drafts(select_nodes(trees, 2, curve, prompts=prompts))
    assert limited > 10


def test_what_is_kept_is_a_tree_with_the_root() -> None:
    dice = random.Random(1)
    for _ in range(50):
        tree = random_tree(dice, 9)
        (cut,) = select_nodes([tree], 1, random_curve(dice))
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
    even = CostCurve(1.0, 0.5, 0.5)
    assert select_nodes([tree], 1, even, prompts=500) == select_nodes([tree], 1, even)
    expensive = CostCurve(1.0, -3.0, 1.0)
    assert select_nodes([tree], 1, expensive)[0].num_draft_tokens == 3
    assert select_nodes([tree], 1, expensive, prompts=500)[0].num_draft_tokens == 0


def test_improbable_draft_tokens_stay_only_if_they_are_free() -> None:
    improbable = TokenTree.chain([1, 2, 3, 4, 5], gain=[1.0, 1e-6, 1e-7, 1e-8, 1e-9])
    assert select_nodes([improbable], 1, CostCurve(1.0, 0.0, 1.0))[0].num_draft_tokens == 0
    assert select_nodes([improbable], 1, CostCurve(1.0, 1.0, 0.0))[0].num_draft_tokens == 4
    assert select_nodes([improbable], 1, CURVE)[0].num_draft_tokens == 3


def test_drafting_that_has_taken_time_makes_further_rows_worth_more() -> None:
    tree = TokenTree.chain(range(9), gain=[0.8**depth for depth in range(9)])
    kept = [
        select_nodes([tree], 1, CURVE, drafting=seconds)[0].num_draft_tokens
        for seconds in (0.0, 1.0, 5.0)
    ]
    assert kept == sorted(kept)
    assert kept[0] < kept[-1]


def test_of_equal_gains_the_parents_comes_first() -> None:
    chain = TokenTree.chain([1, 2, 3, 4], gain=[1.0, 0.5, 0.5, 0.5])
    assert select_nodes([chain], 1, CostCurve(1.0, -1.0, 1.0)) == [chain.keep([0, 1])]


def test_nodes_without_gains_stay() -> None:
    plain = TokenTree.chain([1, 2, 3, 4])
    window = TokenTree((1, 2, 3), (-1, 0, 0), (True, True, False), gain=(1.0, 1e-9, 0.0))
    expensive = CostCurve(1.0, -639.0, 640.0)
    assert select_nodes([plain, window], 4, expensive) == [plain, window.keep([2])]


def test_while_costs_are_unknown_only_nodes_without_gains_stay() -> None:
    plain = TokenTree.chain([1, 2, 3])
    sure = TokenTree.chain([1, 2, 3], gain=[1.0, 1.0, 1.0])
    assert select_nodes([plain, sure], 2, None) == [plain, TokenTree.chain([1], gain=[1.0])]


@pytest.mark.parametrize("requests", [1, 2, 5])
def test_an_offer_is_a_requests_part_if_all_choose_alike(requests: int) -> None:
    dice = random.Random(requests)
    for _ in range(50):
        curve = random_curve(dice)
        gains = sorted((dice.random() for _ in range(8)), reverse=True)
        choices = [
            Offer(1 + sum(gains[:count]), curve.at(requests * (1 + count)) / requests)
            for count in range(9)
        ]
        offer = Offer.of(random.Random(0).sample(gains, 8), curve, requests)
        assert offer.tokens / offer.seconds == pytest.approx(
            max(each.tokens / each.seconds for each in choices)
        )
        assert any(offer == pytest.approx(each) for each in choices)
    assert Offer.of((), CURVE, requests) == (1.0, pytest.approx(CURVE.at(requests) / requests))


def test_requests_share_the_costs_of_a_chain() -> None:
    assert ChainPrice(CURVE, 0.5).seconds(1, 3, 3) == pytest.approx(1.0 + 3 * 0.5)
    assert ChainPrice(CURVE, 0.5).seconds(4, 2, 2) == pytest.approx((3.0 + 2 * 0.5) / 4)
    assert ChainPrice(CURVE, 0.5).seconds(1, 7, 2) == pytest.approx(2.0 + 2 * 0.5)
