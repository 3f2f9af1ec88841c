"""The contract between the engine and whoever guesses tokens.

A :class:`Drafter` is options; once it meets a model it gives a :class:`Proposer`, which has two verbs. ``propose`` turns
what is known of some requests into one tree each; ``observe`` tells it what the target said of one. It may keep a state
per request, which must depend on the committed tokens and, if it learns from its guesses, on what the target said of
its trees: a request that goes the same way has the same state, and proposing leaves no trace. Nothing a guesser does
changes the text, only how many passes it takes; if it raises, the request goes on without guesses.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, NamedTuple, Self, TypeVar

from torch import Tensor

from pronk.errors import OptionError
from pronk.kv_cache.blocks import BlockTable
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.speculation.cost_model import CostCurve
from pronk.speculation.target import Target
from pronk.speculation.tree import TokenTree

__all__ = ["Capabilities", "DraftContext", "Drafter", "Outcome", "Proposer", "SourceReport", "bind_proposer"]

State = TypeVar("State")


@dataclass(frozen=True)
class Capabilities:
    """Optional behaviour of a proposer, declared once so that the engine need not ask.

    Attributes:
        hidden: numbers of the layers whose output it reads at every node: 1 is the first layer's, before the final norm.
        logits: whether it reads the logits of every node, those that may not be accepted included.
        costs: whether it reads the measured cost of forward passes.
        proposes: whether it ever proposes; if not, it is never asked, and no KV slots are reserved for it.
        observes_all_steps: whether it must see the outcome of steps in which it was not asked. If not, it reads the
            tokens that it missed from the next context.
        self_budgeting: whether it limits by itself what a proposal costs. If not, it is asked only where its usual cost
            may be lost.
        bypass_budget: whether its draft tokens are verified whatever they cost.
    """

    hidden: tuple[int, ...] = ()
    logits: bool = False
    costs: bool = False
    proposes: bool = True
    observes_all_steps: bool = True
    self_budgeting: bool = False
    bypass_budget: bool = False


@dataclass(frozen=True)
class DraftContext(Generic[State]):
    """One request, as a drafter sees it before a step.

    Attributes:
        state: what :meth:`Proposer.start` returned for the request.
        tokens: the text so far, not to be changed; the last token is the root of the tree to propose. Behind what
            ``block_table`` has there is one token more, unless a composite asks what follows its own guesses.
        max_depth: a guess deeper than this is of no use.
        max_nodes: no more guesses than this.
        params: the request's options.
        sampler: who chooses the request's tokens, told of all ``tokens``: for drafters that choose from a distribution
            of their own as the target would. Whoever tells it of more takes that back.
        block_table: where the target's keys and values of the first ``block_table.length`` tokens are.
        costs: what a pass costs by its rows, if the drafter needs it and it is known.
        thrifty: whether guesses that do not pay for their time are to be left out.
        salt: only requests with the same one share what a cache has of their texts.
        draws: whether guesses are drawn where the rule of acceptance asks for it. Nothing is drawn for a proposal that
            the target will not see, as the numbers are for the one that it does.
        tries: whether somebody has decided that it is time to guess, though it may not have paid of late.
        allowance: seconds that the proposal may take, for those who choose (:attr:`Proposer.self_budgeting`).
    """

    state: State
    tokens: Sequence[int]
    max_depth: int
    max_nodes: int
    params: SamplingParams
    sampler: Sampler
    block_table: BlockTable
    costs: CostCurve | None = None
    thrifty: bool = False
    salt: bytes = b""
    draws: bool = True
    tries: bool = False
    allowance: float = math.inf

    @property
    def root(self) -> int:
        """Position of the last certain token, which tells the steps apart; with guesses behind it, too."""
        return self.block_table.length


@dataclass(frozen=True)
class Outcome(Generic[State]):
    """What the target said of one tree.

    Under the rejection rule what is said depends on the request's random numbers and on the guesses; a guess may not
    depend on those numbers in turn, so nothing of such a request may reach the guesses of another (``params.rejects``).

    Attributes:
        state: the request's state.
        tree: the tree as it was verified (the proposal, cut to the limits).
        path: its accepted nodes, from the first below the root on.
        committed: the tokens that this step added to the text: those of ``path`` and the bonus token, up to its end,
            and what was forced after them without asking (``guide_mode="jump"``).
        position: of the tree's root in the text, from 0.
        params: the request's options.
        logits: ``[nodes, vocab]`` of the tree if the drafter needs them, but for steps that it is not asked in, because
            guessing does not pay at the moment: ``None`` then.
        hidden: layer number to ``[nodes, hidden]`` for the layers that the drafter needs; empty where logits are left
            out.
        offered: what the drafter itself proposed, if others decided which of it was verified.
        behind: tokens of ``committed`` before its root.
    """

    state: State
    tree: TokenTree
    path: tuple[int, ...]
    committed: tuple[int, ...]
    position: int
    params: SamplingParams
    logits: Tensor | None = None
    hidden: Mapping[int, Tensor] = field(default_factory=dict)
    offered: TokenTree | None = None
    behind: int = 0

    @property
    def judged(self) -> tuple[TokenTree, tuple[int, ...]]:
        """The tree to learn from how often guesses are right, and its nodes that were.

        Nodes that were offered and not verified are judged, too: the text says what was right. Those behind what it
        has so far are left out, as nobody knows.
        """
        tree = self.offered
        if tree is None:
            return self.tree, self.path
        path = [0]
        for token in self.committed[self.behind :]:
            node = tree.child(path[-1], token)
            if node is None:
                return tree, tuple(path[1:])
            path.append(node)
        known = [node for node, parent in enumerate(tree.parents) if parent != path[-1]]
        return tree if len(known) == len(tree) else tree.keep(known), tuple(path[1:])

    @property
    def muted(self) -> Outcome[State]:
        """The same without what takes time to learn from."""
        return replace(self, logits=None, hidden={})


class SourceReport(NamedTuple):
    """A source of guesses that was asked in a step, for who wants to know why.

    Attributes:
        source: its name.
        why: ``"pays"``: it was expected to; ``"explores"``: to learn whether it would; ``"all"``: nobody chose.
        seconds: that it took.
        tree: what it offered.
        before: tokens to be expected of the best of what was offered before, and seconds of that pass; ``None`` where
            costs are not known.
        after: the same with what it offered.
    """

    source: str
    why: Literal["pays", "explores", "all"]
    seconds: float
    tree: TokenTree
    before: tuple[float, float] | None = None
    after: tuple[float, float] | None = None


class Drafter(ABC):
    """A way to guess, and its options: a value, that any number of models may be given.

    A subclass is one file and one line in the registry (:mod:`pronk.drafters.registry`). Two that are equal are the
    same to a model, so it has to be hashable, as a frozen dataclass is.

    Attributes:
        name: what the registry, the command line and messages call it.
    """

    name: str = "drafter"

    @abstractmethod
    def bind(self, target: Target) -> Proposer[Any]:
        """What guesses for the target by these options.

        Raises:
            OptionError: the two do not fit.
            CheckpointError: its own model cannot be loaded.
        """


class Proposer(Drafter, Generic[State]):
    """A drafter at work beside its target.

    One that has neither a model nor a memory is its own: it subclasses this, and is done.

    Attributes:
        capabilities: its optional behaviour; a subclass sets it on the class or on the object.
        target: the model that it was bound to; ``None`` if it goes with any.
        models: what it holds of :meth:`~pronk.speculation.target.Target.share`, its parts' included.
    """

    capabilities: Capabilities = Capabilities()
    target: Target | None = None
    models: tuple[object, ...] = ()

    @property
    def budget_owner(self) -> Proposer[Any]:
        """Whose requests draw on one fund of time (``pronk.speculation.request_budget``): its own, but where it serves another."""
        return self

    def bind(self, target: Target) -> Self:
        """Itself.

        Raises:
            OptionError: it was bound to another model.
        """
        if self.target is not None and self.target is not target:
            msg = f"{self.name}: expected the model that it was bound to, found another; bind its options to that one"
            raise OptionError(msg)
        return self

    @abstractmethod
    def start(self, prompt: Sequence[int]) -> State:
        """The state of a request: ``prompt`` is its prompt, and its output so far, if it goes on with a text."""

    @abstractmethod
    def propose(self, contexts: Sequence[DraftContext[State]]) -> list[TokenTree]:
        """One tree per context, rooted at its last token.

        One that raises costs its requests the guesses. Where guesses are drawn at random, whether it raises must not
        depend on what was drawn: a guess that its own token can take back has another law than its ``probs``.
        """

    @abstractmethod
    def observe(self, outcome: Outcome[State]) -> None:
        """Learn from a step; every context of the last ``propose`` has one outcome, unless its request has failed.

        Of steps that it was not asked in a guesser hears if it :attr:`observes_all_steps`.
        """

    def should_skip(self, state: State, tokens: Sequence[int]) -> bool:  # noqa: ARG002 - most never rest
        """Whether it need not be asked in this step, behind this text; it is said once for each step."""
        return False

    def source_reports(self, state: State) -> Sequence[SourceReport]:  # noqa: ARG002 - who asks others knows it by the state
        """Who of its sources was asked for the last proposal; nobody, where it is one source itself."""
        return ()

    def on_preempt(self, state: State) -> None:
        """The request has given its places away, and will be read again: so do those that its state holds.

        Places in caches of the guesser's own, that is. It may be asked again, or stopped; what it says then is what it
        would have said, once its caches have caught up with the text.
        """

    def stop(self, state: State) -> None:
        """The request has ended; give back what its state holds."""


def bind_proposer(drafter: Drafter, target: Target) -> Proposer[Any]:
    """What a drafter's ``bind`` gives, whoever wrote it.

    Raises:
        OptionError: it is no guesser; others are those of ``bind``.
    """
    found: object = drafter.bind(target)
    if not isinstance(found, Proposer):
        name = getattr(drafter, "name", type(drafter).__name__)
        msg = f"drafter {name}: expected a Guesser of its bind, found {type(found).__name__}; return one there"
        raise OptionError(msg)
    return found
