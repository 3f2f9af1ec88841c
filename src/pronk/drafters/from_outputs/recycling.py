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
which :meth:`RecyclingProposer.save` can keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pronk.checks import check_flag, check_integer, check_path
from pronk.drafters.from_outputs._likeliest import likeliest
from pronk.drafters.from_outputs._successors import Successors, load_successors, save_successors
from pronk.drafters.shared.trie import Frontier, Trie
from pronk.errors import OptionError
from pronk.speculation.acceptance_rates import AcceptanceRates
from pronk.speculation.proposer import Capabilities, DraftContext, Drafter, Outcome, Proposer
from pronk.speculation.shared_acceptance import SharedAcceptance
from pronk.speculation.target import Target
from pronk.speculation.tree import TokenTree

__all__ = ["Recycling", "RecyclingState"]

# What is believed at first of the likeliest successor; each further rank is right a third as often.
_PRIOR, _FALL = 0.45, 0.35


@dataclass
class RecyclingState:
    """One request's successors and how often each of their ranks was right.

    Of the text beyond ``read`` tokens nothing is known yet.
    """

    successors: Successors
    rates: AcceptanceRates
    read: int = 0

    def learn(self, text: Sequence[int], certain: int) -> None:
        """Learn what follows what in the certain part of a text."""
        for token, successor in pairwise(text[max(0, self.read - 1) : certain]):
            self.successors.follow(token, successor)
        self.read = certain


@dataclass(frozen=True)
class Recycling(Drafter):
    """Options of token recycling.

    Attributes:
        num_nodes: guesses per step, 1..127.
        top_k: successors that are kept per token, 1..32.
        max_tokens: tokens whose successors a table keeps, 16..1048576; those met longest ago go first.
        shared: one table for all requests instead of one for each.
        table: file written by :meth:`RecyclingProposer.save` that tables begin with.
    """

    name = "recycling"

    num_nodes: int = 15
    top_k: int = 4
    max_tokens: int = 16384
    shared: bool = False
    table: str | None = None

    def __post_init__(self) -> None:
        check_integer(f"{self.name}: num_nodes", self.num_nodes, 1, 127)
        check_integer(f"{self.name}: top_k", self.top_k, 1, 32)
        check_integer(f"{self.name}: max_tokens", self.max_tokens, 16, 1048576)
        check_flag(f"{self.name}: shared", self.shared)
        check_path(f"{self.name}: table", self.table)

    def bind(self, target: Target) -> RecyclingProposer:
        """What guesses by these options, its table loaded.

        Raises:
            OptionError: the file is missing, damaged, or of another vocabulary.
        """
        known = Successors(self.top_k, self.max_tokens)
        if self.table is not None:
            load_successors(Path(self.table), known, target.vocabulary)
        return RecyclingProposer(self, known, target)


class RecyclingProposer(Proposer[RecyclingState]):
    """Token recycling with the table that requests begin with, or share.

    Attributes:
        options: it guesses by.
    """

    name = Recycling.name
    capabilities = Capabilities(logits=True, observes_all_steps=False)

    def __init__(self, options: Recycling, known: Successors, target: Target) -> None:
        """``known`` is the table."""
        self.options, self.target = options, target
        self._known, self._vocabulary = known, target.vocabulary

    def save(self, path: str | Path) -> None:
        """Write the shared table to a safetensors file.

        Raises:
            OptionError: the table is not shared, or the file cannot be written.
        """
        if not self.options.shared:
            msg = f"{self.name}: expected shared=True to save what was recycled; found a table for each request"
            raise OptionError(msg)
        save_successors(Path(path), self._known, self._vocabulary)

    def start(self, prompt: Sequence[int]) -> RecyclingState:  # noqa: ARG002 - read with the first proposal
        """What is known; the prompt is read with the first proposal."""
        successors = self._known if self.options.shared else self._known.copy()
        priors = {rank: _PRIOR * _FALL**rank for rank in range(self.options.top_k)}
        return RecyclingState(successors, AcceptanceRates(self.name, priors, SharedAcceptance.of(self.target)))

    def propose(self, contexts: Sequence[DraftContext[RecyclingState]]) -> list[TokenTree]:
        """The nodes of largest gain below each text's last token."""
        return [self._tree(context) for context in contexts]

    def observe(self, outcome: Outcome[RecyclingState]) -> None:
        """Recycle the logits of all nodes; where a token is in the tree twice, those of the later node count."""
        state = outcome.state
        state.rates.learn(outcome)
        if outcome.logits is None or (self.options.shared and outcome.params.rejects):
            return
        if state.read == outcome.position + 1:
            state.read += len(outcome.committed)
        successors = state.successors
        for token, best in zip(outcome.tree.tokens, likeliest(outcome, self.options.top_k), strict=True):
            successors.put(token, best)

    def _tree(self, context: DraftContext[RecyclingState]) -> TokenTree:
        if not (self.options.shared and context.params.rejects):
            context.state.learn(context.tokens, context.root + 1)
        successors, room = context.state.successors, min(self.options.num_nodes, context.max_nodes)
        rates = [context.state.rates.rate(rank) for rank in range(self.options.top_k)]
        rates = [min(rates[: rank + 1]) for rank in range(self.options.top_k)]  # a better rank is never passed over
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
