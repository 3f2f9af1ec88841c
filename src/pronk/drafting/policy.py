"""How much to draft, and with which drafters: the choice that maximizes expected tokens per second.

The value of a step (:mod:`pronk.drafting.step_value`) is its expected number of tokens divided by
its seconds. Plain decoding is the choice without draft tokens. A drafter (a *source*) is asked
where its expected contribution raises the value; the draft tokens that raise it most are verified.
Where nothing raises the value, sources are asked now and then all the same, to learn how good they
are on the present text: each for at most 1 % of the time divided by the number of sources, and not
while time is saved for a proposal that is expected to pay.

A drafter with a model must read the text before it can draft. It reads it when its draft tokens
would have saved as many seconds, in the steps since its last proposal, as reading takes. By this
ski-rental rule, the seconds missed and those of reading are at most twice those of the best choice
in hindsight.

**Bound of the loss.** Before anything is spent, its expected price is compared with what may still
be lost, so that
over all steps of an engine ::

    seconds of drafting and of draft rows  ≤  seconds that accepted draft tokens saved  +  1 % of the elapsed seconds
                                              +  two forward passes

A forward pass is the longest one so far that reads no prompt. The seconds of draft rows and the
savings are those of the cost model. The bound is exceeded at most by what one step's proposals take
beyond their expected price, and by one step's rows that may not be dropped: trees that the
rejection rules verify whole, and the window of lookahead. Drafting is the time in proposals and in
their observation, without the first proposal of each source, which prepares it. A proposal counts
as at most twice its expected price, because other processes may interrupt it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pronk.drafting.acceptance_stats import RequestAcceptance
from pronk.drafting.account import Mean, Policy, Regret
from pronk.drafting.step_value import ChainPrice, Offer
from pronk.drafting.trie import Trie
from pronk.models.cost_model import CostCurve
from pronk.sampling.tree import TokenTree

if TYPE_CHECKING:
    from pronk.drafting.proposer import DraftContext, Proposer

# acceptance rate of draft tokens before any count, and draft tokens that a new source adds to a
# step
_RATE = 0.7

Reason = Literal["pays", "explores", "all"]


class SourceReport(NamedTuple):
    """One drafter's proposal in a step, for :mod:`pronk.lab.explain`."""

    source: str  # name of the drafter
    # it is expected to pay; it is asked to learn its acceptance; or all sources are asked
    reason: Reason
    seconds: float  # duration of the proposal, this request's part
    tree: TokenTree  # proposed tree
    # best choice without this proposal; ``None`` if costs are not known
    before: Offer | None = None
    after: Offer | None = None  # best choice with this proposal


class _Asked(NamedTuple):
    """A source that has proposed in this step."""

    proposer: Proposer[Any]
    reason: Reason
    price: list[float] | None  # seconds of its proposal; ``None`` for its first one of all
    most: float  # seconds that count at most


