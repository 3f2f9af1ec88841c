"""Multi-token heads: one forward pass drafts several tokens (Gloeckle et al. 2024, Stern et al. 2018).

The heads read the output of one of the target's layers at the token before the last. The target chose the last token
from that row, and the heads predict the tokens after it (blockwise parallel decoding). All heads of all requests run in
one forward pass::

    text            a  b  c | d              c was computed in the last pass, which chose d
    target's head            d               the root
    head 1, 2, 3             e  f  g         one chain below it: each head sees the text up to c, not the other tokens

With ``tree`` the proposal is a tree of the likeliest tokens of each head
(:mod:`pronk.drafters.from_target._ranked_heads`).

Transformer heads attend to their own keys and values of all earlier tokens, in a cache beside the target's, which keeps
the hidden states that the heads read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pronk.checks import check_integer, check_path
from pronk.drafters.from_target._ranked_heads import draft_tree
from pronk.drafters.from_target.modules.files import open_trained
from pronk.drafters.from_target.modules.heads import HeadsShape, MultiTokenHeads
from pronk.drafters.shared.chain import Chain, ChainDrafter, ChainProposer, Stop, extend_chains
from pronk.drafters.shared.rank_tree import Path as Ranks
from pronk.drafters.shared.rank_tree import check_paths, check_tree
from pronk.drafters.shared.side_cache import CHUNK, Apply, SideCache, SideLane
from pronk.errors import OptionError
from pronk.speculation.calibration import Calibration
from pronk.speculation.draft_length import Backoff
from pronk.speculation.proposer import Capabilities, DraftContext, Outcome
from pronk.speculation.shared_acceptance import SharedAcceptance
from pronk.speculation.target import Target
from pronk.speculation.tree import TokenTree

__all__ = ["MultiToken", "MultiTokenState", "find_target_heads"]

_DEFAULT = "pronk-tiny-multi-token"
_MAX_HEADS = 63


@dataclass
class MultiTokenState:
    """State of one request.

    Attributes:
        calibration: calibration of the heads' probabilities.
        lane: state of the heads' cache; it changes the cost of a proposal, never its tokens.
        backoff: back-off after unprofitable steps.
        can_draft: whether the heads could draft in the current step.
    """

    calibration: Calibration
    lane: SideLane = field(compare=False)
    backoff: Backoff = field(default_factory=Backoff)
    can_draft: bool = field(default=False, compare=False)


class _Heads:
    """Heads loaded beside their target."""

    def __init__(self, target: Target, heads: MultiTokenHeads) -> None:
        self.target, self.heads = target, heads
        self.layer = heads.shape.layer
        self.side_cache = SideCache(target, heads)
        target.keep_hidden(self.layer, self)

    def next_logits(
        self, states: Sequence[MultiTokenState], contexts: Sequence[DraftContext[Any]], count: int
    ) -> Tensor:
        """Run the rows not read yet; return ``[requests, count, vocab]`` float32 for the next tokens."""
        tokens, rows = list[Sequence[int]](), list[Tensor]()

        def forward(x: Tensor, apply: Apply) -> Tensor:
            outputs = dict(self.heads.run(x, apply, count))
            return torch.stack([outputs[index] for index in range(count)], dim=1)

        for state, context in zip(states, contexts, strict=True):
            lane, block_table = state.lane, context.block_table
            if block_table.length - len(lane.tokens) > CHUNK:  # a long text is read in chunks
                self.side_cache.catch_up(lane, context.tokens[: block_table.length], block_table, self.layer, forward)
                _rollback(lane, block_table.length - 1)
            tokens.append(context.tokens[len(lane.tokens) : block_table.length])
            rows.append(self.target.cache.read_hidden(self.layer, block_table, len(lane.tokens), block_table.length))
        outputs = self.side_cache.run([state.lane for state in states], tokens, rows, forward)
        return self._logits(torch.stack([each[-1] for each in outputs]))

    def reserve(self, state: MultiTokenState, context: DraftContext[Any]) -> bool:
        """Whether draft tokens are allowed, their input rows are there, and the cache has slots for these."""
        num_committed, num_released = (
            context.block_table.length,
            context.block_table.num_released * self.target.cache.block_size,
        )
        if min(context.max_depth, context.max_nodes) < 1 or num_committed - 1 < num_released:
            return False
        if len(context.tokens) - 1 > num_committed:  # another drafter's tokens, which the target has not verified
            return False
        # The last row is always run again: its output is needed.
        _rollback(state.lane, num_committed - 1)
        return self.side_cache.reserve(state.lane, context, 0)

    @torch.inference_mode()
    def _logits(self, rows: Tensor) -> Tensor:
        """Map ``[requests, heads, hidden]`` to ``[requests, heads, vocab]``."""
        decoder = self.target.decoder
        logits = [
            self.heads.unembedding(index, decoder.head).logits(self.heads.norm(index, rows[:, index].contiguous()))
            for index in range(rows.shape[1])
        ]
        return torch.stack(logits, dim=1).cpu()


@dataclass(frozen=True)
class MultiToken(ChainDrafter):
    """Options of multi-token heads.

    Attributes:
        model: a folder written by ``pronk train heads`` or ``pronk train lm --future-tokens``, or a Hub id; ``None`` is
            the folder ``heads`` of the target, or else the clone's for ``pronk-tiny``.
        num_tokens: number of heads used, and so most tokens of a branch, 1..63; ``None`` is all of them.
        tree: ``None`` is a chain. A number of nodes is the likeliest tree of that size by the heads' probabilities in
            each step. Paths of ranks, as in ``((0,), (1,), (0, 0))``, are a constant tree.
    """

    name = "multi_token"

    model: str | None = None
    num_tokens: int | None = None
    tree: int | tuple[Ranks, ...] | None = None

    def __post_init__(self) -> None:
        check_path(f"{self.name}: model", self.model)
        if self.num_tokens is not None:
            check_integer(f"{self.name}: num_tokens", self.num_tokens, 1, _MAX_HEADS)
        object.__setattr__(self, "tree", check_tree(self.name, self.tree, _MAX_HEADS))  # lists as tuples

    def bind(self, target: Target) -> MultiTokenProposer:
        """Return the proposer, with the heads loaded beside the target.

        Errors are those of :func:`open_trained`; too few heads or no memory for their cache are an OptionError.
        """
        trained = open_trained(self.name, self.model or find_target_heads(target), _DEFAULT, target)
        shape = trained.make(HeadsShape)
        if self.num_tokens is not None and self.num_tokens > shape.num_heads:
            msg = f"{self.name}: expected num_tokens of at most {shape.num_heads}, the heads, found {self.num_tokens}"
            raise OptionError(msg)
        if isinstance(self.tree, tuple):
            check_paths(self.name, "tree", self.tree, shape.num_heads)

        def make() -> _Heads:
            heads = trained.build(lambda: MultiTokenHeads(shape, target.decoder.config))
            return _Heads(target, trained.load(heads, target.cache))

        return MultiTokenProposer(self, target.load_shared(trained.folder, self.name, load=make))

    @property
    def source(self) -> str:
        """Name of the drafter and of its heads' folder."""
        return self.name if self.model is None else f"{self.name} {Path(self.model).name}"

    @property
    def proposes_tree(self) -> bool:
        """Whether the proposal is a tree, of which a wrapper would lose all but a chain."""
        return self.tree is not None


