"""Multi-token heads: one forward pass drafts several tokens (Gloeckle et al. 2024, Stern et al. 2018).

The input of the heads is the output of one of the target's layers at a token ``c``. The target itself predicts the next
token, ``d``, from ``c``'s row, and the heads predict the tokens after ``d`` (blockwise parallel decoding). All heads of
all requests run in one forward pass. Transformer heads attend to their own keys and values of the earlier tokens, in a
KV cache of their own (:mod:`pronk.drafting.shared.side_cache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pronk import OptionError, TokenTree
from pronk.backends import Program, ProgramRows
from pronk.base import known_keywords
from pronk.base.arrays import Array
from pronk.base.checks import check_integer
from pronk.drafting import (
    Apply,
    Chain,
    DraftContext,
    LaneDrafter,
    LaneProposer,
    SideCache,
    SideLane,
    Stop,
    Target,
    extend_chains,
)
from pronk.lab.drafters.modules.files import read_trained_drafter
from pronk.lab.drafters.modules.heads import HeadsShape, MultiTokenHeads
from pronk.lab.drafters.rank_tree import Path as Ranks
from pronk.lab.drafters.rank_tree import check_paths, check_tree, draft_tree

_DEFAULT_FOLDER = "pronk-tiny-multi-token"  # folder in ``models`` of a clone of this repository
_MAX_HEADS = 63


class _HeadsRunner(SideCache):
    """Owns the heads and their KV pool; runs the heads for several requests in shared forward passes."""

    def __init__(self, target: Target, heads: MultiTokenHeads) -> None:
        super().__init__(target, heads.config, heads.compile_part)
        self.heads = heads
        self.layer = heads.shape.layer
        self._unembeddings: dict[int, Program] = {}  # by head: the program of its norm and unembedding
        target.keep_hidden(self.layer, self)

    def next_logits(self, contexts: Sequence[DraftContext[SideLane]], count: int) -> Array:
        """Run ``count`` heads on all tokens not yet cached; return logits ``[requests, count, vocab]``."""

        def forward(x: Array, apply: Apply) -> Array:
            outputs = dict(self.heads.run(x, apply, count))
            return np.stack([outputs[index] for index in range(count)], axis=1)

        texts, stops = [each.tokens for each in contexts], [each.block_table.length for each in contexts]
        last = self.run_texts(contexts, texts, stops, self.layer, forward)  # ``[requests, heads, hidden]``
        return np.stack([self._head_logits(head, last[:, head]) for head in range(count)], axis=1)

    def _head_logits(self, head: int, rows: Array) -> Array:
        """Return logits ``[requests, vocab]`` for outputs ``[requests, hidden]`` of a head, counted from 0."""
        decoder = self.target.decoder
        if head not in self._unembeddings:
            own = self.heads.unembeddings[head] if self.heads.unembeddings else decoder.head
            program = decoder.backend.program(rows.shape[1], rows.dtype)
            program.linear(own, norm=self.heads.norms[head], to="logits")
            self._unembeddings[head] = program
        logits = np.empty((len(rows), decoder.config.vocab_size), np.float32)
        self._unembeddings[head].run(ProgramRows.without_segments(len(rows)), np.ascontiguousarray(rows), logits)
        return logits


@known_keywords
@dataclass(frozen=True)
class MultiToken(LaneDrafter):
    """Options of multi-token heads.

    Attributes:
        model: folder written by ``pronk train heads`` or ``pronk train lm --future-tokens``, or a Hub id. ``None`` is
            the folder ``heads`` in the target's folder or, if that is missing, ``models/pronk-tiny-multi-token`` in a
            clone of the repository, which fits only pronk-tiny.
        num_tokens: number of heads used, which is the most draft tokens of a path, 1..63; ``None`` is all heads.
        tree: shape of the proposal. With ``None`` it is a chain. With a number of nodes, 1..127, it is the tree of that
            size that is likeliest by the heads' probabilities in the step. With paths of ranks, as in
            ``((0,), (1,), (0, 0))``, it is the same tree in every step (:mod:`~pronk.lab.drafters.rank_tree`).
    """

    name = "multi_token"

    num_tokens: int | None = None
    tree: int | tuple[Ranks, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_tokens is not None:
            check_integer(f"{self.name}: num_tokens", self.num_tokens, 1, _MAX_HEADS)
        object.__setattr__(self, "tree", check_tree(self.name, self.tree, _MAX_HEADS))  # converts lists to tuples

    def find_default(self, target: Target) -> Path | None:
        """Return the folder ``heads`` in the target's folder, if it has heads."""
        folder = None if target.folder is None else target.folder / "heads"
        return folder if folder is not None and (folder / "drafter.json").is_file() else None

    def bind(self, target: Target) -> MultiTokenProposer:
        own = self.find_default(target)
        model = str(own) if self.model is None and own is not None else self.model
        trained = read_trained_drafter(self.name, model, _DEFAULT_FOLDER, target)
        shape = trained.make_shape(HeadsShape)
        if self.num_tokens is not None and self.num_tokens > shape.num_heads:
            msg = f"{self.name}: expected num_tokens of at most {shape.num_heads}, the heads, found {self.num_tokens}"
            raise OptionError(msg)
        if isinstance(self.tree, tuple):
            check_paths(self.name, self.tree, shape.num_heads)

        def load_runner() -> _HeadsRunner:
            return _HeadsRunner(target, trained.load(target, shape, MultiTokenHeads))

        return MultiTokenProposer(self, target.load_shared(trained.folder, self.name, load=load_runner))

    @property
    def proposes_tree(self) -> bool:
        return self.tree is not None


