"""Acceptance statistics of draft tokens, learned from every proposal once the text has passed it.

Under the coupled rule and in greedy decoding the text does not depend on the draft tokens. So a
proposal is compared with the text whether the target verified it, a part of it, or nothing (full
information; "Not-a-Bandit", arXiv 2510.20064). Under the rejection rules the token after a text has
the target's distribution p, so a draft token x that was proposed without a distribution equals it
with probability p(x): its expected acceptance. A draft token that was drawn from a distribution is
verified in any case, and then equals the text if and only if it was accepted.

Draft tokens of one drafter have *kinds*: numbers of its own, such as the length of the match, the
rank among the likeliest tokens, or the confidence of a draft model. A draft token is *reached* if
its parent equals the text, and *accepted* if it equals the text, too. The acceptance rate of a kind
is the share of accepted ones among those that are reached. Each level of counts is the prior of the
next::

    prior of the drafter
      <  all requests, by depth and temperature: AcceptanceStats
        <  this request, weighted towards its last steps: DrafterRates

A level with ``reached`` and ``accepted`` draft tokens, whose prior has a weight of ``w`` draft
tokens, has the rate ``(accepted + w * prior) / (reached + w)``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from pronk.sampling.tree import TokenTree

# Largest number of draft tokens of one drafter in one request that are counted for all requests.
# With this limit a single long text does not determine the rates of other texts.
_SHARE = 256
# number of counted draft tokens of a kind at which its counts are halved, so that old ones fade
MAX_COUNT = 4096.0
_SHARED_PRIOR_WEIGHT = (
    16.0  # weight of the drafter's prior in the counts of all requests, in tokens
)
# in a request's counts, weight of a step relative to the next one: one half after 34 steps
_KEEP = 0.98
_MAX_DEPTH = 4  # draft tokens at larger depths are counted together with those at this depth
# upper bounds of the ranges of temperatures that are counted separately
_TEMPERATURES = (0.0, 0.5, 1.0)

_ALL = -1  # in place of a kind: counts over all kinds of a drafter's draft tokens

# Largest number of draft tokens of a kind that counts on other texts stand for.
_MAX_ASSUMED = 256.0

# Key of a pair of counts: label of the drafter, kind of draft token, depth, and index of the
# temperature class.
_Key = tuple[str, int, int, int]


class KindKey(NamedTuple):
    """Key of one drafter's counts.

    Attributes:
        kind: kind of draft token.
        depth: depth, 1..4; 4 stands for all larger depths, too.
        temperature_class: index of the range of temperatures.
    """

    kind: int
    depth: int
    temperature_class: int


# Numbers of reached and of accepted draft tokens of one drafter.
Counts = Mapping[KindKey, tuple[float, float]]


class AcceptanceStats:
    """Acceptance counts over all requests, by drafter, kind of draft token, depth and temperature.

    The counts contain no token ids, so they reveal no text.
    """

    def __init__(self) -> None:
        # for each key, the numbers of reached and of accepted draft tokens
        self.counts: dict[_Key, list[float]] = {}
        self._assumed: set[str] = set()  # labels of the drafters whose known counts were added

    def assume(self, known: Mapping[str, Counts]) -> None:
        """Begin with counts on other texts, where nothing has been counted yet.

        ``known`` has the counts of each drafter by its label. They stand for at most 256 draft
        tokens of a kind, so that the counts of this engine soon outweigh them. Later calls for a
        drafter change nothing.
        """
        for label, counts in known.items():
            if label in self._assumed:
                continue
            self._assumed.add(label)
            for key, (reached, accepted) in counts.items():
                scale = min(1.0, _MAX_ASSUMED / max(reached, 1.0))
                self.counts.setdefault((label, *key), [scale * reached, scale * accepted])

    def take(self, label: str) -> Counts:
        """Remove and return the counts of a drafter."""
        keys = [key for key in self.counts if key[0] == label]
        found = dict[KindKey, tuple[float, float]]()
        for key in keys:
            reached, accepted = self.counts.pop(key)
            found[KindKey(*key[1:])] = (reached, accepted)
        return found

    def rate(self, label: str, kind: int, depth: int, temperature: float, prior: float) -> float:
        """Return the acceptance rate of a drafter's draft tokens of a kind at a depth.

        Args:
            label: label of the drafter, the first part of ``TokenTree.origin``.
            kind: kind of the draft token, a number that the drafter chooses.
            depth: depth of the draft token in its tree, from 1.
            temperature: temperature of the request. Temperatures are counted by ranges.
            prior: rate assumed before any count.
        """
        key = _key(label, kind, depth, temperature)
        reached, accepted = self.counts.get(key, (0.0, 0.0))
        return (accepted + prior * _SHARED_PRIOR_WEIGHT) / (reached + _SHARED_PRIOR_WEIGHT)

    def learn(
        self, label: str, kind: int, depth: int, temperature: float, *, accepted: bool
    ) -> None:
        """Count a draft token that verification has reached, and whether it was accepted.

        Arguments as in :meth:`rate`.
        """
        key = _key(label, kind, depth, temperature)
        count = self.counts.setdefault(key, [0.0, 0.0])
        count[0] += 1.0
        count[1] += accepted
        if count[0] > MAX_COUNT:
            count[:] = [0.5 * number for number in count]


def _key(label: str, kind: int, depth: int, temperature: float) -> _Key:
    temperature_class = bisect_left(_TEMPERATURES, temperature)
    return label, kind, min(depth, _MAX_DEPTH), temperature_class


@dataclass
class DrafterRates:
    """Acceptance rates of one drafter's draft tokens for one request.

    Attributes:
        PRIOR_WEIGHT: weight of the rate over all requests in this request's counts, in tokens.
        label: label of the drafter, the first part of ``TokenTree.origin``.
        priors: for each kind of draft token, the rate assumed before any count. ``None``: a kind is
            the confidence of a draft token in thousandths, 1..999, and this confidence is the rate
            assumed; the counts are kept by tenths of confidence.
        shared: counts of all requests, the prior of this request's rates; ``None`` if requests do
            not share their counts.
        temperature: temperature of the request, by which shared counts are kept.
        reached: number of reached draft tokens of each kind; earlier steps weigh less.
        accepted: number of accepted draft tokens of each kind, likewise.
    """

    PRIOR_WEIGHT: ClassVar = 4.0

    label: str
    priors: Mapping[int, float] | None
    shared: AcceptanceStats | None = None
    temperature: float = 0.0
    reached: dict[int, float] = field(default_factory=dict)
    accepted: dict[int, float] = field(default_factory=dict)
    _num_shareable: int = _SHARE  # number of draft tokens that may still count for all requests
    # rates by the counts of all requests, by kind and depth, as they were at the first use
    _shared_rates: dict[tuple[int, int], float] = field(default_factory=dict)

    @staticmethod
    def confidence_kind(confidence: float) -> int:
        """Return the kind of a draft token with this confidence: thousandths, 1..999."""
        return min(max(round(1000 * confidence), 1), 999)

    def rate(self, kind: int, depth: int) -> float:
        """Return the acceptance rate of a kind at a depth (from 1), above 0 and below 1."""
        if self.priors is not None:
            return self._rate(kind, depth, self.priors[kind])
        # The counts of a tenth say by how much the confidence of its draft tokens is wrong.
        tenth = kind // 100
        middle = (tenth + 0.5) / 10
        error = self._rate(tenth, depth, middle) - middle
        return min(max(kind / 1000 + error, 0.001), 0.999)

    def mean(self, prior: float) -> float:
        """Return the acceptance rate over all kinds and depths of this drafter's draft tokens.

        ``prior`` is the rate assumed before any count.
        """
        return self._rate(_ALL, 1, prior)

    def prior(self, kind: int, depth: int) -> float:
        """Return the acceptance rate of a kind at a depth, by the counts of all requests.

        It is the prior of this request's own rate. It is read once, at the first use, and then
        fixed for the request.
        """
        assert self.priors is not None
        return self._shared_rate(kind, depth, self.priors[kind])

    def learn(self, kind: int, depth: int, *, accepted: bool, share: bool) -> None:
        """Count a draft token that verification has reached, and whether it was accepted.

        Args:
            kind: kind of the draft token.
            depth: depth of the draft token in its tree, from 1.
            accepted: whether it was accepted.
            share: whether it also counts for all requests (``shared``).
        """
        counted_kind = kind if self.priors is not None else kind // 100
        for each in (counted_kind, _ALL):
            self.reached[each] = self.reached.get(each, 0.0) + 1.0
            self.accepted[each] = self.accepted.get(each, 0.0) + accepted
        if share and self.shared is not None and self._num_shareable > 0:
            self._num_shareable -= 1
            self.shared.learn(self.label, counted_kind, depth, self.temperature, accepted=accepted)
            self.shared.learn(self.label, _ALL, 1, self.temperature, accepted=accepted)

    def fade(self) -> None:
        """Lower the weight of the counts of earlier steps; called once per step."""
        for counts in (self.reached, self.accepted):
            for kind in counts:
                counts[kind] *= _KEEP

    def _rate(self, kind: int, depth: int, prior: float) -> float:
        """Return the acceptance rate of a kind under which draft tokens are counted."""
        shared_rate = self._shared_rates.get((kind, min(depth, _MAX_DEPTH)))
        if shared_rate is None:
            shared_rate = self._shared_rate(kind, depth, prior)
        accepted = self.accepted.get(kind, 0.0) + shared_rate * self.PRIOR_WEIGHT
        reached = self.reached.get(kind, 0.0) + self.PRIOR_WEIGHT
        return accepted / reached

    def _shared_rate(self, kind: int, depth: int, prior: float) -> float:
        """Return the rate of a kind by the counts of all requests, as it was at the first use."""
        if self.shared is None:
            return prior
        key = kind, min(depth, _MAX_DEPTH)
        rate = self._shared_rates.get(key)
        if rate is None:
            rate = self.shared.rate(self.label, kind, depth, self.temperature, prior)
            self._shared_rates[key] = rate
        return rate


@dataclass
class _Proposal:
    """A proposed tree, some of whose draft tokens may still equal the text to come."""

    # Draft tokens of another drafter between the text and the tree's root, in reverse order. The
    # tree counts only if the text continues with them.
    lead: list[int]
    tree: TokenTree
    node: int = 0  # last node whose token equals the text so far


class RequestAcceptance:
    """Acceptance rates of one request by drafter, and its proposals that are still to be counted.

    A proposal is followed until the text has diverged from it or has reached its end.
    """

    def __init__(
        self,
        shared: AcceptanceStats | None = None,
        temperature: float = 0.0,
        *,
        private: bool = False,
    ) -> None:
        """Create the rates; ``private`` counts nothing for other requests.

        A request under the rejection rules is private: its text depends on random numbers that
        other requests may have, too, and draft tokens must not depend on those.
        """
        self._shared = shared
        self._temperature = temperature
        self.private = private
        self._drafters: dict[str, DrafterRates] = {}
        self._proposals: dict[str, _Proposal] = {}
        # rates of the drafters that were counted in the step before
        self._counted: dict[str, DrafterRates] = {}

    def rates(self, name: str, priors: Mapping[int, float] | None = None) -> DrafterRates:
        """Return the acceptance rates of a drafter in this request, created at first use.

        ``priors`` are the rates assumed before any count (:class:`DrafterRates`).
        """
        found = self._drafters.get(name)
        if found is None:
            found = self._drafters[name] = DrafterRates(
                name, priors, self._shared, self._temperature
            )
        return found

    def propose(self, slot: str, lead: Sequence[int], tree: TokenTree) -> None:
        """Remember a proposal, whose draft tokens are counted as the text grows.

        ``slot`` is a name that holds one proposal, usually that of the drafter. While the old
        proposal of a slot may still be right, a new one is ignored. So each drafter is measured as
        if it drafted alone: it proposes again where its last proposal ended. ``lead`` are draft
        tokens of another drafter between the text and the tree's root.
        """
        if len(tree.tokens) > 1 and tree.origin is not None and slot not in self._proposals:
            self._proposals[slot] = _Proposal([*lead[::-1]], tree)

    def advance(self, tokens: Sequence[int]) -> None:
        """Compare the remembered proposals with new tokens of the text, and count the result."""
        for rates in self._counted.values():
            rates.fade()
        self._counted.clear()
        for slot, proposal in [*self._proposals.items()]:
            if self._passes(proposal, tokens):
                del self._proposals[slot]

    def _passes(self, proposal: _Proposal, tokens: Sequence[int]) -> bool:
        """Follow a proposal along new tokens of the text; return whether it is finished.

        It is finished if the text has diverged from it or has reached a leaf of the tree.
        """
        tree = proposal.tree
        origin = tree.origin
        assert origin is not None
        for token in tokens:
            if proposal.lead:
                if proposal.lead.pop() != token:
                    return True
                continue
            children = tree.children(proposal.node)
            for child_token, child in children.items():
                label, kind = origin[child]
                rates = self._drafters.get(label)
                if rates is None:
                    continue
                self._counted[label] = rates
                is_accepted = child_token == token
                depth = tree.depths[child]
                rates.learn(kind, depth, accepted=is_accepted, share=not self.private)
            node = children.get(token)
            if node is None:
                return True
            proposal.node = node
        return not proposal.lead and not tree.children(proposal.node)
