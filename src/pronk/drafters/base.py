"""The contract between the engine and whoever guesses tokens.

A drafter has two verbs. ``propose`` turns what is known of some requests into one tree each; ``observe`` tells it
what the target said. It may keep a state per request, which must depend on the committed tokens and, if the drafter
learns from its guesses, on what the target said of its trees: a request that goes the same way has the same state, and
proposing leaves no trace. Nothing a drafter does changes the text, only how many passes it takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.engine.costs import PassCosts
from pronk.errors import OptionError
from pronk.model.decoder import Decoder
from pronk.sampling import SamplingParams
from pronk.tree import TokenTree

__all__ = ["DraftContext", "Drafter", "Memory", "Needs", "Outcome", "Target"]

State = TypeVar("State")


@dataclass(frozen=True)
class Needs:
    """What a drafter reads of the target's pass.

    Attributes:
        hidden: numbers of layers whose output it wants at every node: 1 is the first layer's, before the final norm.
        logits: whether it wants the logits of every node, those that may not be accepted included.
        costs: whether it wants to know what passes cost on this machine.
    """

    hidden: tuple[int, ...] = ()
    logits: bool = False
    costs: bool = False


@dataclass(frozen=True)
class Target:
    """The model that a drafter guesses for; given once, when both are brought together.

    Attributes:
        decoder: the model.
        cache: its keys and values.
        vocabulary: fingerprint of its tokenizer, by which files of token ids are told apart, or ``None``.
    """

    decoder: Decoder
    cache: PagedCache
    vocabulary: str | None = None


@dataclass
class Memory:
    """Whose tokens a drafter remembers from one request to the next: those of the first model that it meets.

    ``vocabularies`` has the fingerprint of that model's tokenizer, once it has met one.
    """

    vocabularies: set[str | None] = field(default_factory=set)

    def belongs_to(self, drafter: str, target: Target) -> None:
        """Raise :class:`~pronk.errors.OptionError` if the drafter remembers tokens of another vocabulary."""
        if self.vocabularies - {target.vocabulary}:
            msg = (
                f"{drafter}: expected the tokenizer of the model it was used with first, found another; make a new one"
            )
            raise OptionError(msg)
        self.vocabularies.add(target.vocabulary)


@dataclass(frozen=True)
class DraftContext(Generic[State]):
    """One request, as a drafter sees it before a step.

    Attributes:
        state: what :meth:`Drafter.start` returned for the request.
        tokens: the text so far; the last token is the root of the tree to propose. The final
            ``len(tokens) - committed`` tokens are the target's own choices too, but provisional.
        committed: how many of ``tokens`` are certain.
        max_depth: a guess deeper than this is of no use.
        max_nodes: no more guesses than this.
        params: the request's options.
        seed: the request's seed, for drafters that sample with the target's noise.
        table: where the target's keys and values of the first ``table.length`` tokens are.
        costs: what a pass costs by its rows, if the drafter needs it and the cache had room to measure it.
    """

    state: State
    tokens: Sequence[int]
    committed: int
    max_depth: int
    max_nodes: int
    params: SamplingParams
    seed: int
    table: BlockTable
    costs: PassCosts | None = None


@dataclass(frozen=True)
class Outcome(Generic[State]):
    """What the target said of one tree.

    Under the rejection rule what is said depends on the request's random numbers and on the guesses; a guess may not
    depend on those numbers in turn, so nothing of such a request may reach the guesses of another (``params.rejects``).

    Attributes:
        state: the request's state.
        tree: the tree as it was verified (the proposal, cut to the limits).
        path: its accepted nodes, from the first below the root on.
        committed: the tokens that became certain in this step; not only tokens of this tree, and not yet those that are
            provisional.
        position: of the tree's root in the text, from 0.
        params: the request's options.
        logits: ``[nodes, vocab]`` of the tree if the drafter needs them.
        hidden: layer number to ``[nodes, hidden]`` for the layers that the drafter needs.
    """

    state: State
    tree: TokenTree
    path: tuple[int, ...]
    committed: tuple[int, ...]
    position: int
    params: SamplingParams
    logits: Tensor | None = None
    hidden: Mapping[int, Tensor] = field(default_factory=dict)


class Drafter(ABC, Generic[State]):
    """Base of all drafters; a subclass is one file and one line in the registry."""

    name: ClassVar[str]
    needs: Needs = Needs()

    def bind(self, target: Target) -> None:
        """Meet the target. Raises :class:`~pronk.errors.OptionError` if the two do not fit."""

    @abstractmethod
    def start(self, prompt: Sequence[int]) -> State:
        """The state of a new request."""

    @abstractmethod
    def propose(self, contexts: Sequence[DraftContext[State]]) -> list[TokenTree]:
        """One tree per context, rooted at its last token."""

    @abstractmethod
    def observe(self, outcomes: Sequence[Outcome[State]]) -> None:
        """Learn from a step; every context of the last ``propose`` has one outcome."""

    def stop(self, state: State) -> None:
        """The request has ended; give back what its state holds."""
