"""A draft model at work: its weights, its cache, and what that cache holds of each request.

Its cache is kept level with the text. What was accepted of the last proposal is there already; what is new (a bonus
token, tokens that another drafter guessed, at first the prompt) goes through in one pass, whose last row says how the
text goes on. For the text ``a b c`` and the guesses ``x y`` below it ::

    proposal       a b c [x]  y       x was run to guess y; y itself was not
    x accepted,    a b c  x  [z]      one row: the bonus token z
    z the bonus

so no token is run twice, as long as it stays.
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
from pronk.drafters.shared.side_cache import CHUNK, open_pool, shared_prefix
from pronk.drafters.shared.vocabulary.translation import Reencoder, Translation
from pronk.errors import CacheFullError, OptionError
from pronk.execution.attention import Segment
from pronk.execution.model_runner import ForwardJob, ModelRunner
from pronk.interrupts import interrupted, uninterrupted
from pronk.kv_cache.blocks import BlockTable
from pronk.models.clone_models import clone_model
from pronk.models.loader import computed_in, covers, load_decoder, parse_dtype, read_config, resolve_model
from pronk.sampling.sampler import DraftToken
from pronk.speculation.cost_model import CostCurve
from pronk.speculation.proposer import DraftContext
from pronk.speculation.target import Target
from pronk.speculation.tree import TokenTree
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["Draft", "DraftLane"]


@dataclass
class DraftLane:
    """What the draft's cache holds of one request: its text, and behind it the tree of the last proposal.

    Attributes:
        block_table: the places of the text, and of the tree's nodes behind it.
        tokens: the text, in the draft's ids.
        tree: the nodes, in the draft's ids, or ``None``; its root is the token after the text.
        certain: number of leading tokens that were certain at the last proposal, and so are the same now.
        settled: number of leading ones of ``tokens`` that will stay.
        salt: of the request.
        reencoder: for a draft that has other tokens than the target.
    """

    block_table: BlockTable = field(default_factory=BlockTable)
    tokens: list[int] = field(default_factory=list)
    tree: TokenTree | None = None
    certain: int = 0
    settled: int = 0
    salt: bytes = b""
    reencoder: Reencoder | None = None


class Draft:
    """Runs a draft model for any number of requests, in passes that they share.

    Attributes:
        runner: the model and its cache.
        translation: between the target's vocabulary and the draft's.
        context: positions that the model has.
    """

    def __init__(self, runner: ModelRunner, translation: Translation) -> None:
        self.runner = runner
        self.translation = translation
        self.context = runner.decoder.config.context

    @classmethod
    def open(cls, drafter: str, model: str | None, target: Target, dtype: str, weights: str) -> Draft:
        """Load a draft model, once for each target.

        Args:
            drafter: name of the drafter, for errors.
            model: a folder or a Hub id; ``None`` is the clone's ``pronk-tiny-draft``.
            target: the target model, whose device and memory the draft model shares.
            dtype: as for :class:`~pronk.llm.LLM`.
            weights: as for :class:`~pronk.llm.LLM`.

        Raises:
            CheckpointError: the model cannot be loaded.
            OptionError: the vocabularies cannot be translated, or there is no default for this target.
        """
        path = _default(drafter, target) if model is None else resolve_model(model).resolve()

        def make() -> Draft:
            config = read_config(path)
            translation = _translation(drafter, target, path, config)
            kind = parse_dtype(dtype, config)
            kernels = target.cache.kernels if covers(target.cache.kernels, config) else None
            if kernels is None and target.cache.kernels is not None:
                reason = f"{drafter}: no kernels for heads of {config.head_dim} in {path.name}"
                warnings.warn(f"{reason}; torch computes the draft instead, slower", stacklevel=2)
            device = target.cache.device
            decoder = load_decoder(path, config, dtype=kind, device=device, kernels=kernels, weights=weights)
            pool = open_pool(target, config, computed_in(kind, kernels), kernels)
            return cls(ModelRunner(decoder, pool, clock=target.clock), translation)

        return target.share(path, dtype, weights, make=make)

    def costs(self, context: int, requests: int) -> CostCurve | None:
        """What its passes cost by their rows; ``None`` before there was one.

        Args:
            context: positions of all texts together.
            requests: that guess together.
        """
        return self.runner.times.costs(context, requests)

    def lane(self) -> DraftLane:
        """The lane of a new request."""
        return DraftLane(reencoder=self.translation.reencoder())

    def release(self, lane: DraftLane) -> None:
        """Give back what a lane holds."""
        with uninterrupted():
            self._learn(lane)
            self.runner.cache.release(lane.block_table)
            lane.tokens.clear()
            lane.tree = None

    def read(self, lanes: Sequence[DraftLane], contexts: Sequence[DraftContext[Any]]) -> list[Tensor | None]:
        """Bring the lanes up to their requests' text.

        Returns:
            Logits ``[vocab]`` of the target's tokens after the text; ``None`` where the draft has no room for it.
        """
        pending = self.level(lanes, contexts)
        fed = [(lane, new) for lane, new in zip(lanes, pending, strict=True) if new is not None]
        rows = iter(self.feed([lane for lane, _ in fed], [new for _, new in fed]))
        return [None if new is None else next(rows) for new in pending]

    def level(self, lanes: Sequence[DraftLane], contexts: Sequence[DraftContext[Any]]) -> list[list[int] | None]:
        """Forget what the text does not have any more, keep what of the proposals it has now, and read all but the end.

        A request alone reads all of its prompt at once. In company a step reads no more than a chunk, the shortest
        texts first, so that nobody waits for a long prompt; until all of it is read there is nothing to guess from.

        Returns:
            What is still to be read, at least the last token; ``None`` where there is no room for it, or not yet.
        """
        pending: list[list[int] | None] = []
        for lane, context in zip(lanes, contexts, strict=True):
            text, same = context.tokens, lane.certain
            with uninterrupted():
                if lane.reencoder is not None:
                    same = lane.reencoder.update(context.tokens, lane.certain)
                    text = lane.reencoder.tokens
                self._recall(lane, text, context.salt)
                self._follow(lane, text, same)
                lane.certain = context.block_table.length + 1  # what follows may be guesses, which come and go
                lane.settled = lane.certain if lane.reencoder is None else same
                self._learn(lane)
                fits = self._reserve(lane, len(text), context)
            fits = fits and (lane.reencoder is None or lane.reencoder.current)
            pending.append(list(text[len(lane.tokens) :]) if fits else None)
        self._read_ahead(lanes, pending)
        return pending

    def _read_ahead(self, lanes: Sequence[DraftLane], pending: list[list[int] | None]) -> None:
        """Read the beginnings of what is more than a chunk."""
        left = CHUNK
        for size, number in sorted((len(new), number) for number, new in enumerate(pending) if new is not None):
            lane, new = lanes[number], pending[number] or []
            while len(lanes) == 1 and len(new) > CHUNK:
                self.feed([lane], [new[:CHUNK]])
                del new[:CHUNK]
            if len(new) > left:
                if left:
                    self.feed([lane], [new[:left]])
                pending[number] = None
            left = max(0, left - size)

    def feed(self, lanes: Sequence[DraftLane], tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Add tokens (the draft's ids, at least one for each lane) to the text; logits after the last of each."""
        if not lanes:
            return []
        jobs = [
            self.job(lane, TokenTree.chain(new), range(len(new) - 1, len(new)))
            for lane, new in zip(lanes, tokens, strict=True)
        ]
        rows = self._run(jobs)
        with uninterrupted():
            for lane, new in zip(lanes, tokens, strict=True):
                _settle(lane, new)
        return [row[0] for row in rows]

    def grows(self, context: DraftContext[Any]) -> bool:
        """Whether :meth:`grow` can be asked for a request."""
        return self.runner.grows and self.translation.nothing_to_do and context.sampler.drafts_statelessly

    def grow(self, lane: DraftLane, chain: Chain, ends: Callable[[Chain], bool]) -> None:
        """Read one request's text, and add guesses to its chain until it is full or ends: one call of the kernels."""
        (new,) = self.level([lane], [chain.context])
        if new is None:
            return
        steps = min(chain.most, 1 + self.room(lane) - len(new))
        job = self.job(lane, TokenTree.chain(new), range(len(new) - 1, len(new)))

        def hear(guess: DraftToken) -> bool:
            chain.take(guess)
            return not (interrupted() or chain.full or ends(chain))

        # Nobody could be told of an interruption in the midst of it.
        with chain.context.sampler.after(), uninterrupted():
            passes = self.runner.grow(job, chain.context.sampler, steps, hear)
            _settle(lane, [*new, *chain.tokens[: passes - 1]])

    def branch(
        self, lanes: Sequence[DraftLane], trees: Sequence[TokenTree], leads: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """Compute trees (the draft's ids) that grew since the last time, in passes that leave the text as it is.

        Args:
            lanes: of the requests.
            trees: rooted at the token after the lane's text and ``lead``; the nodes of ``lane.tree`` come first.
            leads: text between the lane's and the tree; none if ``lane.tree`` is there.

        Returns:
            Logits ``[new nodes, vocab]`` of the target's tokens.
        """
        jobs = []
        for lane, tree, lead in zip(lanes, trees, leads, strict=True):
            computed, whole = len(lane.tree or ()), tree.hang_below(lead)
            jobs.append(self.job(lane, whole, range(computed or len(lead), len(whole)), computed))
        rows = self._run(jobs)
        with uninterrupted():
            for lane, tree, lead in zip(lanes, trees, leads, strict=True):
                _settle(lane, lead)
                lane.tree = tree
        return rows

    def job(self, lane: DraftLane, tree: TokenTree, wanted: range, computed: int = 0) -> ForwardJob:
        """A lane's share of a pass over ``tree``, its first ``computed`` nodes left out, as :class:`ForwardJob` has it."""
        return ForwardJob(Segment(lane.block_table, tree, computed), wanted, len(lane.tokens) or wanted.start + 1)

    def cut(self, lane: DraftLane, length: int) -> None:
        """Forget what a lane holds beyond the first ``length`` tokens of its text."""
        if lane.tree is not None or len(lane.tokens) > length:
            self._keep(lane, min(len(lane.tokens), length))
            lane.tree = None

    def room(self, lane: DraftLane) -> int:
        """How many more tokens the lane's text may have."""
        return self.context - len(lane.tokens)

    def places(self, lane: DraftLane) -> int:
        """How many more tokens the cache has places for; there may be fewer than were asked for."""
        return len(lane.block_table.blocks) * self.runner.cache.block_size - len(lane.tokens)

    def ids(self, tokens: Sequence[int]) -> list[int]:
        """The draft's ids of tokens that it guessed."""
        ids = [self.translation.to_draft(token) for token in tokens]
        return [token for token in ids if token is not None]

    def _run(self, jobs: Sequence[ForwardJob]) -> list[Tensor]:
        result = self.runner.forward(jobs)
        self.runner.learn(jobs, result.context, result.seconds)
        return [self.translation.to_target(each[:].float()) for each in result.logits]

    def _recall(self, lane: DraftLane, text: Sequence[int], salt: bytes) -> None:
        """Let a new lane begin with what the cache has of its text."""
        lane.salt = salt
        found = None if lane.block_table.blocks or lane.tokens else self.runner.cache.match(text, salt)
        if found is not None:
            lane.block_table, lane.tokens = found, list(text[: found.length])

    def _learn(self, lane: DraftLane) -> None:
        """Remember what will stay of a lane's text."""
        self.runner.cache.learn(lane.block_table, lane.tokens, lane.salt, lane.settled)

    def _follow(self, lane: DraftLane, text: Sequence[int], same: int) -> None:
        """Keep as much of what the lane holds as the text begins with, but for the text's last token.

        ``same`` tokens of the text are what they were the last time.
        """
        held = shared_prefix(lane.tokens, text, same)
        if lane.tree is not None and held == len(lane.tokens) < len(text) - 1:
            path = _path(lane.tree, text[held:-1])
            self.runner.cache.commit(lane.block_table, path)
            _settle(lane, text[held : held + len(path)])
        else:
            self._keep(lane, min(held, len(text) - 1))
        lane.tree = None

    def _keep(self, lane: DraftLane, length: int) -> None:
        del lane.tokens[length:]
        self.runner.cache.rollback(lane.block_table, length)

    def _reserve(self, lane: DraftLane, length: int, context: DraftContext[Any]) -> bool:
        """Find places for the text, and at first for all that will follow, so that the blocks lie in a run."""
        if length > self.context:
            return False
        to_come = max(context.max_depth, context.params.max_tokens - context.sampler.context.num_chosen)
        for more in (to_come, 0):  # or as much as it takes now
            try:
                self.runner.cache.prepare(lane.block_table, length + more + context.max_nodes)
            except CacheFullError:
                continue
            return True
        return False


def _settle(lane: DraftLane, new: Sequence[int]) -> None:
    """A lane's text goes on with ``new``, of which its cache has the rows."""
    lane.tokens += new
    lane.block_table.length = len(lane.tokens)


def _path(tree: TokenTree, text: Sequence[int]) -> list[int]:
    """The nodes from the root on that carry ``text``, as far as there are any."""
    path: list[int] = []
    node: int | None = 0 if text and tree.tokens[0] == text[0] else None
    while node is not None:
        path.append(node)
        node = tree.child(node, text[len(path)]) if len(path) < len(text) else None
    return path


def _default(drafter: str, target: Target) -> Path:
    path = clone_model("pronk-tiny-draft")
    tokenizer = target.tokenizer
    if path is None or tokenizer is None or Tokenizer.load(path).fingerprint != tokenizer.fingerprint:
        found = "none" if path is None else f"none, and {path.name} has another vocabulary"
        msg = f'{drafter}: expected model="…", a folder or a Hub id of a draft model for this target, found {found}'
        raise OptionError(msg)
    return path


def _translation(drafter: str, target: Target, path: Path, config: ModelConfig) -> Translation:
    size = target.decoder.config.vocab_size
    if target.tokenizer is None:
        return Translation.same(size, config.vocab_size)
    return Translation.between(
        drafter, target.tokenizer, size, Tokenizer.load(path, config.vocab_size), config.vocab_size
    )
