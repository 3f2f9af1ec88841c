"""Proposers that raise or return invalid proposals: the request continues without draft tokens, the
text stays.
"""

import logging
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from drafting.helpers import context as plain_context
from engine.failing import (
    PROMPTS,
    DraftState,
    FailingProposer,
    Fuse,
    PlantedError,
    assert_as_plain,
    assert_observed,
    batch,
    failing_proposer,
    finish,
    options,
    plain,
)
from pronk.drafting import Auto, DraftContext, Drafter, Proposer, make_drafter
from pronk.drafting.checked_proposals import check_tree
from pronk.drafting.proposer import bind_proposer
from pronk.engine.validate_draft import validate_draft
from pronk.sampling.params import SamplingParams
from pronk.sampling.tree import TokenTree, TokenView
from tiny_models import make_engine, make_request, run, run_alone, tiny_decoder


@pytest.mark.few(3)
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("verb", ["start", "propose", "observe", "stop"])
def test_proposers_that_raise_for_one_request(
    verb: str, *, lasting: bool, caplog: pytest.LogCaptureFixture
) -> None:
    dice = random.Random(verb)
    burnt = 0
    for _ in range(6):
        victim = dice.randrange(8)
        fuse = Fuse(1 if verb in ("start", "stop") else dice.randrange(1, 9), lasting)
        proposer = failing_proposer(verb=verb, victim=PROMPTS[victim], fuse=fuse)
        requests = batch(proposer)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            finish(make_engine(tiny_decoder()), requests)
        assert_as_plain(requests)
        # Requests of a failed batch are proposed for one by one; a fuse that burns once does not
        # raise again.
        recovered = verb == "propose" and not lasting
        assert_observed(proposer, requests, but=[] if recovered else [victim])
        burnt += bool(fuse.raised)
        error = requests[victim].stats.draft_error
        assert (error is None) == (recovered or not fuse.raised)
        assert error is None or error.startswith("PlantedError: ")
        assert [record.getMessage() for record in caplog.records] == (
            []
            if error is None
            else [f"failing: {error}; the request continues without draft tokens"]
        )
        assert all(
            each.stats.draft_error is None for each in requests if each is not requests[victim]
        )
        if error is not None and verb == "start":
            assert requests[victim].stats.drafted == 0
    assert burnt >= 4


def test_a_proposer_that_raises_for_all_requests() -> None:
    proposer = failing_proposer(verb="propose", fuse=Fuse(9, lasting=True))
    requests = batch(proposer)
    finish(make_engine(tiny_decoder()), requests)
    assert_as_plain(requests)
    assert all(request.stats.draft_error for request in requests)
    assert sum(request.stats.drafted for request in requests) > 0


@pytest.mark.parametrize("wrong", ["root", "fewer", "none", "nothing"])
def test_invalid_proposals(wrong: str) -> None:
    class Wrong(FailingProposer):
        def propose(self, contexts: Sequence[DraftContext[DraftState]]) -> Any:
            trees = super().propose(contexts)
            if wrong == "root":
                return [TokenTree.chain([(tree.tokens[0] + 1) % 7, 3]) for tree in trees]
            return {"fewer": trees[1:], "none": None, "nothing": [None] * len(trees)}[wrong]

    proposer = Wrong(failing_proposer().texts)
    requests = batch(proposer)
    finish(make_engine(tiny_decoder()), requests)
    assert_as_plain(requests)
    errors = [request.stats.draft_error for request in requests]
    assert all(errors)
    if wrong == "root":
        assert all(
            "drafter failing: expected a tree with root token " in str(error) for error in errors
        )


def with_first_draft_token(tree: TokenTree, **changed: Any) -> TokenTree:
    """Return a proposal whose first draft token has odd values."""
    given = {
        name: (None, value) if name == "probs" else (values[0], value)
        for name, value in changed.items()
        for values in [
            {"tokens": tree.tokens, "parents": (-1,), "gain": (1.0,), "origin": (("a", 0),)}.get(
                name, (0,)
            )
        ]
    }
    return TokenTree(**{"tokens": (tree.tokens[0], 3), "parents": (-1, 0), **given})


VOCAB = 131

