"""Forward passes of a trained head (EAGLE-3 or MTP) over texts and draft tokens.

Row ``i`` of the head's KV cache is made of the feature of position ``i`` and the embedding of token
``i + 1``. The last token of a text has no feature yet: the target computes it in the pass that
verifies the draft tokens::

    text       a  b  c  d          the target has computed a b c; d is the root of the draft tree
    rows       ab bc cd            the last row predicts the token after d
    drafts     x  y                rows with the head's own output as the feature: (cd) x, (x) y

If the text ends with another drafter's draft tokens, they get rows of the head's output, too, and
the proposal begins below them. Rows of draft tokens are dropped after the proposal. If the tokens
are accepted, they get rows with true features. The target's KV cache keeps the features, so that a
request with a cached prefix, or after a preemption, has all its rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import numpy as np

from pronk.base.arrays import FLOAT32, Array
from pronk.base.interrupts import uninterrupted
from pronk.drafting.from_target.modules.eagle import EagleHead, head_feature
from pronk.drafting.proposer import DraftContext
from pronk.drafting.shared.chain import Chain, draft_chains
from pronk.drafting.shared.draft_cache import DraftCache
from pronk.drafting.shared.module_runner import CHUNK, ModuleRunner
from pronk.drafting.target import Target
from pronk.models.cost_model import CostModel
from pronk.models.decoder import forward_weights
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.layer_executor import ChainJob, HeadClusters, draft_chain
from pronk.models.linear import Linear
from pronk.models.program import Program
from pronk.sampling.draft_token import DraftLogits
from pronk.sampling.tree import TokenTree

Key = TypeVar("Key", bound=Hashable)

# Parts of a head's passes, each with a program: keys and values only, for rows whose output is not
# needed; the output as well; the logits as well.
_KEYS = 0
_OUTPUTS = 1
_LOGITS = 2

# The pass that drafts reads at most this many rows per request. Of a longer text, all rows but the
# last one are read before, without their output.
_MAX_ROWS = 4

# With fewer rows, the fixed duration of a pass would count as that of reading a row.
_MIN_TIMED_ROWS = 16


@dataclass
class HeadDraft:
    """One request's draft tokens in a step. Node 0 is the last row of the text.

    Draft tokens of another drafter at the end of the text are the first nodes below it.

    Attributes:
        context: the request. Its cache has all rows of the text but the last.
        tokens: for each node, the token whose embedding its row has.
        parents: for each node, its parent; -1 for the root.
        outputs: for each computed node, the head's output ``[hidden]``.
        logits: for each computed node, the logits of the token after it.
    """

    context: DraftContext[DraftCache]
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    outputs: list[Array] = field(default_factory=list)
    logits: list[DraftLogits] = field(default_factory=list)

    def add(self, parent: int, token: int) -> int:
        """Add a node with a token id below the computed node ``parent``; return its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1