class MultiTokenProposer(ChainProposer[MultiTokenState]):
    """Proposes chains or trees of multi-token heads; ``loaded`` runs the heads."""

    name = MultiToken.name
    capabilities = Capabilities(observes_all_steps=False)

    def __init__(self, options: MultiToken, loaded: _Heads) -> None:
        self.options, self.loaded, self.target, self.models = options, loaded, loaded.target, (loaded,)

    @property
    def source(self) -> str:
        """Source of the options."""
        return self.options.source

    @property
    def proposes_tree(self) -> bool:
        """Whether the proposal is a tree."""
        return self.options.proposes_tree

    def start(self, prompt: Sequence[int]) -> MultiTokenState:  # noqa: ARG002 - read with the first proposal
        """Return an empty state."""
        return MultiTokenState(Calibration(self.source, known=SharedAcceptance.of(self.target)), SideLane())

    def chains(self, contexts: Sequence[DraftContext[MultiTokenState]], stop: Stop | None = None) -> list[Chain]:
        """Return a chain for each context; one forward pass drafts all tokens."""
        heads = self.loaded.heads.shape.num_heads
        count = heads if stop is not None else self.options.num_tokens or heads
        chains = [Chain(context, context.state.calibration) for context in contexts]
        rows = self._run_heads(contexts, count)
        numbers = [*rows]

        def logits(live: Sequence[int]) -> Sequence[Tensor | None]:
            return [rows[numbers[i]][len(chains[numbers[i]])] for i in live]

        def is_complete(i: int, chain: Chain) -> bool:
            return len(chain) >= count or (stop is not None and stop(numbers[i], chain))

        extend_chains([chains[number] for number in numbers], logits, is_complete)
        return chains

    def propose(self, contexts: Sequence[DraftContext[MultiTokenState]]) -> list[TokenTree]:
        """Return the chains or the trees."""
        if self.options.tree is None:
            return super().propose(contexts)
        trees = [TokenTree.chain(context.tokens[-1:]) for context in contexts]
        heads = self.loaded.heads.shape.num_heads
        max_depth = heads if isinstance(self.options.tree, int) else max(map(len, self.options.tree))
        for number, logits in self._run_heads(contexts, min(max_depth, self.options.num_tokens or heads)).items():
            calibrations = [contexts[number].state.calibration] * len(logits)
            trees[number] = draft_tree(contexts[number], logits, calibrations, self.options.tree)
        return trees

    def _run_heads(self, contexts: Sequence[DraftContext[MultiTokenState]], count: int) -> dict[int, Tensor]:
        """Return logits ``[count, vocab]`` of the first heads by index of the context, where possible."""
        active = list[int]()
        for number, context in enumerate(contexts):
            state = context.state
            if context.ignore_backoff or not (context.prune_unprofitable and state.backoff.steps):
                state.can_draft = self.loaded.reserve(state, context)
                if state.can_draft and min(context.max_depth, context.max_nodes):
                    active.append(number)
        if not active:
            return {}
        selected = [contexts[number] for number in active]
        return dict(
            zip(active, self.loaded.next_logits([context.state for context in selected], selected, count), strict=True)
        )

    def observe(self, outcome: Outcome[MultiTokenState]) -> None:
        """Record the acceptance."""
        state = outcome.state
        state.calibration.learn(outcome)
        state.backoff.learn(outcome.tree, {self.source}, guessed=state.can_draft)
        state.can_draft = False

    def on_preempt(self, state: MultiTokenState) -> None:
        """Free the lane's blocks; the lane is filled again by the next proposal."""
        self.loaded.side_cache.release(state.lane)

    def stop(self, state: MultiTokenState) -> None:
        """Free the lane's blocks."""
        self.loaded.side_cache.release(state.lane)


def _rollback(lane: SideLane, length: int) -> None:
    """Roll a lane back to its first ``length`` tokens, whose blocks it keeps."""
    del lane.tokens[length:]
    lane.block_table.length = min(lane.block_table.length, length)


def find_target_heads(target: Target) -> str | None:
    """Return the folder of the heads that came with the target, if any."""
    folder = None if target.folder is None else target.folder / "heads"
    return str(folder) if folder is not None and (folder / "drafter.json").is_file() else None
