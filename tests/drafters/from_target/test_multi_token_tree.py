"""Trees of multi-token heads: the best there are by what the heads say, and no text depends on them."""

from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.drafting import Asked, bound, decode, paths, watched
from drafters.from_target.trained_multi_token import SHAPE, dense_heads, spec
from drafters.test_conformance import Stage, outcome
from engine.cases import total
from pronk.drafters import make_drafter
from pronk.drafters.from_target.multi_token import MultiTokenProposer
from pronk.errors import OptionError
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.speculation.tree import TokenTree
from tiny_models import VOCAB, context_of, make_engine, make_request, run, tiny_decoder

PROMPTS = [[1, 2, 3], [5] * 20, [9, 8, 7, 9, 8, 7, 9, 8]]
TREE = ((0,), (1,), (0, 0), (2,), (0, 1), (1, 0), (0, 0, 0))
# Few tokens are likely, so that a tree finds some of them.
LIKELY = dict.fromkeys(range(5), 30.0)


def off_the_chain(asked: list[Asked]) -> int:
    """Accepted guesses beside the main chain."""
    return sum(node >= each.tree.main_chain for each in asked for node in each.path)


def last_rows(text: list[int]) -> list[Tensor]:
    """What each head says from the token before the last, ``[vocab]``."""
    return [rows[len(text) - 2] for rows in dense_heads(tiny_decoder(packed=False), SHAPE, text)]


def with_tree(stage: Stage, tree: Any) -> MultiTokenProposer:
    """The stage's drafter with the same heads, and a tree."""
    assert isinstance(stage.drafter, MultiTokenProposer)
    return MultiTokenProposer(replace(stage.drafter.options, tree=tree), stage.drafter.loaded)


@pytest.mark.parametrize("tree", [12, TREE])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_output_is_that_of_plain_decoding(tree: Any, temperature: float) -> None:
    engine, drafter = watched(spec(tree=tree))
    requests = decode(engine, drafter, PROMPTS, temperature=temperature, logit_bias=LIKELY, max_tokens=60)
    asked = [each for request in requests for each in drafter.of(request)]
    assert off_the_chain(asked) > 10
    assert total(requests, "moved") > 0
    for each in asked:
        assert each.tree.num_draft_tokens <= min(len(TREE) if tree == TREE else 12, each.nodes)
        assert max(each.tree.depths) <= min(3, each.depth)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_guesses_are_point_masses_under_other_rules(rule: Any) -> None:
    engine, drafter = watched(spec(tree=12))
    params = SamplingParams(max_tokens=40, logit_bias=LIKELY, temperature=0.8, seed=4, rule=rule)
    requests = [make_request(prompt, params, drafter) for prompt in PROMPTS]
    run(engine, requests)
    asked = [each for request in requests for each in drafter.of(request)]
    assert {each.tree.probs for each in asked} == {None}
    assert all(len(each.output) == 40 for each in requests)
    assert off_the_chain(asked) > 5


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_guesses_know_nothing_of_the_draws(rule: Any) -> None:
    """Nor do penalties, which count what heads above find likeliest."""
    stage, text = Stage("multi_token"), [1, 2, 3, 4, 5, 6]
    drafter = with_tree(stage, 12)
    seen = set()
    for seed in range(6):
        params = SamplingParams(temperature=2.0, seed=seed, rule=rule, repetition_penalty=2.0)
        state = stage.start(text)
        sampler = Sampler(params, seed, text, VOCAB)
        asked = replace(stage.context(state, text), params=params, sampler=sampler)
        seen.add(drafter.propose([asked])[0])
        assert context_of(sampler) == text
        stage.stop(state)
    assert len(seen) == 1
    assert seen.pop().num_draft_tokens == 12


def test_nodes_are_the_tokens_of_their_ranks() -> None:
    engine, drafter = watched(spec(tree=TREE))
    for request in decode(engine, drafter, PROMPTS):
        for each in drafter.of(request):
            if each.depth >= 3:
                order = [row.argsort(descending=True).tolist() for row in last_rows(each.tokens)]
                assert paths(each.tree) == {tuple(order[i][rank] for i, rank in enumerate(path)) for path in TREE}