class RequestPolicy:
    """Choices for one request: its acceptance rates, its sources, and the offers of the current step."""

    def __init__(
        self, policy: Policy | None = None, acceptance: RequestAcceptance | None = None
    ) -> None:
        self.policy = policy or Policy()
        self.acceptance = acceptance or RequestAcceptance()
        # Costs of this step's forward pass; ``None`` if all draft tokens are wanted whatever they
        # cost.
        self.curve: CostCurve | None = None
        # best choice among this step's offers so far; ``None`` without ``curve``
        self.offer: Offer | None = None
        self.reports: list[SourceReport] = []  # one per proposal in this step
        self.regret = Regret()  # what other choices would have saved
        self._contributions: defaultdict[str, Mean] = defaultdict(Mean)  # by the name of the source
        self.num_requests = 1
        self._step = 0
        self._left = 0.0
        self._exploring = False
        self._tree: TokenTree | None = None  # the only offer so far
        self._trie: Trie | None = None  # all offers, if there are several
        # ``Policy.elapsed`` before which no source can be asked again; 0 if one was asked
        self._wake = 0.0
        self._room = 1.0  # probability that no draft token offered for the next position is right
        self._asked: dict[int, _Asked] = {}  # by the address of the proposer
        self._chain_prices: dict[int, ChainPrice | None] = {}  # by the address of the proposer
        # Seconds that the draft tokens of a source, by name, would have saved since it was last
        # asked.
        self._missed: dict[str, float] = {}
        self._charged = 0.0  # seconds charged to sources since :meth:`charge_rest`
        # offers with nodes that are computed but never accepted
        self._unacceptable: list[TokenTree] = []

    def begin(self) -> None:
        """Begin a step."""
        self._step += 1
        self.curve = self.offer = None
        self.reports = []
        self._asked = {}
        self._charged = 0.0

    def set_prices(self, curve: CostCurve | None, requests: int, allowance: float) -> None:
        """Set the costs of a step of ``requests`` requests, in which this one may lose ``allowance`` seconds."""
        self.curve = curve
        self.num_requests = requests
        self._left = allowance
        self._tree = None
        self._trie = None
        self._unacceptable = []
        self._room = 1.0
        self._wake = inf
        self._chain_prices = {}
        self.offer = None if curve is None else Offer(1.0, curve.at(requests) / requests)

    def is_quiet(self) -> bool:
        """Whether the last step could ask no source, and none can be asked yet.

        False if it did not try to.
        """
        return self.policy.elapsed < self._wake < inf

    def affords(self, seconds: float) -> bool:
        """Return whether drafting of this request may take ``seconds`` more in this step."""
        return seconds <= self._left

    @property
    def min_gain(self) -> float:
        """Smallest gain that pays for a draft row where no free rows are left."""
        if self.curve is None or self.offer is None:
            return 0.0
        return self.offer.tokens * self.curve.row_seconds / self.offer.seconds

    def may_pay(self, gain: float, count: int) -> bool:
        """Return whether a draft token with this gain may pay, after ``count`` others of larger gain."""
        free_rows = 0 if self.curve is None else self.curve.free_rows // self.num_requests
        return gain >= self.min_gain or count + 1 < free_rows

    def reason(self, proposer: Proposer[Any], context: DraftContext[Any]) -> Reason | None:
        """Return why to ask a source for draft tokens in this step, or ``None`` not to ask it."""
        if min(context.max_depth, context.max_nodes) < 1:
            return None
        if self.curve is None or self.offer is None:
            self._wake = 0.0
            return "all"
        source = self.policy.sources[proposer.source]
        offer = self.offer
        chain = self.chain_price(proposer, context)
        if chain is None:
            price = source.price
            prior = source.contribution.value(_RATE, source.asked)
            contribution = self._room * self._contributions[proposer.source].value(
                prior, self._step
            )
            contribution *= source.added / source.expected
            pays = (offer.tokens + contribution) * offer.seconds > offer.tokens * (
                offer.seconds + price
            )
        else:
            best = chain.best(
                self.num_requests,
                self.chain_rate(proposer),
                min(context.max_depth, context.max_nodes),
            )
            saved = best.tokens * offer.seconds / offer.tokens - best.seconds
            missed = self._missed.get(proposer.source, 0.0) + max(0.0, saved)
            self._missed[proposer.source] = missed
            # seconds that can be saved in all tokens that are left
            most = saved / best.tokens * context.max_depth
            pays = saved > 0.0 and chain.reading <= min(missed, most)
            price = chain.reading + chain.start + chain.token / self.num_requests
            if saved > 0.0:
                self._wake = 0.0  # the next step may have missed enough
        exploration = 0.0 if pays else self.policy.next_exploration(source, price)
        if price > self._left or exploration > self.policy.elapsed:
            affordable = self.policy.next_loss(max(0.0, price - self._left), saves=pays)
            self._wake = min(self._wake, max(exploration, affordable))
            return None
        self._exploring = not pays
        self._wake = 0.0
        self._missed.pop(proposer.source, None)
        return "explores" if self._exploring else "pays"

    def extends(
        self, proposer: Proposer[Any], context: DraftContext[Any], gains: Sequence[float]
    ) -> bool:
        """Return whether a chain of draft tokens with these gains is worth another token.

        It is if further tokens, which are accepted with the source's mean rate, raise the value of
        the step.
        """
        chain = None if self.curve is None else self.chain_price(proposer, context)
        if chain is None or (self._exploring and not gains):
            return True
        price = chain.reading + chain.start + (len(gains) + 1) * chain.token / self.num_requests
        if price > self._left:
            return False
        now = Offer(1.0 + sum(gains), chain.seconds(self.num_requests, len(gains), len(gains)))
        most = min(context.max_depth, context.max_nodes)
        best = chain.best(self.num_requests, self.chain_rate(proposer), most, gains)
        return best.tokens * now.seconds > now.tokens * best.seconds

    def chain_price(self, proposer: Proposer[Any], context: DraftContext[Any]) -> ChainPrice | None:
        """Return the price of a source's chains, as it was when the step first asked for it."""
        key = id(proposer)
        if key not in self._chain_prices:
            price = proposer.chain_price(context)
            source = self.policy.sources.get(proposer.source)
            # a wrapper's inner drafter is no source of the policy
            start = 0.0 if source is None else source.start
            self._chain_prices[key] = None if price is None else price._replace(start=start)
        return self._chain_prices[key]

    def charge(self, proposer: Proposer[Any], seconds: float) -> None:
        """Add to the duration of a source's proposal of this step.

        The first proposal of all includes one-time preparation, and is not charged.
        """
        self._charged += seconds
        asked = self._asked[id(proposer)]
        if asked.price is None:
            return
        counted = min(asked.price[0] + seconds, asked.most) - min(asked.price[0], asked.most)
        asked.price[0] += seconds
        self._left -= counted
        self.policy.spent += counted
        if asked.reason == "explores":
            self.policy.sources[proposer.source].explored += counted

    def charge_rest(self, seconds: float) -> None:
        """Divide the time of decisions among the asked sources: what of ``seconds`` is not charged yet."""
        rest = seconds - self._charged
        for asked in self._asked.values():
            self.charge(asked.proposer, rest / len(self._asked))
        self._charged = 0.0

    def close(self, tokens: Sequence[int], accepted: int, draft_rows: int) -> None:
        """Record a step: of ``draft_rows`` draft tokens, ``accepted`` are among the committed ``tokens``."""
        if self.curve is None or not self.reports:
            return
        curve = self.curve
        count = self.num_requests
        plain = curve.at(count) / count
        before = 0
        best = 0.0

        # extra seconds per request if every request verifies ``draft_rows``
        def rows(draft_rows: int) -> float:
            return curve.at(count * (1 + draft_rows)) / count - plain if draft_rows else 0.0

        saved = accepted * plain - rows(draft_rows)
        alone = dict[str, float]()
        for report in self.reports:
            if report.before is None or report.after is None:
                return
            saved -= report.seconds
            net = -report.seconds
            if report.tree.num_draft_tokens:
                length = report.tree.num_matched(tokens)
                source = self.policy.sources[report.source]
                source.expected += report.after.tokens - report.before.tokens
                source.added += max(0, min(length, accepted) - before)
                before = max(before, min(length, accepted))
                best = max(best, net + length * plain - rows(length))
                net += length * plain - rows(report.tree.num_draft_tokens)
            alone[report.source] = alone.get(report.source, 0.0) + net
        self.regret.add_step(saved, alone, best)

    def was_asked(self, proposer: Proposer[Any]) -> bool:
        """Return whether a source has proposed in this step."""
        return id(proposer) in self._asked

    @property
    def needs_logits(self) -> bool:
        """Whether a source that was asked in this step needs the target's logits."""
        return any(asked.proposer.capabilities.logits for asked in self._asked.values())

    def take(
        self,
        proposer: Proposer[Any],
        reason: Reason,
        seconds: float,
        tree: TokenTree,
        lead: Sequence[int],
    ) -> None:
        """Record a source's proposal, before its duration is charged.

        ``reason`` is why the source was asked, and ``seconds`` this request's part of the duration.
        ``lead`` are draft tokens of another source between the text and the tree's root, the root
        included.
        """
        before = self.offer
        source = self.policy.sources[proposer.source]
        tree = tree if tree.gain is not None else self._with_gains(proposer, tree)
        expected = source.price
        chain = self._chain_prices.get(id(proposer))
        if chain is not None:
            # siblings need no further pass
            drafting = max(tree.depths) * chain.token / self.num_requests
            expected = chain.reading + chain.start + drafting
            if reason == "pays" and not chain.reading and tree.num_draft_tokens:
                source.starts.append(max(0.0, seconds - drafting))
        price = [0.0] if source.calls > 1 else None
        self._asked[id(proposer)] = _Asked(
            proposer, reason, price, 2.0 * expected if expected > 0.0 else inf
        )
        source.asked += 1
        if price is not None:
            source.prices.append(price)
        if tree.num_draft_tokens and self._tree is None and self._trie is None:
            self._tree = tree
        elif tree.num_draft_tokens:
            self._union(tree.tokens[0]).merge(tree, (proposer.name, 0))
            if tree.verify is not None:
                self._unacceptable.append(tree)
        self.acceptance.propose(proposer.source, lead, tree)
        if before is not None and self.curve is not None:
            only = () if self._tree is None else self._tree.gain or ()
            gains = only if self._trie is None else self._trie.gains
            after = self.offer = (
                Offer.of(gains[1:], self.curve, self.num_requests) if len(gains) > 1 else before
            )
            added = (
                after.tokens
                - before.tokens
                - (after.seconds - before.seconds) * before.tokens / before.seconds
            )
            self._contributions[proposer.source].learn(added, self._room, self._step)
            if not self.acceptance.private:
                source.contribution.learn(added, self._room, source.asked)
            self._room = max(0.0, self._probability_wrong())
        self.reports.append(
            SourceReport(proposer.source, reason, seconds, tree, before, self.offer)
        )

    def tree(self, root: int, max_nodes: int) -> TokenTree:
        """Return the union of the offers, cut to the ``max_nodes`` draft tokens of largest gain.

        Nodes that are computed but never accepted are kept.
        """
        if self._tree is not None and self._tree.num_draft_tokens <= max_nodes:
            return self._tree  # the usual case; building a tree takes longer than all decisions
        if self._tree is None and self._trie is None:
            return TokenTree.chain([root])
        unacceptable = [tree for tree in self._unacceptable if tree.num_draft_tokens <= max_nodes]
        num_reserved = sum(len(tree) - sum(tree.acceptable) for tree in unacceptable)
        tree = self._union(root).tree(max_nodes - num_reserved)
        for each in unacceptable:
            tree = tree.with_unacceptable(each)
        return tree

    def _with_gains(self, proposer: Proposer[Any], tree: TokenTree) -> TokenTree:
        """Return a tree with the gains that follow from the acceptance of the source's draft tokens by depth."""
        if not tree.num_draft_tokens:
            return replace(tree, gain=(1.0,))
        rates = self.acceptance.source(proposer.source, {0: _RATE})
        gain = [1.0]
        for node in range(1, len(tree)):
            gain.append(
                gain[tree.parents[node]] * rates.rate(0, tree.depths[node]) * tree.acceptable[node]
            )
        return replace(
            tree, gain=tuple(gain), origin=tree.origin or ((proposer.source, 0),) * len(tree)
        )

    def _probability_wrong(self) -> float:
        if self._trie is not None:
            return self._trie.probability_wrong(0)
        tree = self._tree
        return (
            1.0
            if tree is None or tree.gain is None
            else 1.0 - sum(tree.gain[n] for n in tree.children(0).values())
        )

    def _union(self, root: int) -> Trie:
        if self._trie is None:
            self._trie = Trie(root)
        if self._tree is not None:
            tree = self._tree
            self._tree = None
            self._trie.merge(tree)
            if tree.verify is not None:
                self._unacceptable.append(tree)
        return self._trie

    def chain_rate(self, proposer: Proposer[Any]) -> float:
        """Return the mean acceptance rate of a source's draft tokens."""
        return self.acceptance.source(proposer.chain_source).mean(_RATE)
