"""Multi-token heads: one pass beside the target guesses several tokens (Gloeckle et al. 2024, Stern et al. 2018).

The heads read what one of the target's layers says at the token before the last, from which the target has chosen the
last one, and guess what follows it (blockwise parallel decoding). All heads of all requests are one pass, and with none
of them decoding is plain::

    text            a  b  c | d              c was computed in the last pass, which chose d
    target's head            d               the root
    head 1, 2, 3             e  f  g         one chain below it: each guess knows the text up to c, and not the others

or, with ``tree``, a tree of the likeliest tokens of each head (:mod:`pronk.drafters.from_target._ranked_heads`).

Transformer heads attend to keys and values of their own of all earlier tokens, in a cache beside the target's, which
keeps the outputs that they read.
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
from pronk.drafters.shared.chain import Chain, ChainDrafter, ChainProposer, Stop, grow
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

__all__ = ["MultiToken", "MultiTokenState", "heads_beside"]

_DEFAULT = "pronk-tiny-multi-token"
_MOST_HEADS = 63


@dataclass
class MultiTokenState:
    """One request's guesses.

    Attributes:
        calibration: of the heads' probabilities.
        lane: what the heads' cache holds of the text; it makes a proposal cheaper, never another one.
        rest: from guessing, where it does not pay.
        able: whether there was something to guess from in the step that is under way.
    """

    calibration: Calibration
    lane: SideLane = field(compare=False)
    rest: Backoff = field(default_factory=Backoff)
    able: bool = field(default=False, compare=False)


class _Heads:
    """Heads at work beside their target."""

    def __init__(self, target: Target, heads: MultiTokenHeads) -> None:
        self.target, self.heads = target, heads
        self.layer = heads.shape.layer
        self.beside = SideCache(target, heads)
        target.keep_hidden(self.layer, self)

    def read(self, states: Sequence[MultiTokenState], contexts: Sequence[DraftContext[Any]], count: int) -> Tensor:
        """Run what the heads have not read of the texts, which :meth:`ready` has found places for.

        Returns:
            Logits ``[requests, count, vocab]`` float32 of the tokens after the last ones.
        """
        tokens, rows = list[Sequence[int]](), list[Tensor]()

        def forward(x: Tensor, apply: Apply) -> Tensor:
            made = dict(self.heads.run(x, apply, count))
            return torch.stack([made[index] for index in range(count)], dim=1)

        for state, context in zip(states, contexts, strict=True):
            lane, block_table = state.lane, context.block_table
            if block_table.length - len(lane.tokens) > CHUNK:  # it is read by itself
                self.beside.catch_up(lane, context.tokens[: block_table.length], block_table, self.layer, forward)
                _forget(lane, block_table.length - 1)
            tokens.append(context.tokens[len(lane.tokens) : block_table.length])
            rows.append(self.target.cache.read_hidden(self.layer, block_table, len(lane.tokens), block_table.length))
        said = self.beside.run([state.lane for state in states], tokens, rows, forward)
        return self._logits(torch.stack([each[-1] for each in said]))

    def ready(self, state: MultiTokenState, context: DraftContext[Any]) -> bool:
        """Whether there are guesses to be made, rows to make them from, and places for these."""
        certain, gone = context.block_table.length, context.block_table.released * self.target.cache.block_size
        if min(context.max_depth, context.max_nodes) < 1 or certain - 1 < gone:
            return False
        if len(context.tokens) - 1 > certain:  # others' guesses, of which the target has said nothing yet
            return False
        # What the last computed token says is asked again, even if nothing has happened since the last time.
        _forget(state.lane, certain - 1)
        return self.beside.ready(state.lane, context, 0)

    @torch.inference_mode()
    def _logits(self, rows: Tensor) -> Tensor:
        """``[requests, heads, hidden]`` to ``[requests, heads, vocab]``."""
        decoder = self.target.decoder
        said = [
            self.heads.unembedding(index, decoder.head).logits(self.heads.norm(index, rows[:, index].contiguous()))
            for index in range(rows.shape[1])
        ]
        return torch.stack(said, dim=1).cpu()


@dataclass(frozen=True)
class MultiToken(ChainDrafter):
    """Options of multi-token heads.

    Attributes:
        model: a folder that ``pronk train heads``, or ``pronk train lm --future-tokens``, has written, or a Hub id;
            ``None`` is the folder ``heads`` of the target, or else the clone's for ``pronk-tiny``.
        num_tokens: most tokens of a branch, 1..63, and so the heads that are used; ``None`` is all of them.
        tree: ``None`` is a chain. A number of nodes is the tree of so many that is likeliest to be reached, by the
            heads' own probabilities in that step; paths of ranks, as in ``((0,), (1,), (0, 0))``, are always the same
            tree.
    """

    name = "multi_token"

    model: str | None = None
    num_tokens: int | None = None
    tree: int | tuple[Ranks, ...] | None = None

    def __post_init__(self) -> None:
        check_path(f"{self.name}: model", self.model)
        if self.num_tokens is not None:
            check_integer(f"{self.name}: num_tokens", self.num_tokens, 1, _MOST_HEADS)
        object.__setattr__(self, "tree", check_tree(self.name, self.tree, _MOST_HEADS))  # lists as tuples

    def bind(self, target: Target) -> MultiTokenProposer:
        """What guesses with the heads, loaded beside the target.

        Raises:
            CheckpointError: they cannot be loaded.
            OptionError: they were trained on another target or are fewer than asked for, or there is no memory for
                what they keep.
        """
        trained = open_trained(self.name, self.model or heads_beside(target), _DEFAULT, target)
        shape = trained.make(HeadsShape)
        if self.num_tokens is not None and self.num_tokens > shape.num_heads:
            msg = f"{self.name}: expected num_tokens of at most {shape.num_heads}, the heads, found {self.num_tokens}"
            raise OptionError(msg)
        if isinstance(self.tree, tuple):
            check_paths(self.name, "tree", self.tree, shape.num_heads)

        def make() -> _Heads:
            heads = trained.build(lambda: MultiTokenHeads(shape, target.decoder.config))
            return _Heads(target, trained.load(heads, target.cache))

        return MultiTokenProposer(self, target.share(trained.folder, self.name, make=make))

    @property
    def source(self) -> str:
        """Its name, and that of its heads' folder."""
        return self.name if self.model is None else f"{self.name} {Path(self.model).name}"

    @property
    def expands(self) -> bool:
        """Whether it proposes a tree, which whoever wraps it would lose."""
        return self.tree is not None