class EagleRunner:
    """Runs a head for several requests in shared passes.

    The head has a program for each part of a pass (``_KEYS``, ``_OUTPUTS``, ``_LOGITS``). Of a row
    of the text, later rows read only the keys and values. So reading a text takes a fraction of the
    arithmetic of the whole head.

    As long as this object exists, the target's cache keeps the feature of every token. Raises
    ``OptionError`` if there is no memory for the features or for the head's KV cache.
    """

    def __init__(self, target: Target, head: EagleHead) -> None:
        self.target = target
        self.head = head
        runner = target.runner
        self.module = ModuleRunner(
            target,
            head.config,
            lambda part, program: head.compile_pass(
                program, logits=part == _LOGITS, only_keys=part == _KEYS
            ),
            first=1,
            pool=runner.draft_pool(head.config),
        )
        # runs the head on another device than the processor
        self._on_device = runner.open_head(
            head, head.compile_pass, self.module.pool, head.draft_ids
        )
        self._drafts_chains = not self.module.pool.config.has_dynamic_rope
        config = head.config
        self._norm = Program(head.kernels, config.hidden_size, target.cache.dtype)
        self._norm.norm(None if head.eagle.norm_output else head.norm)
        self._clusters: HeadClusters | None = None
        if head.two_stage_head is not None:
            whole = head.two_stage_head
            program = Program(head.kernels, config.hidden_size, target.cache.dtype)
            head.compile_logits(program, whole.clusters[0])
            self._clusters = HeadClusters(program, whole.clusters, whole.tokens, whole.num_best)
        self.feature = head_feature(head, runner.module_decoder, target.cache.dtype)
        target.save_feature(self.feature, self)
        self.cost_model = CostModel()
        on_device = self._on_device
        head_bytes = forward_weights(head).nbytes if on_device is None else on_device.nbytes
        self.relative_size = head_bytes / forward_weights(target.decoder).nbytes

    def draft_chains(self, chains: Sequence[Chain]) -> None:
        """Draft the tokens of empty ``chains`` of several requests in shared passes of the head.

        The state of each chain's context is the request's :class:`DraftCache`.
        """
        max_chains = 1 if self._on_device is None else self._on_device.max_chains
        if len(chains) <= max_chains and all(
            self.supports_draft_chain(chain.context) for chain in chains
        ):
            self.draft_in_one_call(chains)
            return
        most = max([chain.max_tokens for chain in chains], default=0)
        drafts = self.begin({chain: chain.context for chain in chains}, most)

        def next_logits(incomplete: Sequence[Chain]) -> list[DraftLogits]:
            own = [drafts[chain] for chain in incomplete]
            # false in the first round, in which all chains are empty
            if incomplete[0].draft_tokens:
                for chain, draft in zip(incomplete, own, strict=True):
                    draft.add(len(draft.outputs) - 1, chain.tokens[-1])
                self.extend(own)
            return [draft.logits[-1] for draft in own]

        draft_chains([*drafts], next_logits)
        self.end([*drafts.values()])

    def begin(
        self, contexts: Mapping[Key, DraftContext[DraftCache]], rows: int
    ) -> dict[Key, HeadDraft]:
        """Run the rows of each text that are not cached; return a draft for each request.

        The last node of a draft has the logits of the first draft token. The result has the keys of
        ``contexts``; requests that cannot draft in this step are left out, for example if KV slots
        are missing. ``rows`` is the largest number of rows of draft tokens per request.
        """
        drafts = {
            key: HeadDraft(context)
            for key, context in contexts.items()
            if self.module.reserve_again(context, rows)
        }
        if drafts:
            self._run_texts([*drafts.values()])
        # each text may end with draft tokens of another drafter, such as forced tokens
        others = [
            (draft, draft.context.tokens[draft.context.root + 1 :]) for draft in drafts.values()
        ]
        for depth in range(max([len(tokens) for _, tokens in others], default=0)):
            live = [(draft, tokens[depth]) for draft, tokens in others if len(tokens) > depth]
            for draft, token in live:
                draft.add(depth, token)
            self.extend([draft for draft, _ in live])
        return drafts

    def read(
        self, context: DraftContext[DraftCache], most: int
    ) -> tuple[list[DraftLogits], int] | None:
        """Run the rows of a text that are not cached, except the last one, and return logits.

        Returns the logits of the last ``most`` of these rows, and the index in the text of the
        token that the first of them predicts; ``None`` if the request cannot draft in this step.
        """
        if not self.module.reserve_again(context, 1):
            return None
        cache = context.state
        stop = context.block_table.length - 1
        self._read_rows(context, stop - most)
        first = len(cache.tokens) + 2
        tokens, features = self._next_rows(context, stop - len(cache.tokens))
        entry = BatchEntry(cache.block_table, TokenTree.chain(tokens), range(len(tokens)))
        _, logits = self._run(ForwardBatch([entry]), features)
        cache.append(tokens)
        return logits, first

    def extend(self, drafts: Sequence[HeadDraft]) -> None:
        """Run the nodes of all drafts that are not computed yet; each draft must have one."""
        entries = list[BatchEntry]()
        features = list[Array]()
        for draft in drafts:
            computed = len(draft.outputs)
            tree = TokenTree(tuple(draft.tokens), tuple(draft.parents))
            block_table = draft.context.state.block_table
            new_nodes = range(computed, len(tree))
            entries.append(BatchEntry(block_table, tree, new_nodes, num_computed=computed))
            features += [draft.outputs[parent] for parent in draft.parents[computed:]]
        batch = ForwardBatch(entries)
        outputs, logits = self._run(batch, np.stack(features))
        scores = iter(logits)
        for draft, rows, count in zip(
            drafts, batch.split_rows(outputs), batch.logits_counts, strict=True
        ):
            draft.outputs += [*rows]
            draft.logits += islice(scores, count)

    def supports_draft_chain(self, context: DraftContext[DraftCache]) -> bool:
        """Whether a request's chain can be drafted in one call."""
        sampler = context.sampler
        is_supported = self._drafts_chains and sampler.library_sampler is not None
        if self._on_device is not None:
            is_supported = self._on_device.supports_draft_chain(sampler)
        return is_supported and len(context.tokens) == context.block_table.length + 1

    def draft_in_one_call(self, chains: Sequence[Chain]) -> None:
        """Draft all tokens of empty chains in one call of the kernels or of the device."""
        ready = [
            chain for chain in chains if self.module.reserve_again(chain.context, chain.max_tokens)
        ]
        if not ready:
            return
        for chain in ready:
            self._read_text(chain.context)
        start_time = self.target.clock()
        with ExitStack() as stack:
            jobs = list[ChainJob]()
            for chain in ready:
                stack.enter_context(chain.context.sampler.after())
                jobs.append(self._chain_job(chain))
            with uninterrupted():
                num_passes = self._draft_jobs(ready, jobs)
                for chain, job in zip(ready, jobs, strict=True):
                    chain.context.state.append(job.entry.tree.tokens)
        seconds = self.target.clock() - start_time
        length = sum([chain.context.state.block_table.length for chain in ready])
        self.cost_model.learn(
            len(jobs), length, seconds / num_passes, requests=len(jobs), plain=True
        )

    def _chain_job(self, chain: Chain) -> ChainJob:
        """Return the job of a chain after the rows of the text that are not cached."""
        context = chain.context
        cache = context.state
        tokens = list(context.tokens[len(cache.tokens) + 1 : context.block_table.length + 1])
        last = range(len(tokens) - 1, len(tokens))
        entry = BatchEntry(cache.block_table, TokenTree.chain(tokens), last)
        return ChainJob(entry, context.sampler, chain.max_tokens, chain.append_and_go_on)

    def _draft_jobs(self, chains: Sequence[Chain], jobs: Sequence[ChainJob]) -> int:
        """Draft the chains of jobs; return the number of passes of the head."""
        cache = self.target.cache
        rows = list[tuple[int, int]]()
        for chain, job in zip(chains, jobs, strict=True):
            start = len(chain.context.state.tokens)
            rows.append((start, start + job.entry.num_rows))
        tables = [chain.context.block_table for chain in chains]
        if self._on_device is not None:
            slots = [cache.slots(table, *part) for table, part in zip(tables, rows, strict=True)]
            return max(self._on_device.draft_chains(jobs, self.feature, slots))
        (job,) = jobs
        return draft_chain(
            self.module.program(_LOGITS),
            cache.read_feature(self.feature, tables[0], *rows[0]),
            job,
            vocab_size=self._logits_head.out_features,
            ids=self.head.draft_ids if self._clusters is None else self._clusters,
        )

    def end(self, drafts: Sequence[HeadDraft]) -> None:
        """Drop the rows of draft tokens, and keep the last row of each text."""
        for draft in drafts:
            draft.context.state.append(draft.tokens[:1])

    def _run_texts(self, drafts: Sequence[HeadDraft]) -> None:
        """Run the rows of the texts that the caches lack.

        The last row of each becomes its draft's root.
        """
        for draft in drafts:
            self._read_text(draft.context)
        new = [self._next_rows(draft.context, _MAX_ROWS) for draft in drafts]
        entries = list[BatchEntry]()
        for draft, (tokens, _) in zip(drafts, new, strict=True):
            block_table = draft.context.state.block_table
            last = range(len(tokens) - 1, len(tokens))
            entries.append(BatchEntry(block_table, TokenTree.chain(tokens), last))
        batch = ForwardBatch(entries)
        outputs, logits = self._run(batch, np.concatenate([rows for _, rows in new]))
        for draft, (tokens, _), rows, scores in zip(
            drafts, new, batch.split_rows(outputs), logits, strict=True
        ):
            draft.context.state.append(tokens[:-1])
            draft.add(-1, tokens[-1])
            draft.outputs.append(rows[-1])
            draft.logits.append(scores)

    def _read_text(self, context: DraftContext[DraftCache]) -> None:
        """Read the rows that the cache lacks, apart from the last one, unless they are few."""
        num_rows = context.block_table.length
        if num_rows - len(context.state.tokens) > _MAX_ROWS:
            self._read_rows(context, num_rows - 1)

    def _read_rows(self, context: DraftContext[DraftCache], stop: int) -> None:
        """Keep the keys and values of the rows before row ``stop`` that the cache lacks."""
        while (count := min(CHUNK, stop - len(context.state.tokens))) > 0:
            tokens, features = self._next_rows(context, count)
            entry = BatchEntry(context.state.block_table, TokenTree.chain(tokens), range(0))
            self._run(ForwardBatch([entry]), features, _KEYS)
            context.state.append(tokens)

    def _next_rows(self, context: DraftContext[DraftCache], count: int) -> tuple[list[int], Array]:
        """Return the tokens and features ``[rows, hidden]`` of the next ``count`` rows of a text.

        There may be fewer rows.
        """
        start = len(context.state.tokens)
        stop = min(context.block_table.length, start + count)
        features = self.target.cache.read_feature(self.feature, context.block_table, start, stop)
        return list(context.tokens[start + 1 : stop + 1]), features

    @property
    def _logits_head(self) -> Linear:
        """Layer whose outputs are the logits of the head's program: the first stage of two."""
        two_stage = self.head.two_stage_head
        return self.head.head if two_stage is None else two_stage.centroids

    def _run(
        self, batch: ForwardBatch, features: Array, part: int = _LOGITS
    ) -> tuple[Array, list[DraftLogits]]:
        """Run rows of several requests.

        Each row has the embedding of a token and a feature. ``features`` ``[rows, hidden]`` is
        overwritten with the outputs. Returns the outputs, and the logits of the rows of
        ``batch.logits_rows``; with the part ``_KEYS``, there are neither.
        """
        start_time = self.target.clock()
        two_stage = self.head.two_stage_head
        logits: list[DraftLogits] = []
        if self._on_device is not None:
            features, scores = self._on_device.run(batch, features)
            logits = [DraftLogits(row, self.head.draft_ids) for row in scores]
        elif part == _KEYS:
            self.module.program(_KEYS).run(batch, features)
        elif two_stage is None:
            scores = np.empty((len(batch.logits_rows), self.head.head.out_features), FLOAT32)
            self.module.program(_LOGITS).run(batch, features, scores)
            logits = [DraftLogits(row, self.head.draft_ids) for row in scores]
        else:
            self.module.program(_OUTPUTS).run(batch, features)
            normed = np.array(features[batch.logits_rows], order="C")
            self._norm.run(None, normed)
            logits = two_stage.logits(normed)
        seconds = self.target.clock() - start_time
        if part == _KEYS:
            if batch.num_rows >= _MIN_TIMED_ROWS:
                self.cost_model.learn_prompt(batch.num_rows, seconds)
        elif batch.num_rows <= _MAX_ROWS * len(batch.entries):
            self.cost_model.learn(batch.num_rows, batch.num_committed, seconds, plain=True)
        return features, logits