class MultiTokenProposer(LaneProposer[SideLane]):
    """Proposes chains or trees of the heads' tokens; ``runner`` runs the heads."""

    options: MultiToken

    def __init__(self, options: MultiToken, runner: _HeadsRunner) -> None:
        super().__init__(options, runner, runner.target, runner.cache)
        self.runner = runner

    def chains(self, contexts: Sequence[DraftContext[SideLane]], stop: Stop | None = None) -> list[Chain]:
        """Return a chain for each context; one forward pass of the heads drafts all chains.

        ``stop`` is a wrapper's rule that ends chains: with it, all heads run and the option ``num_tokens`` is ignored.
        """
        num_heads = self.runner.heads.shape.num_heads
        count = num_heads if stop is not None else self.options.num_tokens or num_heads
        chains = [Chain(context, self.source) for context in contexts]
        rows = self._run_heads(contexts, count)

        def next_logits(numbers: Sequence[int]) -> Sequence[Array | None]:
            return [rows[number][len(chains[number])] for number in numbers]

        def is_complete(number: int, chain: Chain) -> bool:
            return len(chain) >= count or (stop is not None and stop(number, chain))

        extend_chains({number: chains[number] for number in rows}, next_logits, is_complete)
        return chains

    def propose(self, contexts: Sequence[DraftContext[SideLane]]) -> list[TokenTree]:
        if self.options.tree is None:
            return super().propose(contexts)
        trees = [TokenTree.chain(context.tokens[-1:]) for context in contexts]
        num_heads = self.runner.heads.shape.num_heads
        max_depth = num_heads if isinstance(self.options.tree, int) else max(map(len, self.options.tree))
        for number, logits in self._run_heads(contexts, min(max_depth, self.options.num_tokens or num_heads)).items():
            trees[number] = draft_tree(contexts[number], logits, [self.source] * len(logits), self.options.tree)
        return trees

    def _run_heads(self, contexts: Sequence[DraftContext[SideLane]], count: int) -> dict[int, Array]:
        """Return ``{index into contexts: logits [count, vocab]}``, without requests that cannot draft."""
        active = {
            number: context
            for number, context in enumerate(contexts)
            # Draft tokens of another drafter, at the end of the text, have no hidden states.
            if len(context.tokens) - 1 <= context.root and self.runner.reserve_again(context, 0)
        }
        logits = self.runner.next_logits([*active.values()], count) if active else ()
        return dict(zip(active, logits, strict=True))
