"""Base classes of drafters that propose a chain, token by token.

Each token is sampled from the drafter's own distribution with the request's sampling options. Under the coupled
acceptance rule the draw uses the target's noise.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from torch import Tensor

from pronk.sampling.sampler import DraftToken
from pronk.speculation.calibration import Calibration
from pronk.speculation.proposer import DraftContext, Drafter, Proposer
from pronk.speculation.target import Target
from pronk.speculation.tree import Origin, TokenTree

__all__ = ["Chain", "ChainDrafter", "ChainProposer", "Stop", "extend_chains"]

State = TypeVar("State")


class Chain:
    """Draft tokens for one request, each the child of the one before.

    Attributes:
        context: the request.
        draft_tokens: the tokens so far, with their scores and confidences.
        gains: estimated probability that each token is accepted together with all before it (calibrated).
        cumulative_confidence: product of the drafter's confidences down to each token (not calibrated).
        origin: source and confidence of each token.
    """

    def __init__(self, context: DraftContext[Any], calibration: Calibration) -> None:
        self.context = context
        self.draft_tokens: list[DraftToken] = []
        self.gains: list[float] = []
        self.cumulative_confidence: list[float] = []
        self.origin: list[Origin] = []
        self._calibration = calibration

    def __len__(self) -> int:
        return len(self.draft_tokens)

    @property
    def is_full(self) -> bool:
        """Whether the chain has reached its limit of length."""
        return len(self) >= self.max_tokens

    @property
    def max_tokens(self) -> int:
        """Largest useful number of draft tokens: the smaller of the limits of depth and of nodes."""
        return min(self.context.max_depth, self.context.max_nodes)

    @property
    def tokens(self) -> list[int]:
        """The token ids."""
        return [each.token for each in self.draft_tokens]

    @property
    def distributions(self) -> tuple[Tensor | None, ...] | None:
        """Distributions that the root and each token were drawn from; ``None`` if no rule needs them."""
        return (
            (None, *(each.q for each in self.draft_tokens))
            if self.context.params.rejects and self.context.draws
            else None
        )

    def append_from_logits(self, logits: Tensor) -> bool:
        """Sample the next token from the drafter's logits ``[vocab]``; return False if none is possible."""
        context = self.context
        chosen = context.sampler.draft_token(logits, context.root, draw=context.draws)
        if chosen is not None:
            self.append(chosen)
        return chosen is not None

    def append(self, chosen: DraftToken) -> None:
        """Append a token that is already chosen."""
        self.context.sampler.advance(chosen.token)
        self.draft_tokens.append(chosen)
        self.cumulative_confidence.append(
            (self.cumulative_confidence[-1] if self.cumulative_confidence else 1.0) * chosen.confidence
        )
        self.origin.append(self._calibration.origin(chosen.confidence))
        rate = self._calibration.rate(self.origin[-1], len(self.draft_tokens))
        self.gains.append((self.gains[-1] if self.gains else 1.0) * rate)

    def tree(self) -> TokenTree:
        """Return the chain as a tree below the request's last token."""
        tokens = (self.context.tokens[-1], *self.tokens)
        return TokenTree(
            tokens,
            tuple(range(-1, len(tokens) - 1)),
            probs=self.distributions,
            gain=(1.0, *self.gains),
            origin=(("", 0), *self.origin),
        )


# Whether the chain of the context with this index is complete.
Stop = Callable[[int, Chain], bool]


class ChainDrafter(Drafter):
    """Options of a drafter that proposes a chain, token by token."""

    @property
    def proposes_tree(self) -> bool:
        """Whether the proposal holds more than its chain; a wrapper would lose the rest."""
        return False

    @property
    def source(self) -> str:
        """Name in the origins of its draft tokens; drafters with different models have different names."""
        return self.name

    @abstractmethod
    def bind(self, target: Target) -> ChainProposer[Any]:
        """Return the proposer for the target."""


class ChainProposer(Proposer[State], ChainDrafter):
    """Proposes a chain, token by token."""

    @abstractmethod
    def chains(self, contexts: Sequence[DraftContext[State]], stop: Stop | None = None) -> list[Chain]:
        """Return a chain for each context; ``stop`` replaces the drafter's own rule to end it.

        A chain also ends where its next token would not pay for its time, if the context has ``prune_unprofitable``.
        """

    def propose(self, contexts: Sequence[DraftContext[State]]) -> list[TokenTree]:
        """Return the chains as trees."""
        return [chain.tree() for chain in self.chains(contexts)]


def extend_chains(
    chains: Sequence[Chain],
    logits: Callable[[Sequence[int]], Sequence[Tensor | None]],
    is_complete: Callable[[int, Chain], bool],
) -> None:
    """Add one token at a time to all chains until each is complete.

    Args:
        chains: empty chains.
        logits: returns the drafter's logits ``[vocab]`` after each chain of the given numbers; ``None`` ends a chain.
        is_complete: whether the chain with the given number is complete.
    """
    live = [number for number, chain in enumerate(chains) if not chain.is_full]
    with ExitStack() as stack:
        for chain in chains:
            stack.enter_context(chain.context.sampler.after())
        while live:
            rows = logits(live)
            live = [
                number
                for number, row in zip(live, rows, strict=True)
                if row is not None and chains[number].append_from_logits(row)
            ]
            live = [number for number in live if not chains[number].is_full and not is_complete(number, chains[number])]
