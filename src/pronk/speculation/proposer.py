"""The interface of drafters.

A :class:`Drafter` holds options. Bound to a target model it yields a :class:`Proposer`, which proposes one token tree
per request (``propose``) and receives the verification result of each step (``observe``). A proposer may keep state per
request. The state must be a function of the committed tokens and the outcomes, so that equal histories give equal
states; ``propose`` must not change it. A proposer affects the number of forward passes and never the text. If a
proposer raises an exception, the request continues without draft tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Self, TypeVar

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

# Former attribute names of proposers. The engine ignores them, so a proposer that defines one is refused.
_RENAMED = {
    "needs": "capabilities",
    "listens": "capabilities.observes_all_steps",
    "chooses": "capabilities.self_budgeting",
    "insists": "capabilities.bypass_budget",
    "payer": "budget_owner",
    "skips": "should_skip",
    "give_way": "on_preempt",
    "expands": "proposes_tree",
}

# Former field names of DraftContext and of Outcome, for the error of a drafter that still reads them.
_RENAMED_FIELDS = {
    "thrifty": "prune_unprofitable",
    "tries": "ignore_backoff",
    "allowance": "max_seconds",
    "judged": "evaluated",
    "muted": "without_tensors",
    "offered": "own_proposal",
    "behind": "proposal_offset",
}


class _FormerFields:
    """Base of the values passed to drafters: an error about a former field names the present one."""

    if not TYPE_CHECKING:  # type checkers would accept every attribute

        def __getattr__(self, name: str) -> Any:
            new = _RENAMED_FIELDS.get(name)
            hint = f"; rename it to {new}" if hasattr(type(self), new or "") else ""
            msg = f"expected a field of {type(self).__name__}, found {name}{hint}"
            raise AttributeError(msg)


@dataclass(frozen=True)
class Capabilities:
    """Optional behaviour of a proposer.

    Attributes:
        hidden: layers whose output is read at every node, from 1 (the first layer); before the final norm.
        logits: whether the logits of every node are read, including nodes that cannot be accepted.
        costs: whether the measured cost of forward passes is read.
        proposes: whether the proposer ever proposes; if False, no KV slots are reserved for draft tokens.
        observes_all_steps: whether the outcomes of steps without a proposal are needed; if False, the proposer reads
            the missed tokens from the next context.
        self_budgeting: whether the proposer limits its own cost by ``DraftContext.max_seconds``; if False, the engine
            calls it only if the request's budget covers its usual cost.
        bypass_budget: whether draft tokens are verified regardless of cost.
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
        tokens: read-only text so far; its last token is the root of the tree to propose. ``block_table`` holds all
            tokens but the last. In a proposer wrapped by another one, draft tokens of the wrapper may follow.
        max_depth: maximum depth of a draft token.
        max_nodes: maximum number of draft tokens.
        params: sampling options of the request.
        sampler: the request's sampler at the end of ``tokens``, for drafters that sample from their own distribution
            as the target would. A caller that advances the sampler must roll it back.
        block_table: target's KV blocks of the first ``block_table.length`` tokens.
        costs: cost of a forward pass by number of rows, if requested and measured.
        prune_unprofitable: whether to leave out draft tokens that cost more time than they save.
        salt: key of prefix caches; only requests with equal salts share cached blocks.
        draws: whether to draw draft tokens at random under a rejection rule. False for intermediate proposals that
            the target never verifies, as the random numbers belong to the final proposal.
        ignore_backoff: whether the caller has already decided to draft, even if drafting was recently unprofitable.
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
        """Position of the last committed token, also if draft tokens follow it in ``tokens``."""
        return self.block_table.length


