"""Chains: draft tokens in sequence, without siblings.

Each token is sampled from the drafter's own distribution with the request's sampling options. Under
the coupled acceptance rule the draft token is drawn with the same random numbers as the target's
token at this position.

A proposer of chains has a method ``chains(contexts, stops=None)``, so that ``cape`` and
``threshold`` can wrap it (:func:`chains_of`). Its drafter returns itself from
:meth:`~pronk.drafting.proposer.Drafter.as_chains`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from pronk.base.arrays import Array
from pronk.base.errors import OptionError
from pronk.base.interrupts import is_interrupt_pending
from pronk.drafting.acceptance_stats import DrafterRates
from pronk.drafting.proposer import DraftContext, Proposer
from pronk.sampling.draft_token import DraftIds, DraftLogits, DraftToken
from pronk.sampling.tree import Origin, TokenTree


class Chain:
    """Draft tokens for one request, each the child of the one before.

    Attributes:
        context: the request, as passed to ``propose``.
        label: :attr:`Proposer.label` of the drafter.
        max_tokens: largest number of draft tokens, by default the smaller of the request's limits
            of depth and nodes.
        draft_tokens: the tokens so far, each with the drafter's scores of all tokens and its
            confidence.
        gains: for each token, the estimated probability that it and all tokens before it are
            accepted.
        cumulative_confidence: for each token, the product of the confidences up to it.
        origin: for each token, the pair of :attr:`Proposer.label` and its confidence in
            thousandths, 1..999.
    """

    def __init__(
        self,
        context: DraftContext[Any],
        label: str,
        stop: Stop | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """Create an empty chain, which ends after a token for which ``stop`` returns True."""
        self.context = context
        self.label = label
        self.max_tokens = min(context.max_depth, context.max_nodes)
        if max_tokens is not None:
            self.max_tokens = min(self.max_tokens, max_tokens)
        self._stop = stop
        self.draft_tokens: list[DraftToken] = []
        self.gains: list[float] = []
        self.cumulative_confidence: list[float] = []
        self.origin: list[Origin] = []
        self._rates = context.ledger.acceptance.rates(label)

    def __len__(self) -> int:
        return len(self.draft_tokens)

    @property
    def is_full(self) -> bool:
        """Whether the chain has ``max_tokens`` tokens."""
        return len(self.draft_tokens) >= self.max_tokens

    def is_complete(self) -> bool:
        """Return whether the chain ends here: it is full, or its rule ``stop`` ends it."""
        if len(self.draft_tokens) >= self.max_tokens:
            return True
        return self._stop is not None and self._stop(self)

    @property
    def tokens(self) -> list[int]:
        """Ids of the draft tokens."""
        return [draft_token.token for draft_token in self.draft_tokens]

    @property
    def distributions(self) -> tuple[Array | None, ...] | None:
        """For each node, the distribution that its token was drawn from (``TokenTree.probs``).

        ``None`` if draft tokens are not drawn at random.
        """
        if not (self.context.params.rejects and self.context.draws):
            return None
        return (None, *(draft_token.q for draft_token in self.draft_tokens))

    def append_from_logits(self, logits: Array, ids: DraftIds | None = None) -> bool:
        """Append a token sampled from logits ``[draft vocab]``.

        Return False if no token can be sampled from them.

        ``ids`` has the target's token id of each logit; ``None``: logit i is that of token i.
        """
        context = self.context
        chosen = context.sampler.draft_token(logits, context.root, draw=context.draws, ids=ids)
        if chosen is not None:
            self.append(chosen)
        return chosen is not None

    def append(self, draft_token: DraftToken) -> None:
        """Append a draft token, and make the request's sampler continue after it."""
        last_gain = self.gains[-1] if self.gains else 1.0
        last_confidence = self.cumulative_confidence[-1] if self.cumulative_confidence else 1.0
        self.context.sampler.advance(draft_token.token)
        self.draft_tokens.append(draft_token)
        self.cumulative_confidence.append(last_confidence * draft_token.confidence)
        kind = DrafterRates.confidence_kind(draft_token.confidence)
        self.origin.append((self.label, kind))
        self.gains.append(last_gain * self._rates.rate(kind, len(self.draft_tokens)))

    def append_and_go_on(self, draft_token: DraftToken) -> bool:
        """Append a draft token that the kernels sampled; return whether they draft another one.

        KeyboardInterrupt cannot pass through the kernels, so after Ctrl-C the chain ends.
        """
        self.append(draft_token)
        return not (is_interrupt_pending() or self.is_complete())

    def tree(self) -> TokenTree:
        """Return the chain as a token tree whose root is the last token of the request's text."""
        tokens = (self.context.tokens[-1], *[each.token for each in self.draft_tokens])
        parents = tuple(range(-1, len(tokens) - 1))
        gain = (1.0, *self.gains)
        origin = (("", 0), *self.origin)
        return TokenTree(tokens, parents, probs=self.distributions, gain=gain, origin=origin)


# Callback ``stop(chain)``: called after each new token; returns whether the chain ends there.
Stop = Callable[[Chain], bool]

# Callback ``chains(contexts, stops)``: returns a chain for each context. ``stops``, one for each
# context, replace the drafter's own rules and limits that end chains.
DraftChains = Callable[[Sequence[DraftContext[Any]], Sequence[Stop] | None], list[Chain]]


# Callback ``next_logits(chains)``: returns the drafter's logits after each chain; ``None`` in place
# of logits ends the chain.
NextLogits = Callable[[Sequence[Chain]], Sequence[DraftLogits | None]]


def draft_chains(chains: Sequence[Chain], next_logits: NextLogits) -> None:
    """Draft the tokens of empty ``chains``, one token per round for each incomplete chain.

    ``next_logits`` returns the drafter's logits after the chains.
    """
    incomplete = [chain for chain in chains if not chain.is_full]
    with ExitStack() as stack:
        for chain in chains:
            stack.enter_context(chain.context.sampler.after())
        while incomplete:
            scores = next_logits(incomplete)
            extended = [
                chain
                for chain, logits in zip(incomplete, scores, strict=True)
                if logits is not None and chain.append_from_logits(*logits)
            ]
            incomplete = [chain for chain in extended if not chain.is_complete()]


def chains_of(proposer: Proposer[Any]) -> DraftChains:
    """Return the method by which a proposer drafts chains for a wrapper.

    Raises ``OptionError`` if the proposer has no method ``chains``.
    """
    chains: DraftChains | None = getattr(proposer, "chains", None)
    if chains is None:
        found = (
            f"found {type(proposer).__name__}; add it, or leave out the drafter around "
            f"{proposer.name}"
        )
        msg = (
            f"drafter {proposer.name}: expected bind() to return a proposer with a method chains, "
            f"{found}"
        )
        raise OptionError(msg)
    return chains
