"""Seconds that drafting has cost and saved, and the measurements by which the planner decides.

**Bound of the loss.** Over all steps of an engine ::

    seconds of drafting and of draft rows  ≤  seconds that accepted draft tokens saved
                                              +  1 % of the elapsed seconds  +  two forward passes

Before a proposal is made, its expected seconds are compared with what may still be lost, the
*allowance*. Each of the two forward passes counts as long as the longest pass so far that read no
prompt. The seconds of draft rows and the savings are those of the cost model. The bound is exceeded
at most by what one step's proposals take beyond their expected seconds, and by one step's rows that
may not be dropped: trees that the rejection rules verify whole, and the window of lookahead.
Drafting is the time in proposals and in their observation. A proposal counts as at most twice its
expected seconds, because other processes may interrupt it. The expected seconds are the usual ones
of the last proposals, and 0 for the first four proposals of a drafter: the first one prepares it,
and three are measured first, because a single interruption would otherwise look like the drafter's
price, and end its drafting for a hundred times as long as it took.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ReferenceType, ref

from pronk.base.errors import OptionError
from pronk.drafting.acceptance_stats import RequestAcceptance
from pronk.drafting.planner import (
    DEFAULT_RATE,
    EVERYTHING,
    DrafterEstimate,
    DraftPlan,
    Reason,
    plan,
)
from pronk.drafting.regret import Regret
from pronk.drafting.step_costs import ChainCosts, ExpectedStep, StepCosts
from pronk.drafting.tree_union import TreeUnion
from pronk.models.cost_model import usual
from pronk.sampling.tree import TokenTree

if TYPE_CHECKING:
    from pronk.drafting.proposer import DraftContext, Proposer

# number of proposals of a drafter that are measured before its seconds are expected
_TRIALS = 3
# fraction of the elapsed time that drafting may lose; measuring acceptance rates may use all of it
_LOSS_SHARE = 0.01
_PASSES = 2.0  # number of forward passes whose time drafting may lose in addition
# initial number of tokens that a drafter was expected to add and has added: the estimate is right
_PRIOR_TOKENS = 2.0
# In the mean number of tokens that a drafter adds to a step, the weight of a step relative to the
# next one. The weight falls to one half after 7 steps.
_KEEP = 0.9


@dataclass(slots=True)
class Contribution:
    """Decayed mean of the tokens that a drafter adds to a step.

    The weight of a step is its *room*: the probability that no drafter before this one has proposed
    the right next token. Older steps weigh less.
    """

    total: float = 0.0  # decayed sum of the tokens added
    weight: float = 0.0  # decayed sum of the steps' rooms
    step: int = 0  # number of the last recorded step, down to which earlier steps are decayed

    def learn(self, added: float, room: float, step: int) -> None:
        """Record the tokens that the drafter added in step number ``step``, of weight ``room``."""
        keep = _KEEP ** (step - self.step)
        self.total = keep * self.total + added
        self.weight = keep * self.weight + room
        self.step = step

    def mean(self, prior: float, step: int) -> float:
        """Return the mean as of step number ``step``.

        ``prior`` is the mean assumed before any step; it has the weight of one step with room 1.
        """
        keep = _KEEP ** (step - self.step)
        return (keep * self.total + prior) / (keep * self.weight + 1.0)


@dataclass(slots=True)
class DrafterRecord:
    """Measurements of one drafter's durations and accepted tokens, over all requests."""

    # The proposer that the planner considered last, as long as it exists.
    proposer: ReferenceType[Proposer[Any]] | None = None
    # Seconds of each of the last proposals. Each is a list of one number, to which the drafter's
    # later calls in the same step add.
    durations: deque[list[float]] = field(default_factory=lambda: deque(maxlen=8))
    # Seconds of each of the last chains that needed no prefill, without the seconds per draft
    # token.
    starts: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    learned: float = 0.0  # seconds of proposals that were made only to measure acceptance rates
    contribution: Contribution = field(default_factory=Contribution)  # of its proposals
    num_calls: int = 0  # number of calls of ``propose``, each for all requests of a step
    num_proposals: int = 0  # number of proposals, one per request and call
    # Tokens that the proposals were expected to add to their steps, and tokens that they have added
    # in fact. The ratio of the two corrects later estimates.
    expected: float = _PRIOR_TOKENS
    added: float = _PRIOR_TOKENS

    @property
    def seconds(self) -> float:
        """Expected seconds of a proposal, by the last ones; 0 before ``_TRIALS`` are measured."""
        return _expected_seconds([duration[0] for duration in self.durations])

    @property
    def start(self) -> float:
        """Expected fixed seconds of a chain: without its prefill and its draft tokens."""
        return _expected_seconds(self.starts)


