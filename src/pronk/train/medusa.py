"""Medusa heads on a frozen target (``medusa``), and the tree that they will guess.

Head number ``i`` at position ``t`` learns the target's distribution at position ``t + i``: the target itself chooses
the token ``t + 1``, so head 1 guesses token ``t + 2``. Which of their likeliest tokens make up the tree is decided
whenever the heads are written, by how often each rank of each head is the target's token on text that was held out: the
target's own, after one half of the held-out prompts. The engine measures the drafter on the other half.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from pronk.checks import check_integer
from pronk.drafters.from_target.modules.medusa import MedusaHeads, MedusaShape
from pronk.drafters.shared.rank_tree import MAX_NODES, best_paths
from pronk.errors import OptionError
from pronk.train.batches import Sequences, token_dtype
from pronk.train.distill import chunk_rows
from pronk.train.features import Features
from pronk.train.heads import check_guesses, check_lengths
from pronk.train.lm import held_out_sets
from pronk.train.loop import Passed
from pronk.train.on_policy import held_out_halves, held_out_prompts
from pronk.train.options import StudentOptions
from pronk.train.student import Branch, Student
from pronk.train.teacher import Teacher

__all__ = ["MedusaOptions", "MedusaStudent"]

_RANKS = 16  # that are measured: no tree of use goes further

# Where the target's own text was held out the heads are measured on that: it is what they will guess.
_OWN = "valid-on-policy.bin"


@dataclass(frozen=True)
class MedusaOptions(StudentOptions):
    """The loop's settings for Medusa heads of ``shape``, whose tree is to have ``tree_size`` nodes.

    A finished run whose command is given with another ``tree_size`` is written again with that.
    """

    FREE: ClassVar[frozenset[str]] = StudentOptions.FREE | {"tree_size"}

    shape: MedusaShape = field(default_factory=MedusaShape)
    tree_size: int = 15

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("tree-size", self.tree_size, 1, MAX_NODES)
        check_lengths(self, self.shape.num_heads)
        check_guesses(self.num_tokens, self.shape.num_heads)


class MedusaStudent(Student[MedusaHeads]):
    """See :class:`~pronk.train.student.Student`."""

    kind = "medusa"
    what = "Medusa heads"

    options: MedusaOptions

    def __init__(self, folder: Path, options: MedusaOptions, teacher: Teacher) -> None:
        super().__init__(folder, options, teacher)
        self._run = torch.compile(_run) if options.compile else _run
        self._ranks: tuple[tuple[float, ...], ...] | None = None  # of the heads as they are, once they are measured

    def build(self, generator: torch.Generator) -> MedusaHeads:  # noqa: ARG002 - heads begin as the target's own
        """All heads say what the target says."""
        heads = MedusaHeads(self.options.shape, self.teacher.llm.config)
        heads.initialize(self.teacher.unembedding)
        return heads

    def branches(self, tokens: Tensor, features: Features) -> Iterator[Branch]:
        """One for each head: its guesses for the token after the next, and so on."""
        count, length = tokens.shape
        with torch.no_grad():
            last = self.teacher.decoder.norm(features.last).float().view(count, length, -1)
        rows = torch.arange(tokens.numel(), device=tokens.device).view(count, length)
        for ahead, head in enumerate(self.module.layers, 1):
            if length <= ahead:  # held-out text may be as short as it likes
                return
            states = self._run(head, last[:, : length - ahead].flatten(0, 1))
            yield Branch(states, self._unembedding(ahead - 1), rows[:, ahead:].flatten())

    def backward(self, inputs: Tensor, targets: Tensor, scale: float) -> Passed:
        """See :class:`~pronk.train.loop.Objective`; the heads will be others."""
        self._ranks = None
        return super().backward(inputs, targets, scale)

    def exported_shape(self) -> MedusaShape:
        """See :class:`~pronk.train.student.Student`; the tree is chosen for the heads as they are now."""
        accuracies = self._ranks = self._ranks or self.measure_ranks()
        return replace(self.options.shape, tree=best_paths(accuracies, self.options.tree_size), accuracies=accuracies)

    def prompts(self) -> list[list[int]]:
        """What the engine continues to measure the drafter; the half that the tree was not chosen by."""
        halves = held_out_halves(self.data, self.vocab_size)
        return held_out_prompts(self.data) if halves is None else halves[1]

    @torch.no_grad()
    def measure_ranks(self) -> tuple[tuple[float, ...], ...]:
        """``[head][rank]``: how often that token of the head is the target's likeliest, on held-out text.

        Raises:
            OptionError: no text was held out, or none of a whole guess.
        """
        o, data = self.options, self.data
        hits = torch.zeros(o.shape.num_heads, min(_RANKS, self.vocab_size), dtype=torch.int64, device=self.device)
        seen = [0] * o.shape.num_heads
        for sequences in self._judges():
            count = max(1, o.micro // sequences.length)
            for start in range(0, len(sequences), count):
                inputs, _ = sequences.batch(start, min(count, len(sequences) - start))
                for head, (branch, teacher, _) in enumerate(self._pass(inputs)):
                    hits[head] += _hits(branch, teacher, hits.shape[1])
                    seen[head] += len(branch.hidden)
        if not all(seen):
            msg = f"{data}: expected held-out text of more than {len(seen)} tokens to choose the tree by, found less"
            raise OptionError(msg)
        return tuple(tuple(round(hit / rows, 4) for hit in row.tolist()) for row, rows in zip(hits, seen, strict=True))

    def _judges(self) -> list[Sequences]:
        """The sequences that the ranks are counted on."""
        length, halves = self.options.first_length, held_out_halves(self.data, self.vocab_size)
        if halves is None:
            return [each for _, each in held_out_sets(self.data, length, self.vocab_size) if len(each)]
        file, dtype = self.data / _OWN, token_dtype(self.vocab_size)
        whole = file.stat().st_size // dtype().itemsize
        return [Sequences(file, min(length, halves[0] - 1), seed=0, stop=halves[0] / whole, dtype=dtype)]

    @property
    def description(self) -> str:
        """See :class:`~pronk.train.student.Student`."""
        s, c = self.options.shape, self.teacher.llm.config
        halves = held_out_halves(self.data, self.vocab_size)
        text = "held-out text" if halves is None else "what the target says after half of the held-out prompts"
        own = "the target's unembedding" if s.unembeddings == "shared" else "an unembedding of its own"
        return (
            f"{s.num_heads} heads of {s.blocks} residual blocks of size {c.hidden_size} each, with {own}, over the "
            f"target's last hidden state after its final norm. The tree has {self.options.tree_size} guesses, chosen "
            f"by {text}{'' if halves is None else '; the figures of decoding are those of the other half'}."
        )

    def _unembedding(self, head: int) -> Tensor:
        own = self.module.unembeddings
        return own[head].get_parameter("weight") if own else self.teacher.unembedding


def _run(head: torch.nn.Module, hidden: Tensor) -> Tensor:
    states: Tensor = head(hidden)
    return states


def _hits(branch: Branch, teacher: Any, ranks: int) -> Tensor:
    """``[ranks]``: at how many rows that token of the head is the teacher's likeliest."""
    hits, weight = branch.hidden.new_zeros(ranks, dtype=torch.int64), branch.weight.bfloat16()
    step = chunk_rows(len(weight))
    for start in range(0, len(branch.hidden), step):
        part = slice(start, min(start + step, len(branch.hidden)))
        best = (branch.hidden[part].bfloat16() @ weight.T).topk(ranks).indices
        hits += (best == teacher(part).argmax(-1, keepdim=True)).sum(0)
    return hits
