"""The drafter ``auto``, the default: all drafters that are installed, each where it pays.

The planner (:mod:`pronk.drafting.planner`) calls the drafters one after the other. A drafter is
called only if the tokens that it is expected to add to those of the drafters before it save more
time than it takes. The proposal is the union of their trees. Drafters given as ``parts`` are added,
and replace the drafters of the same kind. ``docs/methods/auto.md`` lists them. Where further rows
of a forward pass are free, drafters that need many rows are asked, too
(:mod:`pronk.drafting.combined._wide`).

Token recycling is left out if there is a head: both propose successors of each token, and beside
SmolLM2's head recycling costs more time than it saves (``docs/log.md``).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pronk.base.checks import check_flag, check_integer
from pronk.base.errors import CheckpointError, OptionError, PronkError
from pronk.base.keywords import known_keywords
from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.hub.model_identity import model_names
from pronk.drafting.combined._wide import WideSiblings, free_rows, is_wide
from pronk.drafting.from_outputs.recycling import Recycling
from pronk.drafting.from_text.prediction import Prediction
from pronk.drafting.from_text.suffix import Suffix
from pronk.drafting.planned_calls import observe_planned, propose_planned
from pronk.drafting.proposer import (
    DraftContext,
    Drafter,
    Outcome,
    Proposer,
    States,
    check_needs,
)
from pronk.drafting.registry import make_drafter
from pronk.drafting.shared.composite import Composite
from pronk.drafting.target import Target
from pronk.drafting.tree_union import TreeUnion
from pronk.models.pairs import find_pairs
from pronk.sampling.tree import TokenTree
from pronk.sampling.tree_size import MAX_TREE

# Drafters whose trained heads may come with a target model, in order of preference.
_HEADS = ("eagle3", "mtp", "gemma4_assistant", "multi_token")


@known_keywords
@dataclass(frozen=True)
class Auto(Composite):
    """Options of ``auto``.

    Attributes:
        parts: drafters in addition to the installed ones; a part replaces the installed drafter of
            the same kind.
        bundled: whether to use the draft model ``pronk-tiny-draft`` of a clone of the repository,
            if it has the target's vocabulary and no other draft model or head is found.
        num_nodes: maximum number of draft tokens per step, 1..1023. Draft tokens whose rows are
            free do not count.
    """

    name = "auto"
    row_options = ("num_nodes",)

    parts: tuple[Drafter, ...] = ()
    bundled: bool = True
    num_nodes: int = 31

    def __post_init__(self) -> None:
        if self.parts == ():  # a composite drafter refuses no parts
            Drafter.__post_init__(self)
        else:
            super().__post_init__()
        check_flag(f"{self.name}: bundled", self.bundled)
        check_integer(f"{self.name}: num_nodes", self.num_nodes, 1, MAX_TREE - 1)

    def bind(self, target: Target) -> AutoProposer:
        given = self.bind_parts(target)
        names = _names(given)
        with_model = [each for each in given if each.models] or self._find(target)
        installed: list[Drafter] = [Prediction(), Suffix(store_tokens=0)]
        if _names(with_model).isdisjoint(_HEADS):
            installed.append(Recycling())
        without_model = [
            *(each.bind(target) for each in installed if each.name not in names),
            *(each for each in given if not each.models),
        ]
        wide = [] if "lookahead" in names else _bind_installed("lookahead", target)
        return AutoProposer(self, [*without_model, *with_model], target, wide)

    def _find(self, target: Target) -> list[Proposer[Any]]:
        """Return the first drafter with a model that works with the target without any option.

        It is a head that comes with the target, a listed head or draft model that is on this
        machine, or ``pronk-tiny-draft``. The list is empty if none of them works. A head or listed
        draft model whose file is damaged or incomplete is left out with a warning.
        """
        found: list[Drafter | str] = [*find_heads(target.folder, target.decoder.config)]
        if target.folder is not None:
            pairs = find_pairs(model_names(target.folder, target.decoder.config))
            found += [pair.specification for pair in pairs if pair.is_here]
        num_trained = len(found)
        if self.bundled:
            found += ["cape(draft_model)", "draft_model"]
        for number, drafter in enumerate(found):
            # The drafter may not work here: no clone of the repository, another vocabulary or size,
            # too little memory, or a missing package. Any other error is a fault, and is not hidden
            # as bind_proposer() would do.
            try:
                proposer = _with_wide_siblings(make_drafter(drafter), target)
                check_needs(proposer.name, proposer.capabilities, target)
            except CheckpointError as error:
                if number < num_trained:
                    warnings.warn(f"auto: drafter left out: {error}", stacklevel=2)
            except PronkError:
                continue
            else:
                return [proposer]
        return []


def _bind_installed(name: str, target: Target) -> list[Proposer[Any]]:
    """Return the proposer of a drafter; empty if it is not installed or does not fit the target."""
    with suppress(PronkError):
        proposer = make_drafter(name).bind(target)
        check_needs(proposer.name, proposer.capabilities, target)
        return [proposer]
    return []


def _with_wide_siblings(drafter: Drafter, target: Target) -> Proposer[Any]:
    """Bind a drafter, with the siblings of ``cape`` in wide steps if it drafts chains."""
    with suppress(OptionError):  # cape is not installed, or the drafter proposes trees
        cape = make_drafter("cape")
        assert isinstance(cape, Composite)
        cape = replace(cape, parts=(drafter,))
        return WideSiblings(cape.bind(target))
    return drafter.bind(target)


def find_heads(folder: Path | None, config: ModelConfig) -> dict[Drafter, Path]:
    """Return the drafters whose heads come with a target model, in order of preference.

    Drafters of missing packages are left out.

    Args:
        folder: checkpoint folder or GGUF file of the target; ``None`` if unknown.
        config: config of the target.

    Returns:
        The folder or file of each drafter's head.
    """
    drafters = []
    for name in _HEADS:
        with suppress(PronkError):
            drafters.append(make_drafter(name))
    heads = {drafter: drafter.find_default(folder, config) for drafter in drafters}
    return {drafter: head for drafter, head in heads.items() if head is not None}


def _names(proposers: Sequence[Proposer[Any]]) -> set[str]:
    """Return the names of proposers and, recursively, of their parts."""
    parts = [part for each in proposers for part in each.parts]
    return {each.name for each in proposers} | (_names(parts) if parts else set())


class AutoProposer(Proposer[States]):
    """Proposes the union of several drafters' trees, each drafter where it saves time."""

    name = Auto.name

    def __init__(
        self,
        options: Auto,
        parts: Sequence[Proposer[Any]],
        target: Target,
        wide: Sequence[Proposer[Any]] = (),
    ) -> None:
        """Combine proposers, of which those of ``wide`` are asked in wide steps only."""
        self._num_always = sum(part.capabilities.proposes for part in parts)
        self.set_parts([part for part in (*parts, *wide) if part.capabilities.proposes])
        self.options = options
        self.clock = target.clock
        wrapped = [part.capabilities for part in self.parts]
        # other drafters get logits in the steps in which they propose
        logits = any(each.logits and each.observes_all_steps for each in wrapped)
        self.capabilities = replace(self.capabilities, logits=logits, self_budgeting=True)

    def propose(self, contexts: Sequence[DraftContext[States]]) -> list[TokenTree]:
        unions: list[TreeUnion] = []
        num_free: list[int] = []
        wide_contexts: list[DraftContext[States]] = []
        wide_unions: list[TreeUnion] = []
        for context in contexts:
            costs = context.ledger.costs
            unions.append(TreeUnion(costs))
            num_free.append(free_rows(costs))
            if is_wide(num_free[-1]):
                wide_contexts.append(context)
                wide_unions.append(unions[-1])
        for number, part in enumerate(self.parts):
            if number < self._num_always:
                propose_planned(part, contexts, unions, self.clock, part=number)
            elif wide_contexts:
                propose_planned(part, wide_contexts, wide_unions, self.clock, part=number)
        trees = []
        for context, union, free in zip(contexts, unions, num_free, strict=True):
            max_nodes = min(max(self.options.num_nodes, free - 1), context.max_nodes)
            trees.append(union.tree(context.tokens[-1], max_nodes))
        return trees

    def observe(self, outcome: Outcome[States]) -> None:
        for number, part in enumerate(self.parts):
            observe_planned(part, outcome, self.clock, number)
