"""Drafts with the target's own first layers, a trained adapter, and a head (Kangaroo).

A draft token runs through the first ``l`` layers only once. Its keys and values, and its output of layer ``l``, are
stored in the target's KV slots of the token. The target's forward pass reads them there and computes only the later
layers of such a row. For the text ``a b c`` of which the target's cache has ``a b``, and the draft tokens ``x y z``::

    draft's forward passes     first l layers of c, then of x, then of y     one row each; they give x, y and z
    target's forward pass      first l layers of z
                               later layers of c x y z

An adapter with attention has a KV cache of its own (:mod:`pronk.drafters.shared.side_cache`). Tokens that entered the
text without it (the prompt, bonus tokens, other drafters' tokens) are run through the adapter later: the target's
forward pass keeps their outputs of layer ``l``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pronk.drafters.from_target.modules.files import Trained
from pronk.drafters.from_target.modules.kangaroo import KangarooAdapter, KangarooShape
from pronk.drafters.shared.chain import Chain
from pronk.drafters.shared.side_cache import CHUNK, Apply, SideCache, SideLane
from pronk.execution.attention import Segment
from pronk.execution.early_rows import StartedRows
from pronk.execution.model_runner import ForwardJob, ModelRunner
from pronk.kv_cache.blocks import BlockTable
from pronk.models.program import Program, ProgramRows
from pronk.speculation.cost_model import CostCurve, CostModel
from pronk.speculation.draft_length import StepCost
from pronk.speculation.target import Target
from pronk.speculation.tree import TokenTree

__all__ = ["EarlyExit", "ExitDraft"]


@dataclass
class ExitDraft:
    """One request's draft in one step."""

    chain: Chain  # the draft tokens so far
    lane: SideLane  # the request's part of the adapter's KV cache
    computed: int = 0  # number of tokens, behind those in the target's cache, that ran through the first layers
    finite: bool = True  # whether the first layers' outputs so far are finite

    @property
    def block_table(self) -> BlockTable:
        """The request's block table in the target's cache."""
        return self.chain.context.block_table

    def text(self, start: int) -> list[int]:
        """Return the request's tokens, followed by the draft tokens, from position ``start`` on."""
        tokens = self.chain.context.tokens
        return [*tokens[start:], *self.chain.tokens[max(0, start - len(tokens)) :]]

    @property
    def segment(self) -> Segment:
        """Rows of the tokens that the target's cache lacks: the end of the text, and the draft tokens."""
        return Segment(self.block_table, TokenTree.chain(self.text(self.block_table.length)), self.computed)


