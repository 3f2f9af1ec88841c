"""CAPE: a chain of draft tokens and, at low confidence, siblings (Du et al. 2024, section 4.2).

At each position of a chain the ``K`` likeliest tokens other than the chain's token become siblings
of that token (``docs/methods/cape.md``). Siblings are leaves, so they cost the drafter no forward
pass. In the tree, the chain's nodes come first, as in the paper::

    the ┬─ cat ┬─ sat ── on         node    0    1    2    3    4    5    6
        ├─ dog └─ ran               token   the  cat  sat  on   dog  man  ran
        └─ man                      parent       0    1    2    0    0    1

Under the rejection and block rules, the chain's token is drawn from the drafter's distribution. The
siblings are not drawn but the likeliest of the other tokens, so the rules treat a sibling as a
distribution with all mass on one token. The confidence that selects ``K`` is that of
:class:`~pronk.sampling.draft_token.DraftToken`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pronk import Drafter, DraftModel, Proposer, TokenTree
from pronk.base import known_keywords
from pronk.base.checks import check_choice, check_integer
from pronk.drafting import (
    MAX_TREE,
    Chain,
    ChainCosts,
    Composite,
    DraftContext,
    DrafterRates,
    States,
    StepCosts,
    Target,
    bind_proposer,
    chains_of,
    check_wraps_chains,
)

# Table of appendix A. Entry i, for confidences in [i / 10, (i + 1) / 10), is K + 1: the paper
# counts the chain's token.
_FINE_COUNTS = (8, 8, 8, 8, 6, 6, 6, 6, 4, 4, 2)

# K as a function of the confidence, for each value of the option ``sizes``.
_SIBLING_COUNTS: dict[str, Callable[[float], int]] = {
    "paper": lambda confidence: (7, 5, 3, 1)[bisect_left((0.3, 0.6, 0.8), confidence)],
    "fine": lambda confidence: _FINE_COUNTS[int(10 * confidence)] - 1,
}


@known_keywords
@dataclass(frozen=True)
class Cape(Composite):
    """Options of CAPE, which adds siblings to the draft tokens of another drafter's chain.

    Attributes:
        parts: the inner drafter, to whose chains siblings are added; ``draft_model`` by default.
        sizes: table that gives K: ``"paper"`` is the table of section 4.2, ``"fine"`` the table of
            appendix A. A number in 1..16 is K at every confidence.
        max_nodes: maximum number of draft tokens of a tree, 1..1023; siblings of the chain's last
            tokens are left out first.
    """

    name = "cape"
    row_options = ("max_nodes",)

    parts: tuple[Drafter, ...] = field(default_factory=lambda: (DraftModel(),))
    sizes: str | int = "paper"
    max_nodes: int = 32

    def __post_init__(self) -> None:
        check_wraps_chains(self)
        super().__post_init__()
        if isinstance(self.sizes, str):
            check_choice(f"{self.name}: sizes", self.sizes, tuple(_SIBLING_COUNTS))
        else:
            check_integer(f"{self.name}: sizes", self.sizes, 1, 16)
        check_integer(f"{self.name}: max_nodes", self.max_nodes, 1, MAX_TREE - 1)

    def as_chains(self) -> Drafter:
        return self.parts[0]  # without siblings, because a chain with siblings is a tree

    def bind(self, target: Target) -> CapeProposer:
        return CapeProposer(self, bind_proposer(self.parts[0], target))


class CapeProposer(Proposer[States]):
    """Proposes the chains of the inner drafter, with siblings added to their tokens."""

    name = Cape.name

    def __init__(self, options: Cape, inner: Proposer[Any]) -> None:
        self.set_parts([inner])
        self.options = options
        self.inner = inner
        self.capabilities = inner.capabilities
        self._inner_chains = chains_of(inner)

    @cached_property
    def label(self) -> str:
        """Drafter name in ``TokenTree.origin`` for the siblings, such as ``cape(draft_model)``."""
        return f"{self.name}({self.inner.label})"

    @property
    def chain_label(self) -> str:
        return self.inner.chain_label

    def chain_costs(self, context: DraftContext[States], costs: StepCosts) -> ChainCosts | None:
        return self.inner.chain_costs(context.with_state(context.state[0]), costs)

    def score_history(self, context: DraftContext[States]) -> bool:
        return self.inner.score_history(context.with_state(context.state[0]))

    def propose(self, contexts: Sequence[DraftContext[States]]) -> list[TokenTree]:
        inner_contexts: list[DraftContext[Any]] = []
        for context in contexts:
            max_depth = min(context.max_depth, self.options.max_nodes)
            inner_contexts.append(context.with_state(context.state[0], max_depth=max_depth))
        chains = self._inner_chains(inner_contexts, None)
        return [self.expand(chain) for chain in chains]

    def expand(self, chain: Chain) -> TokenTree:
        """Return the tree of a chain and of the siblings of its tokens."""
        rates = chain.context.acceptance.rates(self.label)
        tokens = [chain.context.tokens[-1], *chain.tokens]
        parents = [*range(-1, len(chain))]
        gain = [1.0, *chain.gains]
        origin = [("", 0), *chain.origin]
        num_left = min(self.options.max_nodes, chain.context.max_nodes) - len(chain)
        for depth, draft_token in enumerate(chain.draft_tokens):
            count = min(num_left, self._num_siblings(draft_token.confidence))
            # One token more, because the chain's own token may be among the likeliest.
            likeliest = draft_token.top_tokens(count + 1) if count > 0 else []
            others = [(token, prob) for token, prob in likeliest if token != draft_token.token]
            siblings = others[:count]
            num_left -= len(siblings)
            kinds = [DrafterRates.confidence_kind(prob) for _, prob in siblings]
            tokens += [token for token, _ in siblings]
            parents += [depth] * len(siblings)
            origin += [(self.label, kind) for kind in kinds]
            gain += [gain[depth] * rates.rate(kind, depth + 1) for kind in kinds]
        probs = chain.distributions
        if probs is not None:
            # A sibling has no distribution, because it is not drawn from one.
            probs += (None,) * (len(tokens) - len(probs))
        return TokenTree(
            tuple(tokens), tuple(parents), probs=probs, gain=tuple(gain), origin=tuple(origin)
        )

    def _num_siblings(self, confidence: float) -> int:
        """Return K, the number of siblings of a chain token of this confidence."""
        sizes = self.options.sizes
        return sizes if isinstance(sizes, int) else _SIBLING_COUNTS[sizes](confidence)