ODD = {
    "token 3.5": {"tokens": 3.5},
    "token a": {"tokens": "a"},
    "token None": {"tokens": None},
    "gain None": {"gain": None},
    "gain a": {"gain": "a"},
    "gain nan": {"gain": math.nan},
    "gain 1j": {"gain": 1j},
    "origin None": {"origin": None},
    "origin 5": {"origin": (5, "a", 3)},
    "probs 5": {"probs": 5},
    "probs text": {"probs": "a" * VOCAB},
    "probs nan": {"probs": np.full(VOCAB, math.nan)},
    "probs negative": {"probs": np.where(np.arange(VOCAB) == 3, 2.0 - VOCAB, 1.0)},
    "probs 0": {"probs": np.zeros(VOCAB)},
    "probs whole": {"probs": np.eye(VOCAB, dtype=np.int64)[3]},
    "probs of two": {"probs": np.full((VOCAB, 2), 1 / VOCAB)},
}


@pytest.mark.few(11)
@pytest.mark.parametrize(
    "rule", ["coupled", pytest.param("rejection", marks=pytest.mark.slow), "block"]
)
@pytest.mark.parametrize("odd", ODD)
def test_invalid_draft_tokens(odd: str, rule: Any) -> None:
    class Odd(FailingProposer):
        def propose(self, contexts: Sequence[DraftContext[DraftState]]) -> list[TokenTree]:
            trees = super().propose(contexts)
            return [
                with_first_draft_token(tree, **ODD[odd])
                if context.state.prompt == PROMPTS[2] and context.max_depth
                else tree
                for tree, context in zip(trees, contexts, strict=True)
            ]

    engine = make_engine(tiny_decoder())
    want = failing_proposer().texts
    assert engine.runner.decoder.config.vocab_size == VOCAB
    made = [
        make_request(prompt, replace(options(index), rule=rule), Odd(want))
        for index, prompt in enumerate(PROMPTS)
    ]
    finish(engine, made)
    for index, request in enumerate(made):
        assert request.result.error is None
        assert (request.stats.draft_error is not None) == (index == 2)
        assert rule != "coupled" or request.output == plain()[index].output


def test_numbers_of_other_libraries_are_accepted() -> None:
    class Foreign(FailingProposer):
        def propose(self, contexts: Sequence[DraftContext[DraftState]]) -> list[TokenTree]:
            return [
                TokenTree(
                    np.array(tree.tokens),  # type: ignore[arg-type]
                    np.array(tree.parents),  # type: ignore[arg-type]
                    verify=(1,) * len(tree),  # type: ignore[arg-type]
                    gain=tuple(np.float32(0.5) for _ in tree.tokens),  # type: ignore[misc]
                    origin=(("mine", np.int64(3)),) * len(tree),
                )
                for tree in super().propose(contexts)
            ]

    requests = batch(Foreign(failing_proposer().texts))
    finish(make_engine(tiny_decoder()), requests)
    assert_as_plain(requests)
    for request in requests:
        assert request.stats.draft_error is None
        assert set(map(type, request.output)) == {int}
    assert sum(request.stats.accepted for request in requests) > 60


def test_distributions_may_be_arrays_lists_or_tensors() -> None:
    import torch

    q = np.arange(1.0, VOCAB + 1) / (VOCAB * (VOCAB + 1) / 2)
    context = plain_context(
        None, [1], vocab=VOCAB, params=SamplingParams(temperature=1.0, rule="rejection")
    )
    for convert in (np.asarray, np.float32, np.ndarray.tolist, torch.from_numpy):
        tree = TokenTree.chain([1, 5, 6], probs=[None, convert(q), None])
        checked = validate_draft("foreign", context, check_tree(tree), VOCAB)
        assert (checked.tokens, checked.parents) == ((1, 5, 6), (-1, 0, 1))
        assert checked.probs is not None
        assert checked.probs[::2] == (None, None)
        assert type(checked.probs[1]) is np.ndarray
        np.testing.assert_allclose(checked.probs[1], q, rtol=1e-6)


def test_samplers_are_restored_after_an_exception() -> None:
    ahead = []

    class Borrower(FailingProposer):
        def propose(self, contexts: Sequence[DraftContext[DraftState]]) -> list[TokenTree]:
            ahead.extend(len(context.sampler.context) - len(context.tokens) for context in contexts)
            for context in contexts:
                context.sampler.advance(3)
            if len(contexts) > 1:
                raise PlantedError
            contexts[0].sampler.rollback(1)
            return super().propose(contexts)

    requests = batch(Borrower(failing_proposer().texts))
    finish(make_engine(tiny_decoder()), requests)
    assert_as_plain(requests)
    assert set(ahead) == {0}
    assert sum(request.stats.accepted for request in requests) > 60


