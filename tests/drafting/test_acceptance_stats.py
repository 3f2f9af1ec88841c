"""Acceptance statistics: proposals compared with the text, three levels of counts, and the shares
of requests.
"""

import random
from collections.abc import Sequence

import pytest

from pronk.drafting.acceptance_stats import AcceptanceStats, DrafterRates, RequestAcceptance
from pronk.sampling.tree import TokenTree

PRIORS = {0: 0.5, 1: 0.1, 2: 0.8}
SHARE = 256  # draft tokens of one request and drafter that count for all requests


def tree_of(*origin: tuple[str, int]) -> TokenTree:
    """Return a tree with the branches 9-1-2 and 9-3-4, and the ``origin`` of nodes 1 to 4."""
    return TokenTree((9, 1, 2, 3, 4), (-1, 0, 1, 0, 3), origin=(("", 0), *origin))


def chain_of(tokens: Sequence[int], kind: int = 0) -> TokenTree:
    """Return a chain of ``own`` below the root 9."""
    size = len(tokens)
    return TokenTree(
        (9, *tokens), tuple(range(-1, size)), origin=(("", 0), *[("own", kind)] * size)
    )


def request(
    shared: AcceptanceStats | None = None, temperature: float = 0.0, *, private: bool = False
) -> DrafterRates:
    """Return the rates of ``own`` for a new request."""
    return RequestAcceptance(shared, temperature, private=private).rates("own", PRIORS)


def counts(rates: DrafterRates) -> dict[int, tuple[float, float]]:
    """Return reached and accepted draft tokens by kind."""
    return {
        kind: (offered, rates.accepted[kind])
        for kind, offered in rates.reached.items()
        if kind >= 0
    }


def propose(
    tree: TokenTree, *steps: Sequence[int], lead: Sequence[int] = ()
) -> dict[int, tuple[float, float]]:
    """Return the counts after one proposal, which the text passes in the given steps; weights do
    not fade.
    """
    acceptance = RequestAcceptance()
    rates = acceptance.rates("own", PRIORS)
    rates.fade = lambda: None  # type: ignore[method-assign]
    acceptance.propose("slot", lead, tree)
    for step in steps:
        acceptance.advance(step)
    return counts(rates)


def test_a_draft_token_counts_if_its_parent_equals_the_text() -> None:
    tree = tree_of(("own", 0), ("own", 2), ("own", 1), ("own", 2))
    assert propose(tree, [1]) == {0: (1.0, 1.0), 1: (1.0, 0.0)}
    # node 4 has a wrong parent
    assert propose(tree, [1, 5]) == {0: (1.0, 1.0), 1: (1.0, 0.0), 2: (1.0, 0.0)}
    assert propose(tree, [3, 4]) == {0: (1.0, 0.0), 1: (1.0, 1.0), 2: (1.0, 1.0)}
    assert propose(tree, [5, 1, 2]) == {0: (1.0, 0.0), 1: (1.0, 0.0)}


def test_proposals_count_without_verification() -> None:
    """The text may pass a proposal in one step or in several, whatever was verified."""
    tree = chain_of([1, 2, 3, 4])
    want = {0: (4.0, 3.0)}
    for steps in ([[1, 2, 3, 7]], [[1], [2], [3], [7]], [[1, 2], [3], [7, 8]], [[1, 2, 3], [7]]):
        assert propose(tree, *steps) == want
    assert propose(tree, [1, 2, 3, 4], [5]) == {0: (4.0, 4.0)}


def test_draft_tokens_beyond_the_text_do_not_count() -> None:
    assert propose(chain_of([1, 2, 3, 4]), [1, 2]) == {0: (2.0, 2.0)}


def test_nothing_counts_after_a_divergence() -> None:
    assert propose(chain_of([1, 2, 3]), [1, 7, 3], [1, 2, 3]) == {0: (2.0, 1.0)}


def test_a_root_below_other_draft_tokens_counts_if_they_are_right() -> None:
    tree = chain_of([1, 2])
    assert propose(tree, [7, 8, 9, 1, 5], lead=(7, 8, 9)) == {0: (2.0, 1.0)}
    assert propose(tree, [7], [8], [9, 1], [2], lead=(7, 8, 9)) == {0: (2.0, 2.0)}
    assert propose(tree, [7, 5, 9, 1], [7, 8, 9, 1, 2], lead=(7, 8, 9)) == {}


def test_draft_tokens_of_other_drafters_do_not_count() -> None:
    assert propose(tree_of(("other", 0), ("own", 2), ("other", 1), ("other", 2)), [1, 2]) == {
        2: (1.0, 1.0)
    }
    assert propose(TokenTree.chain([9, 1, 2]), [1, 2]) == {}


def test_nodes_that_may_not_be_accepted_do_not_count() -> None:
    window = TokenTree(
        (9, 1, 2), (-1, 0, 0), (True, False, True), origin=(("", 0), ("own", 0), ("own", 1))
    )
    assert propose(window, [1]) == {1: (1.0, 0.0)}


