"""The interface of drafters.

A :class:`Drafter` holds options. :meth:`Drafter.bind` makes a :class:`Proposer` for a target model. The proposer
proposes one token tree per request (``propose``) and receives the verification result of each step (``observe``). It
may keep state per request. The state must be a function of the committed tokens and the outcomes, so that equal
histories give equal states; ``propose`` must not change the state. A proposer affects the number of forward passes and,
under the coupled rule, never the text. If a proposer raises an exception, the request continues without draft tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Self, TypeVar

from pronk.arrays import Array
from pronk.errors import OptionError
from pronk.kv_cache.blocks import BlockTable
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.speculation.cost_model import CostCurve
from pronk.speculation.target import Target
from pronk.speculation.tree import TokenTree

__all__ = ["Capabilities", "DraftContext", "Drafter", "Outcome", "Proposer", "SourceReport", "bind_proposer"]

State = TypeVar("State")

# Former to present attribute names of proposers. The engine ignores former names, so a proposer with one is refused.
_FORMER_ATTRIBUTES = {
    "needs": "capabilities",
    "listens": "capabilities.observes_all_steps",
    "chooses": "capabilities.self_budgeting",
    "insists": "capabilities.bypass_budget",
    "payer": "budget_owner",
    "skips": "should_skip",
    "give_way": "on_preempt",
    "expands": "proposes_tree",
    "proposes": "capabilities.proposes",
    "consulted": "source_reports",
}

# Former to present field names of DraftContext and Outcome, for the error message when a drafter reads a former one.
_FORMER_FIELDS = {
    "thrifty": "prune_unprofitable",
    "tries": "ignore_backoff",
    "allowance": "max_seconds",
    "judged": "evaluated",
    "muted": "without_tensors",
    "offered": "own_proposal",
    "behind": "proposal_offset",
    "chooser": "sampler",
    "table": "block_table",
}


class _FormerFields:
    """Base class whose ``AttributeError`` for a former field name contains the present name."""

    if not TYPE_CHECKING:  # if type checkers saw __getattr__, they would accept every attribute

        def __getattr__(self, name: str) -> Any:
            new = _FORMER_FIELDS.get(name)
            hint = f"; rename it to {new}" if hasattr(type(self), new or "") else ""
            msg = f"expected a field of {type(self).__name__}, found {name}{hint}"
            raise AttributeError(msg)


@dataclass(frozen=True)
class Capabilities:
    """Inputs that a proposer needs, and its behaviour.

    The *budget* of a request is the number of plain steps that drafting may still cost it (``RequestBudget``).

    Attributes:
        hidden: numbers of the layers to report in ``Outcome.hidden``, from 1 (the first layer).
        logits: whether to fill ``Outcome.logits``, also for nodes that are not ``TokenTree.acceptable``.
        costs: whether to fill ``DraftContext.costs``.
        proposes: whether the proposer ever proposes; if False, no KV slots are reserved for draft tokens.
        observes_all_steps: whether ``observe`` is also called for steps in which the request has no budget to draft; if
            False, the proposer finds the tokens of these steps in the next context.
        self_budgeting: whether the proposer limits its own cost by ``DraftContext.max_seconds``; if False, ``propose``
            is called only if the request's budget covers the usual cost of the proposer.
        bypass_budget: whether ``propose`` is called and draft tokens are verified regardless of cost.
    """

    hidden: tuple[int, ...] = ()
    logits: bool = False
    costs: bool = False
    proposes: bool = True
    observes_all_steps: bool = True
    self_budgeting: bool = False
    bypass_budget: bool = False


@dataclass(frozen=True)
class DraftContext(_FormerFields, Generic[State]):
    """Input of :meth:`Proposer.propose` for one request.

    Attributes:
        state: return value of :meth:`Proposer.start`.
        tokens: read-only text so far; the last token is the root of the tree to propose. If a composite proposer calls
            this one, the text may end with draft tokens of the composite proposer.
        max_depth: maximum depth of a draft token.
        max_nodes: maximum number of draft tokens.
        params: sampling options of the request.
        sampler: the request's sampler, positioned after ``tokens``; it samples draft tokens by the request's options.
            A proposer that advances the sampler must roll it back.
        block_table: target's KV blocks, which hold all committed tokens but the last.
        costs: cost of a forward pass by number of rows, if requested and measured.
        prune_unprofitable: whether to leave out draft tokens that cost more time than they save.
        salt: hashed into the keys of prefix caches, so that only requests with equal salts share cached blocks.
        draws: whether to draw draft tokens at random under the rejection and block rules. False if a composite proposer
            selects from the proposal, because the selected tokens would no longer have the drafter's distribution.
        ignore_backoff: whether to propose even if drafting was recently unprofitable, as the caller decided to draft.
        max_seconds: time limit of the proposal in seconds, for :attr:`Capabilities.self_budgeting` proposers.
    """

    state: State
    tokens: Sequence[int]
    max_depth: int
    max_nodes: int
    params: SamplingParams
    sampler: Sampler
    block_table: BlockTable
    costs: CostCurve | None = None
    prune_unprofitable: bool = False
    salt: bytes = b""
    draws: bool = True
    ignore_backoff: bool = False
    max_seconds: float = math.inf

    @property
    def root(self) -> int:
        """Position of the last committed token in ``tokens``; a composite proposer's draft tokens may follow."""
        return self.block_table.length


