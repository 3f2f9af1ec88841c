"""Medusa's trees against its heads without an engine, and refused options."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drafting.drafting import LIKELY, bound, decode, paths, watched
from drafting.from_draft.drafts import draft_folder
from drafting.helpers import context
from engine.cases import total
from lab.drafters.trained_medusa import (
    SHAPE,
    TREE,
    head_logits,
    medusa_folder,
    plain_heads,
    spec,
    write_heads,
)
from pronk import Medusa
from pronk.base.arrays import Array
from pronk.base.convert import to_array
from pronk.base.errors import OptionError
from pronk.drafting import Outcome, make_drafter
from pronk.drafting.ledger import RequestLedger
from pronk.lab.drafters.medusa import MedusaProposer, MedusaState
from pronk.lab.drafters.rank_tree import best_paths
from pronk.models.loader import Fingerprint
from pronk.sampling.noise import gumbel_noise
from pronk.sampling.params import SamplingParams
from pronk.sampling.tree import TokenTree
from pronk.train.attention import dense_hidden
from tiny_models import VOCAB, make_engine, tiny_config, tiny_decoder
from train.tiny_modules import tiny_module

PROMPTS = [[1, 2, 3], [5] * 20, [9, 8, 7, 9, 8, 7, 9, 8]]


@cache
@torch.no_grad()
def last_hidden(text: tuple[int, ...]) -> torch.Tensor:
    """Return the target's ``[hidden]`` at the last token of ``text``, after the final norm, by
    torch.
    """
    module = tiny_module()
    return module.norm(dense_hidden(module, torch.tensor([text])))[-1]


def ranking(text: list[int], params: SamplingParams, depth: int) -> list[int]:
    """Return all tokens by falling score of head ``depth`` (from 1), which reads the hidden state
    of ``text[-2]``.
    """
    hidden = last_hidden(tuple(text[:-1]))[None]
    head = tiny_module().head
    logits = to_array(head_logits(plain_heads(medusa_folder()), hidden, head)[depth - 1, 0])
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if params.greedy:
        return np.argsort(-logits).tolist()
    ids = np.arange(len(logits))
    noise = 0.0 if params.rejects else gumbel_noise(params.seed or 0, len(text) + depth - 1, ids)
    return np.argsort(-(logits / params.temperature).astype(np.float64) - noise).tolist()


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.9}, {"temperature": 0.9, "logit_bias": LIKELY}]
)
def test_nodes_have_the_tokens_of_their_ranks(options: dict[str, Any]) -> None:
    """The heads read the last accepted node's hidden state, or the prompt's; scores include the
    target's noise.
    """
    engine, drafter = watched(spec())
    requests = decode(engine, drafter, PROMPTS, **options)
    for request in requests:
        asked = drafter.of(request)
        assert asked[0].tree.num_draft_tokens > 0
        for each in asked:
            order = [ranking(each.tokens, request.params, depth) for depth in (1, 2, 3)]
            kept = [
                path
                for path in (*TREE[:1], *TREE[2:3], *TREE[6:7], *TREE)
                if len(path) <= each.depth
            ]
            want = {
                tuple(order[i][rank] for i, rank in enumerate(path)) for path in dict.fromkeys(kept)
            }
            assert paths(each.tree) == want
    if "logit_bias" in options:
        assert total(requests, "accepted") > 20
        assert total(requests, "moved") > 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_trees_under_rejection_do_not_depend_on_the_seed(rule: Any) -> None:
    def trees(**options: Any) -> set[TokenTree]:
        params = [
            SamplingParams(temperature=0.9, repetition_penalty=2.0, seed=seed, **options)
            for seed in range(5)
        ]
        return {proposal(bound(spec()), each) for each in params}

    assert {tree.probs for tree in trees(rule=rule)} == {None}
    assert len({tree.tokens for tree in trees(rule=rule)}) == 1
    assert len({tree.tokens for tree in trees()}) > 1


def state_after(
    drafter: MedusaProposer,
    tokens: list[int],
    tree: TokenTree | None = None,
    path: tuple[int, ...] = (),
) -> MedusaState:
    """Return the draft state after a forward pass over ``tree`` below ``tokens``, with made-up
    hidden states.
    """
    state = drafter.start(tokens[:1])
    tree = tree or TokenTree.chain(tokens[-1:])
    rows = [[*tokens, *(tree.tokens[i] for i in tree.path(node))] for node in range(len(tree))]
    hidden = {2: np.array([[sum(row)] * tiny_config().hidden_size for row in rows], np.float32)}
    drafter.observe(
        Outcome(state, tree, path, (), len(tokens) - 1, SamplingParams(), hidden=hidden)
    )
    return state


def propose(
    drafter: MedusaProposer,
    state: MedusaState,
    tokens: list[int],
    params: SamplingParams | None = None,
    **more: Any,
) -> TokenTree:
    (tree,) = drafter.propose([context(state, tokens, params=params, vocab=VOCAB, **more)])
    return tree


def proposal(
    drafter: MedusaProposer, params: SamplingParams | None = None, **limits: int
) -> TokenTree:
    return propose(drafter, state_after(drafter, [4]), [4, 6], params, **limits)


def test_the_hidden_state_is_that_of_the_last_accepted_node() -> None:
    drafter = bound(spec())
    tree = TokenTree((2, 5, 6, 7), (-1, 0, 0, 2))
    for path, row, position in (((), 3, 1), ((1,), 8, 2), ((2, 3), 16, 3)):
        state = state_after(drafter, [1, 2], tree, path)
        assert state.hidden is not None
        assert state.hidden.tolist() == [float(row)] * tiny_config().hidden_size
        assert state.position == position
        text = [1, 2, *(tree.tokens[i] for i in path), 9]
        assert propose(drafter, state, text).num_draft_tokens == len(TREE)
        # No draft tokens for a text of another length.
        for other in (text[:-1], [*text, 3]):
            assert propose(drafter, state, other).tokens == (other[-1],)
    assert propose(drafter, drafter.start([1, 2]), [1, 2]).tokens == (2,)


def test_the_main_chain_comes_first_and_gains_are_products() -> None:
    drafter = bound(spec())
    ledger = RequestLedger()
    params = SamplingParams(temperature=0.7, seed=1)
    tree = propose(drafter, state_after(drafter, [4]), [4, 6], params, ledger=ledger)
    assert tree.parents == (-1, 0, 1, 2, 0, 0, 1, 4, 0, 2)
    assert tree.main_chain == 4
    assert tree.gain is not None
    assert tree.origin is not None
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        depth = tree.depths[node]
        assert tree.origin[node][0] == f"medusa {depth}"
        source, kind = tree.origin[node]
        rate = ledger.acceptance.rates(source).rate(kind, depth)
        assert tree.gain[node] == pytest.approx(tree.gain[parent] * rate)
    wrong = next(token for token in range(VOCAB) if tree.child(1, token) is None)
    ledger.acceptance.propose("medusa", (), tree)
    ledger.acceptance.advance((tree.tokens[1], wrong))
    means = [ledger.acceptance.rates(f"medusa {depth}").mean(0.5) for depth in (1, 2, 3)]
    assert 0.5 > means[0] > means[1]  # one of four siblings was right, and none of the two below it
    assert means[2] == 0.5


def test_limits() -> None:
    drafter = bound(spec())
    whole = proposal(drafter)
    assert proposal(drafter, depth=1).parents == (-1, 0, 0, 0, 0)
    assert (
        proposal(drafter, depth=0).num_draft_tokens
        == proposal(drafter, nodes=0).num_draft_tokens
        == 0
    )
    for nodes in range(1, len(TREE)):
        assert proposal(drafter, nodes=nodes).tokens == whole.tokens[: nodes + 1]
    assert max(proposal(bound(spec(num_tokens=2))).depths) == 2
    assert proposal(bound(spec(num_tokens=16))) == whole


def test_impossible_tokens_are_left_out() -> None:
    """``top_k`` leaves fewer tokens than the tree has ranks."""
    params = SamplingParams(temperature=1.0, top_k=2, seed=3)
    tree = proposal(bound(spec()), params)
    assert tree.parents == (-1, 0, 1, 2, 0, 1, 4, 2)
    assert proposal(bound(spec()), replace(params, top_k=1)).parents == (-1, 0, 1, 2)


def test_a_batch_is_one_call_of_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = bound(spec())
    batches = list[int]()
    logits = type(drafter).logits

    def counted(loaded: Any, hidden: list[Array]) -> Array:
        batches.append(len(hidden))
        return logits(loaded, hidden)

    monkeypatch.setattr(type(drafter), "logits", counted)
    texts = [[4, 6], [7, 7, 1], [2, 9]]
    drafter.propose([context(state_after(drafter, text[:-1]), text) for text in texts])
    assert batches == [3]


def test_the_tree_is_an_option(tmp_path: Path) -> None:
    assert proposal(bound(spec(tree=((1,), (0,), (1, 2))))).parents == (-1, 0, 0, 2)
    assert make_drafter(spec(tree=[[0], [0, 1]])) == Medusa(medusa_folder(), tree=((0,), (0, 1)))
    accuracies = ((0.6, 0.2, 0.1), (0.4, 0.1), (0.3,))
    model = write_heads(tmp_path / "heads", replace(SHAPE, accuracies=accuracies))
    tree = proposal(bound(f"medusa(model={model!r}, tree=6)"))
    assert (
        sorted(tree.depths[1:])
        == sorted(len(path) for path in best_paths(accuracies, 6))
        == [1, 1, 1, 2, 2, 3]
    )


def test_a_tree_deeper_than_the_heads_is_refused() -> None:
    with pytest.raises(
        OptionError, match=r"tree: expected paths of 1\.\.3 ranks in 0\.\.63, found \(0, 0, 0, 0\)"
    ):
        bound(spec(tree=((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))))


def test_another_target_is_refused(tmp_path: Path) -> None:
    mine = Path(draft_folder(0.3))
    other = Path(draft_folder(0.03))
    model = write_heads(tmp_path / "heads", target=Fingerprint.of(mine))
    drafter = make_drafter(f"medusa(model={model!r})")
    drafter.bind(make_engine(tiny_decoder(), folder=mine).target)
    with pytest.raises(
        OptionError, match=r"medusa: expected the target that .* was trained on"
    ) as caught:
        drafter.bind(make_engine(tiny_decoder(), folder=other).target)
    for folder in (mine, other):
        assert Fingerprint.of(folder).weights in str(caught.value)
    assert "\n" not in str(caught.value)
