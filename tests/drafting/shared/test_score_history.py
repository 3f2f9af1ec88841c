"""Scoring of the history: the counted choices against a slow loop without a cache, and proposals after
them.
"""

from collections import Counter
from typing import Any

import pytest

from drafting.drafting import bound, dense, text
from drafting.from_draft.drafts import draft_folder
from drafting.helpers import context
from pronk.cache.blocks import BlockTable
from pronk.drafting.acceptance_stats import DrafterRates
from pronk.drafting.ledger import RequestLedger
from pronk.drafting.proposer import DraftContext
from pronk.sampling.logits_processors import TokenContext
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from tiny_models import VOCAB, kernels, make_engine, make_request, run, tiny_decoder

NOISE = 0.1
SPEC = f"draft_model(model={draft_folder(NOISE)!r}, num_tokens=3)"
GREEDY = {}
HOT = {"temperature": 0.9, "seed": 3}
RECOMMENDED = {"temperature": 0.9, "seed": 3, "top_k": 20, "repetition_penalty": 1.3}


def answer(length: int, **options: Any) -> list[int]:
    """Return a prompt with the target's answer."""
    prompt = text(2, 20)
    request = make_request(prompt, SamplingParams(max_tokens=length, ignore_eos=True, **options))
    run(make_engine(tiny_decoder()), [request])
    return [*prompt, *request.output]


def stateless(
    state: Any,
    tokens: list[int],
    options: dict[str, Any],
    ledger: RequestLedger | None = None,
    num_prompt: int = 0,
) -> DraftContext[Any]:
    """Return a context whose sampler draws draft tokens by the kernels."""
    params = SamplingParams(max_tokens=10_000, **options)
    made = context(state, tokens, params=params, vocab=VOCAB, ledger=ledger or RequestLedger())
    made.sampler = Sampler(  # type: ignore[arg-type]
        params, params.seed or 0, TokenContext(made.tokens, num_prompt), VOCAB, kernels=kernels()
    )
    assert made.sampler.library_sampler is not None
    return made


def choices(tokens: list[int], first: int, options: dict[str, Any]) -> Counter[tuple[int, bool]]:
    """Return the draft's choices from index ``first`` of the text on, one by one: tenth of
    confidence and success.
    """
    found = Counter[tuple[int, bool]]()
    oracle = dense(NOISE)
    for position in range(first, len(tokens)):
        drafted = stateless(None, tokens[:position], options).sampler.draft_token(
            oracle(tokens[:position]), 0
        )
        assert drafted is not None
        kind = DrafterRates.confidence_kind(drafted.confidence) // 100
        found[kind, drafted.token == tokens[position]] += 1
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "options", [GREEDY, HOT, RECOMMENDED], ids=["greedy", "T = 0.9", "recommended"]
)
@pytest.mark.parametrize(
    ("length", "num_prompt"),
    [(40, 0), (120, 0), (120, 110)],
    ids=["all tokens", "the last 64", "after a prompt"],
)
def test_counts_equal_those_of_a_slow_loop(
    options: dict[str, Any], length: int, num_prompt: int
) -> None:
    tokens = answer(length, **options)
    first = max(1, len(tokens) - 64, num_prompt)
    proposer = bound(SPEC, make_engine(tiny_decoder()))
    asked = stateless(proposer.start(tokens), tokens, options, num_prompt=num_prompt)
    counts = [processor.counts.copy() for processor in asked.sampler.processors]  # type: ignore[attr-defined]
    assert proposer.score_history(asked)
    for before, processor in zip(counts, asked.sampler.processors, strict=True):
        assert (before == processor.counts).all()  # type: ignore[attr-defined]
    rates = asked.ledger.acceptance.rates(proposer.label)
    want = choices(tokens, first, options)
    assert {kind: count for kind, count in rates.reached.items() if kind >= 0} == {
        kind: want[kind, True] + want[kind, False] for kind in {kind for kind, _ in want}
    }
    assert sum(count for kind, count in rates.accepted.items() if kind >= 0) == sum(
        count for (_, right), count in want.items() if right
    )
    assert {right for _, right in want} == {True, False}


def test_proposals_after_a_scored_history_equal_those_without_one() -> None:
    tokens = answer(60)
    engine = make_engine(tiny_decoder())
    proposer = bound(SPEC, engine)
    plain = stateless(proposer.start(tokens), tokens, GREEDY)
    (want,) = proposer.propose([plain])
    scored = stateless(proposer.start(tokens), tokens[:50], GREEDY)
    assert proposer.score_history(scored)
    again = stateless(scored.state, tokens, GREEDY)
    (found,) = proposer.propose([again])
    assert found.tokens == want.tokens
    assert want.num_draft_tokens == 3


def test_few_new_tokens_and_draws_by_rejection_are_left_to_draft_tokens() -> None:
    tokens = answer(40)
    proposer = bound(SPEC, make_engine(tiny_decoder()))
    state = proposer.start(tokens)
    assert not proposer.score_history(stateless(state, tokens[:16], GREEDY))
    assert proposer.score_history(stateless(state, tokens[:17], GREEDY))
    assert not proposer.score_history(stateless(state, tokens[:30], GREEDY))
    assert proposer.score_history(stateless(state, tokens[:40], GREEDY))
    rejecting = SamplingParams(temperature=1.0, rule="rejection")
    asked = context(proposer.start(tokens), tokens, params=rejecting, vocab=VOCAB)
    assert not proposer.score_history(asked)
    assert asked.ledger.acceptance.rates(proposer.label).reached == {}


def test_a_wrapper_counts_for_its_inner_drafter() -> None:
    check_wrapper("threshold")


def check_wrapper(wrapper: str) -> None:
    tokens = answer(40)
    proposer = bound(f"{wrapper}({SPEC})", make_engine(tiny_decoder()))
    asked = stateless(proposer.start(tokens), tokens, GREEDY)
    assert proposer.score_history(asked)
    assert proposer.label != proposer.chain_label
    assert sum(asked.ledger.acceptance.rates(proposer.chain_label).reached.values()) > 0
    assert asked.acceptance.rates(proposer.chain_label).mean(0.7) != 0.7
    assert isinstance(asked.block_table, BlockTable)
