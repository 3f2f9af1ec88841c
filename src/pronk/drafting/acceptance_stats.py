"""Acceptance statistics of draft tokens, learned from every proposal once the text has passed it.

Under the coupled rule and in greedy decoding the text does not depend on the draft tokens. So a
proposal is compared with the text whether the target verified it, a part of it, or nothing (full
information; "Not-a-Bandit", arXiv 2510.20064). Under the rejection rules the token after a text has
the target's distribution p, so a draft token x that was proposed without a distribution equals it
with probability p(x): its expected acceptance. A draft token that was drawn from a distribution is
verified in any case, and then equals the text if and only if it was accepted.

Draft tokens of one drafter have *kinds*: numbers of its own, such as the length of the match, the
rank among the likeliest tokens, or the confidence of a draft model. The acceptance rate of a kind
is the probability that a draft token equals the text if its parent does. Counts are kept on two
levels, and each level is the prior of the next ::

    prior of the drafter
      <  all requests, by depth and temperature
        <  this request, weighted towards its last steps
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pronk.base.checks import check_path
from pronk.base.errors import OptionError, describe_json_error, describe_reason
from pronk.base.files.atomic import replace_file
from pronk.base.files.regular import is_folder, read_input
from pronk.models.loader import Fingerprint
from pronk.sampling.tree import TokenTree

# Largest number of draft tokens of one drafter in one request that are counted for all requests.
# With this limit a single long text does not determine the rates of other texts.
_SHARE = 256
# number of counted draft tokens of a kind at which its counts are halved, so that old ones fade
_MAX_COUNT = 4096.0
# Weight of the prior rate, in draft tokens: in the counts of all requests, and in those of one
# request.
_PRIOR_WEIGHT = (16.0, 4.0)
# in a request's counts, weight of a step relative to the next one: one half after 34 steps
_KEEP = 0.98
_MAX_DEPTH = 4  # draft tokens at larger depths are counted together with those at this depth
# upper bounds of the ranges of temperatures that are counted separately
_TEMPERATURES = (0.0, 0.5, 1.0)

_ALL = -1  # in place of a kind: counts over all kinds of a drafter's draft tokens
_FORMAT = "pronk-calibration/2"  # files of the first format counted only verified draft tokens

# Key of a pair of counts: label of the drafter, kind of draft token, depth, and index of the
# temperature class.
_Key = tuple[str, int, int, int]


class AcceptanceStats:
    """Acceptance counts over all requests, by drafter, kind of draft token, depth and temperature.

    The counts contain no token ids, so they reveal no text.
    """

    def __init__(self) -> None:
        # For each key, two counts: draft tokens whose parent was right (equal to the text), and how
        # many of these were right themselves.
        self.counts: dict[_Key, list[float]] = {}

    def rate(self, label: str, kind: int, depth: int, temperature: float, prior: float) -> float:
        """Return the acceptance rate of a drafter's draft tokens of a kind at a depth.

        ``label`` is the drafter's, and ``prior`` the rate assumed before any count.
        """
        key = label, kind, min(depth, _MAX_DEPTH), bisect_left(_TEMPERATURES, temperature)
        offered, accepted = self.counts.get(key, (0.0, 0.0))
        return (accepted + prior * _PRIOR_WEIGHT[0]) / (offered + _PRIOR_WEIGHT[0])

    def learn(self, label: str, kind: int, depth: int, temperature: float, *, right: bool) -> None:
        """Count a draft token whose parent equals the text; ``right``: whether it does, too."""
        key = label, kind, min(depth, _MAX_DEPTH), bisect_left(_TEMPERATURES, temperature)
        count = self.counts.setdefault(key, [0.0, 0.0])
        count[0] += 1.0
        count[1] += right
        if count[0] > _MAX_COUNT:
            count[:] = [0.5 * number for number in count]


@dataclass
class DrafterRates:
    """Acceptance rates of one drafter's draft tokens for one request.

    Attributes:
        label: label of the drafter, the first part of ``TokenTree.origin``.
        priors: for each kind of draft token, the rate assumed before any count. ``None``: a kind is
            the confidence of a draft token in thousandths, 1..999, and this confidence is the rate
            assumed; the counts are kept by tenths of confidence.
        shared: counts of all requests, the prior of this request's rates; ``None`` if requests do
            not share their counts.
        temperature: temperature of the request, by which shared counts are kept.
        offered: for each kind, the number of draft tokens whose parent was right (equal to the
            text). Earlier steps weigh less.
        taken: for each kind, how many of these were right themselves.
    """

    PRIOR_WEIGHT: ClassVar = _PRIOR_WEIGHT[1]

    label: str
    priors: Mapping[int, float] | None
    shared: AcceptanceStats | None = None
    temperature: float = 0.0
    offered: dict[int, float] = field(default_factory=dict)
    taken: dict[int, float] = field(default_factory=dict)
    _left: int = _SHARE  # number of draft tokens that may still be counted for all requests
    _shared_rates: dict[tuple[int, int], float] = field(default_factory=dict)

    @staticmethod
    def confidence_kind(confidence: float) -> int:
        """Return the kind of a draft token with this confidence: thousandths, 1..999."""
        return min(max(round(1000 * confidence), 1), 999)

    def rate(self, kind: int, depth: int) -> float:
        """Return the acceptance rate of a kind at a depth (from 1), above 0 and below 1."""
        if self.priors is not None:
            return self._rate(kind, depth, self.priors[kind])
        tenth = kind // 100
        middle = (tenth + 0.5) / 10
        return min(max(kind / 1000 + self._rate(tenth, depth, middle) - middle, 0.001), 0.999)

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
        return self._shared(kind, depth, self.priors[kind])

    def learn(self, kind: int, depth: int, *, right: bool, share: bool) -> None:
        """Count a draft token whose parent was right (equal to the text).

        ``right``: whether the token is right, too. ``share``: whether it also counts for all
        requests.
        """
        own = kind if self.priors is not None else kind // 100
        for each in (own, _ALL):
            self.offered[each] = self.offered.get(each, 0.0) + 1.0
            self.taken[each] = self.taken.get(each, 0.0) + right
        if share and self.shared is not None and self._left > 0:
            self._left -= 1
            self.shared.learn(self.label, own, depth, self.temperature, right=right)
            self.shared.learn(self.label, _ALL, 1, self.temperature, right=right)

    def fade(self) -> None:
        """Lower the weight of the counts of earlier steps; called once per step."""
        for counts in (self.offered, self.taken):
            for kind in counts:
                counts[kind] *= _KEEP

    def _rate(self, kind: int, depth: int, prior: float) -> float:
        prior = self._shared(kind, depth, prior)
        weight = self.PRIOR_WEIGHT
        return (self.taken.get(kind, 0.0) + prior * weight) / (self.offered.get(kind, 0.0) + weight)

    def _shared(self, kind: int, depth: int, prior: float) -> float:
        if self.shared is None:
            return prior
        key = kind, min(depth, _MAX_DEPTH)
        rate = self._shared_rates.get(key)
        if rate is None:
            rate = self._shared_rates[key] = self.shared.rate(
                self.label, kind, depth, self.temperature, prior
            )
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
        origin = proposal.tree.origin
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
                if rates is not None:
                    self._counted[label] = rates
                    rates.learn(
                        kind, tree.depths[child], right=child_token == token, share=not self.private
                    )
            node = children.get(token)
            if node is None:
                return True
            proposal.node = node
        return not proposal.lead and not tree.children(proposal.node)


@dataclass(frozen=True)
class AcceptanceFile:
    """Acceptance counts of one model, and their file: JSON with the model's fingerprint."""

    # counts of all requests; ``None`` if requests do not share their counts
    stats: AcceptanceStats | None
    path: Path | None = None  # path of the file; ``None`` if the counts are not stored
    model: str = ""  # fingerprint of the model; an empty string without a file

    @classmethod
    def open(cls, calibration: bool | str | Path, model: Path) -> AcceptanceFile:
        """Return the counts of a file, or no counts if there is no file yet.

        ``calibration`` is the path of the file. Without a file it is a flag: whether requests share
        their counts. ``model`` is the folder of the model. Raises ``OptionError`` if the file
        cannot be read, is damaged or of another model, or its folder does not exist.
        """
        if isinstance(calibration, bool):
            return cls(AcceptanceStats() if calibration else None)
        check_path(
            "calibration", str(calibration) if isinstance(calibration, Path) else calibration
        )
        path = Path(calibration)
        if not is_folder(path.absolute().parent):
            msg = (
                f"calibration: expected a file in a folder that exists, found {path}; choose "
                "another place"
            )
            raise OptionError(msg)
        fingerprint = str(Fingerprint.of(model))
        return cls(_read(path, fingerprint), path, fingerprint)

    def save(self) -> None:
        """Write the counts to the file, if there is one.

        Raises ``OptionError`` if the file cannot be written.
        """
        if self.path is None or self.stats is None:
            return
        rows = [[*key, *count] for key, count in sorted(self.stats.counts.items())]
        try:
            with replace_file(self.path) as file:
                file.write(
                    json.dumps({"format": _FORMAT, "model": self.model, "counts": rows}).encode()
                )
        except OSError as error:
            found = describe_reason(error)
            msg = (
                f"calibration: expected a place to write to at {self.path}, found {found}; "
                "choose another"
            )
            raise OptionError(msg) from error


