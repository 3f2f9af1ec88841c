"""Multi-token heads: one forward pass drafts several tokens (Gloeckle et al. 2024).

The input of the heads is the output of one of the target's layers at a token ``c``. The target
itself predicts the next token, ``d``, from ``c``'s row, and the heads predict the tokens after
``d`` (blockwise parallel decoding, Stern et al. 2018). All heads of all requests run in one forward
pass. Transformer heads attend to their own keys and values of the earlier tokens, in a KV cache of
their own (:mod:`pronk.drafting.shared.module_runner`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

from pronk import Drafter, OptionError, Proposer, TokenTree
from pronk.backends import Program
from pronk.base import known_keywords
from pronk.base.arrays import Array
from pronk.base.checks import check_integer, check_path
from pronk.checkpoint import ModelConfig
from pronk.drafting import (
    Apply,
    Capabilities,
    Chain,
    DraftCache,
    DraftContext,
    DraftLogits,
    ModuleRunner,
    Stop,
    Target,
    draft_chains,
)
from pronk.lab.drafters.modules.files import read_trained_drafter
from pronk.lab.drafters.modules.heads import HeadsShape, MultiTokenHeads
from pronk.lab.drafters.rank_tree import Path as Ranks
from pronk.lab.drafters.rank_tree import check_paths, check_tree, draft_tree

_DEFAULT_FOLDER = "pronk-tiny-multi-token"  # folder in ``models`` of a clone of this repository
_MAX_HEADS = 63


class _HeadsRunner:
    """The heads with their KV pool, which run for several requests in shared forward passes."""

    def __init__(self, target: Target, heads: MultiTokenHeads) -> None:
        self.target = target
        self.heads = heads
        self.module = ModuleRunner(target, heads.config, heads.compile_part)
        self.layer = heads.shape.layer
        # By index of a head: the program of its norm and unembedding.
        self._unembeddings: dict[int, Program] = {}
        target.save_feature(self.layer, self)

    def next_logits(self, contexts: Sequence[DraftContext[DraftCache]], count: int) -> Array:
        """Run the first ``count`` heads on all tokens of the texts that are not yet cached.

        Returns the heads' logits after the last tokens, ``[requests, count, vocab]`` float32.
        """

        def forward(x: Array, apply: Apply) -> Array:
            outputs = dict(self.heads.run(x, apply, count))
            return np.stack([outputs[index] for index in range(count)], axis=1)

        texts = [each.tokens for each in contexts]
        stops = [each.block_table.length for each in contexts]
        # Outputs ``[requests, heads, hidden]`` for the last token of each text.
        last = self.module.run_texts(contexts, texts, stops, self.layer, forward)
        return np.stack([self._head_logits(head, last[:, head]) for head in range(count)], axis=1)

    def _head_logits(self, head: int, rows: Array) -> Array:
        """Return the logits ``[requests, vocab]`` of head ``head`` (from 0).

        ``rows`` ``[requests, hidden]`` are the outputs of the head's layer.
        """
        decoder = self.target.decoder
        if head not in self._unembeddings:
            own = self.heads.unembeddings[head] if self.heads.unembeddings else decoder.head
            program = Program(decoder.kernels, rows.shape[1], rows.dtype)
            program.linear(own, norm=self.heads.norms[head], to="logits")
            self._unembeddings[head] = program
        logits = np.empty((len(rows), decoder.config.vocab_size), np.float32)
        self._unembeddings[head].run(None, np.ascontiguousarray(rows), logits)
        return logits


@known_keywords
@dataclass(frozen=True)
class MultiToken(Drafter):
    """Options of multi-token heads, which predict later tokens from the output of a target layer.

    Attributes:
        model: folder written by ``pronk train heads`` or ``pronk train lm --future-tokens``, or a
            Hub id. ``None`` is the folder ``heads`` in the target's folder or, if that is missing,
            ``models/pronk-tiny-multi-token`` in a clone of the repository, which fits only
            pronk-tiny.
        num_tokens: number of heads used, 1..63, which is the maximum number of draft tokens of a
            path; ``None`` is all heads.
        tree: shape of the proposal. With ``None`` it is a chain. With a number of nodes, 1..1023,
            it is the tree of that size that is likeliest by the heads' probabilities in the step.
            With paths of ranks, as in ``((0,), (1,), (0, 0))``, it is the same tree in every step
            (:mod:`~pronk.lab.drafters.rank_tree`).
    """

    name = "multi_token"
    row_options = ("tree",)

    model: str | None = None
    num_tokens: int | None = None
    tree: int | tuple[Ranks, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_path(f"{self.name}: model", self.model)
        if self.num_tokens is not None:
            check_integer(f"{self.name}: num_tokens", self.num_tokens, 1, _MAX_HEADS)
        tree = check_tree(self.name, self.tree, _MAX_HEADS)  # lists become tuples
        object.__setattr__(self, "tree", tree)

    def find_default(
        self,
        folder: Path | None,
        config: ModelConfig,  # noqa: ARG002 - of the base class
    ) -> Path | None:
        """Return the folder ``heads`` in the target's folder, or ``None`` if it has no drafter."""
        if folder is None:
            return None
        heads = folder / "heads"
        return heads if (heads / "drafter.json").is_file() else None

    def bind(self, target: Target) -> MultiTokenProposer:
        own = self.find_default(target.folder, target.decoder.config)
        model = str(own) if self.model is None and own is not None else self.model
        trained = read_trained_drafter(self.name, model, _DEFAULT_FOLDER, target)
        shape = trained.make_shape(HeadsShape)
        if self.num_tokens is not None and self.num_tokens > shape.num_heads:
            msg = (
                f"{self.name}: expected num_tokens of at most {shape.num_heads}, the heads, found "
                f"{self.num_tokens}"
            )
            raise OptionError(msg)
        if isinstance(self.tree, tuple):
            check_paths(self.name, self.tree, shape.num_heads)

        def load_runner() -> _HeadsRunner:
            return _HeadsRunner(target, trained.load(target, shape, MultiTokenHeads))

        runner = target.loaded_models.get_or_load(trained.folder, self.name, load=load_runner)
        return MultiTokenProposer(self, runner)

    def as_chains(self) -> Self:
        return replace(self, tree=None)


