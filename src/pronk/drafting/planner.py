"""The rule of drafting: which drafter proposes next, and how many draft tokens.

**Each step is made as fast as its place in the text allows: the choice with the most expected
tokens per second** ::

    tokens expected of the step            1 + Σ gains
    --------------------------- = ------------------------------
       seconds of the step        forward pass + drafting

A *gain* is the estimated probability that a draft token is accepted. Plain decoding is the choice
without draft tokens. Why this rule: every token of a text must be passed by some step, and some
places are passed at other rates than others, so the sum of the seconds is least if each place is
passed at its own highest rate.

So a token is worth the seconds that a token of the best step so far takes. The planner asks the
drafters of a request one after the other, cheap ones first. A drafter proposes if the tokens that
it is expected to add are worth more than its seconds; a draft model, if a step with its chain alone
is faster than the best step so far. A further pass of a draft model is made, and a further row
verified, if the step becomes faster.

**Prefill of a draft model.** A draft model must read the text before it can draft. It does when its
draft tokens would have saved, in the steps since its last proposal, as many seconds as reading
takes. By this ski-rental rule, the seconds missed and those of reading are at most twice those of
the best choice in hindsight.

**Learning.** A drafter that is not expected to pay proposes now and then, to measure how good it is
on the present text. Learning may take as much time as drafting may lose, divided equally among the
drafters that exist: a drafter that waits for time to read the text keeps its part.

**Bound of the loss.** Nothing may cost more than the *allowance*, by which
:mod:`pronk.drafting.ledger` bounds what drafting loses over all steps of an engine.

**Order of a step.** All that decides about drafting is in this package, and the engine calls it.

1. :meth:`.RequestLedger.begin_proposals`: is the request's drafter asked at all? Not while the
   costs are unknown, nor while no drafter can propose for lack of allowance, except that a guide
   may force text.
2. :meth:`.RequestLedger.plan` calls :func:`plan` with the ledger's measurements: does this drafter
   propose?
3. :meth:`DraftPlan.extends`, :meth:`~DraftPlan.another_pass_pays`, :meth:`~DraftPlan.wants`: does
   it go on? :mod:`pronk.drafting.shared.stepwise` asks before each token of a chain. A drafter's
   own rule, such as a smallest confidence, may end a chain earlier, never later.
4. :func:`select_nodes`: which of the proposed draft tokens are verified?
5. :meth:`.Ledger.record_step`: what did it cost and save?

Two drafters choose more than a number of draft tokens. ``lookahead`` chooses the size of its window
for all requests, because the rows of a window may not be dropped one by one: the size with the most
tokens per second, by the measured tokens of each size (``WindowTuner`` in
``lab/drafters/window.py``). ``threshold`` moves its smallest confidence by the outcomes, as its
source says. Both are asked only if the planner expects them to pay, like any drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Literal, NamedTuple

from pronk.drafting.step_costs import ChainCosts, ExpectedStep, StepCosts
from pronk.sampling.tree import TokenTree

Reason = Literal["pays", "learns", "all"]

# Acceptance rate of draft tokens, and tokens that a drafter adds to a step, before any count.
DEFAULT_RATE = 0.7


class DrafterEstimate(NamedTuple):
    """Estimates of a drafter before a step, by the measurements of the ledger."""

    seconds: float = 0.0  # of a proposal; a chain has ``chain`` instead
    # Draft tokens that the drafter adds to a step, after subtraction of what the seconds of their
    # rows are worth, if no drafter before it has the next token.
    contribution: float = 0.0
    chain: ChainCosts | None = None
    rate: float = 0.0  # acceptance rate of a chain's draft tokens, below 1
    missed: float = 0.0  # seconds that a chain would have saved since its last proposal
    may_learn: bool = False  # whether its share of the time for learning covers a proposal


class DraftPlan(NamedTuple):
    """A drafter's part in one step of one request.

    A drafter that grows its proposal token by token asks :meth:`wants`, :meth:`extends` or
    :meth:`another_pass_pays` whether to go on.
    """

    # Why the drafter proposes: it is expected to pay; its acceptance is measured; or everything is
    # drafted, whatever it costs. ``None``: it does not propose.
    reason: Reason | None = "all"
    costs: StepCosts | None = None  # ``None``: draft tokens are wanted whatever they cost
    chain: ChainCosts | None = None  # of a drafter that drafts token by token
    allowance: float = inf  # seconds that drafting may take
    before: ExpectedStep = ExpectedStep(1.0, 1.0)  # best choice without this drafter
    saving: float = 0.0  # expected seconds saved in this step, the prefill not counted

    @property
    def min_gain(self) -> float:
        """Smallest gain of a draft token that is worth its row, where rows are not free."""
        if self.costs is None:
            return 0.0
        return self.costs.curve.row_seconds / self.before.token_seconds

    def wants(self, gain: float, count: int) -> bool:
        """Return whether a draft token is worth its row, after ``count`` others of larger gain."""
        if self.costs is None or gain >= self.min_gain:
            return True
        return count + 1 < self.costs.curve.free_rows // self.costs.num_requests

    def extends(
        self, gains: Sequence[float], chain: ChainCosts | None, rate: float, max_tokens: int
    ) -> bool:
        """Return whether a chain of draft tokens with these gains is worth another token.

        Args:
            gains: estimated probability, for each draft token, that all up to it are accepted.
            chain: costs of the drafter; ``None``: not known.
            rate: acceptance rate of further tokens.
            max_tokens: largest number of draft tokens.
        """
        if self.costs is None or chain is None:
            return True
        if self.reason == "learns" and not gains:
            return True
        length = len(gains)
        if chain.prefill + chain.start + (length + 1) * chain.token > self.allowance:
            return False
        now = ExpectedStep(1.0 + sum(gains), _chain_seconds(self.costs, chain, length))
        return _best_longer_chain(self.costs, chain, rate, max_tokens, gains).is_faster(now)

    def another_pass_pays(
        self, gains: Sequence[float], more: Sequence[float], chain: ChainCosts | None, passes: int
    ) -> bool:
        """Return whether a tree is worth one more pass of the draft model.

        Args:
            gains: for each draft token so far, the probability that it is accepted.
            more: the same for the draft tokens that the pass would add, as expected.
            chain: costs of the drafter, ``token`` being the seconds of a pass; ``None``: not known.
            passes: number of passes so far.
        """
        if self.costs is None or chain is None:
            return True
        drafting = chain.start + passes * chain.token
        if chain.prefill + drafting + chain.token > self.allowance:
            return False
        now = self.costs.best(gains)
        later = self.costs.best([*gains, *more])
        later = ExpectedStep(later.tokens, later.seconds + drafting + chain.token)
        return later.is_faster(ExpectedStep(now.tokens, now.seconds + drafting))


# The plan of a drafter whose draft tokens are wanted whatever they cost.
EVERYTHING = DraftPlan()


def plan(
    drafter: DrafterEstimate,
    costs: StepCosts,
    allowance: float,
    *,
    before: ExpectedStep,
    room: float = 1.0,
    max_tokens: int = 1,
    num_left: int = 1,
) -> DraftPlan:
    """Decide whether a drafter proposes draft tokens in a step of a request.

    Args:
        drafter: measurements of the drafter.
        costs: costs of the step.
        allowance: seconds that drafting for the request may take.
        before: best choice among the draft tokens that other drafters have proposed in this step.
        room: probability that none of these draft tokens is the next token, 0..1.
        max_tokens: largest number of draft tokens.
        num_left: largest number of tokens until the end of the text.
    """
    chain = drafter.chain
    if chain is None:
        seconds = drafter.seconds
        saving = room * drafter.contribution * before.token_seconds - seconds
        pays = saving > 0.0
    else:
        seconds = chain.prefill + chain.start + chain.token
        max_tokens = min(max_tokens, chain.max_tokens)
        best = _best_longer_chain(costs, chain, drafter.rate, max_tokens)
        saving = best.tokens * before.token_seconds - best.seconds
        most = saving * num_left / best.tokens  # seconds to save in all steps that are left
        pays = saving > 0.0 and chain.prefill <= min(drafter.missed + saving, most)
    reason: Reason | None = None
    if seconds <= allowance:
        if pays:
            reason = "pays"
        elif drafter.may_learn:
            reason = "learns"
    return DraftPlan(reason, costs, chain, allowance, before, max(0.0, saving))


def _chain_seconds(costs: StepCosts, chain: ChainCosts, length: int) -> float:
    """Return the seconds of a step with a chain, without the prefill of the drafter."""
    start = chain.start if length else 0.0
    return costs.pass_seconds(length) + start + length * chain.token


def _best_longer_chain(
    costs: StepCosts,
    chain: ChainCosts,
    rate: float,
    max_tokens: int,
    gains: Sequence[float] = (),
) -> ExpectedStep:
    """Return the best step among those whose chain is longer than one with ``gains``."""
    tokens = 1.0 + sum(gains)
    gain = gains[-1] if gains else 1.0
    best = ExpectedStep(0.0, 1.0)
    for length in range(len(gains) + 1, max_tokens + 1):
        gain *= rate
        tokens += gain
        choice = ExpectedStep(tokens, _chain_seconds(costs, chain, length))
        if choice.is_faster(best):
            best = choice
            continue
        # All further tokens together: if they do not make up for the seconds of this one, stop.
        limit = ExpectedStep(tokens + gain * rate / (1.0 - rate), choice.seconds)
        if not limit.is_faster(best):
            break
    return best


def stays_whole(tree: TokenTree, *, rejects: bool, bypass_budget: bool) -> bool:
    """Return whether all draft tokens of a tree are verified, whatever they cost.

    The acceptance rules ``rejection`` and ``block`` (``rejects``) are exact only if draft tokens
    are distributed as ``tree.probs``. Dropping tokens by their gain could change this distribution.
    """
    return bypass_budget or (rejects and tree.probs is not None)


def select_nodes(
    trees: Sequence[TokenTree],
    costs: StepCosts | None,
    *,
    whole: Sequence[bool] = (),
    prompt_rows: int = 0,
    drafting: float = 0.0,
    allowance: float = inf,
) -> list[TokenTree]:
    """Cut the trees of a step to the draft tokens with the most expected tokens per second.

    The draft tokens of largest gain are kept. A child's gain is at most its parent's, so they form
    a tree. Nodes without a gain, and nodes that may not be accepted, are kept. If prompts are read
    in the same forward pass, draft rows cost what they add to it.

    Args:
        trees: one per request with a proposal.
        costs: costs of the step; ``None``: they are not known, and no draft token with a gain is
            kept.
        whole: for each tree, whether all its nodes are kept (:func:`stays_whole`); empty: no tree
            is kept whole.
        prompt_rows: number of rows of prompts in the same forward pass.
        drafting: seconds that the proposals took.
        allowance: seconds by which draft rows may lengthen the forward pass.
    """
    # Gain with the sign changed, number of the tree, node: the largest gains come first.
    ranked = sorted(
        (-tree.gain[node], number, node)
        for number, tree in enumerate(trees)
        if tree.gain is not None and not (whole and whole[number])
        for node in range(1, len(tree))
        if tree.acceptable[node]
    )
    count = 0
    if costs is not None:
        num_others = sum(tree.num_draft_tokens for tree in trees) - len(ranked)
        gains = [-rank[0] for rank in ranked]
        count = _best_count(gains, costs, prompt_rows, num_others, drafting, allowance)
    if count == len(ranked):
        return [*trees]
    dropped = {(number, node) for _, number, node in ranked[count:]}
    selected = []
    for number, tree in enumerate(trees):
        nodes = [node for node in range(len(tree)) if (number, node) not in dropped]
        selected.append(tree if len(nodes) == len(tree) else tree.keep(nodes))
    return selected


def _best_count(
    gains: Sequence[float],
    costs: StepCosts,
    prompt_rows: int,
    num_others: int,
    drafting: float,
    allowance: float,
) -> int:
    """Return how many draft tokens make the whole step the fastest; ``gains`` fall.

    ``num_others`` draft tokens are verified in any case.
    """
    curve = costs.curve
    plain_rows = costs.num_requests + prompt_rows
    longest = curve.at(plain_rows) + allowance
    # A step without prompts takes the seconds of its pass and of drafting; with prompts, these are
    # not seconds of the decoding requests.
    shift = curve.at(costs.num_requests) - curve.at(plain_rows) + drafting
    tokens = float(costs.num_requests)
    best = ExpectedStep(tokens, curve.at(plain_rows + num_others) + shift)
    best_count = 0
    for count, gain in enumerate(gains, 1):
        tokens += gain
        seconds = curve.at(plain_rows + num_others + count)
        if seconds > longest:
            break
        choice = ExpectedStep(tokens, seconds + shift)
        if choice.is_faster(best):
            best = choice
            best_count = count
    return best_count
