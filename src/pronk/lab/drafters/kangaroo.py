"""Kangaroo: the target's own first layers draft for it (*Kangaroo*, Liu et al. 2024).

The draft model is the target up to layer ``l``, a small trained adapter, and the target's head
(:mod:`pronk.lab.drafters.modules.kangaroo`). The chain ends after the first token with
``confidence <= eta`` (equation 4); this token is proposed too.

A draft token runs through the first ``l`` layers in a forward pass of its own
(:meth:`~pronk.models.model_runner.ModelRunner.run_first_layers`). Its keys and values of these
layers are stored in the target's KV slot of the token, where later tokens of the chain read them.
The paper's target then continues from these rows (section 3.2). Here the target verifies the chain
in an ordinary forward pass, which computes these rows again.

An adapter with attention has a KV cache of its own (:mod:`pronk.drafting.shared.module_runner`).
The adapter reads the outputs of layer ``l``, which the target's cache keeps for every token. Tokens
that the adapter did not draft (the prompt, bonus tokens, other drafters' tokens) are run through
the adapter at the next proposal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from pronk import Drafter, Proposer, TokenTree
from pronk.backends import BatchEntry, BlockTable, ForwardBatch, Program
from pronk.base import known_keywords
from pronk.base.arrays import Array
from pronk.base.checks import check_integer, check_number, check_path
from pronk.drafting import (
    Capabilities,
    Chain,
    ChainCosts,
    CostModel,
    DraftCache,
    DraftContext,
    DraftLogits,
    ModuleRunner,
    StepCosts,
    Stop,
    Target,
    TokenView,
    begin_chains,
    draft_chains,
    model_chain_costs,
)
from pronk.lab.drafters.modules.files import read_trained_drafter
from pronk.lab.drafters.modules.kangaroo import KangarooAdapter, KangarooShape


@dataclass
class ExitDraft:
    """One request's chain of draft tokens in one step."""

    chain: Chain  # the draft tokens so far
    num_computed: int = 0  # number of uncommitted tokens that have run through the first layers

    @property
    def block_table(self) -> BlockTable:
        """The request's KV blocks in the target's cache."""
        return self.chain.context.block_table

    @property
    def text(self) -> TokenView:
        """The request's text, then the draft tokens."""
        return TokenView(self.chain.context.tokens, self.chain.tokens)


class EarlyExit:
    """Drafting of several requests in shared passes: the target's first layers, then the adapter.

    ``module`` is the adapter with its KV pool; ``None`` if the adapter has no attention.

    As long as this object exists, the target's cache also stores the output of layer ``exit_layer``
    for every token. Raises OptionError if there is no memory for these outputs.
    """

    def __init__(self, target: Target, adapter: KangarooAdapter) -> None:
        self.target = target
        self.adapter = adapter
        self.exit_layer = adapter.shape.exit_layer
        self.runner = target.runner
        has_attention = adapter.shape.has_attention
        self.module = (
            ModuleRunner(target, adapter.config, adapter.compile_part) if has_attention else None
        )
        target.save_feature(self.exit_layer, self)
        self.cost_model = CostModel()
        self.relative_size = self.exit_layer / len(target.decoder.layers)
        self._program: Program | None = None

    def draft_chains(self, chains: Sequence[Chain]) -> None:
        """Draft the tokens of empty chains.

        The state of each chain's context is the request's KV cache of the adapter, or ``None`` for
        an adapter without attention.
        """
        drafts: dict[Chain, ExitDraft] = {}
        for chain in chains:
            draft = ExitDraft(chain)
            if self.reserve(draft):
                drafts[chain] = draft

        def next_logits(incomplete: Sequence[Chain]) -> list[DraftLogits]:
            return list(map(DraftLogits, self.next_logits([drafts[chain] for chain in incomplete])))

        draft_chains([*drafts], next_logits)

    def reserve(self, draft: ExitDraft) -> bool:
        """Allocate KV slots for the draft tokens in the adapter's pool.

        Returns False if the adapter's pool, or the target's cache, has too few slots.
        """
        context = draft.chain.context
        max_tokens = draft.chain.max_tokens
        length = len(context.tokens) + max_tokens
        if self.target.cache.allocator.num_missing(draft.block_table, length) > 0:
            return False  # the scheduler has allocated too few slots in the target's cache
        if self.module is None:
            return True
        # The text's last token is run again, because the first draft token needs the adapter's
        # output for the last token.
        context.state.rollback(len(context.tokens) - 1)
        return self.module.reserve(context, max_tokens)

    def next_logits(self, drafts: Sequence[ExitDraft]) -> Array:
        """Run the new tokens of each chain; return the logits of the next draft tokens.

        The logits are ``[drafts, vocab]`` float32.
        """
        start_time = self.target.clock()
        entries = list[BatchEntry]()
        # rows for the tokens that are not in the target's cache: the text's end, then the drafts
        for draft in drafts:
            new = TokenTree.chain(draft.text[draft.block_table.length :])
            entry = BatchEntry(
                draft.block_table,
                new,
                prompt_length=draft.chain.context.sampler.context.num_prompt,
                num_computed=draft.num_computed,
            )
            entries.append(entry)
        batch = ForwardBatch(entries)
        outputs = self.runner.run_first_layers(batch, self.exit_layer)
        for draft, entry in zip(drafts, entries, strict=True):
            draft.num_computed = len(entry.tree)
        if self.module is None:
            hidden = self._run_mlp_adapter(np.stack([rows[-1] for rows in outputs]))
        else:
            contexts = [draft.chain.context for draft in drafts]
            texts = [draft.text for draft in drafts]
            stops = [len(text) for text in texts]
            hidden = self.module.run_texts(
                contexts, texts, stops, self.exit_layer, lambda x, apply: apply(0, x)
            )
        logits = (self.adapter.head or self.target.decoder.head).logits(hidden)
        seconds = self.target.clock() - start_time
        self.cost_model.learn(batch.num_rows, batch.num_committed, seconds, plain=True)
        return logits

    def _run_mlp_adapter(self, rows: Array) -> Array:
        """Run an adapter without attention (kind ``mlp``) on rows ``[drafts, hidden]``."""
        if self._program is None:
            program = Program(self.target.decoder.kernels, rows.shape[1], rows.dtype)
            self.adapter.compile_part(0, program)
            self._program = program
        out = rows.copy()
        self._program.run(None, out)
        return out