class FinishedStep(NamedTuple):
    """Durations and counts of a finished step, for :meth:`Ledger.record_step`."""

    seconds: float  # duration of the step in seconds, without the time of drafters
    drafting: float  # seconds in which drafters started requests, proposed and observed
    num_decoding: int  # number of requests that decoded, each with one row and its draft rows
    num_prompt_rows: int = 0  # number of prompt tokens that the step read
    num_draft_rows: int = 0  # number of verified draft tokens, of all requests
    # number of steps that accepted draft tokens made unnecessary, summed over the requests
    num_saved: int = 0
    has_drafters: bool = True  # whether a request of the step has a drafter that may propose


@dataclass
class Ledger:
    """Totals of the seconds that drafting has cost and saved in an engine; its drafters' records.

    A step begins with :meth:`begin_step`, and ends with :meth:`record_step`.
    """

    elapsed: float = 0.0  # seconds of all steps with a request that has a drafter
    longest: float = 0.0  # seconds of the longest forward pass so far that read no prompt
    # seconds of drafting and of draft rows; how proposals count is in the docstring of the module
    spent: float = 0.0
    saved: float = 0.0  # seconds of the plain steps that accepted draft tokens made unnecessary
    # Measurements of each drafter by its name, created at first use.
    drafters: defaultdict[str, DrafterRecord] = field(
        default_factory=lambda: defaultdict(DrafterRecord)
    )
    # Costs of this step; ``None``: they are not known, or they are ignored (``budget="all"``).
    costs: StepCosts | None = None
    num_drafting: int = 1  # number of requests that may draft in this step

    @property
    def allowance(self) -> float:
        """Seconds that drafting may still cost the engine.

        Over all steps, drafting costs at most the seconds that accepted draft tokens have saved,
        1 % of the elapsed seconds, and two forward passes. The value may be negative.
        """
        return _LOSS_SHARE * self.elapsed + _PASSES * self.longest + self.saved - self.spent

    @property
    def request_allowance(self) -> float:
        """Seconds that drafting for one request of this step may lose.

        An equal part, because all requests may draft at once.
        """
        return self.allowance / self.num_drafting

    def begin_step(self, costs: StepCosts | None, num_drafting: int) -> None:
        """Begin a step in which ``num_drafting`` requests may draft.

        ``costs`` are the costs of the step's forward pass; ``None``: they are not known.
        """
        self.costs = costs
        self.num_drafting = max(1, num_drafting)

    def record_step(self, step: FinishedStep, requests: Iterable[RequestLedger]) -> None:
        """Add the seconds that drafting cost and saved in a finished step to the totals.

        The seconds of draft rows and of savings are those of the cost model, because other
        processes may prolong a single pass. The seconds of proposals are recorded already, by
        :meth:`RequestLedger.charge`.

        Args:
            step: the step.
            requests: ledgers of its decoding requests.
        """
        # Drafting may lose a fraction of the time of steps with drafters only.
        if step.has_drafters:
            self.elapsed += step.seconds + step.drafting
        if self.costs is None or not step.num_decoding:
            return
        curve = self.costs.curve
        num_plain_rows = step.num_decoding + step.num_prompt_rows
        rows = (num_plain_rows + step.num_draft_rows, num_plain_rows, step.num_decoding)
        expected, without_drafts, decoding = curve.table(rows)
        if not step.num_prompt_rows:
            # Other processes can prolong a pass, so it counts as at most twice its estimate.
            self.longest = max(self.longest, min(step.seconds, 2.0 * expected))
        self.spent += expected - without_drafts
        self.saved += step.num_saved * decoding / step.num_decoding
        for request in requests:
            if not request.acceptance.private:
                request.regret.seconds += (step.seconds + step.drafting) / step.num_decoding

    def learning_time(self, record: DrafterRecord, seconds: float) -> float:
        """Return the ``elapsed`` from which a drafter may spend ``seconds`` more on learning.

        Learning (proposals made only to measure acceptance rates) may take 1 % of the elapsed time.
        The part that drafters have used which no longer exist is subtracted, and the existing
        drafters share the rest equally.
        """
        num_live = 1
        learned_before = 0.0
        for other in self.drafters.values():
            if other is record:
                continue
            # whether the other drafter may propose again: its proposer has not been deleted
            if other.proposer is not None and other.proposer() is not None:
                num_live += 1
            else:
                learned_before += other.learned
        return ((record.learned + seconds) * num_live + learned_before) / _LOSS_SHARE

    def allowed_time(self, seconds: float) -> float:
        """Return the value of ``elapsed`` at which the allowance is ``seconds`` larger than now."""
        return self.elapsed + max(0.0, seconds) / _LOSS_SHARE


