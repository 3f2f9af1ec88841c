"""Drafts with the target's own first layers, a trained adapter, and a head (Kangaroo).

A draft token runs through the first ``l`` layers only once. Its keys and values, and its output of layer ``l``, are
stored in the target's KV slots of the token. The target's forward pass reads them there and computes only the later
layers of such an *early row*.

An adapter with attention has a KV cache of its own (:mod:`pronk.drafters.shared.side_cache`). From the outputs of layer
``l``, which the target's cache keeps, tokens that the adapter did not draft (the prompt, bonus tokens, other drafters'
tokens) are run through the adapter at the next proposal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pronk.arrays import Array, is_finite
from pronk.drafters.from_target.modules.files import TrainedDrafter
from pronk.drafters.from_target.modules.kangaroo import KangarooAdapter, KangarooShape
from pronk.drafters.shared.chain import Chain
from pronk.drafters.shared.side_cache import CHUNK, Apply, SideCache, SideLane
from pronk.execution.forward_job import EarlyTokens, ForwardJob, Segment
from pronk.execution.model_runner import ModelRunner
from pronk.kv_cache.blocks import BlockTable
from pronk.models.program import Program
from pronk.models.program_rows import ProgramRows
from pronk.speculation.cost_model import CostModel
from pronk.speculation.proposer import DraftContext
from pronk.speculation.step_value import ChainPrice
from pronk.speculation.target import Target
from pronk.speculation.tree import TokenTree


@dataclass
class ExitDraft:
    """One request's chain of draft tokens in one step."""

    chain: Chain  # the draft tokens so far
    lane: SideLane  # the adapter's KV cache of this request
    num_early_rows: int = 0  # number of leading rows of ``segment`` whose first layers are already computed
    is_finite: bool = True  # False if the first layers have output an infinity or NaN in this step

    @property
    def block_table(self) -> BlockTable:
        """The request's KV blocks in the target's cache."""
        return self.chain.context.block_table

    def tokens_from(self, start: int) -> list[int]:
        """Return the token ids from text position ``start`` on: the rest of the text, then the draft tokens."""
        tokens = self.chain.context.tokens
        return [*tokens[start:], *self.chain.tokens[max(0, start - len(tokens)) :]]

    @property
    def segment(self) -> Segment:
        """Rows for the tokens that are not in the target's cache: the text's end, then the draft tokens."""
        return Segment(
            self.block_table, TokenTree.chain(self.tokens_from(self.block_table.length)), self.num_early_rows
        )


