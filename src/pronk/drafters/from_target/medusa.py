"""Medusa: heads on the target's last hidden state guess what follows its next token (Cai et al. 2024).

The last pass left a hidden state at the last accepted node, from which the target chose the token that is the new root.
From the same state head 1 guesses the token after the root, head 2 the one after that, and so on, each without knowing
what the others say. All heads of all requests are one batch, and no cache is needed. The likeliest tokens of each make
up a tree whose shape never changes: the node ``(r1, …, rd)`` carries the token of rank ``rd`` of head ``d``
(:mod:`pronk.drafters.from_target._ranked_heads`). ::

    hidden state ─ target's head    the                      root
                 ─ head 1           cat .6  dog .3           (0,) (1,)
                 ─ head 2           sat .5  ran .2           (0, 0) (0, 1) (1, 0)

The tree is offered with the gains that the heads' probabilities give it, and the engine keeps what pays. A request of
which it keeps nothing rests, and tries again after 2 steps, then after twice as many each time, up to 32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from pronk.checks import check_integer, check_path
from pronk.drafters.from_target._ranked_heads import draft_tree
from pronk.drafters.from_target.modules.files import Trained, open_trained
from pronk.drafters.from_target.modules.medusa import Head, MedusaHeads, MedusaShape
from pronk.drafters.shared.rank_tree import Path, best_paths, check_paths, check_tree, main_chain_first
from pronk.models.decoder import Decoder
from pronk.models.linear import Linear
from pronk.models.program import Program, ProgramRows
from pronk.speculation.calibration import Calibration
from pronk.speculation.draft_length import Backoff
from pronk.speculation.proposer import Capabilities, DraftContext, Drafter, Outcome, Proposer
from pronk.speculation.shared_acceptance import SharedAcceptance
from pronk.speculation.target import Target
from pronk.speculation.tree import TokenTree

__all__ = ["Medusa", "MedusaState"]

_MOST_HEADS = 16

_DEFAULT = "pronk-tiny-medusa"


@dataclass
class MedusaState:
    """What one request's heads guess from, and how right they were.

    Attributes:
        calibrations: of each head's probabilities.
        hidden: ``[hidden]``, the target's last hidden state at ``position``, before the final norm.
        position: of a token in the text.
        rest: from guessing, where it does not pay.
    """

    calibrations: list[Calibration]
    hidden: Tensor | None = None
    position: int = -1
    rest: Backoff = field(default_factory=Backoff)

    def learn(self, outcome: Outcome[MedusaState]) -> None:
        """Hear what became of a tree."""
        for calibration in self.calibrations:
            calibration.learn(outcome)
        self.rest.learn(outcome.tree, {each.source for each in self.calibrations}, guessed=self.hidden is not None)


@dataclass(frozen=True)
class _Loaded:
    """Heads beside their target, and the tree that they guess."""

    heads: MedusaHeads
    decoder: Decoder
    paths: tuple[Path, ...]
    programs: list[Program] = field(default_factory=list)  # each head's, for the kernels

    @torch.inference_mode()
    def logits(self, hidden: Sequence[Tensor]) -> Tensor:
        """``[requests, heads, vocab]`` float32 on the CPU, of hidden states ``[hidden]`` before the final norm."""
        rows = torch.stack(list(hidden))
        states = self._states(rows)
        own = self.heads.unembeddings
        if own:
            said = [cast(Linear, unembed).logits(state) for unembed, state in zip(own, states, strict=True)]
            return torch.stack(said, dim=1).cpu()
        return self.decoder.head.logits(torch.cat(states)).view(len(states), len(rows), -1).transpose(0, 1).cpu()

    def _states(self, rows: Tensor) -> list[Tensor]:
        """What goes into each head's unembedding."""
        kernels = self.decoder.kernels
        if kernels is None:
            normed = self.decoder.norm(rows)
            return [head(normed) for head in self.heads.layers]
        if not self.programs:
            made = [Program(kernels, rows.shape[1], rows.dtype) for _ in self.heads.layers]
            for program, head in zip(made, self.heads.layers, strict=True):
                program.norm(self.decoder.norm)
                cast(Head, head).compile(program)
            self.programs.extend(made)  # all or, if that was interrupted, none
        states = [rows.clone() for _ in self.programs]
        for program, state in zip(self.programs, states, strict=True):
            program.run(ProgramRows.loose(len(rows)), state)
        return states


