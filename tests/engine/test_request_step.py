"""A proposal is checked once, and is the tree that the kernels compute and the drafter observes."""

from collections.abc import Sequence
from typing import Any

import pytest

from engine.cases import watch
from pronk.drafting import DraftContext, Outcome, Proposer, make_drafter
from pronk.engine.request import Request
from pronk.models.forward_batch import ForwardBatch
from pronk.models.model_runner import ForwardResult
from pronk.sampling.params import SamplingParams
from pronk.sampling.tree import TokenTree
from tiny_models import make_engine, make_request, run, tiny_decoder

PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]


class Branches(Proposer[None]):
    """Proposes two draft tokens below the last token, one of them with a child."""

    name = "branches"

    def __init__(self) -> None:
        self.proposed: list[TokenTree] = []
        self.observed: list[TokenTree] = []

    def start(self, prompt: Sequence[int]) -> None:
        del prompt

    def propose(self, contexts: Sequence[DraftContext[None]]) -> list[TokenTree]:
        trees = list[TokenTree]()
        for context in contexts:
            tokens = (context.tokens[-1], 5, 6, 7)
            origin = ((self.name, 0),) * 4
            trees.append(TokenTree(tokens, (-1, 0, 0, 1), gain=(1.0, 0.5, 0.4, 0.3), origin=origin))
        self.proposed += trees
        return trees

    def observe(self, outcome: Outcome[None]) -> None:
        self.observed.append(outcome.tree)


class Counts:
    """Number of calls of :meth:`TokenTree.check`, and of objects made, since the last reset."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made = 0
        self.checked = 0
        make = TokenTree.__init__
        check = TokenTree.check

        def counted_make(tree: TokenTree, *args: Any, **options: Any) -> None:
            self.made += 1
            make(tree, *args, **options)

        def counted_check(tree: TokenTree) -> None:
            self.checked += 1
            check(tree)

        patch.setattr(TokenTree, "__init__", counted_make)
        patch.setattr(TokenTree, "check", counted_check)


def decode(drafter: Proposer[Any]) -> tuple[Request, list[TokenTree]]:
    """Decode a text without a budget; return the request, and the trees of the decoding passes."""
    engine = make_engine(tiny_decoder())
    request = make_request(PROMPT, SamplingParams(max_tokens=12, seed=1), drafter)
    computed = list[TokenTree]()

    def note(batch: ForwardBatch, _: ForwardResult) -> None:
        computed.extend(entry.tree for entry in batch.entries if entry.block_table.length)

    watch(engine, note)
    run(engine, [request])
    return request, computed


def test_the_kernels_compute_the_proposal_itself() -> None:
    drafter = Branches()
    _, computed = decode(drafter)
    proposed = [tree for tree in drafter.proposed if len(tree) == 4]
    assert len(proposed) > 2
    for tree in proposed[:-1]:  # the last proposal may exceed the end of the text
        assert any(tree is each for each in computed)
        assert any(tree is each for each in drafter.observed)


def test_a_proposal_is_made_and_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Branches()
    counts = Counts(monkeypatch)
    request, computed = decode(drafter)
    assert request.stats.draft_error is None
    assert counts.checked == len(drafter.proposed)
    # Besides proposals: the prompt with its root, a last token without draft tokens, and one
    # proposal that is cut at the end of the text.
    assert counts.made <= len(computed) + 4


def test_each_part_of_a_union_and_the_union_are_checked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(tiny_decoder())
    drafter = make_drafter("auto(suffix, recycling)").bind(engine.target)
    request = make_request(PROMPT, SamplingParams(max_tokens=30, seed=1), drafter)
    counts = Counts(monkeypatch)
    run(engine, [request])
    assert request.stats.drafted > 0
    assert 0 < counts.checked <= 3 * len(request.stats.steps)
