"""One request of who chooses among sources: what they know of it, what they have brought, whether its text repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pronk.speculation.proposer import Outcome, SourceReport
from pronk.speculation.source_value import SourceValue
from pronk.speculation.tree import TokenTree

__all__ = ["SourceStates"]

# Tokens that are known to follow each other, after which a text is taken to be copied.
_COPIED = 6


@dataclass
class SourceStates:
    """One request: its sources' states, and what asking them has brought.

    Attributes:
        states: of the sources.
        worth: of each.
        read: tokens of the text when a source was last asked, by its number.
        asked: in which step each was asked last.
        steps: so far.
        rest: steps to come in which nobody need be asked, and for which the last rest was.
        repeating: whether the text ended like an earlier place when it was last decided, and if that was reason enough
            to ask: where little is left to lose it has to be copied.
        copied: certain tokens at its end that are each, with the two before, in the text before.
        sparing: whether so little was left to lose when it was last decided that it was kept for what is copied.
        source_reports: in this step, by the number of the source.
        root: position of the last token that they guessed behind.
        lead: tokens before it that are not certain.
        plain: seconds of a step without guesses, its share; 0 while they are not known.
        taught: steps that have counted for all requests.
        places: of the groups of three tokens, the first ones: some 150 bytes for each token.
        known: tokens that these are of.
    """

    states: tuple[Any, ...]
    worth: list[SourceValue]
    asked: list[int]
    steps: int = 0
    rest: tuple[int, int] = (0, 0)
    repeating: bool = False
    copied: int = field(default=0, compare=False)
    sparing: bool = False
    read: dict[int, int] = field(default_factory=dict)
    source_reports: dict[int, SourceReport] = field(default_factory=dict, compare=False)
    root: int = 0
    lead: tuple[int, ...] = ()
    plain: float = 0.0
    taught: int = 0
    places: dict[tuple[int, ...], int] = field(default_factory=dict, compare=False)
    known: int = field(default=2, compare=False)

    def judged(self, outcome: Outcome[Any], tree: TokenTree) -> Outcome[Any]:
        """What a source hears that has offered a tree."""
        behind = self.root - outcome.position
        if outcome.committed[:behind] != self.lead:  # where it guessed is no part of the text
            tree, behind = TokenTree.chain(tree.tokens[:1]), 0
        return replace(outcome, own_proposal=tree, proposal_offset=behind)

    @property
    def copies(self) -> bool:
        """Whether the text is copied from before for a while already."""
        return self.copied >= _COPIED

    def repeats(self, tokens: Sequence[int], certain: int) -> bool:
        """Whether the last three tokens are together in the text before."""
        if certain > self.known:
            fresh = tokens[self.known - 2 : certain]
            for place, group in enumerate(zip(fresh, fresh[1:], fresh[2:], strict=False), self.known):
                self.copied = self.copied + 1 if self.places.setdefault(group, place) < place else 0
            self.known = certain
        last = len(tokens) - 1
        return self.places.get(tuple(tokens[last - 2 : last + 1]), last) < last
