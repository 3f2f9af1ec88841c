"""Forward passes of Gemma 4's assistant, which has no cache of its own.

A pass computes one row of each request. All rows of a proposal are at the position of the text's
last token, and see the same keys and values of the target, those of the text before it::

    text       a  b  c  d          the target has computed a b c; d is the root of the draft tree
    rows       dc x1 y2            token and state: of c by the target, then of rows 1 and 2
    drafts      x  y  z

If the text ends with another drafter's draft tokens, they get rows before the proposal begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pronk.base.arrays import FLOAT32, Array
from pronk.cache.blocks import BlockTable
from pronk.drafting.from_target.modules.final_state import FinalState
from pronk.drafting.from_target.modules.gemma4_assistant import AssistantDecoder
from pronk.drafting.proposer import DraftContext
from pronk.drafting.shared.chain import Chain, draft_chains
from pronk.drafting.target import Target
from pronk.models.cost_model import CostModel
from pronk.models.decoder import forward_weights
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.program import Program
from pronk.sampling.draft_token import DraftLogits
from pronk.sampling.tree import TokenTree


@dataclass
class _Draft:
    """One request's proposal.

    Attributes:
        context: the request.
        state: state ``[target hidden]`` that the next row reads.
        logits: logits of the last row.
    """

    context: DraftContext[tuple[()]]
    state: Array
    logits: DraftLogits | None = None


class AssistantRunner:
    """Runs an assistant for several requests in shared passes.

    As long as this object exists, the target's cache keeps the final state of tokens. Raises
    ``OptionError`` if there is no memory for the states.
    """

    def __init__(self, target: Target, assistant: AssistantDecoder) -> None:
        self.target = target
        self.assistant = assistant
        # A proposal reads the state of the text's last computed token, whose logits gave the next.
        self.feature = FinalState(target.decoder, target.cache.dtype, only_logits_rows=True)
        target.save_feature(self.feature, self)
        self.cost_model = CostModel()
        self.relative_size = (
            forward_weights(assistant).nbytes / forward_weights(target.decoder).nbytes
        )
        dtype = target.cache.dtype
        self._input = Program(assistant.kernels, target.decoder.config.hidden_size, dtype)
        assistant.compile_input(self._input, target.decoder)
        self._layers: Program | None = None
        self._version = -1  # version of the target's KV pool for which ``_layers`` is compiled

    def draft_chains(self, chains: Sequence[Chain]) -> None:
        """Draft the tokens of empty ``chains`` of several requests in shared passes."""
        drafts = {chain: self._begin(chain.context) for chain in chains if self._can_draft(chain)}
        self._run_texts([*drafts.values()])

        def next_logits(incomplete: Sequence[Chain]) -> list[DraftLogits | None]:
            own = [drafts[chain] for chain in incomplete]
            # false in the first round, in which all chains are empty
            if incomplete[0].draft_tokens:
                self._run(own, [chain.tokens[-1] for chain in incomplete])
            return [draft.logits for draft in own]

        draft_chains([*drafts], next_logits)

    @staticmethod
    def _can_draft(chain: Chain) -> bool:
        """Return whether a request can draft: there is a state of the token before the last one.

        There is none in the prompt, whose rows before the last have no logits.
        """
        context = chain.context
        return chain.max_tokens > 0 and context.root >= context.sampler.context.num_prompt

    def _begin(self, context: DraftContext[tuple[()]]) -> _Draft:
        table = context.block_table
        (state,) = self.target.cache.read_feature(
            self.feature, table, table.length - 1, table.length
        )
        return _Draft(context, state)

    def _run_texts(self, drafts: Sequence[_Draft]) -> None:
        """Run the last token of each text, and the draft tokens of another drafter after it."""
        texts = [draft.context.tokens[draft.context.root :] for draft in drafts]
        for number in range(max(map(len, texts), default=0)):
            live = [
                (draft, text[number])
                for draft, text in zip(drafts, texts, strict=True)
                if len(text) > number
            ]
            self._run([draft for draft, _ in live], [token for _, token in live])

    def _run(self, drafts: Sequence[_Draft], tokens: Sequence[int]) -> None:
        """Run a row of each draft: set its logits and the state of the next row."""
        start_time = self.target.clock()
        batch = ForwardBatch(
            [_make_entry(draft.context, token) for draft, token in zip(drafts, tokens, strict=True)]
        )
        dtype = self.target.cache.dtype
        config = self.assistant.config
        states = np.stack([draft.state for draft in drafts])
        inputs = np.empty((len(drafts), config.hidden_size), FLOAT32)
        self._input.run(batch, states, inputs)
        outputs = inputs.astype(dtype)
        logits = self._run_layers(batch, outputs)
        states = self.assistant.post_projection.logits(outputs).astype(dtype)
        for number, draft in enumerate(drafts):
            draft.state = states[number]
            draft.logits = logits[number]
        seconds = self.target.clock() - start_time
        self.cost_model.learn(len(drafts), batch.num_committed, seconds, plain=True)

    def _run_layers(self, batch: ForwardBatch, stream: Array) -> list[DraftLogits]:
        """Run layers and head on ``stream``, which is overwritten with the normed outputs."""
        head = self.assistant.two_stage_head
        if head is not None:
            self._program.run(batch, stream)
            return head.logits(stream)
        logits = np.empty((len(stream), self.assistant.config.vocab_size), FLOAT32)
        self._program.run(batch, stream, logits)
        return [DraftLogits(row) for row in logits]

    @property
    def _program(self) -> Program:
        """Program of the layers; it has addresses of the target's KV pool."""
        cache = self.target.cache
        if self._layers is None or self._version != cache.version:
            hidden = self.assistant.config.hidden_size
            self._layers = Program(self.assistant.kernels, hidden, cache.dtype, None, [cache])
            self.assistant.compile_layers(self._layers)
            self._version = cache.version
        return self._layers


def _make_entry(context: DraftContext[tuple[()]], token: int) -> BatchEntry:
    """Return the entry of one row: at the position of the text's last token, reading the target."""
    table = context.block_table
    return BatchEntry(
        BlockTable(length=table.length),  # the assistant stores no keys
        TokenTree.chain([token]),
        prompt_length=context.sampler.context.num_prompt,
        other_tables=(table,),
    )
