"""Chains that the kernels extend in one call equal chains of one forward pass after the other, bit
for bit.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from drafting.drafting import assert_no_blocks, decode, watch_draft, watched
from drafting.from_draft.test_draft_model import FAIR, RIGHT, WRONG
from drafting.from_draft.test_draft_model import spec as model
from pronk.checkpoint import rope
from pronk.drafting import DraftContext
from pronk.drafting.shared.chain import Chain
from pronk.drafting.shared.draft_runner import DraftRunner
from pronk.engine.engine import Engine
from pronk.models.model_runner import ModelRunner
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import DraftToken
from pronk.sampling.tree import TokenTree
from tiny_models import context_of, make_request, run

PROMPTS: tuple[tuple[int, ...], ...] = ((1, 2, 3), (4, 5, 6, 7), tuple(range(30)), (9,))
SPECS = {
    "right": model(RIGHT, num_tokens=6),
    "fair": model(FAIR, num_tokens=5),
    "wrong": model(WRONG, num_tokens=3),
    "unsure": model(FAIR, num_tokens=12, min_confidence=0.4),
    "threshold": f"threshold({model(FAIR)})",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    "recommended": {
        "temperature": 0.8,
        "top_k": 12,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
    },
}


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return record_chains(monkeypatch)


def record_chains(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of forward passes of each chain of ``draft_chains``."""
    counts: list[int] = []
    grow = ModelRunner.draft_chains

    def counted(*arguments: Any) -> list[int]:
        own = grow(*arguments)
        counts.extend(own)
        return own

    monkeypatch.setattr(ModelRunner, "draft_chains", counted)
    return counts


def proposals(spec: str, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[Any]]:
    """Return all trees of each prompt, decoded alone."""
    engine, drafter = watched(spec)
    found = []
    for prompt in prompts:
        (request,) = decode(engine, drafter, [prompt], **options)
        found.append(
            [(note.tree, note.tree.gain, note.tree.origin) for note in drafter.of(request)]
        )
    return found


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", SPECS)
def test_one_call_gives_the_same_trees(
    name: str, options: str, grown: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SPECS.get(name, name)
    at_once = proposals(spec, PROMPTS[:2], **OPTIONS[options])
    assert max(grown) > 2
    calls = len(grown)
    monkeypatch.setattr(DraftRunner, "supports_draft_chain", lambda *_: False)
    one_by_one = proposals(spec, PROMPTS[:2], **OPTIONS[options])
    assert len(grown) == calls
    assert at_once == one_by_one
    assert sum(len(tree) - 1 for trees in at_once for tree, *_ in trees) > 10


def test_the_rope_table_covers_the_whole_chain(
    grown: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table doubles from one entry, so some chains begin at its last entries."""
    want = proposals(SPECS["right"], PROMPTS[:2])
    monkeypatch.setattr(rope, "_INITIAL_POSITIONS", 1)
    assert proposals(SPECS["right"], PROMPTS[:2]) == want
    assert max(grown) > 2


@pytest.mark.parametrize(
    ("options", "alone"),
    [
        ({}, True),
        ({"temperature": 0.8}, True),
        ({"temperature": 0.8, "top_p": 0.9}, True),
        ({"temperature": 0.8, "top_k": 9}, True),
        ({"temperature": 0.8, "min_p": 0.1}, True),
        ({"temperature": 0.8, "rule": "rejection"}, False),
        ({"rule": "block"}, True),
        ({"repetition_penalty": 1.2}, True),
        ({"logit_bias": {3: 1.0}}, False),
    ],
    ids=str,
)
def test_options_that_one_call_supports(
    options: dict[str, Any], alone: bool, grown: list[int]
) -> None:
    engine, drafter = watched(SPECS["fair"])
    passes = watch_draft(drafter.inner.draft)
    request = make_request(PROMPTS[2], SamplingParams(max_tokens=12, **options), drafter)
    run(engine, [request])
    assert request.stats.drafted > 5
    assert len(passes) > 5
    assert bool(grown) == alone


def finish(engine: Engine) -> None:
    while engine.scheduler.running:
        engine.step()


def test_several_requests_share_forward_passes_instead(grown: list[int]) -> None:
    engine, drafter = watched(SPECS["fair"])
    requests = [
        make_request(prompt, SamplingParams(max_tokens=20), drafter) for prompt in PROMPTS[:2]
    ]
    for request in requests:
        engine.add(request)
    while not any(request.ended for request in requests):
        assert not grown
        engine.step()
    assert all(request.stats.drafted for request in requests)
    finish(engine)


def fail(patch: pytest.MonkeyPatch) -> None:
    """Make ``Chain.append`` raise after it has added the second draft token of a chain."""
    take = Chain.append

    def failing(chain: Chain, token: DraftToken) -> None:
        take(chain, token)
        if len(chain) == 2:
            raise ZeroDivisionError

    patch.setattr(Chain, "append", failing)


def test_an_exception_in_the_callback_is_raised(
    monkeypatch: pytest.MonkeyPatch, grown: list[int]
) -> None:
    """C cannot pass on the callback's exception, so it is raised after the call; a repeated
    proposal is unchanged.
    """
    want = proposals(SPECS["fair"], PROMPTS[2:3])
    engine, drafter = watched(SPECS["fair"])
    propose = drafter.inner.propose
    failed = 0

    def twice(contexts: Sequence[DraftContext[Any]]) -> list[TokenTree]:
        nonlocal failed
        if min(contexts[0].max_depth, contexts[0].max_nodes) > 1:
            with monkeypatch.context() as patch:
                fail(patch)
                with pytest.raises(ZeroDivisionError):
                    propose(contexts)
            failed += 1
        assert context_of(contexts[0].sampler) == contexts[0].tokens
        return propose(contexts)

    drafter.inner.propose = twice
    (request,) = decode(engine, drafter, PROMPTS[2:3])
    assert [(note.tree, note.tree.gain, note.tree.origin) for note in drafter.of(request)] == want[
        0
    ]
    assert request.stats.accepted > 3
    assert failed > 3
    assert max(grown) > 2
    assert_no_blocks(drafter)