class MultiTokenProposer(ChainProposer[MultiTokenState]):
    """Multi-token heads that guess.

    Attributes:
        options: it guesses by.
        loaded: the heads at work.
    """

    name = MultiToken.name
    capabilities = Capabilities(observes_all_steps=False)

    def __init__(self, options: MultiToken, loaded: _Heads) -> None:
        self.options, self.loaded, self.target, self.models = options, loaded, loaded.target, (loaded,)

    @property
    def source(self) -> str:
        """As :class:`MultiToken` has it."""
        return self.options.source

    @property
    def expands(self) -> bool:
        """As :class:`MultiToken` has it."""
        return self.options.expands

    def start(self, prompt: Sequence[int]) -> MultiTokenState:  # noqa: ARG002 - read with the first proposal
        """Nothing is read yet."""
        return MultiTokenState(Calibration(self.source, known=SharedAcceptance.of(self.target)), SideLane())

    def chains(self, contexts: Sequence[DraftContext[MultiTokenState]], stop: Stop | None = None) -> list[Chain]:
        """A chain for each context; all guesses cost one pass, so all are made or none."""
        heads = self.loaded.heads.shape.num_heads
        count = heads if stop is not None else self.options.num_tokens or heads
        chains = [Chain(context, context.state.calibration) for context in contexts]
        said = self._ask(contexts, count)
        numbers = [*said]

        def logits(live: Sequence[int]) -> Sequence[Tensor | None]:
            return [said[numbers[i]][len(chains[numbers[i]])] for i in live]

        def ends(i: int, chain: Chain) -> bool:
            return len(chain) >= count or (stop is not None and stop(numbers[i], chain))

        grow([chains[number] for number in numbers], logits, ends)
        return chains

    def propose(self, contexts: Sequence[DraftContext[MultiTokenState]]) -> list[TokenTree]:
        """The chains, or the trees."""
        if self.options.tree is None:
            return super().propose(contexts)
        trees = [TokenTree.chain(context.tokens[-1:]) for context in contexts]
        heads = self.loaded.heads.shape.num_heads
        deepest = heads if isinstance(self.options.tree, int) else max(map(len, self.options.tree))
        for number, logits in self._ask(contexts, min(deepest, self.options.num_tokens or heads)).items():
            own = [contexts[number].state.calibration] * len(logits)
            trees[number] = draft_tree(contexts[number], logits, own, self.options.tree)
        return trees

    def _ask(self, contexts: Sequence[DraftContext[MultiTokenState]], count: int) -> dict[int, Tensor]:
        """Logits ``[count, vocab]`` of the first heads, by the number of the context; none where they cannot guess."""
        going = list[int]()
        for number, context in enumerate(contexts):
            state = context.state
            if context.tries or not (context.thrifty and state.rest.steps):
                state.able = self.loaded.ready(state, context)
                if state.able and min(context.max_depth, context.max_nodes):
                    going.append(number)
        if not going:
            return {}
        asked = [contexts[number] for number in going]
        return dict(zip(going, self.loaded.read([context.state for context in asked], asked, count), strict=True))

    def observe(self, outcome: Outcome[MultiTokenState]) -> None:
        """Count what was accepted."""
        state = outcome.state
        state.calibration.learn(outcome)
        state.rest.learn(outcome.tree, {self.source}, guessed=state.able)
        state.able = False

    def on_preempt(self, state: MultiTokenState) -> None:
        """Give back the lane, which begins anew."""
        self.loaded.beside.release(state.lane)

    def stop(self, state: MultiTokenState) -> None:
        """Give back the lane."""
        self.loaded.beside.release(state.lane)


def _forget(lane: SideLane, length: int) -> None:
    """Cut a lane's text to its first ``length`` tokens."""
    del lane.tokens[length:]
    lane.block_table.length = min(lane.block_table.length, length)


def heads_beside(target: Target) -> str | None:
    """The heads that came with the target, if any."""
    folder = None if target.folder is None else target.folder / "heads"
    return str(folder) if folder is not None and (folder / "drafter.json").is_file() else None