@dataclass(frozen=True)
class Outcome(_FormerFields, Generic[State]):
    """Verification result of one request's tree.

    Under the rejection and block rules (``params.rejects``) the result depends on the request's random numbers. Another
    request may have the same seed, hence the same numbers. Draft tokens must be independent of these numbers, so an
    outcome must not affect proposals for other requests.

    Attributes:
        state: the proposer's state of the request.
        tree: verified tree: the proposal, from which the engine may have removed nodes.
        path: accepted nodes in order, without the root.
        committed: tokens added to the text: those of ``path``, the bonus token, and the tokens forced by the guide
            (``guide_mode="jump"``). Tokens after the end of the text are left out.
        position: position of the tree's root in the text, from 0.
        params: sampling options of the request.
        logits: ``[nodes, vocab]`` if requested; ``None`` in steps in which the request has no budget to draft.
        hidden: layer number to layer output ``[nodes, hidden]``, before the final norm; ``{}`` in steps without budget.
        own_proposal: the proposer's own tree, if a composite proposer had ``tree`` verified instead; else ``None``.
        proposal_offset: index in ``committed`` of the first token after the root of ``own_proposal``.
    """

    state: State
    tree: TokenTree
    path: tuple[int, ...]
    committed: tuple[int, ...]
    position: int
    params: SamplingParams
    logits: Array | None = None
    hidden: Mapping[int, Array] = field(default_factory=dict)
    own_proposal: TokenTree | None = None
    proposal_offset: int = 0

    @property
    def evaluated(self) -> tuple[TokenTree, tuple[int, ...]]:
        """Tree to count in acceptance statistics, and the path of its nodes in the committed text.

        If the committed text ends at a node, its children are left out, because it is unknown whether they are correct.
        """
        tree = self.own_proposal
        if tree is None:
            return self.tree, self.path
        path = [0]
        for token in self.committed[self.proposal_offset :]:
            node = tree.child(path[-1], token)
            if node is None:
                return tree, tuple(path[1:])
            path.append(node)
        known = [node for node, parent in enumerate(tree.parents) if parent != path[-1]]
        return tree if len(known) == len(tree) else tree.keep(known), tuple(path[1:])

    @property
    def without_tensors(self) -> Outcome[State]:
        """Copy without logits and hidden states, for steps in which the request has no budget to draft."""
        return replace(self, logits=None, hidden={})


class SourceReport(NamedTuple):
    """Facts about one drafter's proposal within a composite drafter, for :mod:`pronk.explain`.

    Attributes:
        source: drafter name.
        reason: the composite drafter called this drafter for an expected gain (``"pays"``), to measure acceptance
            (``"explores"``), or because it called all drafters without a selection (``"all"``).
        seconds: duration of the proposal.
        tree: proposed tree.
        before: (expected tokens, expected seconds) of a forward pass without this proposal; ``None`` if not measured.
        after: (expected tokens, expected seconds) of a forward pass with this proposal; ``None`` if not measured.
    """

    source: str
    reason: Literal["pays", "explores", "all"]
    seconds: float
    tree: TokenTree
    before: tuple[float, float] | None = None
    after: tuple[float, float] | None = None


