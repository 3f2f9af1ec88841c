"""Token recycling (Luo et al. 2024): what the target thought would follow a token before, it will think again.

Every pass gives logits at all nodes, the rejected ones included. The likeliest successors of each node's token are
kept, and the next tree is grown from them, best first: a node's gain is the product of the acceptance rates, measured
so far, of the ranks on its path ::

    successors          tree below "the", 5 guesses
    the → cat dog sun   the ── cat ── sat
    cat → sat ran was    │      └──── ran
    sat → on  at  in     └──── dog ── ran
    dog → ran sat was

For any text, above all where nothing has been said before that could be copied. It needs no model and no match in the
context. A step takes 0.1 ms, ten thousand a second, with a vocabulary of 8,192, and six times as long with 128,256. A
table holds at most ``max_tokens`` rows of ``top_k`` ids, about 300 bytes each: 5 MB with the defaults. It is the
request's own, begun from its prompt and the saved table if there is one, or that of all requests (``shared=True``),
which :meth:`Recycling.save` can keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Self

from pronk.drafters.base import DraftContext, Drafter, Needs, Outcome
from pronk.drafters.from_outputs._likeliest import likeliest
from pronk.drafters.from_outputs._successors import Successors, load_successors, save_successors
from pronk.drafters.shared.options import check_flag, check_integer, check_path
from pronk.drafters.shared.rates import Rates
from pronk.drafters.shared.trie import Frontier, Trie
from pronk.drafters.target import Memory, Target
from pronk.errors import OptionError
from pronk.tree import TokenTree

__all__ = ["Recycled", "Recycling"]

# What is believed at first of the likeliest successor; each further rank is right a third as often.
_PRIOR, _FALL = 0.45, 0.35


@dataclass
class Recycled:
    """One request's successors and how often each of their ranks was right."""

    successors: Successors
    rates: Rates


@dataclass
class _Shared:
    """What belongs to the drafter and not to a request: the table of all, and whose tokens are in it."""

    successors: Successors | None = None
    memory: Memory = field(default_factory=Memory)


@dataclass(frozen=True)
class Recycling(Drafter[Recycled]):
    """Options of token recycling.

    Attributes:
        num_nodes: guesses per step, 1..127.
        top_k: successors that are kept per token, 1..32.
        max_tokens: tokens whose successors a table keeps, 16..1048576; those met longest ago go first.
        shared: one table for all requests instead of one for each.
        table: file written by :meth:`save` that tables begin with.
    """

    name: ClassVar[str] = "recycling"
    needs = Needs(logits=True)

    num_nodes: int = 15
    top_k: int = 4
    max_tokens: int = 16384
    shared: bool = False
    table: str | None = None
    _own: _Shared = field(default_factory=_Shared, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_integer(self.name, "num_nodes", self.num_nodes, 1, 127)
        check_integer(self.name, "top_k", self.top_k, 1, 32)
        check_integer(self.name, "max_tokens", self.max_tokens, 16, 1048576)
        check_flag(self.name, "shared", self.shared)
        check_path(self.name, "table", self.table)

    def bind(self, target: Target) -> Self:
        """Load the table.

        Raises:
            OptionError: the file is missing, damaged, or of another vocabulary; or the drafter has met another one.
        """
        if self.shared or self.table is not None:
            self._own.memory.belongs_to(self.name, target)
        if self._own.successors is None:
            fresh = Successors(self.top_k, self.max_tokens)
            if self.table is not None:
                load_successors(Path(self.table), fresh, target.vocabulary)
            self._own.successors = fresh
        return self

    def save(self, path: str | Path) -> None:
        """Write the shared table to a safetensors file.

        Raises:
            OptionError: the table is not shared, or the file cannot be written.
        """
        if not self.shared or self._own.successors is None:
            msg = f"{self.name}: expected shared=True and a model to save what was recycled; found neither table"
            raise OptionError(msg)
        (vocabulary,) = self._own.memory.vocabularies
        save_successors(Path(path), self._own.successors, vocabulary)

    def start(self, prompt: Sequence[int]) -> Recycled:
        """What follows what in the prompt, on top of what is known."""
        known = self._own.successors or Successors(self.top_k, self.max_tokens)
        successors = known if self.shared else known.copy()
        for token, successor in pairwise(prompt):
            successors.follow(token, successor)
        priors = {rank: _PRIOR * _FALL**rank for rank in range(self.top_k)}
        return Recycled(successors, Rates(self.name, priors))

    def propose(self, contexts: Sequence[DraftContext[Recycled]]) -> list[TokenTree]:
        """The nodes of largest gain below each text's last token."""
        return [self._tree(context) for context in contexts]

    def observe(self, outcomes: Sequence[Outcome[Recycled]]) -> None:
        """Recycle the logits of all nodes; where a token is in the tree twice, those of the later node count."""
        for outcome in outcomes:
            outcome.state.rates.learn(outcome.tree, outcome.path)
            if self.shared and outcome.params.rejects:
                continue
            for token, best in zip(outcome.tree.tokens, likeliest(outcome, self.top_k), strict=True):
                outcome.state.successors.put(token, best)

    def _tree(self, context: DraftContext[Recycled]) -> TokenTree:
        successors, room = context.state.successors, min(self.num_nodes, context.max_nodes)
        rates = [context.state.rates.rate(rank) for rank in range(self.top_k)]
        rates = [min(rates[: rank + 1]) for rank in range(self.top_k)]  # a better rank is never passed over
        trie = Trie(context.tokens[-1])
        frontier = Frontier[tuple[int, int]]()

        def offer(parent: int, rank: int) -> None:
            if trie.depths[parent] < context.max_depth and rank < len(successors.after(trie.tokens[parent])):
                frontier.offer(trie.gains[parent] * rates[rank], (parent, rank))

        offer(0, 0)
        while frontier and len(trie) <= room:
            gain, (parent, rank) = frontier.take()
            token = successors.after(trie.tokens[parent])[rank]
            node = trie.add(parent, token, gain, (self.name, rank))
            offer(node, 0)
            offer(parent, rank + 1)
        return trie.tree(room)