def test_a_slot_ignores_proposals_until_the_text_has_passed_its_first() -> None:
    acceptance = RequestAcceptance()
    rates = acceptance.rates("own", PRIORS)
    acceptance.propose("slot", (), chain_of([1, 2, 3], 0))
    acceptance.advance([1])
    acceptance.propose("slot", (), TokenTree((1, 2), (-1, 0), origin=(("", 0), ("own", 1))))
    acceptance.propose("other slot", (), TokenTree((1, 2), (-1, 0), origin=(("", 0), ("own", 2))))
    acceptance.advance([2])
    assert set(counts(rates)) == {0, 2}
    acceptance.advance([5])
    acceptance.propose("slot", (), chain_of([6], 1))
    acceptance.advance([6])
    assert set(counts(rates)) == {0, 1, 2}


def test_proposals_without_draft_tokens_leave_the_slot_free() -> None:
    acceptance = RequestAcceptance()
    rates = acceptance.rates("own", PRIORS)
    acceptance.propose("slot", (), TokenTree.chain([9]))
    acceptance.propose("slot", (), chain_of([1], 1))
    acceptance.advance([1])
    assert counts(rates) == {1: (1.0, 1.0)}


def learn(rates: DrafterRates, right: bool, times: int = 1, kind: int = 1, depth: int = 1) -> None:
    """Count a draft token in each of ``times`` steps."""
    for _ in range(times):
        rates.fade()
        rates.learn(kind, depth, accepted=right, share=True)


def test_the_rate_is_the_mean_of_prior_and_counts() -> None:
    rates = request()
    assert [rates.rate(kind, 1) for kind in PRIORS] == pytest.approx([0.5, 0.1, 0.8])
    learn(rates, True)
    assert rates.rate(1, 1) == pytest.approx((1 + 0.1 * 4) / 5)
    assert rates.rate(2, 1) == pytest.approx(0.8)
    assert rates.mean(0.3) == pytest.approx((1 + 0.3 * 4) / 5)
    learn(rates, False, kind=2)
    assert rates.rate(2, 1) == pytest.approx(0.8 * 4 / 5)
    assert rates.mean(0.3) == pytest.approx((0.98 + 0.3 * 4) / (1.98 + 4))


def test_rates_follow_the_text() -> None:
    rates = request()
    for step in range(400):
        learn(rates, step % 4 > 0)
    assert rates.rate(1, 1) == pytest.approx(0.71, abs=0.05)
    learn(rates, False, 34)
    assert 0.3 < rates.rate(1, 1) < 0.45  # half of the weight after 34 steps
    learn(rates, False, 400)
    assert 0.0 < rates.rate(1, 1) < 0.02


def test_steps_without_decided_draft_tokens_do_not_fade_the_counts() -> None:
    acceptance = RequestAcceptance()
    rates = acceptance.rates("own", PRIORS)
    acceptance.propose("slot", (), chain_of([1]))
    acceptance.advance([1])
    for _ in range(50):
        acceptance.advance([7])
    assert 0.97 < counts(rates)[0][0] <= 1.0


def test_a_request_starts_with_the_counts_of_others() -> None:
    stats = AcceptanceStats()
    learn(request(stats), True, 100)
    second = request(stats)
    shared = (100 + 0.1 * 16) / 116
    assert second.rate(1, 1) == second.prior(1, 1) == pytest.approx(shared)
    assert second.rate(1, 2) == pytest.approx(0.1)  # another depth
    assert second.rate(0, 1) == pytest.approx(0.5)
    assert second.mean(0.2) == pytest.approx((100 + 0.2 * 16) / 116)
    learn(second, False)
    assert second.rate(1, 1) == pytest.approx(shared * 4 / 5)
    learn(second, False, 100)
    assert second.rate(1, 1) < 0.1


def test_the_prior_of_a_request_is_fixed_for_its_first_use() -> None:
    """Otherwise proposals would depend on other requests of the same batch."""
    stats = AcceptanceStats()
    rates = request(stats)
    before = rates.rate(1, 1)
    learn(request(stats), True, 100)
    assert rates.rate(1, 1) == before
    assert request(stats).rate(1, 1) > before


def test_one_request_adds_a_bounded_share() -> None:
    stats = AcceptanceStats()
    learn(request(stats), True, 3 * SHARE)
    assert stats.counts == {("own", 1, 1, 0): [SHARE, SHARE], ("own", -1, 1, 0): [SHARE, SHARE]}


def test_private_requests_add_nothing() -> None:
    stats = AcceptanceStats()
    acceptance = RequestAcceptance(stats, 0.8, private=True)
    rates = acceptance.rates("own", PRIORS)
    acceptance.propose("slot", (), chain_of([1]))
    acceptance.advance([1])
    assert not stats.counts
    assert counts(rates) == {0: (1.0, 1.0)}
    shared = RequestAcceptance(stats, 0.8)
    shared.rates("own", PRIORS)
    shared.propose("slot", (), chain_of([1]))
    shared.advance([1])
    assert stats.counts