class MultiTokenProposer(Proposer[DraftCache]):
    """Proposes chains or trees of the heads' tokens; ``runner`` runs the heads."""

    capabilities = Capabilities(observes_all_steps=False)

    def __init__(self, options: MultiToken, runner: _HeadsRunner) -> None:
        self.options = options
        self.runner = runner
        self.name = options.name
        self.target = runner.target
        self.models = (runner,)
        self.model_name = options.model

    def start(self, prompt: Sequence[int]) -> DraftCache:  # noqa: ARG002 - the first proposal reads it
        return self.runner.module.make_cache()

    def stop(self, state: DraftCache) -> None:
        state.release()

    on_preempt = stop  # for a preempted request, the next proposal fills new blocks

    def chains(
        self, contexts: Sequence[DraftContext[DraftCache]], stops: Sequence[Stop] | None = None
    ) -> list[Chain]:
        """Return a chain for each context; one forward pass of the heads drafts all chains.

        ``stops`` are a wrapper's rules that end chains: with them, all heads run and the option
        ``num_tokens`` is ignored.
        """
        num_heads = self.runner.heads.shape.num_heads
        count = num_heads if stops is not None else self.options.num_tokens or num_heads
        all_stops = [None] * len(contexts) if stops is None else stops
        chains = [
            Chain(context, self.label, stop, count)
            for context, stop in zip(contexts, all_stops, strict=True)
        ]
        outputs = self._run_heads(contexts, count)
        rows = {chains[number]: logits for number, logits in outputs.items()}

        def next_logits(incomplete: Sequence[Chain]) -> list[DraftLogits]:
            return [DraftLogits(rows[chain][len(chain)]) for chain in incomplete]

        draft_chains([*rows], next_logits)
        return chains

    def propose(self, contexts: Sequence[DraftContext[DraftCache]]) -> list[TokenTree]:
        if self.options.tree is None:
            return [chain.tree() for chain in self.chains(contexts)]
        trees = [TokenTree.chain(context.tokens[-1:]) for context in contexts]
        tree = self.options.tree
        num_heads = self.runner.heads.shape.num_heads
        max_depth = num_heads if isinstance(tree, int) else max(map(len, tree))
        count = min(max_depth, self.options.num_tokens or num_heads)
        for number, logits in self._run_heads(contexts, count).items():
            sources = [self.label] * len(logits)
            trees[number] = draft_tree(contexts[number], logits, sources, tree)
        return trees

    def _run_heads(
        self, contexts: Sequence[DraftContext[DraftCache]], count: int
    ) -> dict[int, Array]:
        """Return the logits ``[count, vocab]`` of each request that can draft, by its index."""
        active: dict[int, DraftContext[DraftCache]] = {}
        for number, context in enumerate(contexts):
            # Draft tokens of another drafter, at the end of the text, have no hidden states.
            has_hidden_states = len(context.tokens) - 1 <= context.root
            if has_hidden_states and self.runner.module.reserve_again(context, 0):
                active[number] = context
        logits = self.runner.next_logits([*active.values()], count) if active else ()
        return dict(zip(active, logits, strict=True))