class ProposalReport(NamedTuple):
    """One drafter's proposal in a step, for :mod:`pronk.lab.explain`.

    Attributes:
        drafter: name of the drafter.
        reason: why the drafter proposed (``DraftPlan.reason``).
        seconds: duration of the proposal, this request's part.
        tree: proposed tree.
        before: fastest step with the draft tokens proposed before; ``None`` if costs are ignored.
        after: fastest step with this proposal as well; ``None`` if costs are ignored.
        num_nested: number of reports just before this one that belong to drafters which this
            drafter has called, as ``auto`` inside ``merged`` does.
        nested_seconds: the part of ``seconds`` that these drafters took.
    """

    drafter: str
    reason: Reason
    seconds: float
    tree: TokenTree
    before: ExpectedStep | None = None
    after: ExpectedStep | None = None
    num_nested: int = 0
    nested_seconds: float = 0.0

    @property
    def own_seconds(self) -> float:
        """Seconds of this drafter itself, without those of the drafters that it has called."""
        return self.seconds - self.nested_seconds


@dataclass(slots=True)
class _Proposal:
    """A proposal of the current step, to which the seconds of its drafter's calls are added."""

    proposer: Proposer[Any]
    reason: Reason
    duration: list[float] | None  # list of its seconds so far; ``None`` in the drafter's first call
    most: float  # largest number of its seconds that count as spent


