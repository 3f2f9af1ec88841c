"""The interface of drafters.

A :class:`Drafter` holds options. :meth:`Drafter.bind` makes a :class:`Proposer` for a target model.
The proposer proposes one token tree per request (``propose``) and receives the verification result
of each step (``observe``). It may keep state per request, and it may combine other proposers, its
``parts``. The state must be a function of the committed tokens and the outcomes, so that equal
histories give equal states. ``propose`` must not change what later proposals depend on; it may
remember its own proposal for ``observe``, or results of its model. A proposer affects the number of
forward passes and, under the coupled rule, never the text. If a proposer raises an exception, the
request continues without draft tokens.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

from pronk.base.arrays import Array
from pronk.base.errors import OptionError, PronkError, describe_error
from pronk.base.options import check_options
from pronk.cache.blocks import BlockTable
from pronk.checkpoint.config import ModelConfig
from pronk.drafting.acceptance_stats import Counts, RequestAcceptance
from pronk.drafting.ledger import RequestLedger
from pronk.drafting.planner import EVERYTHING, DraftPlan
from pronk.drafting.step_costs import ChainCosts, StepCosts
from pronk.drafting.target import Target
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.sampling.tree import TokenTree

_log = logging.getLogger(__name__)

State = TypeVar("State")
Other = TypeVar("Other")

# A request's state of a proposer with parts: the state of each part, in order, and after them the
# proposer's own state if it has one.
States = tuple[Any, ...]


@dataclass(frozen=True)
class Capabilities:
    """Needs from the target, and behaviour, of a proposer.

    A drafter may need four things of the target; :func:`check_needs` refuses a need that the target
    does not fulfil:

    - *outputs of layers*, of the rows of a step (``hidden``), or of every token of the text
      (:meth:`~pronk.drafting.target.Target.save_feature`; ``computes_features``),
    - *logits* (``logits``),
    - *rows through the first layers*, to draft with a part of the target (``first_layers``),
    - *layers that read the target's keys and values* (``kv_layers``).

    Layers are numbered from 1.

    Attributes:
        hidden: numbers of the layers to report in ``Outcome.hidden``.
        computes_features: whether the drafter saves features that are functions of layer outputs.
            Not needed for a feature that is the unchanged output of one layer.
        logits: whether to fill ``Outcome.logits``, also for nodes that are not
            ``TokenTree.acceptable``.
        first_layers: number of the target's first layers through which the drafter runs rows
            (:meth:`~pronk.models.model_runner.ModelRunner.run_first_layers`); 0: none.
        kv_layers: numbers of the target's layers whose keys and values the drafter's own model
            reads (:class:`~pronk.models.program.KVSource`).
        proposes: False if the proposer never proposes; then no KV slots are reserved for draft
            tokens.
        observes_all_steps: whether ``observe`` is also called for steps in which the proposer was
            not asked; if False, the proposer finds the tokens of these steps in the next context.
        self_budgeting: whether ``propose`` itself asks the planner which of its parts may propose;
            if False, the engine asks before each call of ``propose``.
        bypass_budget: whether ``propose`` is called and all draft tokens are verified regardless of
            cost.
    """

    hidden: tuple[int, ...] = ()
    computes_features: bool = False
    logits: bool = False
    first_layers: int = 0
    kv_layers: tuple[int, ...] = ()
    proposes: bool = True
    observes_all_steps: bool = True
    self_budgeting: bool = False
    bypass_budget: bool = False


@dataclass  # not frozen, because frozen objects take four times as long to create
class DraftContext(Generic[State]):
    """Input of :meth:`Proposer.propose` for one request; read-only for the proposer.

    Attributes:
        state: return value of :meth:`Proposer.start`.
        tokens: read-only text so far; the last token is the root of the tree to propose. If a
            composite proposer calls this one, the text may end with draft tokens of the composite
            proposer.
        max_depth: maximum depth of a draft token.
        max_nodes: maximum number of draft tokens.
        params: sampling options of the request.
        sampler: the request's sampler, positioned after ``tokens``; it samples draft tokens by the
            request's options. A proposer that advances the sampler must roll it back.
        block_table: target's KV blocks, which hold all committed tokens but the last.
        plan: why the drafter proposes in this step, and which draft tokens are worth their time.
        ledger: measurements of the request, and what has been proposed in this step.
        salt: hashed into the keys of prefix caches, so that only requests with equal salts share
            cached blocks.
        draws: whether to draw draft tokens at random under the rejection and block rules. False if
            a composite proposer selects from the proposal, because the selected tokens would no
            longer have the drafter's distribution.
    """

    state: State
    tokens: Sequence[int]
    max_depth: int
    max_nodes: int
    params: SamplingParams
    sampler: Sampler
    block_table: BlockTable
    plan: DraftPlan = EVERYTHING
    ledger: RequestLedger = field(default_factory=RequestLedger)
    salt: bytes = b""
    draws: bool = True

    @property
    def acceptance(self) -> RequestAcceptance:
        """Acceptance rates of the request's draft tokens."""
        return self.ledger.acceptance

    @property
    def max_tokens(self) -> int:
        """Largest length of a chain of draft tokens, by the limits of depth and of nodes."""
        return min(self.max_depth, self.max_nodes)

    @property
    def max_future_tokens(self) -> int:
        """Largest number of tokens that can follow the text, draft tokens of this step included.

        It is the number of tokens that the request may still generate or, if that is larger, the
        maximum depth of this step's draft.
        """
        num_left = self.params.max_tokens - self.sampler.context.num_generated
        return max(self.max_depth, num_left)

    @property
    def root(self) -> int:
        """Index in ``tokens`` of the last committed token.

        Draft tokens of a composite proposer may follow.
        """
        return self.block_table.length

    def with_state(self, state: Other, **changes: Any) -> DraftContext[Other]:
        """Return a copy with another proposer's state, and ``changes`` of other fields.

        Faster than :func:`dataclasses.replace`.
        """
        copy: DraftContext[Other] = object.__new__(DraftContext)
        copy.__dict__.update(self.__dict__, state=state, **changes)
        return copy


