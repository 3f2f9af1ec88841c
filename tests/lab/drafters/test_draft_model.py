"""Drafters of the lab around a draft model: the engine's tests of a draft model's chains and its KV
cache.
"""

import pytest

from drafting.drafting import decode, watch_draft, watched
from drafting.from_draft import test_draft_model as draft_model
from drafting.from_draft.test_draft_model import FAIR, KINDS, PROMPTS, RIGHT, models_of, spec

WITH_LANES = {
    "cape": f"cape({spec(FAIR)}, sizes=3)",
    "staged": f"staged({spec(FAIR)}, prompt_lookup, num_nodes=6)",
    "beam": f"beam({spec(FAIR)}, width=2)",
}


@pytest.mark.parametrize("count", [40, 150])
@pytest.mark.parametrize("kind", WITH_LANES)
def test_a_cache_that_lacks_much_begins_anew_near_the_end_of_the_text(
    kind: str, count: int
) -> None:
    draft_model.test_a_cache_that_lacks_much_begins_anew_near_the_end_of_the_text(
        WITH_LANES[kind], count
    )


@pytest.mark.parametrize("length", [30, 62, 63, 64, 80])
@pytest.mark.parametrize(
    ("kind", "most"), [("staged({}, prompt_lookup)", 8), ("beam({})", 5)], ids=["staged", "beam"]
)
def test_draft_tokens_end_after_the_drafts_last_position(kind: str, most: int, length: int) -> None:
    draft_model.test_draft_tokens_end_after_the_drafts_last_position(kind, most, length)


AROUND = {
    "cape": f"cape({spec(FAIR)})",
    "staged": f"staged({spec(FAIR)}, prompt_lookup(min_ngram=1))",
    "staged twice": f"staged({spec(FAIR)}, {spec(RIGHT)})",
    "beam": f"beam({spec(FAIR)})",
}


@pytest.mark.few(3)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", AROUND)
def test_an_interrupted_forward_pass_of_the_draft_changes_no_text(
    kind: str, *, after: bool
) -> None:
    draft_model.test_an_interrupted_forward_pass_of_the_draft_changes_no_text(
        AROUND[kind], after=after
    )


@pytest.mark.parametrize("kind", AROUND)
def test_the_sampler_is_unchanged_after_a_proposal(kind: str) -> None:
    draft_model.test_the_sampler_is_unchanged_after_a_proposal(AROUND[kind])


@pytest.mark.parametrize(
    "kind",
    ["beam({}, width=16, num_tokens=30)", "staged({}, suffix, num_nodes=100, width=32, depth=16)"],
)
def test_wide_trees_write_only_to_their_own_blocks(kind: str) -> None:
    spec = kind.format(KINDS["draft_model"])
    alone = []
    for prompt in PROMPTS[:2]:
        engine, drafter = watched(spec)
        alone += decode(engine, drafter, [prompt], max_tokens=12, seed=1)
    engine, drafter = watched(spec)
    watch_draft(models_of(drafter.inner)[0])
    together = decode(engine, drafter, PROMPTS[:2], max_tokens=12, seed=1)
    assert [request.stats.acceptance for request in together] == [
        request.stats.acceptance for request in alone
    ]