class EarlyExit:
    """Owns the adapter and its KV pool; drafts for several requests in shared forward passes.

    From now on the target's cache keeps the output of layer ``layers`` for every token.

    Raises:
        OptionError: the KV memory has no room for these outputs.
    """

    def __init__(self, target: Target, adapter: KangarooAdapter) -> None:
        self.target = target
        self.adapter = adapter
        self.layers = adapter.shape.exit_layer
        self.runner = target.runner or ModelRunner(target.decoder, target.cache)
        self._side_cache = SideCache(target, adapter) if adapter.shape.attends else None
        target.keep_hidden(self.layers, self)
        self._cost_model = CostModel()
        self._program: Program | None = None

    @classmethod
    def load(cls, trained: Trained, target: Target) -> EarlyExit:
        """Load a trained adapter; raise CheckpointError if its files are damaged."""
        shape = trained.make_shape(KangarooShape)
        adapter = trained.build(lambda: KangarooAdapter(shape, target.decoder.config))
        return cls(target, trained.load(adapter, target.cache))

    def release(self, lane: SideLane) -> None:
        """Free the blocks of a request in the adapter's cache."""
        if self._side_cache is not None:
            self._side_cache.release(lane)

    def reserve(self, draft: ExitDraft) -> bool:
        """Allocate the chain's slots in the adapter's cache; return False if either cache has too few."""
        context, lane = draft.chain.context, draft.lane
        max_tokens = min(context.max_depth, context.max_nodes)
        block_table = draft.block_table
        if self.target.cache.allocator.num_missing(block_table, len(context.tokens) + max_tokens) > 0:
            return False  # in the target's cache, whose slots the scheduler allocates
        if self._side_cache is None:
            return True
        # The last row is always run again: its output is needed.
        del lane.tokens[len(context.tokens) - 1 :]
        return self._side_cache.reserve(lane, context, max_tokens)

    def next_logits(self, drafts: Sequence[ExitDraft]) -> Tensor:
        """Run the tokens not run yet; return logits ``[drafts, vocab]`` of the next draft tokens."""
        start_time = self.target.clock()
        jobs = [ForwardJob(draft.segment, range(0), draft.chain.context.sampler.context.num_prompt) for draft in drafts]
        for draft in drafts:  # after an error in the forward pass the rows may be incomplete
            self.runner.started_rows.put(draft.block_table, None)
        outputs = self.runner.run_first_layers(jobs, self.layers)
        last = [rows[-1] for rows in outputs]
        for draft, job, rows in zip(drafts, jobs, outputs, strict=True):
            # Torch keeps overflowed outputs as zeros, which would hide the overflow from the target's forward pass.
            draft.finite = draft.finite and bool(rows.isfinite().all())
            draft.computed = len(job.segment.tree)
            started = StartedRows(self.layers, job.segment.tree.tokens) if draft.finite else None
            self.runner.started_rows.put(draft.block_table, started)
        if self._side_cache is None:
            hidden = self._adapt(torch.stack(last))
        else:
            hidden = torch.stack([rows[-1] for rows in self._run_side_cache(self._side_cache, drafts)])
        logits = self._logits(hidden)
        context = sum(draft.block_table.length for draft in drafts)
        self._cost_model.learn(sum(map(len, outputs)), context, self.target.clock() - start_time)
        return logits

    def _run_side_cache(self, side_cache: SideCache, drafts: Sequence[ExitDraft]) -> list[Tensor]:
        """Run the rows that the adapter's cache lacks in one forward pass; long texts first in chunks."""
        tokens, rows = list[list[int]](), list[Tensor]()
        for draft in drafts:
            lane, block_table = draft.lane, draft.block_table
            if block_table.length - len(lane.tokens) > CHUNK:
                side_cache.catch_up(lane, draft.chain.context.tokens, block_table, self.layers, _run_adapter)
            num_cached = len(lane.tokens)
            tokens.append(draft.text(num_cached))
            rows.append(
                self.target.cache.read_hidden(self.layers, block_table, num_cached, block_table.length + draft.computed)
            )
        return side_cache.run([draft.lane for draft in drafts], tokens, rows, _run_adapter)

    @torch.inference_mode()
    def _adapt(self, rows: Tensor) -> Tensor:
        """Run an adapter without attention on rows ``[drafts, hidden]``."""
        kernels = self.target.cache.kernels
        if kernels is None:
            return self.adapter(rows, None, _no_attention)
        if self._program is None:
            program = Program(kernels, rows.shape[1], rows.dtype)
            self.adapter.compile_part(0, program)
            self._program = program
        out = rows.clone()
        self._program.run(ProgramRows.independent(len(rows)), out)
        return out

    def step_cost(self, target: CostCurve, context: int, requests: int) -> StepCost | None:
        """Return the costs of a draft's forward pass and of the target's later layers, once measured.

        ``target`` is the cost of the target's whole forward passes; ``context`` counts all requests' cached tokens.
        """
        draft = self._cost_model.costs(context, requests)
        fraction = self.layers / len(self.target.decoder.layers)
        return None if draft is None else StepCost(self.target.cost_model.rest(target, fraction), draft, requests)

    @torch.inference_mode()
    def _logits(self, rows: Tensor) -> Tensor:
        head = self.target.decoder.head if self.adapter.head is None else self.adapter.head
        return head.logits(rows).cpu()


def _run_adapter(x: Tensor, apply: Apply) -> Tensor:
    return apply(0, x)


def _no_attention(*_: object) -> Tensor:
    msg = "expected an adapter without attention, found one that attends"
    raise AssertionError(msg)
