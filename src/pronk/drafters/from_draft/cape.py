"""CAPE: a chain with siblings, more where the drafter is less confident (Du et al. 2024, 4.2).

At each token of a chain the drafter has a probability for every other token as well. The ``K`` likeliest others are
verified beside the chain's token, with ``K`` by its confidence ::

    confidence   (0, 0.3]   (0.3, 0.6]   (0.6, 0.8]   (0.8, 1]
    K                7           5            3           1

or by appendix A's finer table of tenths. Siblings are leaves, so they cost the drafter no forward pass. In the paper's
linear order, first the chain and then the siblings ::

    the ── cat ── sat ── on         the  cat sat on  dog man  ran  (mat: none)
     ├──── dog     └ ran            0    1   2   3   4   5    6
     └──── man

its mask (row ``i`` sees column ``j`` of the chain if ``pos(i) > j``, and itself) is the tree's own rule.

*Confidence.* S(p) of the paper is a function of the drafter's largest probability, max p. Greedy decoding uses max p.
The coupled rule uses the largest entry of softmax(logits / T + Gumbel noise), with the target's noise at the position.
That value is noisy and is not max p: it depends on the noise as well as on the drafter's certainty. The rejection and
block rules use max p at the request's temperature. They draw the chain's token from the drafter's distribution; the
siblings are the likeliest other tokens, as point masses.
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

# Appendix A, by tenths of the confidence; the paper's numbers include the chain's token.
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
        parts: the drafter whose chains are expanded, ``draft_model`` by default.
        sizes: numbers of siblings by confidence: ``"paper"`` is the table of section 4.2, ``"fine"`` that of appendix
            A.
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
    def proposes_tree(self) -> bool:
        """Always true: the proposal has siblings."""
        return True

    @property
    def source(self) -> str:
        """Name of this drafter and of the inner one."""
        return f"{self.name}({self.inner.source})"

    def bind(self, target: Target) -> CapeProposer:
        """Return the proposer around that of the inner drafter."""
        return CapeProposer(self, self.bind_inner(target))


class CapeProposer(WrapperProposer[Calibration]):
    """Proposes chains with siblings."""

    name = Cape.name

    def __init__(self, options: Cape, inner: ChainProposer[Any]) -> None:
        super().__init__(inner)
        self.options = options

    @property
    def source(self) -> str:
        """Source of the options."""
        return self.options.source

    @property
    def proposes_tree(self) -> bool:
        """Always true: the proposal has siblings."""
        return True

    def make_own_state(self) -> Calibration:
        """Return the calibration of the siblings."""
        return Calibration(self.source, known=SharedAcceptance.of(self.inner.target))

    def chains(
        self, contexts: Sequence[DraftContext[WrappedState[Calibration]]], stop: Stop | None = None
    ) -> list[Chain]:
        """Return the inner chains without siblings, for a wrapper around this drafter."""
        return self.inner.chains(self.inner_contexts(contexts, self.options.max_nodes), stop)

    def propose(self, contexts: Sequence[DraftContext[WrappedState[Calibration]]]) -> list[TokenTree]:
        """Return the chains with their siblings."""
        return [
            self.expand(chain, context.state.own)
            for chain, context in zip(self.chains(contexts), contexts, strict=True)
        ]

    def observe(self, outcome: Outcome[WrappedState[Calibration]]) -> None:
        """Count the accepted siblings."""
        super().observe(outcome)
        outcome.state.own.learn(outcome)

    def expand(self, chain: Chain, calibration: Calibration) -> TokenTree:
        """Return the chain with its siblings; ``calibration`` is that of the siblings."""
        tokens, parents = [chain.context.tokens[-1], *chain.tokens], [*range(-1, len(chain))]
        gain, origin = [1.0, *chain.gains], [("", 0), *chain.origin]
        num_left = min(self.options.max_nodes, chain.context.max_nodes) - len(chain)
        for depth, draft_token in enumerate(chain.draft_tokens):
            siblings = self._siblings(draft_token, num_left)
            num_left -= len(siblings)
            origins = [calibration.origin(prob) for _, prob in siblings]
            tokens += [token for token, _ in siblings]
            parents += [depth] * len(siblings)
            origin += origins
            gain += [gain[depth] * calibration.rate(each, depth + 1) for each in origins]
        chain_probs = chain.distributions
        probs = None if chain_probs is None else chain_probs + (None,) * (len(tokens) - len(chain_probs))
        return TokenTree(tuple(tokens), tuple(parents), probs=probs, gain=tuple(gain), origin=tuple(origin))

    def _siblings(self, draft_token: DraftToken, max_siblings: int) -> list[tuple[int, float]]:
        count = min(max_siblings, _SIZES[self.options.sizes](draft_token.confidence))
        if count <= 0:
            return []
        return [each for each in draft_token.ranked(count + 1) if each[0] != draft_token.token][:count]
