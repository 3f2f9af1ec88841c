"""The rule of drafting: which drafter proposes next, and how many draft tokens.

**Each step is made as fast as its place in the text allows: the choice with the most expected
tokens per second** ::

    tokens expected of the step            1 + Σ gains
    --------------------------- = ------------------------------
       seconds of the step        forward pass + drafting

A *gain* is the estimated probability that a draft token is accepted. Plain decoding is the choice
without draft tokens. Why this rule: some places of a text can be generated at more tokens per
second than others. The seconds of the whole text are least if each place is generated at its own
highest rate.

A drafter's seconds are therefore compared with the *seconds per token* of the fastest step that is
possible without it. The planner considers the drafters of a request one after the other, cheap ones
first. A drafter without a model proposes if the tokens that it is expected to add, times the
seconds per token, exceed its own seconds. A draft model proposes if a step with its chain alone is
faster than the fastest step so far. A draft model makes a further forward pass, and the target
verifies a further row, if that makes the step faster.

**Prefill of a draft model.** A draft model must read the text before it can draft. It does so as
soon as the seconds that its draft tokens would have saved in the steps since its last proposal
reach the seconds of reading. By this ski-rental rule, the savings missed and the seconds of reading
together are at most twice the cost of the best choice in hindsight.

**Learning.** A drafter that is not expected to pay proposes now and then, to measure how good it is
on the present text. Learning may take as much time as drafting may lose (1 % of the elapsed time).
Each drafter has an equal part of this time, which it keeps until it needs it, for example to read a
long text.

**Bound of the loss.** Nothing may cost more than the *allowance*, by which
:mod:`pronk.drafting.ledger` bounds what drafting loses over all steps of an engine.

**Order of a step.** The engine makes these calls in each step; all decisions about drafting are
made in this package.

1. :meth:`.RequestLedger.begin_proposals`: may the request's drafter propose in this step? Not while
   the costs of forward passes are unknown. Not while the allowance is too small for every drafter,
   unless a guide (a grammar) may force text, which costs nothing to draft.
2. :meth:`.RequestLedger.plan` calls :func:`plan` with the ledger's measurements: does this drafter
   propose?
3. :meth:`DraftPlan.extends`, :meth:`~DraftPlan.another_pass_pays`, :meth:`~DraftPlan.wants`: is a
   further draft token worth its time? :mod:`pronk.drafting.shared.stepwise` calls the first before
   each token of a chain. A drafter's own rule, such as a smallest confidence, may end a chain
   earlier, never later.
4. :func:`select_nodes`: which of the proposed draft tokens are verified?
5. :meth:`.Ledger.record_step`: how many seconds did the step's draft tokens cost and save?

Two drafters adapt a parameter of their own. ``lookahead`` (Fu et al. 2024) chooses one window size
for all requests, because the rows of a window may not be dropped one by one. It takes the size with
the most tokens per second, by the tokens measured for each size (``WindowTuner`` in
``lab/drafters/window.py``). ``threshold`` raises and lowers its confidence threshold after each
verification (:mod:`pronk.drafting.from_draft.threshold`). Like any drafter, both propose only if
the planner expects that to save time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Literal, NamedTuple

from pronk.drafting.step_costs import ChainCosts, ExpectedStep, StepCosts
from pronk.sampling.tree import TokenTree

Reason = Literal["pays", "learns", "all"]

# Assumed before anything is measured: the acceptance rate of a draft token, and the number of
# tokens that a drafter adds to a step.
DEFAULT_RATE = 0.7


class DrafterEstimate(NamedTuple):
    """Expected costs and gains of a drafter in the next step of a request.

    The values come from the measurements of :mod:`pronk.drafting.ledger`.
    """

    seconds: float = 0.0  # seconds of a proposal; with ``chain``, of one with a single draft token
    # Expected accepted tokens that the drafter adds to a step if no earlier drafter has proposed
    # the right next token. Tokens that could be generated in the seconds of verifying its rows are
    # subtracted.
    contribution: float = 0.0
    # Seconds per draft token, if the drafter drafts token by token; ``None``: its proposals are
    # made at once.
    chain: ChainCosts | None = None
    rate: float = 0.0  # acceptance rate of a chain's draft tokens, below 1
    # expected savings, in seconds, of the steps since the last proposal of a chain; they justify
    # its prefill
    missed: float = 0.0
    # whether the drafter's part of the time for measuring acceptance rates suffices for a proposal
    may_learn: bool = False


class DraftPlan(NamedTuple):
    """The planner's decision about one drafter in one step of one request.

    A drafter that grows its proposal token by token calls :meth:`wants`, :meth:`extends` or
    :meth:`another_pass_pays` before each further token, row or forward pass of its model.

    Attributes:
        reason: why the drafter proposes. "pays": it is expected to save time. "learns": its
            acceptance rate is to be measured. "all": costs are ignored (``budget="all"``).
            ``None``: it does not propose.
        costs: costs of the step; ``None``: costs are ignored.
        chain: seconds per draft token, if the drafter drafts token by token.
        allowance: largest number of seconds that the proposal may take.
        before: fastest step without this drafter's draft tokens.
        saving: seconds that the proposal is expected to save in this step, apart from its prefill.
    """

    reason: Reason | None = "all"
    costs: StepCosts | None = None
    chain: ChainCosts | None = None
    allowance: float = inf
    before: ExpectedStep = ExpectedStep(1.0, 1.0)
    saving: float = 0.0

    @property
    def min_gain(self) -> float:
        """Smallest probability of acceptance at which verifying a draft token saves time.

        0 if costs are ignored. Assumes that a further row lengthens the forward pass.
        """
        if self.costs is None:
            return 0.0
        return self.costs.curve.row_seconds / self.before.token_seconds

    def wants(self, gain: float, count: int) -> bool:
        """Return whether verifying a further draft token is expected to save time.

        ``gain`` is the probability that the token is accepted; ``count`` other draft tokens of the
        request have larger gains. While the forward pass is no longer than that of one row, every
        token is wanted.
        """
        if self.costs is None or gain >= self.min_gain:
            return True
        return count + 1 < self.costs.curve.free_rows // self.costs.num_requests

    def extends(
        self, gains: Sequence[float], chain: ChainCosts | None, rate: float, max_tokens: int
    ) -> bool:
        """Return whether drafting at least one more token of a chain is expected to save time.

        Args:
            gains: estimated probability, for each draft token, that all up to it are accepted.
            chain: seconds per token of the drafter; ``None`` if not known: the chain goes on.
            rate: acceptance rate assumed for the tokens to come.
            max_tokens: largest number of draft tokens.
        """
        if self.costs is None or chain is None:
            return True
        # plan() has decided that the chain has a first token
        if not gains and (self.reason == "learns" or chain is self.chain):
            return True
        length = len(gains)
        if chain.prefill + chain.start + (length + 1) * chain.token > self.allowance:
            return False
        seconds = self.costs.pass_seconds(length) + length * chain.token
        if length:
            seconds += chain.start
        tokens = 1.0 + sum(gains)
        best_tokens, best_seconds = _best_longer_chain(self.costs, chain, rate, max_tokens, gains)
        return best_tokens * seconds > tokens * best_seconds  # more tokens per second

    def another_pass_pays(
        self, gains: Sequence[float], more: Sequence[float], chain: ChainCosts | None, passes: int
    ) -> bool:
        """Return whether one more forward pass of the draft model is expected to save time.

        Args:
            gains: for each draft token so far, the probability that it is accepted.
            more: the same for the draft tokens that the pass would add, as expected.
            chain: costs of the drafter, where ``token`` is the seconds of one pass; ``None`` if not
                known: another pass is made.
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