@dataclass(frozen=True)
class Medusa(Drafter):
    """Options of Medusa heads.

    Attributes:
        model: a folder that ``pronk train medusa`` has written, or a Hub id; ``None`` is the clone's for
            ``pronk-tiny``.
        tree: paths of ranks, parents first, as in ``((0,), (1,), (0, 0))``; or a number of nodes, for the best tree of
            that size; ``None`` is the tree that was chosen when the heads were trained.
        num_tokens: most tokens of a branch, 1..16: the heads that guess. ``None`` is all of them.
    """

    name = "medusa"

    model: str | None = None
    tree: int | tuple[Path, ...] | None = None
    num_tokens: int | None = None

    def __post_init__(self) -> None:
        check_path(f"{self.name}: model", self.model)
        object.__setattr__(self, "tree", check_tree(self.name, self.tree, _MOST_HEADS))  # lists as tuples
        if self.num_tokens is not None:
            check_integer(f"{self.name}: num_tokens", self.num_tokens, 1, _MOST_HEADS)

    def bind(self, target: Target) -> MedusaProposer:
        """What guesses with the heads, loaded beside the target.

        Raises:
            CheckpointError: they cannot be loaded.
            OptionError: they were trained on another target, or have fewer heads than the tree is deep.
        """
        trained = open_trained(self.name, self.model, _DEFAULT, target)
        shape, decoder = trained.make(MedusaShape), target.decoder
        paths = main_chain_first(self._paths(trained, shape))

        def make() -> MedusaHeads:
            heads = trained.build(lambda: MedusaHeads(shape, decoder.config))
            return trained.load(heads, target.cache)

        heads = target.share(trained.folder, self.name, make=make)
        return MedusaProposer(self, _Loaded(heads, decoder, paths), target)

    def _paths(self, trained: Trained, shape: MedusaShape) -> tuple[Path, ...]:
        """The tree by the options, or else by the file."""
        tree = self.tree
        if isinstance(tree, tuple):
            return check_paths(self.name, "tree", tree, shape.num_heads)

        def choose() -> tuple[Path, ...]:
            paths = best_paths(shape.accuracies, tree) if isinstance(tree, int) else shape.tree
            return check_paths(self.name, "tree", paths, shape.num_heads)

        return trained.build(choose)


class MedusaProposer(Proposer[MedusaState]):
    """Heads on the target that guess.

    Attributes:
        options: it guesses by.
        loaded: the heads at work.
        needs: the target's last hidden states.
    """

    name = Medusa.name

    def __init__(self, options: Medusa, loaded: _Loaded, target: Target) -> None:
        self.options, self.loaded, self.target, self.models = options, loaded, target, (loaded.heads,)
        self.capabilities = Capabilities(hidden=(loaded.decoder.config.num_layers,), observes_all_steps=False)

    def start(self, prompt: Sequence[int]) -> MedusaState:  # noqa: ARG002 - its last hidden state comes with its pass
        """Nothing to guess from yet."""
        heads = self.loaded.heads.shape.num_heads
        known = SharedAcceptance.of(self.target)
        return MedusaState([Calibration(f"{self.name} {number}", known=known) for number in range(1, heads + 1)])

    def propose(self, contexts: Sequence[DraftContext[MedusaState]]) -> list[TokenTree]:
        """The tree for each context whose last token was chosen from the hidden state at hand."""
        trees = [TokenTree.chain(context.tokens[-1:]) for context in contexts]
        known = [
            (number, context.state.hidden)
            for number, context in enumerate(contexts)
            if context.state.hidden is not None
            and context.state.position == len(context.tokens) - 2
            and min(context.max_depth, context.max_nodes) > 0
            and (context.tries or not (context.thrifty and context.state.rest.steps))
        ]
        if known:
            said = self.loaded.logits([hidden for _, hidden in known])
            for (number, _), logits in zip(known, said, strict=True):
                own = contexts[number].state.calibrations
                trees[number] = draft_tree(contexts[number], logits[: self.options.num_tokens], own, self.loaded.paths)
        return trees

    def observe(self, outcome: Outcome[MedusaState]) -> None:
        """Keep the hidden state of the last accepted node, and count what was accepted."""
        layer = self.loaded.decoder.config.num_layers
        state, last = outcome.state, outcome.path[-1] if outcome.path else 0
        state.learn(outcome)
        # A view would keep the whole pass alive.
        state.hidden = outcome.hidden[layer][last].clone() if outcome.hidden else None
        state.position = outcome.position + len(outcome.path)
