"""The value of a step, and the draft tokens that maximize it.

With gains ``g`` (estimated probabilities that draft tokens are accepted), the measured time
``t(n)`` of a forward pass over ``n`` rows, and the seconds ``a`` that drafting takes, a step of
``r`` requests has the value ::

    tokens expected of the step          r + Σ g
    --------------------------- = -----------------------
       seconds of the step        t(r + draft tokens) + a
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pronk.models.cost_model import CostCurve
from pronk.sampling.tree import TokenTree


class Offer(NamedTuple):
    """The best choice among the draft tokens offered so far: a request's part of the step."""

    tokens: float  # expected tokens, at least 1
    seconds: float  # seconds of the forward pass

    @classmethod
    def of(cls, gains: Iterable[float], curve: CostCurve, requests: int) -> Offer:
        """Return the best choice among draft tokens with these gains, if all ``requests`` choose alike."""
        count, tokens = _best_count(sorted(gains, reverse=True), 1.0, curve, requests, requests)
        return cls(tokens, curve.at(requests * (1 + count)) / requests)


class ChainPrice(NamedTuple):
    """Price of a chain of draft tokens, of a source that drafts token by token."""

    curve: CostCurve  # cost of the target's forward pass
    token: float  # seconds of a draft token for every request together
    reading: float = 0.0  # seconds to read this request's text since the last proposal
    # seconds of a proposal besides reading and draft tokens, for this request alone
    start: float = 0.0

    def seconds(self, requests: int, draft_tokens: int, passes: int) -> float:
        """Return one request's part of a step with ``draft_tokens`` each, drafted in ``passes`` passes."""
        start = self.start if passes else 0.0
        return (
            self.curve.at(requests * (1 + draft_tokens)) + passes * self.token
        ) / requests + start

    def best(self, requests: int, rate: float, most: int, gains: Sequence[float] = ()) -> Offer:
        """Return the best choice among chains of at most ``most`` tokens that continue one with ``gains``.

        It has at least one further token. Each is accepted with probability ``rate``, below 1, if
        the one before is.
        """
        tokens = 1.0 + sum(gains)
        gain = gains[-1] if gains else 1.0
        best = Offer(0.0, 1.0)
        for count in range(len(gains) + 1, most + 1):
            gain *= rate
            tokens += gain
            seconds = self.seconds(requests, count, count)
            if tokens * best.seconds > best.tokens * seconds:
                best = Offer(tokens, seconds)
            elif (tokens + gain * rate / (1.0 - rate)) * best.seconds <= best.tokens * seconds:
                break  # all further tokens together do not make up for the seconds of this one
        return best


def select_nodes(
    trees: Sequence[TokenTree],
    requests: int,
    curve: CostCurve | None,
    *,
    prompts: int = 0,
    drafting: float = 0.0,
    allowance: float = float("inf"),
) -> list[TokenTree]:
    """Cut the trees of a step to the draft tokens that maximize its value.

    The draft tokens of largest gain are kept. A child's gain is at most its parent's, so what is
    kept is a tree. Nodes without a gain, and those that may not be accepted, are kept. If prompts
    are read in the same forward pass, draft rows cost what they add to it.

    Args:
        trees: one per request with a proposal.
        requests: number of requests that decode: one row and one token of each.
        curve: costs of the forward pass; if they are not known, no draft token is kept.
        prompts: number of rows of prompts in the forward pass.
        drafting: seconds that the proposals took.
        allowance: seconds that draft rows may cost.
    """
    # Gain with the sign changed, number of the tree, node.
    ranked = sorted(
        (-tree.gain[node], number, node)
        for number, tree in enumerate(trees)
        if tree.gain
        for node in range(1, len(tree))
        if tree.acceptable[node]
    )
    count = 0
    if curve is not None:
        others = sum(tree.num_draft_tokens for tree in trees) - len(ranked)
        plain = curve.at(prompts + requests)
        saved = plain - curve.at(requests) - drafting
        gains = [-loss for loss, _, _ in ranked]
        rows = prompts + requests + others
        count, _ = _best_count(
            gains, float(requests), curve, rows, saved=saved, most=plain + allowance
        )
    if count == len(ranked):
        return [*trees]
    dropped = {(number, node) for _, number, node in ranked[count:]}
    kept = [
        [node for node in range(len(tree)) if (number, node) not in dropped]
        for number, tree in enumerate(trees)
    ]
    return [
        tree if len(nodes) == len(tree) else tree.keep(nodes)
        for tree, nodes in zip(trees, kept, strict=True)
    ]


def _best_count(
    gains: Iterable[float],
    tokens: float,
    curve: CostCurve,
    rows: int,
    step: int = 1,
    *,
    saved: float = 0.0,
    most: float = float("inf"),
) -> tuple[int, float]:
    """Return how many draft tokens maximize expected tokens per second, and the expected tokens with them.

    Without draft tokens, a forward pass over ``rows`` rows gives ``tokens``. Each draft token adds
    one of ``gains``, which are in falling order, and ``step`` rows: one per request that chooses
    alike. A forward pass may take ``most`` seconds, of which ``saved`` do not count.
    """
    best = tokens / (curve.at(rows) - saved)
    count = 0
    expected = tokens
    for number, gain in enumerate(gains, 1):
        tokens += gain
        seconds = curve.at(rows + step * number)
        if seconds > most:
            break
        if tokens > best * (seconds - saved):
            best = tokens / (seconds - saved)
            count = number
            expected = tokens
    return count, expected