# The plan with ``budget="all"``: the drafter proposes as many tokens as it can, whatever they cost.
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
        drafter: what the drafter is expected to cost and to add.
        costs: costs of the step.
        allowance: seconds that drafting for the request may take.
        before: fastest step with the draft tokens that other drafters have proposed, or some of
            them.
        room: probability that none of these draft tokens is the next token, 0..1.
        max_tokens: largest number of draft tokens.
        num_left: largest number of tokens until the end of the text.
    """
    chain = drafter.chain
    seconds = drafter.seconds
    token_seconds = before.seconds / before.tokens
    if chain is None:
        saving = room * drafter.contribution * token_seconds - seconds
        pays = saving > 0.0
    else:
        max_tokens = min(max_tokens, chain.max_tokens)
        best_tokens, best_seconds = _best_longer_chain(costs, chain, drafter.rate, max_tokens)
        saving = best_tokens * token_seconds - best_seconds
        # seconds that the chain could save until the text ends
        most = saving * num_left / best_tokens
        pays = saving > 0.0 and chain.prefill <= min(drafter.missed + saving, most)
    reason: Reason | None = None
    if seconds <= allowance:
        if pays:
            reason = "pays"
        elif drafter.may_learn:
            reason = "learns"
    return DraftPlan(reason, costs, chain, allowance, before, max(0.0, saving))


def _best_longer_chain(
    costs: StepCosts,
    chain: ChainCosts,
    rate: float,
    max_tokens: int,
    gains: Sequence[float] = (),
) -> tuple[float, float]:
    """Return tokens and seconds of the fastest step whose chain has more tokens than ``gains``.

    The chain has at most ``max_tokens`` tokens. The seconds include those of drafting, apart from
    the prefill of the draft model.
    ``gains`` are those of the chain so far; each further token is accepted at the rate ``rate``.
    """
    by_count = costs.by_count(len(gains) + 1)
    tokens = 1.0 + sum(gains)
    gain = gains[-1] if gains else 1.0
    best_tokens = 0.0
    best_seconds = 1.0
    for length in range(len(gains) + 1, max_tokens + 1):
        gain *= rate
        tokens += gain
        if length == len(by_count):
            by_count = costs.by_count(length)
        seconds = by_count[length] + chain.start + length * chain.token
        if tokens * best_seconds > best_tokens * seconds:  # more tokens per second
            best_tokens = tokens
            best_seconds = seconds
            continue
        # The limit of an endless chain whose further tokens take no time. If even that step is not
        # faster than the best one, longer chains need not be examined.
        limit = tokens + gain * rate / (1.0 - rate)
        if limit * best_seconds <= best_tokens * seconds:
            break
    return best_tokens, best_seconds


def stays_whole(tree: TokenTree, *, rejects: bool, bypass_budget: bool) -> bool:
    """Return whether the engine must verify all draft tokens of a tree, whatever they cost.

    Args:
        tree: the proposal.
        rejects: whether the request's acceptance rule is ``rejection`` or ``block``. These rules
            are exact only if draft tokens are distributed as ``tree.probs``, and the choice of
            draft tokens by their gain could change this distribution.
        bypass_budget: whether the drafter declares that all its draft tokens are verified
            (``Capabilities.bypass_budget``).
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
    a tree. Nodes without a gain, and nodes that may not be accepted, are kept. If the same forward
    pass reads prompts, the cost of draft rows is the time by which they lengthen that pass.

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
    # Triples of a negative gain, the number of the tree, and the node, sorted: the largest gain
    # comes first.
    ranked = list[tuple[float, int, int]]()
    num_draft_tokens = 0
    for number, tree in enumerate(trees):
        num_draft_tokens += tree.num_draft_tokens
        if tree.gain is None or (whole and whole[number]):
            continue
        for node, acceptable in enumerate(tree.acceptable[1:], 1):
            if acceptable:
                ranked.append((-tree.gain[node], number, node))
    ranked.sort()
    count = 0
    if costs is not None:
        num_others = num_draft_tokens - len(ranked)
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
    """Return how many draft tokens to verify for the most expected tokens per second.

    ``gains`` are sorted, the largest first; the first tokens of that order are verified. Besides
    them, ``num_others`` draft tokens are verified in any case. Draft rows lengthen the forward pass
    by at most ``allowance`` seconds.
    """
    # Seconds of a pass without draft tokens, without and with the prompts; then of passes with 0,
    # 1, 2, … of the sorted draft tokens.
    plain_rows = costs.num_requests + prompt_rows
    first = plain_rows + num_others
    rows = [costs.num_requests, plain_rows, *range(first, first + len(gains) + 1)]
    without_prompts, plain, *by_count = costs.curve.table(rows)
    longest = plain + allowance
    # The seconds of reading prompts in the same pass are not a cost of the decoding requests, so
    # they are subtracted. The seconds of drafting are added.
    shift = without_prompts - plain + drafting
    tokens = float(costs.num_requests)
    best_tokens = tokens
    best_seconds = by_count[0] + shift
    best_count = 0
    for count, gain in enumerate(gains, 1):
        tokens += gain
        pass_seconds = by_count[count]
        if pass_seconds > longest:
            break
        seconds = pass_seconds + shift
        if tokens * best_seconds > best_tokens * seconds:  # more tokens per second
            best_tokens = tokens
            best_seconds = seconds
            best_count = count
    return best_count