class Drafter(ABC):
    """Options of a drafting method.

    A new drafting method is one file and one line in the registry (:mod:`pronk.drafters.registry`). Equal options share
    one proposer per model, so a drafter must be hashable, like a frozen dataclass.

    Attributes:
        name: name in the registry, on the command line and in messages.
    """

    name: str = "drafter"

    @abstractmethod
    def bind(self, target: Target) -> Proposer[Any]:
        """Create a proposer for a target model.

        Raises:
            OptionError: the options do not fit the target.
            CheckpointError: the draft model cannot be loaded.
        """


class Proposer(Drafter, Generic[State]):
    """A drafter bound to a target model.

    A drafting method with neither a model nor memory across requests may subclass ``Proposer`` alone: ``bind`` returns
    the proposer itself.

    Attributes:
        capabilities: needed inputs and behaviour; set on the class or on the object.
        target: bound model; ``None`` if the proposer works with any model.
        models: models from :meth:`~pronk.speculation.target.Target.load_shared`, for inner proposers too.
    """

    capabilities: Capabilities = Capabilities()
    target: Target | None = None
    models: tuple[object, ...] = ()

    @property
    def budget_owner(self) -> Proposer[Any]:
        """Proposer whose :class:`SharedBudget` bears the cost of the proposals; by default this proposer."""
        return self

    def bind(self, target: Target) -> Self:
        """Return the proposer itself; raise ``OptionError`` if the proposer is bound to another model."""
        if self.target is not None and self.target is not target:
            msg = f"drafter {self.name}: expected its own model, found another; bind the options to the other model"
            raise OptionError(msg)
        return self

    @abstractmethod
    def start(self, prompt: Sequence[int]) -> State:
        """Return a request's initial state; a resumed request has its earlier output at the end of ``prompt``."""

    @abstractmethod
    def propose(self, contexts: Sequence[DraftContext[State]]) -> list[TokenTree]:
        """Return one tree per context, with the last token of ``context.tokens`` as the root.

        After an exception the requests continue without draft tokens. Whether an exception occurs must not depend on
        randomly drawn tokens: the draft tokens of the other steps would not have the distribution ``TokenTree.probs``.
        """

    @abstractmethod
    def observe(self, outcome: Outcome[State]) -> None:
        """Receive the verification result of one request in one step.

        Not called after steps without budget to draft, unless :attr:`Capabilities.observes_all_steps` is True.
        """

    def should_skip(self, state: State, tokens: Sequence[int]) -> bool:  # noqa: ARG002 - for overrides
        """Return whether to omit the request from ``propose`` in this step; called at most once per step."""
        return False

    def source_reports(self, state: State) -> Sequence[SourceReport]:  # noqa: ARG002 - for overrides
        """Return one :class:`SourceReport` per inner drafter that took part in the request's last proposal."""
        return ()

    def on_preempt(self, state: State) -> None:
        """Release the KV blocks that a preempted request holds in the proposer's own caches.

        The request resumes later or stops. If it resumes, its proposals must be the same as without the preemption.
        """

    def stop(self, state: State) -> None:
        """Release the resources of a request that has ended."""


def bind_proposer(drafter: Drafter, target: Target) -> Proposer[Any]:
    """Return ``drafter.bind(target)``; check that it is a proposer without former attribute names.

    Raises:
        OptionError: the options do not fit the target, or the result is no :class:`Proposer` or has a former attribute.
    """
    proposer: object = drafter.bind(target)
    name = getattr(drafter, "name", type(drafter).__name__)
    if not isinstance(proposer, Proposer):
        msg = f"drafter {name}: expected bind() to return a Proposer, found {type(proposer).__name__}; return one there"
        raise OptionError(msg)
    for old, new in _FORMER_ATTRIBUTES.items():
        if hasattr(proposer, old):
            msg = f"drafter {name}: expected no attribute {old}, found one; rename it to {new}"
            raise OptionError(msg)
    return proposer