def test_rates_depend_on_the_temperature() -> None:
    stats = AcceptanceStats()
    learn(request(stats, 0.0), True, 50)
    learn(request(stats, 0.8), False, 50)
    assert request(stats, 0.0).rate(1, 1) == pytest.approx((50 + 1.6) / 66)
    assert (
        request(stats, 0.7).rate(1, 1) == request(stats, 1.0).rate(1, 1) == pytest.approx(1.6 / 66)
    )
    assert request(stats, 0.5).rate(1, 1) == request(stats, 1.5).rate(1, 1) == pytest.approx(0.1)


def test_few_counts_leave_the_prior_and_many_replace_it() -> None:
    stats = AcceptanceStats()
    assert stats.rate("a", 1, 1, 0.0, 0.3) == pytest.approx(0.3)
    for number in range(1000):
        stats.learn("a", 1, 1, 0.0, accepted=number % 4 == 0)
        if number == 0:
            assert stats.rate("a", 1, 1, 0.0, 0.3) == pytest.approx((1 + 0.3 * 16) / 17)
    assert stats.rate("a", 1, 1, 0.0, 0.3) == pytest.approx(0.25, abs=0.01)


def test_statistics_depend_on_source_kind_and_depth() -> None:
    stats = AcceptanceStats()
    for _ in range(1000):
        stats.learn("a", 1, 2, 0.7, accepted=True)
    assert stats.rate("a", 1, 2, 0.7, 0.1) > 0.9
    for other in (("b", 1, 2, 0.7), ("a", 2, 2, 0.7), ("a", 1, 1, 0.7), ("a", 1, 3, 0.7)):
        assert stats.rate(*other, 0.1) == pytest.approx(0.1)
    stats.learn("a", 1, 4, 0.7, accepted=True)
    # All depths from 4 on have the same counts.
    assert stats.rate("a", 1, 9, 0.7, 0.1) == stats.rate("a", 1, 4, 0.7, 0.1) > 0.1


def test_old_counts_fade() -> None:
    stats = AcceptanceStats()
    for _ in range(20_000):
        stats.learn("a", 1, 1, 0.0, accepted=True)
    for _ in range(8_000):
        stats.learn("a", 1, 1, 0.0, accepted=False)
    assert stats.rate("a", 1, 1, 0.0, 0.5) < 0.25
    ((reached, accepted),) = stats.counts.values()
    assert 0 <= accepted <= reached <= 4096


def confidences(shared: AcceptanceStats | None = None, source: str = "draft_model") -> DrafterRates:
    """Return the rates of a draft model, whose kinds are confidences."""
    return RequestAcceptance(shared).rates(source)


def rate(rates: DrafterRates, confidence: float, depth: int = 1) -> float:
    return rates.rate(DrafterRates.confidence_kind(confidence), depth)


def test_the_first_estimate_is_the_confidence() -> None:
    fresh = confidences()
    for confidence in (0.001, 0.25, 0.5, 0.9, 0.999):
        assert rate(fresh, confidence) == pytest.approx(confidence)
    assert 0 < rate(fresh, 0.0) < 0.01
    assert 0.99 < rate(fresh, 1.0) < 1


def test_confidences_of_the_same_tenth_share_their_error() -> None:
    rates = confidences()
    learn(rates, True, 2, kind=DrafterRates.confidence_kind(0.35))
    error = rate(rates, 0.35) - 0.35
    assert error > 0.15
    assert [rate(rates, each) - each for each in (0.301, 0.399)] == pytest.approx([error] * 2)
    assert [rate(rates, each) for each in (0.25, 0.45)] == pytest.approx([0.25, 0.45])
    learn(rates, True, 400, kind=DrafterRates.confidence_kind(0.95))
    assert 0.97 < rate(rates, 0.95) < rate(rates, 0.999) < 1.0


@pytest.mark.parametrize("off", [-0.2, 0.0, 0.2])
def test_the_error_of_a_draft_models_confidence_is_found(off: float) -> None:
    dice = random.Random(0)
    rates = confidences()
    errors = []
    for step in range(3000):
        confidence = dice.uniform(0.2, 0.8)
        if step > 500:
            errors.append(rate(rates, confidence) - confidence - off)
        learn(
            rates, dice.random() < confidence + off, kind=DrafterRates.confidence_kind(confidence)
        )
    assert abs(sum(errors) / len(errors)) < 0.1  # the prior keeps a third of its weight
    assert sum(map(abs, errors)) / len(errors) < 0.15


def test_confidences_start_with_the_counts_of_other_requests() -> None:
    stats = AcceptanceStats()
    dice = random.Random(0)
    for _ in range(4):
        teacher = confidences(stats)
        for _ in range(40):
            kind = DrafterRates.confidence_kind(dice.uniform(0.5, 0.5999))
            learn(teacher, dice.random() < 0.9, kind=kind)
    taught = confidences(stats)
    assert 0.8 < rate(taught, 0.55) < 0.95
    assert rate(taught, 0.55, 2) == pytest.approx(0.55)  # no counts at depth 2
    assert rate(taught, 0.25) == pytest.approx(0.25)
    assert (
        rate(confidences(), 0.55)
        == rate(confidences(stats, "another"), 0.55)
        == pytest.approx(0.55)
    )
