"""The selection of draft tokens that pay, against all subsets and in whole decodings with made-up costs."""

import random
from itertools import combinations, product

import pytest

from drafters.trees import DraftCase, TreeDrafter
from engine.cases import DRAFTERS, PROMPTS, ask, assert_same, drafter, params, plain
from pronk.arrays import BFLOAT16
from pronk.drafters import make_drafter
from pronk.drafters.shared.trie import Trie
from pronk.sampling.params import SamplingParams
from pronk.speculation.cost_model import CostCurve
from pronk.speculation.node_selection import select_paying_nodes
from pronk.speculation.tree import TokenTree
from tiny_models import VOCAB, make_engine, make_request, run, tiny_decoder

# Up to 4 rows cost the same; every 4 rows more add half a plain pass.
STEPS = CostCurve((1, 4, 8, 12, 64), (1.0, 1.0, 1.5, 2.0, 8.5))


def some_tree(dice: random.Random, size: int) -> TokenTree:
    trie = Trie(0)
    while len(trie) <= size:
        parent = dice.randrange(len(trie))
        trie.add(parent, dice.randrange(50), trie.gains[parent] * dice.random(), ("x", 0))
    return trie.tree(size)


def value(expected: float, requests: int, nodes: int, prompts: int, costs: CostCurve) -> float:
    """Return tokens per cost; ``nodes`` cost what they add to a pass with ``prompts`` prompt rows."""
    added = costs.at(prompts + requests + nodes) - costs.at(prompts + requests)
    return (requests + expected) / (costs.at(requests) + added)


def sure_tree(case: DraftCase) -> TokenTree:
    return TokenTree.chain([case.root, 1], gain=[1.0, 1.0])


def test_no_subset_is_worth_more() -> None:
    dice = random.Random(0)
    for _ in range(60):
        trees = [some_tree(dice, dice.randrange(5)) for _ in range(dice.randint(1, 2))]
        requests, prompts = len(trees) + dice.randrange(4), dice.choice([0, 0, 3, 40])
        nodes = [(number, node) for number, tree in enumerate(trees) for node in range(1, len(tree))]
        best = 0.0
        for count in range(len(nodes) + 1):
            for chosen in combinations(nodes, count):
                kept = [{node for other, node in chosen if other == number} for number in range(len(trees))]
                gain = sum((tree.gain or ())[node] for tree, own in zip(trees, kept, strict=True) for node in own)
                best = max(best, value(gain, requests, count, prompts, STEPS))
        cut = select_paying_nodes(trees, requests, STEPS, prompts=prompts)
        gain = sum(sum((tree.gain or ())[1:]) for tree in cut)
        found = value(gain, requests, sum(tree.num_draft_tokens for tree in cut), prompts, STEPS)
        assert found == pytest.approx(best)


def test_a_prompt_in_the_same_pass_makes_no_draft_token_cheaper() -> None:
    """A row that is free in a small forward pass is not free beside a prompt."""
    tree = TokenTree.chain([1, 2, 3, 4, 5], gain=[1.0, 0.9, 0.6, 0.3, 0.1])
    even = CostCurve((1, 64), (1.0, 32.5))
    assert select_paying_nodes([tree], 1, even, prompts=500) == select_paying_nodes([tree], 1, even)
    assert select_paying_nodes([tree], 1, STEPS)[0].num_draft_tokens == 3
    assert select_paying_nodes([tree], 1, STEPS, prompts=500)[0].num_draft_tokens == 3
    expensive = CostCurve((1, 4, 64), (1.0, 1.0, 61.0))
    assert select_paying_nodes([tree], 1, expensive)[0].num_draft_tokens == 3
    assert select_paying_nodes([tree], 1, expensive, prompts=500)[0].num_draft_tokens == 0


