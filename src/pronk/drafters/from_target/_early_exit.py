"""The target's own first layers at work as a draft model, with an adapter between them and its head.

A token that is guessed from runs through the first ``l`` layers once. Their keys and values and the last one's output
go to the very places where the target's pass will look for them, so that this pass begins at layer ``l`` with these
rows. For the text ``a b c`` of which the target has computed ``a b``, and the guesses ``x y z``::

    first layers    c → x → y → z        three passes of one row; z, where drafting stopped, waits
    target's pass   layers 0 to l - 1    z alone
                    layers l to the end  c x y z

The adapter has keys and values of its own, in a cache beside the target's. Of tokens that came into the text without
it (the prompt, the target's own choice, other drafters' guesses) it reads what the target's pass has left of them.
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
        chain: its guesses so far.
        lane: what the adapter's cache holds of the request.
        computed: nodes behind the target's text that have been through the first layers.
        finite: whether no number has overflowed there.
    """

    chain: Chain
    lane: SideLane
    computed: int = 0
    finite: bool = True

    @property
    def block_table(self) -> BlockTable:
        """Where the target's keys and values are."""
        return self.chain.context.block_table

    def text(self, start: int) -> list[int]:
        """The request's tokens and the guesses, from token number ``start`` on."""
        certain = self.chain.context.tokens
        return [*certain[start:], *self.chain.tokens[max(0, start - len(certain)) :]]

    @property
    def segment(self) -> Segment:
        """What the target's cache lacks of the text; the chain is its end."""
        return Segment(self.block_table, TokenTree.chain(self.text(self.block_table.length)), self.computed)


class EarlyExit:
    """Guesses with the first layers of a target, for any number of requests in passes that they share.

    Attributes:
        target: the model.
        layers: how many of its layers.
        adapter: what stands between them and the head.
    """

    def __init__(self, target: Target, adapter: KangarooAdapter) -> None:
        """Let the target's cache keep the outputs of the exit layer.

        Raises:
            OptionError: there is no memory for it, or requests are being decoded that would have to give some up.
        """
        self.target = target
        self.adapter = adapter
        self.layers = adapter.shape.exit_layer
        self.runner = target.runner or ModelRunner(target.decoder, target.cache)
        self._beside = SideCache(target, adapter) if adapter.shape.attends else None
        target.keep_hidden(self.layers, self)
        self._times = CostModel()
        self._program: Program | None = None

    @classmethod
    def load(cls, trained: Trained, target: Target) -> EarlyExit:
        """A trained adapter.

        Raises:
            CheckpointError: its files are damaged.
            OptionError: it does not go with the target.
        """
        shape = trained.make(KangarooShape)
        adapter = trained.build(lambda: KangarooAdapter(shape, target.decoder.config))
        return cls(target, trained.load(adapter, target.cache))

    def release(self, lane: SideLane) -> None:
        """Give back what a lane holds."""
        if self._beside is not None:
            self._beside.release(lane)

    def ready(self, draft: ExitDraft) -> bool:
        """Find places for a chain in both caches; returns whether there are any."""
        context, lane = draft.chain.context, draft.lane
        most = min(context.max_depth, context.max_nodes)
        block_table = draft.block_table
        if self.target.cache.allocator.missing(block_table, len(context.tokens) + most) > 0:
            return False  # the scheduler has reserved slots for fewer draft tokens
        if self._beside is None:
            return True
        # What the last token says is asked again, even if nothing has happened since the last time.
        del lane.tokens[len(context.tokens) - 1 :]
        return self._beside.ready(lane, context, most)

    def read(self, drafts: Sequence[ExitDraft]) -> Tensor:
        """Run the ends of the chains that have not been run yet; every one has some.

        Returns:
            Logits ``[drafts, vocab]`` of the tokens that follow.
        """
        began = self.target.clock()
        jobs = [ForwardJob(draft.segment, range(0), draft.chain.context.sampler.context.num_prompt) for draft in drafts]
        for draft in drafts:
            self.runner.started.put(draft.block_table, None)  # if the pass raises, its rows are not known to be whole
        made = self.runner.begin(jobs, self.layers)
        last = [rows[-1] for rows in made]
        for draft, job, rows in zip(drafts, jobs, made, strict=True):
            # In torch what has overflowed is kept as zero, which would hide it from the target's pass.
            draft.finite = draft.finite and bool(rows.isfinite().all())
            draft.computed = len(job.segment.tree)
            started = StartedRows(self.layers, job.segment.tree.tokens) if draft.finite else None
            self.runner.started.put(draft.block_table, started)
        if self._beside is None:
            said = self._adapt(torch.stack(last))
        else:
            said = torch.stack([rows[-1] for rows in self._attend(self._beside, drafts)])
        logits = self._logits(said)
        context = sum(draft.block_table.length for draft in drafts)
        self._times.learn(sum(map(len, made)), context, self.target.clock() - began)
        return logits

    def _attend(self, beside: SideCache, drafts: Sequence[ExitDraft]) -> list[Tensor]:
        """The adapter's rows of all that its lanes lack, in one pass but for what they lack of long texts."""
        tokens, rows = list[list[int]](), list[Tensor]()
        for draft in drafts:
            lane, block_table = draft.lane, draft.block_table
            if block_table.length - len(lane.tokens) > CHUNK:
                beside.catch_up(lane, draft.chain.context.tokens, block_table, self.layers, _whole)
            held = len(lane.tokens)
            tokens.append(draft.text(held))
            rows.append(
                self.target.cache.read_hidden(self.layers, block_table, held, block_table.length + draft.computed)
            )
        return beside.run([draft.lane for draft in drafts], tokens, rows, _whole)

    @torch.inference_mode()
    def _adapt(self, rows: Tensor) -> Tensor:
        """An adapter without attention: every row by itself."""
        kernels = self.target.cache.kernels
        if kernels is None:
            return self.adapter(rows, None, _no_attention)
        if self._program is None:
            program = Program(kernels, rows.shape[1], rows.dtype)
            self.adapter.compile_part(0, program)
            self._program = program
        out = rows.clone()
        self._program.run(ProgramRows.loose(len(rows)), out)
        return out

    def step_cost(self, target: CostCurve, context: int, requests: int) -> StepCost | None:
        """What a guess costs, and the target's pass after some; ``None`` before there was a guess.

        Args:
            target: of whole passes of the target.
            context: positions of all texts together.
            requests: that guess together.
        """
        guess = self._times.costs(context, requests)
        share = self.layers / len(self.target.decoder.layers)
        return None if guess is None else StepCost(self.target.times.rest(target, share), guess, requests)

    @torch.inference_mode()
    def _logits(self, rows: Tensor) -> Tensor:
        head = self.target.decoder.head if self.adapter.head is None else self.adapter.head
        return head.logits(rows).cpu()


def _whole(x: Tensor, apply: Apply) -> Tensor:
    """The adapter, which is one part."""
    return apply(0, x)


def _no_attention(*_: object) -> Tensor:
    msg = "expected an adapter without attention, found one that attends"
    raise AssertionError(msg)
