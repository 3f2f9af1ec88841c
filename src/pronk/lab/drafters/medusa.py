"""Medusa: heads on the target's last hidden state predict later tokens (Cai et al. 2024).

From the hidden state of a token the target's own head predicts the root of the next tree, and head
1 the token after the root. All heads of all requests run in one batch. Their likeliest tokens form
a tree of constant shape (:mod:`pronk.lab.drafters.rank_tree`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pronk import Drafter, Proposer, TokenTree
from pronk.backends import Program
from pronk.base import known_keywords
from pronk.base.arrays import Array
from pronk.base.checks import check_integer, check_path
from pronk.drafting import Capabilities, DraftContext, Outcome, Target
from pronk.lab.drafters.modules.files import TrainedDrafter, read_trained_drafter
from pronk.lab.drafters.modules.heads import MedusaHeads, MedusaShape
from pronk.lab.drafters.rank_tree import (
    Path,
    best_paths,
    check_paths,
    check_tree,
    draft_tree,
    main_chain_first,
)

_MAX_HEADS = 16
_DEFAULT_FOLDER = "pronk-tiny-medusa"  # folder in ``models`` of a clone of this repository


@dataclass
class MedusaState:
    """State of one request: the hidden state that the heads read."""

    # Output ``[hidden]`` of the target's last layer, before the final norm.
    hidden: Array | None = None
    position: int = -1  # text position of the token that ``hidden`` belongs to


@known_keywords
@dataclass(frozen=True)
class Medusa(Drafter):
    """Options of Medusa heads, which predict later tokens from the target's last hidden state.

    Attributes:
        model: folder written by ``pronk train medusa``, or a Hub id. ``None`` is
            ``models/pronk-tiny-medusa`` of a clone of the repository, which fits only pronk-tiny.
        tree: shape of the tree: paths of ranks, parents first, as in ``((0,), (1,), (0, 0))``; or a
            number of nodes, 1..1023, for the best tree of that size by the accuracies measured in
            training. ``None`` is the tree chosen in training.
        num_tokens: number of heads used, which is the largest depth of the tree, 1..16; ``None`` is
            all heads.
    """

    name = "medusa"
    row_options = ("tree",)

    model: str | None = None
    tree: int | tuple[Path, ...] | None = None
    num_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_path(f"{self.name}: model", self.model)
        tree = check_tree(self.name, self.tree, _MAX_HEADS)  # lists become tuples
        object.__setattr__(self, "tree", tree)
        if self.num_tokens is not None:
            check_integer(f"{self.name}: num_tokens", self.num_tokens, 1, _MAX_HEADS)

    def bind(self, target: Target) -> MedusaProposer:
        trained = read_trained_drafter(self.name, self.model, _DEFAULT_FOLDER, target)
        shape = trained.make_shape(MedusaShape)
        paths = main_chain_first(self._choose_paths(trained, shape))
        heads = target.loaded_models.get_or_load(
            trained.folder, self.name, load=lambda: trained.load(target, shape, MedusaHeads)
        )
        return MedusaProposer(self, heads, paths, target)

    def _choose_paths(self, trained: TrainedDrafter, shape: MedusaShape) -> tuple[Path, ...]:
        """Return the tree's paths: from the option ``tree``, or else from ``drafter.json``."""
        tree = self.tree
        depth = shape.num_heads
        if isinstance(tree, tuple):
            return check_paths(self.name, tree, depth)

        def choose() -> tuple[Path, ...]:
            paths = shape.tree if tree is None else best_paths(shape.accuracies, tree)
            return check_paths(self.name, paths, depth)

        return trained.make_checked(choose)


class MedusaProposer(Proposer[MedusaState]):
    """Proposes trees of the heads' likeliest tokens; ``paths`` of ranks are the nodes of a tree."""

    name = Medusa.name

    def __init__(
        self, options: Medusa, heads: MedusaHeads, paths: tuple[Path, ...], target: Target
    ) -> None:
        self.options = options
        self.heads = heads
        self.paths = paths
        self.models = (heads,)
        self.target: Target = target
        self.capabilities = Capabilities(hidden=(target.decoder.config.num_layers,))
        self._sources = [f"{self.name} {number}" for number in range(1, heads.shape.num_heads + 1)]
        self._programs: list[Program] = []  # one per head, built at first use

    def start(self, prompt: Sequence[int]) -> MedusaState:  # noqa: ARG002 - the first outcome has its hidden state
        return MedusaState()

    def propose(self, contexts: Sequence[DraftContext[MedusaState]]) -> list[TokenTree]:
        trees = [TokenTree.chain(context.tokens[-1:]) for context in contexts]
        # Hidden states of requests that may draft, by index in ``contexts``.
        hidden: dict[int, Array] = {}
        for number, context in enumerate(contexts):
            state = context.state
            is_current = state.position == len(context.tokens) - 2
            has_room = context.max_tokens > 0
            if state.hidden is not None and is_current and has_room:
                hidden[number] = state.hidden
        if hidden:
            outputs = self.logits([*hidden.values()])
            for number, logits in zip(hidden, outputs, strict=True):
                used = logits[: self.options.num_tokens]
                trees[number] = draft_tree(contexts[number], used, self._sources, self.paths)
        return trees

    def observe(self, outcome: Outcome[MedusaState]) -> None:
        (layer,) = self.capabilities.hidden
        state = outcome.state
        last = outcome.path[-1] if outcome.path else 0
        # A copy, because a view would keep the outputs of the whole forward pass in memory.
        state.hidden = outcome.hidden[layer][last].copy() if outcome.hidden else None
        state.position = outcome.position + len(outcome.path)

    def logits(self, hidden: Sequence[Array]) -> Array:
        """Return the logits of all heads, ``[requests, heads, vocab]`` float32.

        ``hidden`` has, for each request, an output ``[hidden]`` of the target's last layer.
        """
        rows = np.stack(hidden)
        decoder = self.target.decoder
        if not self._programs:
            programs = [Program(decoder.kernels, rows.shape[1], rows.dtype) for _ in self._sources]
            for head, program in enumerate(programs):
                self.heads.compile(head, decoder.norm, program)
            # Set only when complete, because an interrupt may end the loop above.
            self._programs = programs
        states = [rows.copy() for _ in self._programs]
        for program, state in zip(self._programs, states, strict=True):
            program.run(None, state)
        unembeddings = self.heads.unembeddings  # empty if all heads use the target's unembedding
        if unembeddings:
            by_head = [
                unembed.logits(state) for unembed, state in zip(unembeddings, states, strict=True)
            ]
            return np.stack(by_head, axis=1)
        logits = decoder.head.logits(np.concatenate(states))
        return logits.reshape(len(states), len(rows), -1).swapaxes(0, 1)
