"""The target's own first layers as a draft model, with a trained adapter between them and the head.

Each draft token runs through the first ``l`` layers once. The keys and values, and the output of layer ``l``, go to the
slots where the target's forward pass expects them. That forward pass therefore begins at layer ``l`` with these rows.
For the text ``a b c`` of which the target has computed ``a b``, and the draft tokens ``x y z``::

    first layers          c → x → y → z        three forward passes of one row; z, the last draft token, is not run
    target's pass         layers 0 to l - 1    z alone
                          layers l to the end  c x y z

The adapter has keys and values of its own, in a cache beside the target's. For tokens that entered the text without the
adapter (the prompt, bonus tokens, other drafters' tokens) it reads the hidden states kept by the target's forward pass.
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
    """One request's draft.

    Attributes:
        chain: the draft tokens so far.
        lane: state of the adapter's cache for the request.
        computed: number of nodes behind the target's text that ran through the first layers.
        finite: whether all outputs of the first layers are finite.
    """

    chain: Chain
    lane: SideLane
    computed: int = 0
    finite: bool = True

    @property
    def block_table(self) -> BlockTable:
        """Blocks of the target's keys and values."""
        return self.chain.context.block_table

    def text(self, start: int) -> list[int]:
        """Return the request's tokens and the draft tokens from index ``start`` on."""
        tokens = self.chain.context.tokens
        return [*tokens[start:], *self.chain.tokens[max(0, start - len(tokens)) :]]

    @property
    def segment(self) -> Segment:
        """Segment of the text that the target's cache lacks; its end is the chain."""
        return Segment(self.block_table, TokenTree.chain(self.text(self.block_table.length)), self.computed)


class EarlyExit:
    """Drafts with the first ``layers`` layers of a target and an adapter, in shared forward passes.

    The target's cache keeps the outputs of the exit layer. An OptionError means that there is no memory for them.
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
        """Load a trained adapter; damaged files are a CheckpointError, another target an OptionError."""
        shape = trained.make(KangarooShape)
        adapter = trained.build(lambda: KangarooAdapter(shape, target.decoder.config))
        return cls(target, trained.load(adapter, target.cache))

    def release(self, lane: SideLane) -> None:
        """Free the blocks of a lane."""
        if self._side_cache is not None:
            self._side_cache.release(lane)

    def reserve(self, draft: ExitDraft) -> bool:
        """Allocate slots for a chain in both caches; return False if there are too few."""
        context, lane = draft.chain.context, draft.lane
        max_tokens = min(context.max_depth, context.max_nodes)
        block_table = draft.block_table
        if self.target.cache.allocator.num_missing(block_table, len(context.tokens) + max_tokens) > 0:
            return False  # the scheduler has reserved slots for fewer draft tokens
        if self._side_cache is None:
            return True
        # The last row is always run again: its output is needed.
        del lane.tokens[len(context.tokens) - 1 :]
        return self._side_cache.reserve(lane, context, max_tokens)

    def next_logits(self, drafts: Sequence[ExitDraft]) -> Tensor:
        """Run the rows of the chains not run yet; return logits ``[drafts, vocab]`` of the next tokens."""
        start_time = self.target.clock()
        jobs = [ForwardJob(draft.segment, range(0), draft.chain.context.sampler.context.num_prompt) for draft in drafts]
        for draft in drafts:
            self.runner.started_rows.put(
                draft.block_table, None
            )  # an error in the forward pass may leave rows incomplete
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
        """Run the adapter's missing rows in one forward pass; long texts are first read in chunks."""
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
        """Run an adapter without attention, each row by itself."""
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
        """Return the costs of draft and target for ``context`` positions; ``None`` before the first draft."""
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
