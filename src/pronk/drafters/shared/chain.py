"""What drafters that guess token after token have in common: draft models today, and what wraps them.

Each token comes from a distribution of the drafter's own, in the same way in which the target chooses: by the request's
options, and under the coupled rule with the target's noise. How far a chain goes is a rule that others may bring along
(:mod:`~pronk.drafters.from_draft.threshold`), and what else hangs on it too (:mod:`~pronk.drafters.from_draft.cape`).
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

__all__ = ["Chain", "ChainDrafter", "ChainProposer", "Stop", "grow"]

State = TypeVar("State")


class Chain:
    """Guesses below one request's last token, each below the one before.

    Attributes:
        context: the request.
        draft_tokens: the tokens drafted so far, with how they were chosen.
        gains: the probability that the walk reaches each, as far as it is known.
        origin: who made each guess, and how confidently.
        reached: the product of the confidences down to each: what the drafter itself believes.
    """

    def __init__(self, context: DraftContext[Any], calibration: Calibration) -> None:
        self.context = context
        self.draft_tokens: list[DraftToken] = []
        self.gains: list[float] = []
        self.reached: list[float] = []
        self.origin: list[Origin] = []
        self._calibration = calibration

    def __len__(self) -> int:
        return len(self.draft_tokens)

    @property
    def full(self) -> bool:
        """Whether a further guess would be of no use."""
        return len(self) >= self.most

    @property
    def most(self) -> int:
        """The largest useful number of guesses: by depth and by nodes."""
        return min(self.context.max_depth, self.context.max_nodes)

    @property
    def tokens(self) -> list[int]:
        """The token ids."""
        return [guess.token for guess in self.draft_tokens]

    @property
    def drawn(self) -> tuple[Tensor | None, ...] | None:
        """What the root and each token were drawn from, where that matters."""
        return (
            (None, *(guess.q for guess in self.draft_tokens))
            if self.context.params.rejects and self.context.draws
            else None
        )

    def add(self, logits: Tensor) -> bool:
        """Choose the next token by the drafter's logits ``[vocab]``; returns whether there was one."""
        context = self.context
        guess = context.sampler.guess(logits, context.root, draw=context.draws)
        if guess is not None:
            self.take(guess)
        return guess is not None

    def take(self, guess: DraftToken) -> None:
        """The next token is chosen."""
        self.context.sampler.advance(guess.token)
        self.draft_tokens.append(guess)
        self.reached.append((self.reached[-1] if self.reached else 1.0) * guess.confidence)
        self.origin.append(self._calibration.origin(guess.confidence))
        rate = self._calibration.rate(self.origin[-1], len(self.draft_tokens))
        self.gains.append((self.gains[-1] if self.gains else 1.0) * rate)

    def tree(self) -> TokenTree:
        """The proposal."""
        tokens = (self.context.tokens[-1], *self.tokens)
        return TokenTree(
            tokens,
            tuple(range(-1, len(tokens) - 1)),
            probs=self.drawn,
            gain=(1.0, *self.gains),
            origin=(("", 0), *self.origin),
        )


# Whether the chain of context number ``i`` is long enough.
Stop = Callable[[int, Chain], bool]


class ChainDrafter(Drafter):
    """Options of a drafter that guesses token after token."""

    @property
    def expands(self) -> bool:
        """Whether it proposes more than its chains, which whoever wraps it would lose."""
        return False

    @property
    def source(self) -> str:
        """What the origins of its guesses say: other models' guesses have another one."""
        return self.name

    @abstractmethod
    def bind(self, target: Target) -> ChainProposer[Any]:
        """What guesses for the target by these options."""


class ChainProposer(Proposer[State], ChainDrafter):
    """Guesses token after token."""

    @abstractmethod
    def chains(self, contexts: Sequence[DraftContext[State]], stop: Stop | None = None) -> list[Chain]:
        """A chain for each context.

        Args:
            contexts: the requests.
            stop: asked after every token; by default it is the drafter's own rule. Guesses that do not pay for their
                time end a chain as well, where the request asks for that.
        """

    def propose(self, contexts: Sequence[DraftContext[State]]) -> list[TokenTree]:
        """The chains, as trees."""
        return [chain.tree() for chain in self.chains(contexts)]


def grow(
    chains: Sequence[Chain],
    logits: Callable[[Sequence[int]], Sequence[Tensor | None]],
    ends: Callable[[int, Chain], bool],
) -> None:
    """Add a token to all chains at a time, for as long as any goes on.

    Args:
        chains: to begin with, empty.
        logits: what the drafter says after the chains with these numbers, ``[vocab]`` each or ``None``.
        ends: whether a chain, given with its number, is long enough.
    """
    live = [number for number, chain in enumerate(chains) if not chain.full]
    with ExitStack() as loans:
        for chain in chains:
            loans.enter_context(chain.context.sampler.after())
        while live:
            rows = logits(live)
            live = [
                number for number, row in zip(live, rows, strict=True) if row is not None and chains[number].add(row)
            ]
            live = [number for number in live if not chains[number].full and not ends(number, chains[number])]