def _read(path: Path, model: str) -> AcceptanceStats:
    """Return the counts in a file, or no counts if the file does not exist."""
    stats = AcceptanceStats()
    try:
        if not path.exists():
            return stats
        found = json.loads(read_input(path))
    except (OSError, ValueError, RecursionError) as error:
        found_problem = (
            describe_reason(error) if isinstance(error, OSError) else describe_json_error(error)
        )
        msg = (
            f"calibration: expected a file that pronk has written at {path}, found "
            f"{found_problem}; choose another"
        )
        raise OptionError(msg) from error
    if (
        not isinstance(found, Mapping)
        or found.get("format") != _FORMAT
        or not _are_rows(found.get("counts"))
    ):
        msg = (
            f"calibration: expected a file of the format {_FORMAT} at {path}, found another; "
            "choose another place"
        )
        raise OptionError(msg)
    if found.get("model") != model:
        msg = (
            f"calibration: expected {path} to be of {model}, found {found.get('model')}; give each "
            "model its own file"
        )
        raise OptionError(msg)
    for *key, offered, accepted in found["counts"]:
        stats.counts[tuple(key)] = [float(offered), float(accepted)]
    return stats


def _are_rows(rows: Any) -> bool:
    """Return whether ``rows`` are valid rows of a file of acceptance counts.

    A row has a drafter, a kind, a depth, a class of temperatures and two counts.
    """
    return isinstance(rows, list) and all(
        isinstance(row, list)
        and [type(value) for value in row[:4]] == [str, int, int, int]
        and all(type(count) in (int, float) for count in row[4:])
        and len(row) == 6
        and 0.0 <= row[5] <= row[4] <= _MAX_COUNT
        for row in rows
    )