@dataclass
class Outcome(Generic[State]):
    """Verification result of one request's tree; read-only.

    Under the rejection and block rules (``params.rejects``) the result depends on the request's
    random numbers. Another request may have the same seed, hence the same numbers. Draft tokens
    must be independent of these numbers, so an outcome must not affect proposals for other
    requests.

    Attributes:
        state: the proposer's state of the request.
        tree: verified tree: the proposal, from which the engine may have removed nodes.
        path: accepted nodes in order, without the root.
        committed: tokens added to the text: those of ``path``, the bonus token, and the tokens
            forced by the guide (``guide_mode="jump"``). Tokens after the end of the text are left
            out.
        position: position of the tree's root in the text, from 0.
        params: sampling options of the request.
        logits: ``[nodes, vocab]`` if requested, else ``None``.
        hidden: layer number to layer output ``[nodes, hidden]``, before the final norm; ``{}`` if
            not requested.
        ledger: the request's measurements, and the drafters that have proposed in this step.
    """

    state: State
    tree: TokenTree
    path: tuple[int, ...]
    committed: tuple[int, ...]
    position: int
    params: SamplingParams
    logits: Array | None = None
    hidden: Mapping[int, Array] = field(default_factory=dict)
    ledger: RequestLedger = field(default_factory=RequestLedger)

    @property
    def num_saved(self) -> int:
        """Number of plain steps that the accepted draft tokens made unnecessary.

        One fewer than the accepted tokens if the last of them ended the text: a plain step would
        have given it.
        """
        return max(0, min(len(self.path), len(self.committed) - 1))

    def with_state(self, state: Other) -> Outcome[Other]:
        """Return a copy with the state of another proposer."""
        copy: Outcome[Other] = object.__new__(Outcome)
        copy.__dict__.update(self.__dict__, state=state)
        return copy


