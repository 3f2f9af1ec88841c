"""CAPE: a chain with siblings, the more the less sure the drafter is (*GLIDE with a CAPE*, Du et al. 2024, 4.2).

At each token of a chain the drafter has given every other token a probability as well. The ``K`` likeliest of those are
verified beside it, with ``K`` by the confidence of the chain's token ::

    confidence   (0, 0.3]   (0.3, 0.6]   (0.6, 0.8]   (0.8, 1]
    K                7           5            3           1

or, finer, by appendix A's table of tenths. They are leaves: nothing is drafted below them, so they cost the drafter no
pass. In the paper's linear order, first the chain and then the siblings ::

    the ── cat ── sat ── on         the  cat sat on  dog man  ran  (mat: none)
     ├──── dog     └ ran            0    1   2   3   4   5    6
     └──── man

its mask (row ``i`` sees column ``j`` of the chain if ``pos(i) > j``, and itself) is the tree's own rule.

Where guesses are accepted by chance, the chain's token is drawn from the drafter's distribution, and its siblings are
the likeliest others, without a further draw: they are point masses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pronk.checks import check_choice, check_integer
from pronk.drafters.from_draft._wrapper import WrappedState, Wrapper, WrapperProposer
from pronk.drafters.shared.chain import Chain, ChainProposer, Stop
from pronk.sampling.sampler import DraftToken
from pronk.speculation.calibration import Calibration
from pronk.speculation.proposer import DraftContext, Outcome
from pronk.speculation.shared_acceptance import SharedAcceptance
from pronk.speculation.target import Target
from pronk.speculation.tree import TokenTree

__all__ = ["Cape"]

# Appendix A: by tenths of the confidence. Its tables' numbers count the chain's token as well.
_TENTHS = (8, 8, 8, 8, 6, 6, 6, 6, 4, 4, 2, 2)


def _paper(confidence: float) -> int:
    return 7 if confidence <= 0.3 else 5 if confidence <= 0.6 else 3 if confidence <= 0.8 else 1


def _fine(confidence: float) -> int:
    return _TENTHS[int(10 * confidence)] - 1


_SIZES: dict[str, Callable[[float], int]] = {"paper": _paper, "fine": _fine}


@dataclass(frozen=True)
class Cape(Wrapper):
    """Options of the expansion.

    Attributes:
        parts: the drafter whose chains it expands, ``draft_model`` by default.
        sizes: numbers of siblings: ``"paper"`` for those of section 4.2, ``"fine"`` for those of appendix A.
        max_nodes: most tokens to verify, 1..127; the chain's come first, then the siblings from the first token on.
    """

    name = "cape"

    sizes: str = "paper"
    max_nodes: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(f"{self.name}: sizes", self.sizes, tuple(_SIZES))
        check_integer(f"{self.name}: max_nodes", self.max_nodes, 1, 127)

    @property
    def expands(self) -> bool:
        """See :class:`~pronk.drafters.shared.chain.ChainDrafter`: siblings."""
        return True

    @property
    def source(self) -> str:
        """Its name, and whose chains it expands."""
        return f"{self.name}({self.inner.source})"

    def bind(self, target: Target) -> CapeProposer:
        """What expands the chains of the drafter within."""
        return CapeProposer(self, self.bind_inner(target))


class CapeProposer(WrapperProposer[Calibration]):
    """Chains with siblings.

    Attributes:
        options: it guesses by.
    """

    name = Cape.name

    def __init__(self, options: Cape, inner: ChainProposer[Any]) -> None:
        super().__init__(inner)
        self.options = options

    @property
    def source(self) -> str:
        """As :class:`Cape` has it."""
        return self.options.source

    @property
    def expands(self) -> bool:
        """See :class:`~pronk.drafters.shared.chain.ChainDrafter`: siblings."""
        return True

    def fresh(self) -> Calibration:
        """Acceptance of siblings."""
        return Calibration(self.source, known=SharedAcceptance.of(self.inner.target))

    def chains(
        self, contexts: Sequence[DraftContext[WrappedState[Calibration]]], stop: Stop | None = None
    ) -> list[Chain]:
        """The chains within, as they are: for a wrapper around this one."""
        return self.inner.chains(self.within(contexts, self.options.max_nodes), stop)

    def propose(self, contexts: Sequence[DraftContext[WrappedState[Calibration]]]) -> list[TokenTree]:
        """The chains, expanded."""
        return [
            self.expand(chain, context.state.own)
            for chain, context in zip(self.chains(contexts), contexts, strict=True)
        ]

    def observe(self, outcome: Outcome[WrappedState[Calibration]]) -> None:
        """Count the siblings that were accepted."""
        super().observe(outcome)
        outcome.state.own.learn(outcome)

    def expand(self, chain: Chain, calibration: Calibration) -> TokenTree:
        """The chain with its siblings; ``calibration`` is theirs."""
        tokens, parents = [chain.context.tokens[-1], *chain.tokens], [*range(-1, len(chain))]
        gain, origin = [1.0, *chain.gains], [("", 0), *chain.origin]
        room = min(self.options.max_nodes, chain.context.max_nodes) - len(chain)
        for depth, guess in enumerate(chain.draft_tokens):
            siblings = self._siblings(guess, room)
            room -= len(siblings)
            origins = [calibration.origin(share) for _, share in siblings]
            tokens += [token for token, _ in siblings]
            parents += [depth] * len(siblings)
            origin += origins
            gain += [gain[depth] * calibration.rate(each, depth + 1) for each in origins]
        drawn = chain.drawn
        probs = None if drawn is None else drawn + (None,) * (len(tokens) - len(drawn))
        return TokenTree(tuple(tokens), tuple(parents), probs=probs, gain=tuple(gain), origin=tuple(origin))

    def _siblings(self, guess: DraftToken, room: int) -> list[tuple[int, float]]:
        count = min(room, _SIZES[self.options.sizes](guess.confidence))
        if count <= 0:
            return []
        return [each for each in guess.ranked(count + 1) if each[0] != guess.token][:count]