class EarlyExit:
    """Owns the adapter and its KV pool; drafts for several requests in shared forward passes.

    As long as this object exists, the target's cache also stores the output of layer ``exit_layer`` for every token.
    Raises ``OptionError`` if there is no memory for the outputs of layer ``exit_layer``.
    """

    def __init__(self, target: Target, adapter: KangarooAdapter) -> None:
        self.target = target
        self.adapter = adapter
        self.exit_layer = adapter.shape.exit_layer
        self.runner = target.runner or ModelRunner(target.decoder, target.cache)
        self._side_cache = SideCache(target, adapter) if adapter.shape.has_attention else None
        target.keep_hidden(self.exit_layer, self)
        self._cost_model = CostModel()
        self._program: Program | None = None

    @classmethod
    def load(cls, trained: TrainedDrafter, target: Target) -> EarlyExit:
        """Load a trained adapter; raise CheckpointError if its files are damaged."""
        shape = trained.make_shape(KangarooShape)
        config = target.decoder.config
        return cls(target, trained.load(target, lambda weights: KangarooAdapter(shape, config, weights)))

    def release(self, lane: SideLane) -> None:
        """Free the blocks of a request in the adapter's cache."""
        if self._side_cache is not None:
            self._side_cache.release(lane)

    def reserve(self, draft: ExitDraft) -> bool:
        """Allocate the chain's slots in the adapter's cache; return False if it or the target's lacks slots."""
        context, lane = draft.chain.context, draft.lane
        max_tokens = min(context.max_depth, context.max_nodes)
        block_table = draft.block_table
        if self.target.cache.allocator.num_missing(block_table, len(context.tokens) + max_tokens) > 0:
            return False  # the scheduler has allocated too few slots in the target's cache
        if self._side_cache is None:
            return True
        # Drop the text's last token, to run it again: the first draft token needs the adapter's output for it.
        del lane.tokens[len(context.tokens) - 1 :]
        return self._side_cache.reserve(lane, context, max_tokens)

    def next_logits(self, drafts: Sequence[ExitDraft]) -> Array:
        """Run the new tokens of each chain; return the logits ``[drafts, vocab]`` of its next draft token."""
        start_time = self.target.clock()
        jobs = [ForwardJob(draft.segment, range(0), draft.chain.context.sampler.context.num_prompt) for draft in drafts]
        for draft in drafts:  # remove the old early rows first: an error below must not leave incomplete ones
            self.runner.early_tokens.pop(id(draft.block_table), None)
        outputs = self.runner.run_first_layers(jobs, self.exit_layer)
        for draft, job, rows in zip(drafts, jobs, outputs, strict=True):
            # Outputs that overflow are cached as zeros. After an overflow, the target computes all layers of the rows
            # itself, and so detects the error.
            draft.is_finite = draft.is_finite and is_finite(rows)
            draft.num_early_rows = len(job.segment.tree)
            if draft.is_finite:
                early_tokens = EarlyTokens(self.exit_layer, job.segment.tree.tokens)
                self.runner.early_tokens[id(draft.block_table)] = early_tokens
        if self._side_cache is None:
            hidden = self._run_mlp_adapter(np.stack([rows[-1] for rows in outputs]))
        else:
            hidden = np.stack([rows[-1] for rows in self._run_side_cache(self._side_cache, drafts)])
        logits = self._logits(hidden)
        context = sum(draft.block_table.length for draft in drafts)
        self._cost_model.learn(sum(map(len, outputs)), context, self.target.clock() - start_time, plain=True)
        return logits

    def _run_side_cache(self, side_cache: SideCache, drafts: Sequence[ExitDraft]) -> list[Array]:
        """Run the adapter on the tokens that its cache lacks; return ``[tokens, hidden]`` for each draft."""
        tokens, rows = list[list[int]](), list[Array]()
        for draft in drafts:
            lane, block_table = draft.lane, draft.block_table
            if block_table.length - len(lane.tokens) > CHUNK:  # cache a long text in chunks first
                side_cache.catch_up(lane, draft.chain.context.tokens, block_table, self.exit_layer, _run_adapter)
            num_cached, stop = len(lane.tokens), block_table.length + draft.num_early_rows
            tokens.append(draft.tokens_from(num_cached))
            rows.append(self.target.cache.read_hidden(self.exit_layer, block_table, num_cached, stop))
        return side_cache.run([draft.lane for draft in drafts], tokens, rows, _run_adapter)

    def _run_mlp_adapter(self, rows: Array) -> Array:
        """Run an adapter without attention (kind ``mlp``) on rows ``[drafts, hidden]``."""
        if self._program is None:
            program = self.target.decoder.backend.program(rows.shape[1], rows.dtype)
            self.adapter.compile_part(0, program)
            self._program = program
        out = rows.copy()
        self._program.run(ProgramRows.without_segments(len(rows)), out)
        return out

    def chain_price(self, context: DraftContext[Any]) -> ChainPrice | None:
        """Return the price of draft tokens; ``None`` if all are wanted."""
        policy = context.policy
        if policy.curve is None:
            return None
        fraction = self.exit_layer / len(self.target.decoder.layers)
        own = self._cost_model.costs(policy.num_requests * len(context.tokens))
        own = own or policy.curve._replace(speed=fraction * policy.curve.speed)
        return ChainPrice(policy.curve.rest(fraction), own.at(policy.num_requests))

    def _logits(self, rows: Array) -> Array:
        head = self.target.decoder.head if self.adapter.head is None else self.adapter.head
        return head.logits(rows)


def _run_adapter(x: Array, apply: Apply) -> Array:
    return apply(0, x)