@dataclass(frozen=True)
class Outcome(_FormerFields, Generic[State]):
    """Verification result of one request's tree.

    Under a rejection rule (``params.rejects``) the result depends on the request's random numbers. Draft tokens must
    not depend on these numbers, so a proposer must not use such an outcome for proposals to other requests.

    Attributes:
        state: the request's state.
        tree: verified tree (the proposal, cut to the limits).
        path: accepted nodes in order, without the root.
        committed: tokens added to the text: those of ``path``, the bonus token, and the tokens forced by the guide
            (``guide_mode="jump"``); cut at the end of the text.
        position: position of the tree's root in the text, from 0.
        params: sampling options of the request.
        logits: ``[nodes, vocab]`` if requested; ``None`` in steps in which the policy suspends the drafter.
        hidden: layer number to ``[nodes, hidden]`` for the requested layers; empty in suspended steps.
        own_proposal: the drafter's own proposal, if a composite drafter verified a different tree.
        proposal_offset: number of tokens of ``committed`` before the root of ``own_proposal``.
    """

    state: State
    tree: TokenTree
    path: tuple[int, ...]
    committed: tuple[int, ...]
    position: int
    params: SamplingParams
    logits: Tensor | None = None
    hidden: Mapping[int, Tensor] = field(default_factory=dict)
    own_proposal: TokenTree | None = None
    proposal_offset: int = 0

    @property
    def evaluated(self) -> tuple[TokenTree, tuple[int, ...]]:
        """Tree and correct nodes for acceptance statistics, including proposed nodes that were not verified.

        The committed text shows which proposed nodes are correct. Nodes beyond the committed text are left out.
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
        """Copy without logits and hidden states, for steps in which the policy suspends the drafter."""
        return replace(self, logits=None, hidden={})


class SourceReport(NamedTuple):
    """Report of one drafter's proposal, for :mod:`pronk.explain`.

    Attributes:
        source: drafter name.
        reason: ``"pays"`` (expected gain), ``"explores"`` (to measure acceptance), or ``"all"`` (no selection).
        seconds: duration of the proposal.
        tree: proposed tree.
        before: expected tokens and forward-pass seconds without this proposal; ``None`` without measured costs.
        after: expected tokens and forward-pass seconds with this proposal.
    """

    source: str
    reason: Literal["pays", "explores", "all"]
    seconds: float
    tree: TokenTree
    before: tuple[float, float] | None = None
    after: tuple[float, float] | None = None


class Drafter(ABC):
    """Options of a drafting method.

    A new method is one file and one line in the registry (:mod:`pronk.drafters.registry`). Equal options share one
    proposer per model, so a drafter must be hashable, like a frozen dataclass.

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

    A drafter without a model and without memory across requests subclasses ``Proposer`` directly.

    Attributes:
        capabilities: optional behaviour; set on the class or on the object.
        target: bound model; ``None`` if the proposer works with any model.
        models: models from :meth:`~pronk.speculation.target.Target.load_shared`, including those of wrapped proposers.
    """

    capabilities: Capabilities = Capabilities()
    target: Target | None = None
    models: tuple[object, ...] = ()

    @property
    def budget_owner(self) -> Proposer[Any]:
        """Proposer whose shared budget pays for proposals; a wrapper returns the wrapped proposer."""
        return self

    def bind(self, target: Target) -> Self:
        """Return the proposer itself; raise ``OptionError`` if the proposer is bound to another model."""
        if self.target is not None and self.target is not target:
            msg = f"drafter {self.name}: expected its own model, found another; bind the options to the other model"
            raise OptionError(msg)
        return self

    @abstractmethod
    def start(self, prompt: Sequence[int]) -> State:
        """Return the state of a new request; ``prompt`` includes the output of a resumed request."""

    @abstractmethod
    def propose(self, contexts: Sequence[DraftContext[State]]) -> list[TokenTree]:
        """Return one tree per context, rooted at its last token.

        After an exception the requests continue without draft tokens. An exception must not depend on randomly drawn
        tokens: discarding a draft token by its value changes its distribution from its ``probs``.
        """

    @abstractmethod
    def observe(self, outcome: Outcome[State]) -> None:
        """Receive the outcome of a step, one per context of the last ``propose`` except for failed requests.

        With :attr:`Capabilities.observes_all_steps` it is also called for steps without a proposal.
        """

    def should_skip(self, state: State, tokens: Sequence[int]) -> bool:  # noqa: ARG002 - for overrides
        """Return whether to skip the proposal in this step; called once per step."""
        return False

    def source_reports(self, state: State) -> Sequence[SourceReport]:  # noqa: ARG002 - for overrides
        """Return one report per wrapped drafter of the last proposal; empty for a single drafter."""
        return ()

    def on_preempt(self, state: State) -> None:
        """Release the KV blocks that the state holds in the proposer's own caches; the request was preempted.

        The request may resume or stop. After resuming, proposals must be the same as without the preemption.
        """

    def stop(self, state: State) -> None:
        """Release the resources of a request that has ended."""


def bind_proposer(drafter: Drafter, target: Target) -> Proposer[Any]:
    """Bind a drafter to a target and check the result of its ``bind``.

    Raises:
        OptionError: ``bind`` raises it, returns no :class:`Proposer`, or returns one with an old attribute name.
    """
    proposer: object = drafter.bind(target)
    name = getattr(drafter, "name", type(drafter).__name__)
    if not isinstance(proposer, Proposer):
        msg = f"drafter {name}: expected bind() to return a Proposer, found {type(proposer).__name__}; return one there"
        raise OptionError(msg)
    for old, new in _RENAMED.items():
        if hasattr(proposer, old):
            msg = f"drafter {name}: expected no attribute {old}, found one; rename it to {new}"
            raise OptionError(msg)
    return proposer
