"""Beam search with a draft model, the baseline of the CAPE paper (Du et al. 2024, section 5.3).

A *hypothesis* is a sequence of draft tokens. After each forward pass of the draft model, every
hypothesis that can be extended is replaced by its extensions by one token, and the ``width``
likeliest hypotheses remain. The proposal is the final hypotheses, merged into one tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pronk import Drafter, DraftModel, OptionError, Proposer, TokenTree
from pronk.base import known_keywords
from pronk.base.checks import check_integer
from pronk.drafting import (
    Composite,
    DraftContext,
    ModelDrafter,
    ModelProposer,
    States,
    Target,
    Trie,
)
from pronk.lab.drafters.cached_tree import CachedTree, compute_new_nodes


@dataclass(frozen=True)
class _Hypothesis:
    """A sequence of draft tokens below the root."""

    probability: float  # product of the draft model's probabilities of all tokens
    # Pairs (token id, the draft model's probability of the token).
    tokens: tuple[tuple[int, float], ...] = ()
    # Node of the last token in the ``CachedTree``; ``None`` if the hypothesis cannot be extended.
    node: int | None = 0


@known_keywords
@dataclass(frozen=True)
class Beam(Composite):
    """Options of beam search, which drafts several sequences with a draft model.

    Attributes:
        parts: one ``draft_model``, ``glide`` or ``vanilla``; its ``num_tokens`` and
            ``min_confidence`` are ignored.
        width: number of hypotheses, 1..16.
        num_tokens: number of draft tokens of a hypothesis, 1..64.
    """

    name = "beam"

    parts: tuple[Drafter, ...] = field(default_factory=lambda: (DraftModel(),))
    width: int = 4
    num_tokens: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.parts) != 1 or not isinstance(self.parts[0], ModelDrafter):
            found = ", ".join(part.name for part in self.parts)
            msg = f"{self.name}: expected draft_model, glide or vanilla alone, found {found}"
            raise OptionError(msg)
        check_integer(f"{self.name}: width", self.width, 1, 16)
        check_integer(f"{self.name}: num_tokens", self.num_tokens, 1, 64)

    def bind(self, target: Target) -> BeamProposer:
        model = self.parts[0]
        assert isinstance(model, ModelDrafter)
        return BeamProposer(self, model.bind(target))


class BeamProposer(Proposer[States]):
    """Proposes the final hypotheses as one tree; ``model`` is the draft model's proposer."""

    name = Beam.name

    def __init__(self, options: Beam, model: ModelProposer) -> None:
        self.set_parts([model])
        self.options = options
        self.model = model

    def propose(self, contexts: Sequence[DraftContext[States]]) -> list[TokenTree]:
        model = self.model
        options = self.options
        cached_trees = CachedTree.create(model, contexts)
        beams = {number: [_Hypothesis(1.0)] for number in cached_trees}
        for length in range(1, options.num_tokens + 1):
            growing: list[int] = []
            for number, beam in beams.items():
                is_extendable = any(hypothesis.node is not None for hypothesis in beam)
                if is_extendable and length <= contexts[number].max_depth:
                    growing.append(number)
            if not growing:
                break
            compute_new_nodes(model.draft, [cached_trees[number] for number in growing])
            for number in growing:
                last = length == min(options.num_tokens, contexts[number].max_depth)
                beams[number] = self._extend(cached_trees[number], beams[number], last=last)
        roots = [context.tokens[-1:] for context in contexts]
        trees = [TokenTree.chain(root) for root in roots]
        for number, beam in beams.items():
            trees[number] = _merge(beam, contexts[number], model.label)
        return trees

    def _extend(
        self, cached_tree: CachedTree, beam: Sequence[_Hypothesis], *, last: bool
    ) -> list[_Hypothesis]:
        """Return the ``width`` likeliest extensions of all hypotheses by one token.

        A hypothesis that cannot be extended competes as it is. Unless this is the ``last``
        extension, the new tokens are added to the cached tree, and the next forward pass computes
        them.
        """
        # Pairs (hypothesis, cached node that is the parent of its new token). The node is ``None``
        # if the hypothesis has no new token.
        extensions: list[tuple[_Hypothesis, int | None]] = []
        for hypothesis in beam:
            node = hypothesis.node
            draft_token = None if node is None else cached_tree.draft_token(node)
            if draft_token is None:
                extensions.append((replace(hypothesis, node=None), None))
                continue
            for token, prob in draft_token.top_tokens(self.options.width):
                tokens = (*hypothesis.tokens, (token, prob))
                extensions.append((_Hypothesis(hypothesis.probability * prob, tokens, None), node))
        extensions.sort(key=lambda extension: -extension[0].probability)
        likeliest: list[_Hypothesis] = []
        for longer, parent in extensions[: self.options.width]:
            if last or parent is None:
                likeliest.append(longer)
                continue
            token, _ = longer.tokens[-1]
            likeliest.append(replace(longer, node=cached_tree.add_node(parent, token)))
        return likeliest


def _merge(beam: Sequence[_Hypothesis], context: DraftContext[States], label: str) -> TokenTree:
    """Merge all hypotheses into one tree of at most ``context.max_nodes`` draft tokens.

    The draft tokens that are likeliest to be accepted are kept. ``label`` is the draft model's name
    in the acceptance statistics.
    """
    rates = context.acceptance.rates(label)
    trie = Trie(context.tokens[-1])
    for hypothesis in beam:
        node = 0
        for token, prob in hypothesis.tokens:
            kind = rates.confidence_kind(prob)
            gain = trie.gains[node] * rates.rate(kind, trie.depths[node] + 1)
            node = trie.add(node, token, gain, (label, kind))
    return trie.tree(context.max_nodes)