@pytest.mark.parametrize("size", [1, 5, 40])
def test_a_number_of_nodes_is_the_tree_that_is_likeliest_to_be_reached(size: int) -> None:
    """Of all paths over the 8 likeliest tokens of each head; nothing was learned yet at the first proposal."""
    engine, drafter = watched(spec(tree=size))
    for request in decode(engine, drafter, PROMPTS, logit_bias=LIKELY):
        first = drafter.of(request)[0]
        bias = torch.zeros(len(last_rows(first.tokens)[0]))
        bias[list(LIKELY)] = 30.0
        shares = [(row + bias).softmax(0).topk(8).values.tolist() for row in last_rows(first.tokens)]
        shares = [[min(max(round(1000 * share), 1), 999) / 1000 for share in row] for row in shares]
        every = [prod(path) for depth in (1, 2, 3) for path in product(*shares[:depth])]
        assert first.tree.num_draft_tokens == size
        assert first.tree.gain is not None
        assert sum(first.tree.gain[1:]) == pytest.approx(sum(sorted(every)[-size:]), abs=1e-9)


def test_the_chain_comes_first() -> None:
    engine, drafter = watched(spec(tree=12))
    for request in decode(engine, drafter, PROMPTS):
        for each in drafter.of(request):
            likeliest = [int(row.argmax()) for row in last_rows(each.tokens)]
            length = sum(tuple(likeliest[:end]) in paths(each.tree) for end in (1, 2, 3))
            assert each.tree.main_chain == 1 + length
            assert list(each.tree.tokens[1 : 1 + length]) == likeliest[:length]
            assert length or not min(each.depth, each.nodes)


def test_limits() -> None:
    stage = Stage("multi_token")
    text = [1, 2, 3, 4, 5, 6]
    for tree in (20, TREE):
        drafter = with_tree(stage, tree)
        for depth, nodes in ((0, 9), (9, 0), (1, 9), (2, 4), (9, 9)):
            state = stage.start(text)
            (made,) = drafter.propose([stage.context(state, text, 0, depth, nodes)])
            assert made.num_draft_tokens <= nodes
            assert max(made.depths) <= min(depth, 3)
            assert (made.num_draft_tokens > 0) == (min(depth, nodes) > 0)
            stage.stop(state)
    assert max(proposal_depths(num_tokens=2, tree=40)) == 2


def proposal_depths(**options: Any) -> set[int]:
    engine, drafter = watched(spec(**options))
    requests = decode(engine, drafter, PROMPTS[:1])
    return {depth for request in requests for each in drafter.of(request) for depth in each.tree.depths}


def test_it_rests_only_where_it_could_have_guessed() -> None:
    """A step without anything to guess from says nothing about what pays."""
    stage, text = Stage("multi_token"), [1, 2, 3, 4, 5, 6]
    drafter, bare = stage.drafter, TokenTree.chain(text[-1:])
    state = stage.start(text)
    able = replace(stage.context(state, text), prune_unprofitable=True)
    unable = replace(able, block_table=type(able.block_table)())  # the target's cache has nothing of the text
    for context, steps in ((unable, 0), (able, 2)):
        (tree,) = drafter.propose([context])
        assert (tree.num_draft_tokens > 0) == (context is able)
        drafter.observe(outcome(drafter, state, text, bare, (), [7]))
        assert state.backoff.steps == steps
    stage.stop(state)


def test_wrappers_take_chains() -> None:
    for wrapper in ("cape", "threshold"):
        with pytest.raises(OptionError, match="expected a drafter of chains, found multi_token; leave out its tree"):
            make_drafter(f"{wrapper}({spec(tree=8)})")
        make_drafter(f"{wrapper}({spec()})")
    with pytest.raises(OptionError, match=r"found cape; write cape\(threshold\(…\)\) instead"):
        make_drafter(f"threshold(cape({spec()}))")


def test_a_tree_deeper_than_the_heads_is_refused() -> None:
    with pytest.raises(OptionError, match=r"tree: expected paths of 1\.\.3 ranks in 0\.\.63, found \(0, 0, 0, 0\)"):
        bound(spec(tree=((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))), make_engine(tiny_decoder()))
