"""Sampled draft tokens in the engine: distribution of strings under the rules ``rejection`` and
``block``.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from drafting.trees import DraftCase, TreeDrafter, drawn_trees
from engine.cases import assert_same, total
from engine.test_rejection_distribution import (
    BATCH,
    OPTIONS,
    PROMPT,
    SMALL,
    bushy,
    distribution_of,
    p_value,
)
from exact_distributions import chain_shape
from pronk.base.arrays import Array
from pronk.drafting import Proposer
from pronk.engine.request import Request
from pronk.models.cost_model import CostCurve
from pronk.sampling.acceptance import ChooseToken, acceptance_rule
from pronk.sampling.params import Rule, SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.sampling.tree import TokenTree
from tiny_models import make_engine, make_request, run, tiny_decoder

RULES: tuple[Rule, ...] = ("rejection", "block")
SAMPLES = 600
CHAIN = (-1, 0, 1, 2)
TREE = (-1, 0, 1, 2, 0, 1, 4, 0)


def outside(case: DraftCase) -> TokenTree:
    """Return a tree of draft tokens sampled from a vocabulary with three more tokens than the
    target's.
    """
    return drawn_trees(TREE)(replace(case, vocab=case.vocab + 3))


SHAPES = {
    "chain": drawn_trees(CHAIN),
    "tree": drawn_trees(TREE),
    "mixed": drawn_trees(TREE, 0.5),
    "outside": outside,
    "point masses": bushy,
    "dishonest": drawn_trees(CHAIN, honest=False),
}


def draw(
    proposer: Proposer[Any] | str, options: str, rule: Rule, samples: int = SAMPLES
) -> list[Request]:
    by = TreeDrafter(SHAPES[proposer], vocab=SMALL) if isinstance(proposer, str) else proposer
    given = replace(OPTIONS[options], rule=rule)
    asked = [
        make_request(PROMPT, replace(given, seed=seed), by, vocab=SMALL) for seed in range(samples)
    ]
    run(make_engine(tiny_decoder(vocab=SMALL), max_batch=BATCH, num_blocks=16 * BATCH), asked)
    return asked


drawn = cache(draw)


def assert_not_vacuous(shape: str, strings: Sequence[Request]) -> None:
    assert len(strings) / 5 < total(strings, "accepted") < total(strings, "drafted") / 2
    assert (total(strings, "moved") > 0) == (shape != "chain")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("shape", "options", "rule"),
    [
        ("chain", "shaped", "block"),
        ("tree", "shaped", "rejection"),
        ("mixed", "temperature", "block"),
    ],
)
def test_strings_have_the_distribution_of_the_model(shape: str, options: str, rule: Rule) -> None:
    strings = drawn(shape, options, rule)
    assert p_value(strings, distribution_of(options)) > 1e-3
    assert_not_vacuous(shape, strings)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("options", ["temperature", "shaped"])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "dishonest"])
def test_more_strings_have_the_distribution_of_the_model(
    shape: str, options: str, rule: Rule
) -> None:
    strings = draw(shape, options, rule, 2500)
    assert p_value(strings, distribution_of(options)) > 1e-3
    assert_not_vacuous(shape, strings)


def test_wrong_draft_distributions_are_detected() -> None:
    assert (
        p_value(draw("dishonest", "temperature", "rejection"), distribution_of("temperature"))
        < 1e-5
    )


@pytest.mark.parametrize("rule", RULES)
def test_rows_of_other_nodes_are_detected(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(sampler: Sampler, tree: TokenTree, logits: Array, chosen: Any) -> ChooseToken:
        return acceptance_rule(sampler, tree, np.concatenate((logits[1:], logits[-1:])), chosen)

    monkeypatch.setattr("pronk.engine.request_step.acceptance_rule", shifted)
    assert p_value(draw("chain", "temperature", rule), distribution_of("temperature")) < 1e-5


def test_block_rule_accepts_more_than_rejection() -> None:
    one, other = (total(drawn("chain", "temperature", rule), "accepted") for rule in RULES)
    assert other > one


def test_all_rules_in_one_batch() -> None:
    """Each request has the result of its own rule; under the coupled rule this is plain
    decoding.
    """
    by = TreeDrafter(drawn_trees(TREE, 0.7), vocab=SMALL)
    rules = ("coupled", *RULES)
    base = SamplingParams(max_tokens=20, temperature=1.5, logprobs=1)
    asked = [
        make_request(PROMPT[: 3 + i], replace(base, seed=i, rule=rules[i % 3]), by, vocab=SMALL)
        for i in range(9)
    ]
    run(make_engine(tiny_decoder(vocab=SMALL)), asked)
    for request in asked:
        proposer = None if request.params.rule == "coupled" else by
        alone = make_request(request.prompt, request.params, proposer, vocab=SMALL)
        run(make_engine(tiny_decoder(vocab=SMALL)), [alone])
        assert_same([request], [alone])
    assert total(asked[1::3], "accepted") > 0
    assert total(asked[2::3], "accepted") > 0


def unprofitable(case: DraftCase) -> TokenTree:
    tree = drawn_trees(chain_shape(30))(case)
    return replace(tree, gain=(1.0, *(1e-6,) * 30))


@pytest.mark.parametrize("rule", ["coupled", *RULES])
def test_sampled_draft_tokens_are_not_dropped(rule: Rule) -> None:
    """Dropping unprofitable sampled tokens would change the distribution of the rules ``rejection``
    and ``block``.
    """
    params = SamplingParams(max_tokens=12, temperature=1.0, rule=rule)
    drafted = []
    for costs in (None, CostCurve(1.0, 0.0, 1.0)):
        request = make_request(PROMPT, params, TreeDrafter(unprofitable, vocab=SMALL), vocab=SMALL)
        run(make_engine(tiny_decoder(vocab=SMALL), costs=costs), [request])
        drafted.append(next((step.drafted for step in request.stats.steps if step.drafted), 0))
    assert drafted[0] == 10
    assert drafted[1] == (0 if rule == "coupled" else 10)


@pytest.mark.parametrize("more", [0, 3])
def test_draft_tokens_of_a_larger_vocabulary_are_point_masses(more: int) -> None:
    trees: list[TokenTree] = []

    class Watched(TreeDrafter):
        def observe(self, outcome: Any) -> None:
            if len(outcome.tree) > 1:
                trees.append(outcome.tree)

    params = SamplingParams(max_tokens=60, temperature=1.0, rule="block", seed=2)
    shape = outside if more else drawn_trees(TREE)
    request = make_request(PROMPT, params, Watched(shape, vocab=SMALL), vocab=SMALL)
    run(make_engine(tiny_decoder(vocab=SMALL)), [request])
    assert trees
    assert all((tree.probs is None) == bool(more) for tree in trees)
    assert all(max(tree.tokens) < SMALL for tree in trees)