@known_keywords
@dataclass(frozen=True)
class Kangaroo(Drafter):
    """Options of Kangaroo, which drafts with the target's first layers and a small adapter.

    Attributes:
        model: folder written by ``pronk train kangaroo``, or a Hub id. ``None`` is
            ``models/pronk-tiny-kangaroo`` of a clone of the repository, which fits only pronk-tiny.
        num_tokens: maximum number of draft tokens of a chain, 1..64; gamma in the paper.
        eta: a chain ends after a token of at most this confidence, 0..1; 0 turns the rule off.
    """

    name = "kangaroo"

    model: str | None = None
    num_tokens: int = 6
    eta: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_path(f"{self.name}: model", self.model)
        check_integer(f"{self.name}: num_tokens", self.num_tokens, 1, 64)
        check_number(f"{self.name}: eta", self.eta, 0, 1)

    def as_chains(self) -> Self:
        return self

    def bind(self, target: Target) -> KangarooProposer:
        trained = read_trained_drafter(self.name, self.model, "pronk-tiny-kangaroo", target)

        def load_early_exit() -> EarlyExit:
            shape = trained.make_shape(KangarooShape)
            return EarlyExit(target, trained.load(target, shape, KangarooAdapter))

        models = target.loaded_models
        early_exit = models.get_or_load(trained.folder, self.name, load=load_early_exit)
        return KangarooProposer(self, early_exit)


class KangarooProposer(Proposer[DraftCache | None]):
    """Proposes the chains that ``early_exit`` drafts with the target's first layers."""

    def __init__(self, options: Kangaroo, early_exit: EarlyExit) -> None:
        self.options = options
        self.early_exit = early_exit
        self.capabilities = Capabilities(
            first_layers=early_exit.exit_layer, observes_all_steps=False
        )
        self.name = options.name
        self.target = early_exit.target
        self.models = (early_exit,)
        self.model_name = options.model

    def start(self, prompt: Sequence[int]) -> DraftCache | None:  # noqa: ARG002 - the first proposal reads it
        module = self.early_exit.module
        return None if module is None else module.make_cache()

    def stop(self, state: DraftCache | None) -> None:
        if state is not None:
            state.release()

    on_preempt = stop  # for a preempted request, the next proposal fills new blocks

    def chain_costs(self, context: DraftContext[DraftCache | None], costs: StepCosts) -> ChainCosts:
        return model_chain_costs(self.early_exit, context, costs, self.options.num_tokens)

    def chains(
        self,
        contexts: Sequence[DraftContext[DraftCache | None]],
        stops: Sequence[Stop] | None = None,
    ) -> list[Chain]:
        chains = begin_chains(self, contexts, self.options.num_tokens, self._is_unsure, stops)
        self.early_exit.draft_chains([chain for chain in chains if not chain.is_full])
        return chains

    def propose(self, contexts: Sequence[DraftContext[DraftCache | None]]) -> list[TokenTree]:
        return [chain.tree() for chain in self.chains(contexts)]

    def _is_unsure(self, chain: Chain) -> bool:
        return chain.draft_tokens[-1].confidence <= self.options.eta