class RequestLedger:
    """Measurements of one request, and the proposals of its current step.

    Attributes:
        acceptance: acceptance rates of the request's draft tokens.
        regret: seconds that other choices of drafters would have saved, in hindsight.
        reports: a report on each proposal of this step.
        charged: seconds charged to drafters in this step since :meth:`charge_rest`.
        proposers: ``id()`` of each drafter that has proposed in this step.
        costs: costs of this step; ``None`` if they are ignored (``budget="all"``).
    """

    def __init__(
        self, ledger: Ledger | None = None, acceptance: RequestAcceptance | None = None
    ) -> None:
        self.ledger = ledger or Ledger()
        self.acceptance = acceptance or RequestAcceptance()
        self.regret = Regret()
        self.reports: list[ProposalReport] = []
        self.costs: StepCosts | None = None
        # by drafter name
        self._contributions: defaultdict[str, Contribution] = defaultdict(Contribution)
        # By name of a drafter: seconds that its draft tokens would have saved in the steps since
        # its last proposal.
        self._missed: dict[str, float] = {}
        self._step = 0
        self._allowance = 0.0
        self._proposals: list[_Proposal] = []
        self.proposers: set[int] = set()
        self.charged = 0.0
        # Value of ``Ledger.elapsed`` before which no drafter of the request can propose. 0: one may
        # propose in the next step. ``inf``: no drafter has been considered in this step.
        self._next_proposal = 0.0

    def begin(self) -> None:
        """Begin a step of the request: forget the proposals, reports and costs of the last one."""
        self._step += 1
        self.costs = None
        self.forget_proposals()

    def begin_proposals(self, *, everything: bool, has_guide: bool) -> bool:
        """Return whether the engine calls the request's drafter in this step; if so, set the costs.

        Args:
            everything: whether costs are ignored (``budget="all"``).
            has_guide: whether a guide (a grammar) may force text. Forced tokens cost nothing to
                draft, so the drafter is called even if other draft tokens are not expected to save
                time.
        """
        if everything:
            self.set_costs(None, self.ledger.request_allowance)
            return True
        # Without costs, a forward pass without draft tokens has to be measured first.
        ledger = self.ledger
        if ledger.costs is None or (self.is_quiet() and not has_guide):
            return False
        self.set_costs(ledger.costs, ledger.request_allowance)
        return True

    def set_costs(self, costs: StepCosts | None, allowance: float) -> None:
        """Set the costs of the step, in which drafting may lose ``allowance`` seconds."""
        self.costs = costs
        self._allowance = allowance
        self._next_proposal = inf

    def forget_proposals(self) -> None:
        """Forget the proposals of this step, and the seconds charged for them."""
        self.reports = []
        self._proposals = []
        self.proposers = set()
        self.charged = 0.0

    def is_quiet(self) -> bool:
        """Whether too little time has elapsed for any drafter of the request to propose again."""
        return self.ledger.elapsed < self._next_proposal < inf

    def plan(
        self, proposer: Proposer[Any], context: DraftContext[Any], union: TreeUnion
    ) -> DraftPlan:
        """Decide whether a drafter proposes for the request in this step, and at which costs.

        ``union`` has the draft tokens that other drafters have proposed in this step.
        """
        costs = self.costs
        max_tokens = min(context.max_depth, context.max_nodes)
        if max_tokens < 1:
            return DraftPlan(None)
        if costs is None:
            self._next_proposal = 0.0
            return EVERYTHING
        name = proposer.label
        ledger = self.ledger
        record = ledger.drafters[name]
        if record.proposer is None or record.proposer() is not proposer:
            record.proposer = ref(proposer)
        chain = proposer.chain_costs(context, costs)
        contribution = 0.0
        rate = 0.0
        missed = 0.0
        if chain is None:
            seconds = record.seconds
            prior = record.contribution.mean(DEFAULT_RATE, record.num_proposals)
            contribution = self._contributions[name].mean(prior, self._step)
            contribution *= record.added / record.expected
        else:
            if not isinstance(chain, ChainCosts) or min(chain) < 0.0:
                raise _wrong_chain_costs(proposer, chain)
            chain = ChainCosts(chain.token, chain.prefill, record.start, chain.max_tokens)
            rate = self.acceptance.rates(proposer.chain_label).mean(DEFAULT_RATE)
            missed = self._missed.get(name, 0.0)
            seconds = chain.prefill + chain.start + chain.token
        learning_time = ledger.learning_time(record, seconds)
        may_learn = learning_time <= ledger.elapsed
        estimate = DrafterEstimate(seconds, contribution, chain, rate, missed, may_learn)
        planned = plan(
            estimate,
            costs,
            self._allowance,
            before=union.best,
            room=union.room,
            max_tokens=max_tokens,
            num_left=context.max_depth,
        )
        if planned.reason is not None:
            self._missed.pop(name, None)
            self._next_proposal = 0.0
        elif chain is not None and planned.saving > 0.0:
            self._missed[name] = missed + planned.saving
            self._next_proposal = 0.0  # the savings missed may justify the prefill in the next step
        else:
            allowed_time = ledger.allowed_time(seconds - self._allowance)
            next_time = allowed_time if planned.saving > 0.0 else max(learning_time, allowed_time)
            self._next_proposal = min(self._next_proposal, next_time)
        return planned

    def add(
        self,
        proposer: Proposer[Any],
        planned: DraftPlan,
        seconds: float,
        tree: TokenTree,
        union: TreeUnion,
        lead: Sequence[int],
        *,
        num_reports: int | None = None,
    ) -> None:
        """Add a proposal to a union, before its duration is charged.

        Args:
            proposer: the drafter.
            planned: its plan.
            seconds: this request's part of the duration.
            tree: the proposed tree.
            union: draft tokens of other drafters, to which the tree is added.
            lead: draft tokens of another drafter between the text and the tree's root, the root
                included.
            num_reports: length of ``reports`` before the drafter was called. Later ones are those
                of the drafters that it combines. ``None``: it combines none.
        """
        assert planned.reason is not None
        name = proposer.label
        record = self.ledger.drafters[name]
        has_draft_tokens = len(tree.tokens) > 1
        if has_draft_tokens and (tree.gain is None or tree.origin is None):
            tree = self.with_gains(name, tree)
        expected = record.seconds
        if planned.chain is not None:
            drafting = max(tree.depths) * planned.chain.token
            # A plug-in drafter may report wrong costs, so its measured seconds count, too.
            expected = max(expected, planned.chain.prefill + planned.chain.start + drafting)
            is_first = record.num_calls <= 1  # the first call includes one-time preparation
            if has_draft_tokens and not planned.chain.prefill and not is_first:
                record.starts.append(max(0.0, seconds - drafting))
        duration = [0.0] if record.num_calls > 1 else None
        self._proposals.append(_Proposal(proposer, planned.reason, duration, 2.0 * expected))
        self.proposers.add(id(proposer))
        record.num_proposals += 1
        if duration is not None:
            record.durations.append(duration)
        before = union.best
        room = union.room
        if has_draft_tokens:
            union.add(tree)
            self.acceptance.propose(name, lead, tree)
        after = union.best
        nested = [] if num_reports is None else self.reports[num_reports:]
        nested_seconds = 0.0
        if nested:
            nested_seconds = min(seconds, sum([each.own_seconds for each in nested]))
        has_costs = self.costs is not None
        self.reports.append(
            ProposalReport(
                name,
                planned.reason,
                seconds,
                tree,
                before if has_costs else None,
                after if has_costs else None,
                len(nested),
                nested_seconds,
            )
        )
        if not has_costs:
            return
        added = after.tokens - before.tokens
        added -= (after.seconds - before.seconds) / (before.seconds / before.tokens)
        self._contributions[name].learn(added, room, self._step)
        if not self.acceptance.private:
            record.contribution.learn(added, room, record.num_proposals)

    def with_gains(self, name: str, tree: TokenTree) -> TokenTree:
        """Return a tree whose draft tokens have gains and origins; given ones stay.

        Gains are estimated from the drafter's acceptance rates by depth. The origin of each node is
        ``name``, the label of the drafter.
        """
        if tree.gain is not None and tree.origin is not None:
            return tree
        has_draft_tokens = len(tree.tokens) > 1
        if has_draft_tokens:
            tree = tree.with_origin((name, 0))
        if tree.gain is not None:
            return tree
        if not has_draft_tokens:
            return replace(tree, gain=(1.0,))
        rates = self.acceptance.rates(name, {0: DEFAULT_RATE})
        gain = [1.0]
        for node in range(1, len(tree)):
            parent_gain = gain[tree.parents[node]]
            rate = rates.rate(0, tree.depths[node])
            gain.append(parent_gain * rate * tree.acceptable[node])
        return replace(tree, gain=tuple(gain))

    @property
    def needs_logits(self) -> bool:
        """Whether a drafter that has proposed in this step needs the target's logits."""
        for proposal in self._proposals:  # noqa: SIM110 - a generator takes longer
            if proposal.proposer.capabilities.logits:
                return True
        return False

    def charge(self, proposer: Proposer[Any], seconds: float, charged_before: float) -> None:
        """Add to the duration of a drafter's proposal in this step.

        Args:
            proposer: the drafter.
            seconds: duration of a call, those of its parts included.
            charged_before: ``charged`` before the call. The seconds charged since then belong to
                the drafters that this one combines, and are not counted twice.
        """
        nested = min(seconds, self.charged - charged_before)
        self.charged += seconds - nested
        for proposal in self._proposals:
            if proposal.proposer is proposer:
                self._charge(proposal, seconds, nested)

    def charge_rest(self, seconds: float) -> None:
        """Divide the part of ``seconds`` that is not charged yet among the proposals of the step.

        ``seconds`` is the duration of drafting for this request. The part that no drafter was
        charged for is the time of the planner's decisions.
        """
        rest = seconds - self.charged
        self.charged = 0.0
        for proposal in self._proposals:
            self._charge(proposal, rest / len(self._proposals))

    def _charge(self, proposal: _Proposal, seconds: float, nested: float = 0.0) -> None:
        # A drafter's first call includes one-time preparation, so its seconds do not count.
        if proposal.duration is None:
            return
        before = proposal.duration[0]
        proposal.duration[0] += seconds
        counted = min(proposal.duration[0], proposal.most) - min(before, proposal.most)
        counted = max(0.0, counted - nested) if nested else counted
        self._allowance -= counted
        self.ledger.spent += counted
        if proposal.reason == "learns":
            self.ledger.drafters[proposal.proposer.label].learned += counted

    def end(self, tokens: Sequence[int], accepted: int, draft_rows: int) -> None:
        """Record which proposals of this step were right; without known costs do nothing.

        Updates the regret, and the ratio by which the expected tokens of each drafter are
        corrected.

        Args:
            tokens: tokens that the step added to the text.
            accepted: how many of them are draft tokens.
            draft_rows: number of verified draft tokens.
        """
        costs = self.costs
        if costs is None or self.acceptance.private or not self.reports:
            return
        drafting = 0.0
        longest = draft_rows
        for report in self.reports:
            drafting += report.seconds - report.nested_seconds
            longest = max(longest, len(report.tree.tokens) - 1)
        pass_seconds = costs.by_count(longest)
        plain = pass_seconds[0]
        rows = pass_seconds[draft_rows] - plain
        saved = accepted * plain - rows - drafting
        matched = 0  # largest number of accepted draft tokens in one of the proposals so far
        matched_before = list[int]()  # value of ``matched`` before each report
        best = 0.0
        alone: dict[str, float] = {}
        for number, report in enumerate(self.reports):
            if report.num_nested:  # the drafter's tree consists of its parts' draft tokens
                matched = matched_before[number - report.num_nested]
            matched_before.append(matched)
            net = -report.seconds
            num_draft_tokens = len(report.tree.tokens) - 1
            if num_draft_tokens:
                length = report.tree.num_matched(tokens)
                record = self.ledger.drafters[report.drafter]
                assert report.before is not None
                assert report.after is not None
                # Can be negative: a proposal may make a step with fewer tokens the fastest.
                record.expected += max(0.0, report.after.tokens - report.before.tokens)
                record.added += max(0, min(length, accepted) - matched)
                matched = max(matched, min(length, accepted))
                saves = length * plain
                best = max(best, net + saves - (pass_seconds[length] - plain))
                net += saves - (pass_seconds[num_draft_tokens] - plain)
            alone[report.drafter] = alone.get(report.drafter, 0.0) + net
        self.regret.add_step(saved, alone, best)


def _expected_seconds(measured: Collection[float]) -> float:
    return usual(measured) if len(measured) >= _TRIALS else 0.0


def _wrong_chain_costs(proposer: Proposer[Any], chain: object) -> OptionError:
    msg = (
        f"drafter {proposer.name}: expected chain_costs() to return ChainCosts of at least 0 "
        f"seconds, or None, found {chain!r}"
    )
    return OptionError(msg)
