"""Beam search with a draft model: the baseline of CAPE (Du et al. 2024, section 5.3).

A forward pass of the draft extends the ``width`` likeliest branches by one token each. The likeliest ``width`` of all
continuations survive. The final branches are the proposal, merged where they begin alike. The tree has about as many
tokens as CAPE's, but the draft runs ``width`` rows in each forward pass and sorts all continuations after it, and most
branches are wasted where they part early. Prefer ``cape`` or ``staged``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pronk.checks import check_integer
from pronk.drafters.from_draft._branches import Branches, compute_new_nodes, model_context
from pronk.drafters.from_draft.draft_model import DraftModel, DraftState, ModelDrafter, ModelProposer
from pronk.drafters.shared.composite import Composite, CompositeProposer, Parts
from pronk.drafters.shared.trie import Trie
from pronk.errors import OptionError
from pronk.speculation.proposer import DraftContext, Drafter
from pronk.speculation.target import Target
from pronk.speculation.tree import TokenTree

__all__ = ["Beam"]


@dataclass(frozen=True)
class _Branch:
    """A branch: probability of its path, tokens with their probabilities, and its last node, if open."""

    probability: float
    tokens: tuple[tuple[int, float], ...] = ()
    node: int | None = 0


@dataclass(frozen=True)
class Beam(Composite):
    """Options of the search.

    Attributes:
        parts: ``draft_model``, ``glide`` or ``vanilla``; only its model is used, not the options of its chain.
        width: number of branches, 1..16.
        num_tokens: number of tokens of each branch, 1..64.
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
        """Return the proposer, with the model loaded beside the target."""
        model = self.parts[0]
        assert isinstance(model, ModelDrafter)
        return BeamProposer(self, model.bind(target))


class BeamProposer(CompositeProposer):
    """Beam search with a draft model."""

    name = Beam.name

    def __init__(self, options: Beam, model: ModelProposer) -> None:
        super().__init__((model,))
        self.options, self.model = options, model

    def propose(self, contexts: Sequence[DraftContext[Parts]]) -> list[TokenTree]:
        """Return the likeliest branches for each context."""
        model, options = self.model, self.options
        model_contexts = [model_context(context) for context in contexts]
        searches = Branches.create(model, model_contexts)
        beams = {number: [_Branch(1.0)] for number in searches}
        for length in range(1, options.num_tokens + 1):
            live = [
                n
                for n in searches
                if length <= contexts[n].max_depth and any(each.node is not None for each in beams[n])
            ]
            if not live:
                break
            compute_new_nodes(model.draft, [searches[number] for number in live])
            for number in live:
                last = length == min(options.num_tokens, contexts[number].max_depth)
                beams[number] = self._extend(searches[number], beams[number], last=last)
        trees = [TokenTree.chain(context.tokens[-1:]) for context in contexts]
        for number, beam in beams.items():
            trees[number] = _merge(beam, model_contexts[number])
        return trees

    def _extend(self, branches: Branches, beam: Sequence[_Branch], *, last: bool) -> list[_Branch]:
        """Return the likeliest continuations; a branch that cannot be extended stays as it is."""
        extended: list[tuple[_Branch, int | None]] = []
        for branch in beam:
            chosen = None if branch.node is None else branches.draft_token(branch.node)
            for token, prob in [] if chosen is None else chosen.ranked(self.options.width):
                extended.append(
                    (_Branch(branch.probability * prob, (*branch.tokens, (token, prob)), None), branch.node)
                )
            if chosen is None:
                extended.append((replace(branch, node=None), None))
        extended.sort(key=lambda each: -each[0].probability)
        return [
            branch if last or node is None else replace(branch, node=branches.add_node(node, branch.tokens[-1][0]))
            for branch, node in extended[: self.options.width]
        ]


def _merge(beam: Sequence[_Branch], context: DraftContext[DraftState]) -> TokenTree:
    calibration = context.state.calibration
    trie = Trie(context.tokens[-1])
    for branch in beam:
        node = 0
        for token, prob in branch.tokens:
            origin = calibration.origin(prob)
            node = trie.add(node, token, trie.gains[node] * calibration.rate(origin, trie.depths[node] + 1), origin)
    return trie.tree(context.max_nodes)
