"""Base classes of drafters that propose a chain: draft tokens in sequence, without siblings.

Each token is sampled from the drafter's own distribution with the request's sampling options. Under the coupled
acceptance rule the draft token is drawn with the same random numbers as the target's token at this position.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from pronk.base.arrays import Array
from pronk.base.interrupts import is_interrupt_pending
from pronk.drafting.acceptance_stats import SourceRates
from pronk.drafting.proposer import DraftContext, Drafter, Proposer
from pronk.sampling.draft_token import DraftIds, DraftToken
from pronk.sampling.tree import Origin, TokenTree

State = TypeVar("State")


class Chain:
    """Draft tokens for one request, each the child of the one before.

    Attributes:
        context: the request, as passed to ``propose``.
        draft_tokens: the tokens so far, each with the drafter's scores of all tokens and its confidence.
        gains: for each token, the estimated probability that it and all tokens before it are accepted.
        cumulative_confidence: for each token, the product of the confidences up to it.
        origin: for each token, the pair of :attr:`Proposer.source` and its confidence in thousandths, 1..999.
    """

    def __init__(self, context: DraftContext[Any], source: str) -> None:
        self.context = context
        self.source = source
        self.draft_tokens: list[DraftToken] = []
        self.gains: list[float] = []
        self.cumulative_confidence: list[float] = []
        self.origin: list[Origin] = []
        self._rates = context.policy.acceptance.source(source)

    def __len__(self) -> int:
        return len(self.draft_tokens)

    @property
    def is_full(self) -> bool:
        """Whether the chain has ``max_tokens`` tokens."""
        return len(self) >= self.max_tokens

    @property
    def max_tokens(self) -> int:
        """Largest number of draft tokens: the smaller of the request's limits of depth and of nodes."""
        return min(self.context.max_depth, self.context.max_nodes)

    @property
    def tokens(self) -> list[int]:
        """Ids of the draft tokens."""
        return [draft_token.token for draft_token in self.draft_tokens]

    @property
    def distributions(self) -> tuple[Array | None, ...] | None:
        """Distribution that each node was drawn from (``TokenTree.probs``); ``None`` if none was drawn."""
        if not (self.context.params.rejects and self.context.draws):
            return None
        return (None, *(draft_token.q for draft_token in self.draft_tokens))

    def append_from_logits(self, logits: Array, ids: DraftIds | None = None) -> bool:
        """Append a token sampled from logits ``[draft vocab]``; return False if they allow no token.

        ``ids`` has the target's token of each logit; ``None``: 0, 1, ….
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
        kind = SourceRates.confidence_kind(draft_token.confidence)
        self.origin.append((self.source, kind))
        self.gains.append(last_gain * self._rates.rate(kind, len(self.draft_tokens)))

    def append_and_go_on(self, draft_token: DraftToken, is_complete: Callable[[Chain], bool]) -> bool:
        """Append a draft token of a chain by the kernels; return whether to draft another one.

        KeyboardInterrupt cannot pass through the kernels, so after Ctrl-C the chain ends.
        """
        self.append(draft_token)
        return not (is_interrupt_pending() or self.is_full or is_complete(self))

    def tree(self) -> TokenTree:
        """Return the chain as a tree below the request's last token."""
        tokens, parents = (self.context.tokens[-1], *self.tokens), tuple(range(-1, len(self)))
        gain, origin = (1.0, *self.gains), (("", 0), *self.origin)
        return TokenTree(tokens, parents, probs=self.distributions, gain=gain, origin=origin)


# Callback ``stop(index, chain)``: returns whether the chain of ``contexts[index]`` is complete.
Stop = Callable[[int, Chain], bool]


class ChainDrafter(Drafter):
    """Options of a drafter that proposes chains."""

    @property
    def proposes_tree(self) -> bool:
        """Whether proposals have siblings; if so, ``cape`` and ``threshold`` cannot wrap this drafter."""
        return False


class ChainProposer(Proposer[State], ChainDrafter):
    """Base of proposers of chains; subclasses implement :meth:`chains`."""

    @abstractmethod
    def chains(self, contexts: Sequence[DraftContext[State]], stop: Stop | None = None) -> list[Chain]:
        """Return a chain for each context; ``stop`` replaces the drafter's own rule that ends chains.

        A drafter with a forward pass per draft token (such as a draft model) also ends a chain where the next token
        would cost more time than it saves (``DraftContext.policy``).
        """

    def propose(self, contexts: Sequence[DraftContext[State]]) -> list[TokenTree]:
        return [chain.tree() for chain in self.chains(contexts)]


def extend_chains(
    chains: Mapping[int, Chain],
    next_logits: Callable[[Sequence[int]], Sequence[Array | None]],
    is_complete: Callable[[int, Chain], bool],
    ids: DraftIds | None = None,
) -> None:
    """Add one token per round to every incomplete one of the empty ``chains``, until all are complete.

    ``next_logits``, given keys of ``chains``, returns the drafter's logits ``[draft vocab]`` after each of these
    chains; ``None`` ends a chain. ``is_complete``, given a key and that chain, returns whether the chain is complete.
    ``ids`` has the target's token of each logit; ``None``: 0, 1, ….
    """
    incomplete = [number for number, chain in chains.items() if not chain.is_full]
    with ExitStack() as stack:
        for chain in chains.values():
            stack.enter_context(chain.context.sampler.after())
        while incomplete:
            all_logits = next_logits(incomplete)
            incomplete = [
                number
                for number, logits in zip(incomplete, all_logits, strict=True)
                if logits is not None and chains[number].append_from_logits(logits, ids)
            ]
            incomplete = [i for i in incomplete if not chains[i].is_full and not is_complete(i, chains[i])]