class Drafter(ABC):
    """Options of a drafting method.

    A subclass is a frozen dataclass whose fields are the options: equal options share one proposer
    per model, so a drafter must be hashable. A field that declares an
    :class:`~pronk.base.options.Option` is checked when the drafter is made; a subclass with a
    ``__post_init__`` of its own calls ``super().__post_init__()`` there.

    An object can be used at once, ``LLM(drafter=Mine())``. A package registers the class by an
    entry point of the group ``pronk.drafters``, and then ``"mine(…)"`` makes it, too.
    ``docs/methods/writing.md`` shows both.

    Attributes:
        name: name in specifications such as ``"mine(num_tokens=3)"``, in messages and in
            statistics; equal to the name of the entry point.
        row_options: names of the options that are numbers of draft tokens of a step. Their values
            must not exceed ``Target.max_tree`` (:func:`bind_proposer`).
    """

    name: str = "drafter"
    row_options: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Check the declared options (:mod:`pronk.base.options`) of a dataclass.

        Raises ``OptionError`` for the first value of another type or out of its range.
        """
        check_options(self, f"{self.name}: ")

    @abstractmethod
    def bind(self, target: Target) -> Proposer[Any]:
        """Create a proposer for a target model.

        Raises:
            OptionError: the options do not fit the target.
            CheckpointError: a file of the drafter, such as a draft model, a table or a datastore,
                cannot be loaded.
        """

    def find_default(
        self,
        folder: Path | None,  # noqa: ARG002 - for overrides
        config: ModelConfig,  # noqa: ARG002 - for overrides
    ) -> Path | None:
        """Return the file or folder of this drafter that comes with a target model.

        The drafter ``auto`` uses these files, and ``pronk info`` lists them.

        Args:
            folder: checkpoint folder or GGUF file of the target; ``None`` if unknown.
            config: config of the target.

        Returns:
            The file or folder; ``None`` if there is none.
        """
        return None

    def as_chains(self) -> Drafter | None:
        """Return this drafter with options by which it proposes chains, without siblings.

        Return the drafter itself if it proposes chains already, and ``None`` if it cannot. The
        drafters ``cape`` and ``threshold`` wrap a drafter of chains, whose proposer has a method
        ``chains`` (:mod:`pronk.drafting.shared.chain`).
        """
        return None

    def for_adapter(self) -> Drafter | None:
        """Return the options of a proposer that serves only the requests of one LoRA adapter.

        ``None``: one proposer serves the requests of all adapters.

        A drafter that drafts from texts of earlier requests overrides this method. Texts of another
        adapter give worse draft tokens, and response times would reveal them. A proposer that a
        caller passes in place of its options serves all adapters.
        """
        return None


class Proposer(Drafter, Generic[State]):
    """A drafter bound to a target model.

    A drafting method with neither a model nor memory across requests may subclass ``Proposer``
    alone: ``bind`` returns the proposer itself. Only :meth:`propose` is abstract. By default, the
    state of a request is the tuple of the states of ``parts``, which is empty without parts.

    Attributes:
        capabilities: needs of the target, and behaviour; set on the class or on the object.
        target: bound model; ``None`` if the proposer works with any model.
        model_name: folder or Hub id of the drafter's own model, if the options name one.
        models: models from ``target.loaded_models``, those of the parts included.
        known_acceptance: by label, acceptance counts on other texts, with which an engine begins;
            those of the parts included.
        parts: the proposers that this one combines, set by :meth:`set_parts`. They are started,
            informed and stopped together with it.
    """

    capabilities: Capabilities = Capabilities()
    target: Target | None = None
    model_name: str | None = None
    models: tuple[object, ...] = ()
    known_acceptance: Mapping[str, Counts] = MappingProxyType({})
    parts: tuple[Proposer[Any], ...] = ()

    @cached_property
    def label(self) -> str:
        """Name in ``TokenTree.origin`` and in the statistics; different for each draft model."""
        return self.name if self.model_name is None else f"{self.name} {Path(self.model_name).name}"

    @cached_property
    def chain_label(self) -> str:
        """Name in the acceptance statistics for draft tokens that are drafted as a chain."""
        return self.label

    @cached_property
    def observes(self) -> bool:
        """Whether outcomes are passed to :meth:`observe`: it is overridden, here or by a part."""
        is_overridden = type(self).observe is not Proposer.observe
        return is_overridden or any(part.observes for part in self.parts)

    def set_parts(self, parts: Sequence[Proposer[Any]]) -> None:
        """Set ``parts``, and the attributes that follow from them.

        These are ``models``, ``known_acceptance`` and ``capabilities``.
        """
        self.parts = tuple(parts)
        self.models = tuple(model for part in self.parts for model in part.models)
        self.known_acceptance = dict(
            item for part in self.parts for item in part.known_acceptance.items()
        )
        needs = [part.capabilities for part in self.parts]
        self.capabilities = Capabilities(
            hidden=tuple(sorted({layer for each in needs for layer in each.hidden})),
            computes_features=any(each.computes_features for each in needs),
            logits=any(each.logits for each in needs),
            first_layers=max((each.first_layers for each in needs), default=0),
            kv_layers=tuple(sorted({layer for each in needs for layer in each.kv_layers})),
            proposes=any(each.proposes for each in needs),
            observes_all_steps=any(each.observes_all_steps for each in needs),
            self_budgeting=all(each.self_budgeting for each in needs),
        )

    def drafts_for(self, params: SamplingParams) -> bool:  # noqa: ARG002 - for overrides
        """Return whether the proposer may have draft tokens for requests with these options.

        The planner does not consider it for other requests.
        """
        return True

    def chain_costs(
        self,
        context: DraftContext[State],  # noqa: ARG002 - for overrides
        costs: StepCosts,  # noqa: ARG002 - for overrides
    ) -> ChainCosts | None:
        """Return the expected seconds per draft token, if the drafter drafts token by token.

        The planner compares them with the ``costs`` of the target's step. ``None`` for proposers
        that make a whole proposal at once; the planner uses their measured durations.
        """
        return None

    def score_history(self, context: DraftContext[State]) -> bool:  # noqa: ARG002 - for overrides
        """Measure the drafter's acceptance rate on known tokens of the text, instead of proposing.

        One forward pass of the drafter's model over tokens that it has not read gives its choice at
        each of them, which is compared with the text. This measures more than a few draft tokens
        would. Return False if the drafter cannot do this, or if fewer than 16 tokens are unread; it
        then proposes draft tokens.
        """
        return False

    def bind(self, target: Target) -> Self:
        """Check that the proposer works with this target, and return it.

        Raises ``OptionError`` if the proposer or one of its parts is bound to another model.
        """
        if self.target is not None and self.target is not target:
            msg = (
                f"drafter {self.name}: expected its own model, found another; bind the options to "
                "the other model"
            )
            raise OptionError(msg)
        for part in self.parts:
            part.bind(target)
        return self

    def start(self, prompt: Sequence[int]) -> State:
        """Return a request's initial state.

        A resumed request has its earlier output at the end of ``prompt``.

        By default it is the tuple of the states of all parts. If a part raises an error, the parts
        that have started are stopped.
        """
        states: list[Any] = []
        try:
            for part in self.parts:
                states.append(part.start(prompt))  # noqa: PERF401 - the started ones are stopped after an error
        except BaseException:
            with suppress(Exception):
                self.stop(cast("State", tuple(states)))
            raise
        return cast("State", tuple(states))

    @abstractmethod
    def propose(self, contexts: Sequence[DraftContext[State]]) -> list[TokenTree]:
        """Return one tree per context, with the last token of ``context.tokens`` as the root.

        After an exception the requests continue without draft tokens. Whether an exception occurs
        must not depend on randomly drawn tokens: the draft tokens of the other steps would not have
        the distribution ``TokenTree.probs``.
        """

    def observe(self, outcome: Outcome[State]) -> None:
        """Receive the verification result of one request in one step.

        By default it is passed to each part that observes outcomes (:attr:`observes`).

        Not called after steps in which the proposer was not asked, unless it
        ``observes_all_steps``.
        """
        for part, state in self._states_of_parts(outcome.state):
            if part.observes:
                part.observe(outcome.with_state(state))

    def on_preempt(self, state: State) -> None:
        """Release the KV blocks that a preempted request holds in the proposer's own caches.

        The request resumes later or stops. If it resumes, its proposals should be those without the
        preemption; a drafter that skips the beginning of long texts may propose others.
        """
        for part, part_state in self._states_of_parts(state):
            part.on_preempt(part_state)

    def stop(self, state: State) -> None:
        """Release the resources of a request that has ended.

        By default every part is stopped, in order, even if one raises an error; then the first
        error is raised.
        """
        errors = []
        for part, part_state in self._states_of_parts(state):
            try:
                part.stop(part_state)
            except Exception as error:  # noqa: BLE001 - raised after the other parts have stopped
                errors.append(error)
        if errors:
            raise errors[0]

    def _states_of_parts(self, state: Any) -> Iterator[tuple[Proposer[Any], Any]]:
        """Yield each part with its state.

        After an error in :meth:`start`, parts that have not started are left out.
        """
        return zip(self.parts, state if self.parts else (), strict=False)


def bind_proposer(drafter: Drafter, target: Target) -> Proposer[Any]:
    """Return ``drafter.bind(target)``.

    Raises:
        OptionError: the options do not fit the target or ask for more rows than it verifies,
            ``bind`` raises an error that is not pronk's or returns no :class:`Proposer`, or the
            proposer needs what the target lacks (:func:`check_needs`).
        PronkError: one that ``bind`` raises.
    """
    name = getattr(drafter, "name", type(drafter).__name__)
    for option in getattr(drafter, "row_options", ()):
        value = getattr(drafter, option)
        if value is not None:
            target.check_rows(f"{name}: {option}", value if isinstance(value, int) else len(value))
    try:
        proposer: object = drafter.bind(target)
    except PronkError:
        raise
    except Exception as error:  # drafters are user code
        _log.debug("traceback of %s", name, exc_info=error)
        found = f"{type(error).__name__}: {describe_error(error)}"
        msg = f"drafter {name}: expected bind() to return a Proposer, found {found}; correct it"
        raise OptionError(msg) from error
    if not isinstance(proposer, Proposer):
        msg = (
            f"drafter {name}: expected bind() to return a Proposer, found "
            f"{type(proposer).__name__}; return one there"
        )
        raise OptionError(msg)
    check_needs(name, proposer.capabilities, target)
    return proposer


def check_needs(name: str, needs: Capabilities, target: Target) -> None:
    """Refuse a drafter that needs what the target lacks, before anything is generated.

    :func:`bind_proposer` checks every proposer. A drafter may also call this function before it
    loads a large model of its own.

    Args:
        name: name of the drafter, for error messages.
        needs: its capabilities.
        target: target model. Its config limits its layers, and a target on several processes lacks
            a whole KV cache.

    Raises:
        OptionError: the target lacks a layer, or its KV cache or computation is split among several
            processes where the drafter needs it in one.
    """
    config = target.decoder.config
    for field_name, layers in (("hidden", needs.hidden), ("kv_layers", needs.kv_layers)):
        for layer in layers:
            if not 1 <= layer <= config.num_layers:
                msg = (
                    f"{name}: expected layers 1 to {config.num_layers} of the target in "
                    f"capabilities.{field_name}, found {layer!r}"
                )
                raise OptionError(msg)
    if not 0 <= needs.first_layers <= config.num_layers:
        msg = (
            f"{name}: expected at most the {config.num_layers} layers of the target in "
            f"capabilities.first_layers, found {needs.first_layers!r}"
        )
        raise OptionError(msg)
    without_keys = [layer for layer in needs.kv_layers if not config.has_attention(layer - 1)]
    if without_keys:
        found = config.describe_mixer(without_keys[0] - 1)
        msg = (
            f"{name}: expected target layers with attention in capabilities.kv_layers, found "
            f"{found} in layer {without_keys[0]}"
        )
        raise OptionError(msg)
    if needs.kv_layers and target.is_split:
        msg = (
            f"{name}: expected the target's whole KV cache in one process, found it split; use "
            "parallel='tree'"
        )
        raise OptionError(msg)
    if needs.kv_layers and not target.cache.is_in_memory:
        msg = (
            f"{name}: expected the target's KV cache in the machine's memory, found it on another "
            "device; use device='cpu'"
        )
        raise OptionError(msg)
    if needs.computes_features and not target.cache.can_compute_features:
        msg = (
            f"{name}: expected a target in one process, found one on several; load it without "
            "workers"
        )
        raise OptionError(msg)
