"""Runs a draft model: its weights, its KV cache, and the state of that cache for each request.

The cache follows the text of a request. The accepted part of the last proposal is already cached. New tokens (a bonus
token, tokens of another drafter, at first the prompt) are run in one forward pass, whose last row gives the next
logits. For the text ``a b c`` and the draft tokens ``x y`` below it ::

    proposal       a b c [x]  y       x was run to propose y; y itself was not run
    x accepted,    a b c  x  [z]      one row: the bonus token z
    z the bonus

so no token is run twice while its keys and values stay cached.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from pronk.architecture.config import ModelConfig
from pronk.drafters.shared.chain import Chain
from pronk.drafters.shared.side_cache import CHUNK, common_prefix_length, open_pool
from pronk.drafters.shared.vocabulary.translation import Reencoder, Translation
from pronk.errors import CacheFullError, OptionError
from pronk.execution.attention import Segment
from pronk.execution.model_runner import ForwardJob, ModelRunner
from pronk.interrupts import interrupted, uninterrupted
from pronk.kv_cache.blocks import BlockTable
from pronk.models.clone_models import clone_model
from pronk.models.loader import compute_dtype, kernels_support, load_decoder, parse_dtype, read_config, resolve_model
from pronk.sampling.sampler import DraftToken
from pronk.speculation.cost_model import CostCurve
from pronk.speculation.proposer import DraftContext
from pronk.speculation.target import Target
from pronk.speculation.tree import TokenTree
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["DraftLane", "DraftRunner"]


@dataclass
class DraftLane:
    """State of the draft's cache for one request: the text, and behind it the tree of the last proposal.

    Attributes:
        block_table: blocks of the text and of the tree's nodes behind it.
        tokens: the cached text, in the draft's ids.
        tree: the cached nodes, in the draft's ids, or ``None``; the root is the token after the text.
        num_target_committed: number of leading tokens of the target's text that were final at the last proposal.
        num_committed: number of leading ``tokens`` that are final, and may enter the prefix cache.
        salt: the request's salt for prefix caching.
        reencoder: converts the text, for a draft with another vocabulary than the target's.
    """

    block_table: BlockTable = field(default_factory=BlockTable)
    tokens: list[int] = field(default_factory=list)
    tree: TokenTree | None = None
    num_target_committed: int = 0
    num_committed: int = 0
    salt: bytes = b""
    reencoder: Reencoder | None = None


class DraftRunner:
    """Runs a draft model for any number of requests, batched into shared forward passes.

    Attributes:
        runner: the model and its cache.
        translation: maps between the vocabularies of target and draft.
        context: number of positions of the model.
    """

    def __init__(self, runner: ModelRunner, translation: Translation) -> None:
        self.runner = runner
        self.translation = translation
        self.context = runner.decoder.config.context

    @classmethod
    def open(cls, drafter: str, model: str | None, target: Target, dtype: str, weights: str) -> DraftRunner:
        """Load a draft model, once for each target.

        ``model`` is a folder or a Hub id; ``None`` is ``pronk-tiny-draft`` of the clone. ``dtype`` and ``weights`` are
        those of :class:`~pronk.llm.LLM`. Errors begin with the name ``drafter``.

        Raises:
            CheckpointError: the model cannot be loaded.
            OptionError: the vocabularies cannot be translated, or there is no default for this target.
        """
        path = _default_model(drafter, target) if model is None else resolve_model(model).resolve()

        def make() -> DraftRunner:
            config = read_config(path)
            translation = _make_translation(drafter, target, path, config)
            kind = parse_dtype(dtype, config)
            kernels = target.cache.kernels if kernels_support(target.cache.kernels, config) else None
            if kernels is None and target.cache.kernels is not None:
                reason = f"{drafter}: no kernels for heads of {config.head_dim} in {path.name}"
                warnings.warn(f"{reason}; torch computes the draft instead, slower", stacklevel=2)
            device = target.cache.device
            decoder = load_decoder(path, config, dtype=kind, device=device, kernels=kernels, weights=weights)
            pool = open_pool(target, config, compute_dtype(kind, kernels), kernels)
            return cls(ModelRunner(decoder, pool, clock=target.clock), translation)

        return target.load_shared(path, dtype, weights, load=make)

    def costs(self, context: int, requests: int) -> CostCurve | None:
        """Return the cost of a forward pass by its rows, at ``context`` cached positions, once measured."""
        return self.runner.cost_model.costs(context, requests)

    def lane(self) -> DraftLane:
        """Return the lane of a new request."""
        return DraftLane(reencoder=self.translation.reencoder())

    def release(self, lane: DraftLane) -> None:
        """Free the blocks of a lane."""
        with uninterrupted():
            self._register_prefix(lane)
            self.runner.cache.release(lane.block_table)
            lane.tokens.clear()
            lane.tree = None

    def forward_texts(self, lanes: Sequence[DraftLane], contexts: Sequence[DraftContext[Any]]) -> list[Tensor | None]:
        """Run the pending text of each lane; return logits ``[vocab]`` each, ``None`` where slots are missing."""
        pending = self.align_lanes(lanes, contexts)
        fed = [(lane, new) for lane, new in zip(lanes, pending, strict=True) if new is not None]
        rows = iter(self.forward_tokens([lane for lane, _ in fed], [new for _, new in fed]))
        return [None if new is None else next(rows) for new in pending]

    def align_lanes(self, lanes: Sequence[DraftLane], contexts: Sequence[DraftContext[Any]]) -> list[list[int] | None]:
        """Align the lanes with their texts: roll back, keep accepted tokens, run long pending text.

        A single request reads its whole prompt at once. With several requests a step reads at most one chunk, the
        shortest texts first, so that no request waits for another's long prompt. A request whose prompt is not complete
        yet has no proposal.

        Returns:
            The tokens still to be run for each lane, at least the last one; ``None`` where slots are missing or the
            prompt is not complete yet.
        """
        pending: list[list[int] | None] = []
        for lane, context in zip(lanes, contexts, strict=True):
            text, num_unchanged = context.tokens, lane.num_target_committed
            with uninterrupted():
                if lane.reencoder is not None:
                    num_unchanged = lane.reencoder.update(context.tokens, lane.num_target_committed)
                    text = lane.reencoder.tokens
                self._match_prefix(lane, text, context.salt)
                self._align(lane, text, num_unchanged)
                # Later tokens of the text may be a composite's draft tokens.
                lane.num_target_committed = context.block_table.length + 1
                lane.num_committed = lane.num_target_committed if lane.reencoder is None else num_unchanged
                self._register_prefix(lane)
                fits = self._reserve(lane, len(text), context)
            fits = fits and (lane.reencoder is None or lane.reencoder.is_complete)
            pending.append(list(text[len(lane.tokens) :]) if fits else None)
        self._prefill(lanes, pending)
        return pending

    def _prefill(self, lanes: Sequence[DraftLane], pending: list[list[int] | None]) -> None:
        rows_left = CHUNK
        for size, number in sorted((len(new), number) for number, new in enumerate(pending) if new is not None):
            lane, new = lanes[number], pending[number] or []
            while len(lanes) == 1 and len(new) > CHUNK:
                self.forward_tokens([lane], [new[:CHUNK]])
                del new[:CHUNK]
            if len(new) > rows_left:
                if rows_left:
                    self.forward_tokens([lane], [new[:rows_left]])
                pending[number] = None
            rows_left = max(0, rows_left - size)

    def forward_tokens(self, lanes: Sequence[DraftLane], tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Append at least one token (the draft's id) to each lane; return logits ``[vocab]`` each."""
        if not lanes:
            return []
        jobs = [
            self.make_job(lane, TokenTree.chain(new), range(len(new) - 1, len(new)))
            for lane, new in zip(lanes, tokens, strict=True)
        ]
        rows = self._run(jobs)
        with uninterrupted():
            for lane, new in zip(lanes, tokens, strict=True):
                _append(lane, new)
        return [row[0] for row in rows]

    def supports_draft_chain(self, context: DraftContext[Any]) -> bool:
        """Whether :meth:`draft_chain` supports a request."""
        return self.runner.supports_draft_chain and self.translation.is_identity and context.sampler.drafts_statelessly

    def draft_chain(self, lane: DraftLane, chain: Chain, is_complete: Callable[[Chain], bool]) -> None:
        """Read one request's text and extend its chain until it is complete, in one call of the kernels."""
        (new,) = self.align_lanes([lane], [chain.context])
        if new is None:
            return
        steps = min(chain.max_tokens, 1 + self.num_free_positions(lane) - len(new))
        job = self.make_job(lane, TokenTree.chain(new), range(len(new) - 1, len(new)))

        def append(token: DraftToken) -> bool:
            chain.append(token)
            return not (interrupted() or chain.is_full or is_complete(chain))

        # KeyboardInterrupt cannot cross the kernels' callback: append() ends the chain instead.
        with chain.context.sampler.after(), uninterrupted():
            passes = self.runner.draft_chain(job, chain.context.sampler, steps, append)
            _append(lane, [*new, *chain.tokens[: passes - 1]])

    def forward_trees(
        self, lanes: Sequence[DraftLane], trees: Sequence[TokenTree], leads: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """Compute the new nodes of trees (the draft's ids) and return their logits ``[new nodes, vocab]``.

        A tree is rooted at the token after the lane's text and ``lead``; the nodes of ``lane.tree`` come first.
        ``lead`` is empty if ``lane.tree`` is set.
        """
        jobs = []
        for lane, tree, lead in zip(lanes, trees, leads, strict=True):
            computed, full_tree = len(lane.tree or ()), tree.hang_below(lead)
            jobs.append(self.make_job(lane, full_tree, range(computed or len(lead), len(full_tree)), computed))
        rows = self._run(jobs)
        with uninterrupted():
            for lane, tree, lead in zip(lanes, trees, leads, strict=True):
                _append(lane, lead)
                lane.tree = tree
        return rows

    def make_job(self, lane: DraftLane, tree: TokenTree, logits_nodes: range, computed: int = 0) -> ForwardJob:
        """Return a lane's part of a forward pass over ``tree``, whose first ``computed`` nodes are cached."""
        return ForwardJob(
            Segment(lane.block_table, tree, computed), logits_nodes, len(lane.tokens) or logits_nodes.start + 1
        )

    def truncate(self, lane: DraftLane, length: int) -> None:
        """Roll a lane back to the first ``length`` tokens of its text."""
        if lane.tree is not None or len(lane.tokens) > length:
            self._rollback(lane, min(len(lane.tokens), length))
            lane.tree = None

    def num_free_positions(self, lane: DraftLane) -> int:
        """Number of further tokens for which the draft model has positions."""
        return self.context - len(lane.tokens)

    def num_free_slots(self, lane: DraftLane) -> int:
        """Number of further tokens for which the lane has cache slots; may be less than requested."""
        return len(lane.block_table.blocks) * self.runner.cache.block_size - len(lane.tokens)

    def to_draft_ids(self, tokens: Sequence[int]) -> list[int]:
        """Return the draft's ids of tokens that it proposed."""
        ids = [self.translation.to_draft(token) for token in tokens]
        return [token for token in ids if token is not None]

    def _run(self, jobs: Sequence[ForwardJob]) -> list[Tensor]:
        result = self.runner.forward(jobs)
        self.runner.record_duration(jobs, result.context, result.seconds)
        return [self.translation.to_target(each[:].float()) for each in result.logits]

    def _match_prefix(self, lane: DraftLane, text: Sequence[int], salt: bytes) -> None:
        lane.salt = salt
        found = None if lane.block_table.blocks or lane.tokens else self.runner.cache.match_prefix(text, salt)
        if found is not None:
            lane.block_table, lane.tokens = found, list(text[: found.length])

    def _register_prefix(self, lane: DraftLane) -> None:
        self.runner.cache.cache_blocks(lane.block_table, lane.tokens, lane.salt, lane.num_committed)

    def _align(self, lane: DraftLane, text: Sequence[int], num_unchanged: int) -> None:
        """Keep the cached tokens that agree with ``text``, except its last; the first ``num_unchanged`` do."""
        num_kept = common_prefix_length(lane.tokens, text, num_unchanged)
        if lane.tree is not None and num_kept == len(lane.tokens) < len(text) - 1:
            path = _matching_path(lane.tree, text[num_kept:-1])
            self.runner.cache.commit(lane.block_table, path)
            _append(lane, text[num_kept : num_kept + len(path)])
        else:
            self._rollback(lane, min(num_kept, len(text) - 1))
        lane.tree = None

    def _rollback(self, lane: DraftLane, length: int) -> None:
        del lane.tokens[length:]
        self.runner.cache.rollback(lane.block_table, length)

    def _reserve(self, lane: DraftLane, length: int, context: DraftContext[Any]) -> bool:
        """Allocate blocks for the text, at first also for all future tokens, to get consecutive blocks."""
        if length > self.context:
            return False
        num_future = max(context.max_depth, context.params.max_tokens - context.sampler.context.num_generated)
        for num_extra in (num_future, 0):  # if memory is short, only what this step needs
            try:
                self.runner.cache.prepare(lane.block_table, length + num_extra + context.max_nodes)
            except CacheFullError:
                continue
            return True
        return False


def _append(lane: DraftLane, new: Sequence[int]) -> None:
    lane.tokens += new
    lane.block_table.length = len(lane.tokens)


def _matching_path(tree: TokenTree, text: Sequence[int]) -> list[int]:
    path: list[int] = []
    node: int | None = 0 if text and tree.tokens[0] == text[0] else None
    while node is not None:
        path.append(node)
        node = tree.child(node, text[len(path)]) if len(path) < len(text) else None
    return path


def _default_model(drafter: str, target: Target) -> Path:
    path = clone_model("pronk-tiny-draft")
    tokenizer = target.tokenizer
    if path is None or tokenizer is None or Tokenizer.load(path).fingerprint != tokenizer.fingerprint:
        found = "none" if path is None else f"none, and {path.name} has another vocabulary"
        msg = f'{drafter}: expected model="…", a folder or a Hub id of a draft model for this target, found {found}'
        raise OptionError(msg)
    return path


def _make_translation(drafter: str, target: Target, path: Path, config: ModelConfig) -> Translation:
    size = target.decoder.config.vocab_size
    if target.tokenizer is None:
        return Translation.same(size, config.vocab_size)
    return Translation.between(
        drafter, target.tokenizer, size, Tokenizer.load(path, config.vocab_size), config.vocab_size
    )