def test_a_proposer_cannot_decode_with_its_own_target() -> None:
    engine = make_engine(tiny_decoder())

    class Inward(FailingProposer):
        def propose(self, contexts: Sequence[DraftContext[DraftState]]) -> list[TokenTree]:
            engine.run([make_request([3, 4], options(0))])
            return super().propose(contexts)

    requests = batch(Inward(failing_proposer().texts))
    finish(engine, requests)
    assert_as_plain(requests)
    assert all("step() is not re-entrant" in str(request.stats.draft_error) for request in requests)


def test_what_may_be_lost_does_not_grow_with_the_prompt() -> None:
    """A pass over a prompt takes long, and is no measure of two decoding passes."""
    engine = make_engine(tiny_decoder(), budget=True)
    drafter = bind_proposer(make_drafter("suffix"), engine.target)
    request = make_request(list(range(50)) * 4, SamplingParams(max_tokens=12), drafter)
    run(engine, [request])
    policy = engine.speculator.ledger
    steps = request.stats.steps
    assert 0.0 < policy.longest < steps[0].clock


class Behind(Proposer[Any]):
    """Calls the second of its parts behind the first token of the first part's draft."""

    name = "behind"

    def __init__(self, first: Proposer[Any], second: Proposer[Any]) -> None:
        self.set_parts([first, second])
        self.num_hung = 0  # trees of the second part with draft tokens

    def propose(self, contexts: Sequence[DraftContext[Any]]) -> list[TokenTree]:
        trees = self.parts[0].propose([each.with_state(each.state[0]) for each in contexts])
        return [self._hang(each, tree) for each, tree in zip(contexts, trees, strict=True)]

    def _hang(self, context: DraftContext[Any], tree: TokenTree) -> TokenTree:
        if not tree.num_draft_tokens or context.max_tokens < 2:
            return tree
        token = tree.tokens[1]
        behind = context.with_state(
            context.state[1],
            tokens=TokenView(context.tokens, [token]),
            max_depth=context.max_depth - 1,
            max_nodes=context.max_nodes - 1,
        )
        with context.sampler.after([token]):
            (lower,) = self.parts[1].propose([behind])
        self.num_hung += lower.num_draft_tokens > 0
        return lower.hang_below([context.tokens[-1]])


def test_auto_behind_draft_tokens_keeps_its_trees_to_itself() -> None:
    """Trees of ``auto`` inside a composite have another root; no pass may verify them as they are."""
    engine = make_engine(tiny_decoder())
    first = bind_proposer(make_drafter("recycling"), engine.target)
    second = bind_proposer(make_drafter("auto(suffix, recycling)"), engine.target)
    drafter = Behind(first, second)
    prompt = [5, 6, 7, 8] * 6
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    request = make_request(prompt, params, drafter)
    run(engine, [request])
    assert drafter.num_hung > 5
    assert request.stats.drafted > 0
    assert request.output == run_alone(tiny_decoder(), prompt, params).output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gain": (1.0, -3.0)}, "expected probabilities, 0..1, in gain"),
        ({"gain": (1.0, 1e300)}, "expected probabilities, 0..1, in gain"),
        ({"origin": (("", 0), ([], "x"))}, "cannot be interpreted as an integer"),
    ],
    ids=["negative", "huge", "unhashable"],
)
@pytest.mark.parametrize("inside", ["{}", "auto({})"])
def test_odd_values_of_one_drafter_end_its_drafts_alone(
    changes: dict[str, Any], message: str, inside: str
) -> None:
    class Odd(Proposer[Any]):
        name = "odd"

        def propose(self, contexts: Sequence[DraftContext[Any]]) -> list[TokenTree]:
            return [replace(TokenTree.chain([each.tokens[-1], 5]), **changes) for each in contexts]

    engine = make_engine(tiny_decoder())
    drafter: Drafter = Odd() if inside == "{}" else Auto(parts=(Odd(),), bundled=False)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    requests = [make_request([1, 2, 3], params, bind_proposer(drafter, engine.target))]
    requests.append(make_request([4, 5, 6], params))
    finish(engine, requests)
    assert message in str(requests[0].stats.draft_error)
    for request in requests:
        assert request.output == run_alone(tiny_decoder(), request.prompt, params).output