def test_improbable_draft_tokens_stay_only_if_they_are_free() -> None:
    improbable = TokenTree.chain([1, 2, 3, 4, 5], gain=[1.0, 1e-6, 1e-7, 1e-8, 1e-9])
    assert select_paying_nodes([improbable], 1, CostCurve((1, 64), (1.0, 64.0)))[0].num_draft_tokens == 0
    assert select_paying_nodes([improbable], 1, CostCurve((1, 64), (1.0, 1.0)))[0].num_draft_tokens == 4
    assert select_paying_nodes([improbable], 1, STEPS)[0].num_draft_tokens == 3


def test_of_equal_gains_the_parents_comes_first() -> None:
    chain = TokenTree.chain([1, 2, 3, 4], gain=[1.0, 0.5, 0.5, 0.5])
    two_at_a_time = CostCurve((1, 2, 3, 64), (1.0, 1.0, 2.0, 63.0))
    assert select_paying_nodes([chain], 1, two_at_a_time) == [chain.keep([0, 1])]


def test_nodes_without_gains_stay() -> None:
    plain = TokenTree.chain([1, 2, 3, 4])
    window = TokenTree((1, 2, 3), (-1, 0, 0), (True, True, False), gain=(1.0, 1e-9, 0.0))
    expensive = CostCurve((1, 64), (1.0, 640.0))
    assert select_paying_nodes([plain, window], 4, expensive) == [plain, window.keep([2])]


def test_while_costs_are_unknown_only_nodes_without_gains_stay() -> None:
    plain, sure = TokenTree.chain([1, 2, 3]), TokenTree.chain([1, 2, 3], gain=[1.0, 1.0, 1.0])
    assert select_paying_nodes([plain, sure], 2, None) == [plain, TokenTree.chain([1], gain=[1.0])]


@pytest.mark.parametrize("name", ["prompt_lookup", "recycling", "jacobi", "lookahead", "merged", "first_of"])
def test_no_draft_tokens_if_rows_are_expensive(name: str) -> None:
    dice = random.Random(0)
    prompt = [dice.randrange(VOCAB) for _ in range(20)] * 3
    drafted, outputs = [], []
    for costs in (CostCurve((1, 64), (1.0, 1.0)), CostCurve((1, 64), (1.0, 6400.0))):
        engine = make_engine(tiny_decoder(), costs=costs)
        drafter = make_drafter(name).bind(engine.target)
        request = make_request(prompt, SamplingParams(max_tokens=30, seed=3, logit_bias={3: 9.0, 5: 9.0}), drafter)
        run(engine, [request])
        drafted.append(request.stats.drafted)
        outputs.append(request.output)
    assert drafted[0] > 0
    assert drafted[1] == 0
    assert outputs[0] == outputs[1]


def test_the_first_pass_after_a_prompt_is_plain() -> None:
    """The cost of a plain forward pass must be known first."""
    counts = []
    for budget in (True, False):
        engine = make_engine(tiny_decoder(), budget=budget)
        request = make_request([1, 2, 3, 1, 2], SamplingParams(max_tokens=9), TreeDrafter(sure_tree))
        run(engine, [request])
        counts.append([step.drafted for step in request.stats.steps])
    assert counts[0][:2] == [0, 0]
    assert counts[1][:2] == [0, 1]


# ``test_equality.py`` runs all drafters greedily; here they run with all options at once.
GREEDY = ("suffix", "auto", "merged with trained")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, marks=() if options == "all" or name in GREEDY else pytest.mark.slow)
        for name, options in product(DRAFTERS, ("greedy", "all"))
        if name != "autoregressive"
    ],
)
def test_trees_with_dropped_nodes_give_the_same_tokens(name: str, options: str) -> None:
    """In a ragged batch, at costs that a part of the draft tokens pays for."""
    want = plain(BFLOAT16, options)
    engine = make_engine(tiny_decoder(BFLOAT16), costs=STEPS)
    proposer = drafter(name, want).bind(engine.target)
    got = [ask(prompt, params(options, index), proposer) for index, prompt in enumerate(PROMPTS)]
    run(engine, got)
    assert_same(got, want)
