"""Training of multi-token heads (Gloeckle et al. 2024) and of Medusa heads on a frozen target.

The logits of all heads, and their gradients, would be the largest tensors in memory. Each step
therefore runs a head forward and backward before the next head (:func:`head_by_head`; section 2,
figures 2 and S11).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from pronk import OptionError
from pronk.base.checks import check_integer
from pronk.lab import MAX_TREE_NODES, HeadsShape, MedusaShape, best_paths
from pronk.train.attention import DenseAttention, Features, dense_rope
from pronk.train.batches import Sequences
from pronk.train.corpus.encoder import token_dtype
from pronk.train.lm import held_out_sets
from pronk.train.loop import PassResult
from pronk.train.losses import TeacherLogits, chunks, product_dtype
from pronk.train.modules.decoder import Rope, maybe_compile
from pronk.train.modules.drafters import HeadsModule, MedusaHeadModule, MedusaModule
from pronk.train.on_policy import held_out_halves, held_out_prompts
from pronk.train.options import HeadsOptions
from pronk.train.students import Branch, Student

# A head's number, and the function that maps its input ``[rows, hidden]`` to its output before the
# head's norm, of the same shape.
Stage = tuple[int, Callable[[Tensor], Tensor]]
# For each head, the accuracy of this number of its most likely tokens is measured. Token trees that
# pay have no less likely tokens.
_NUM_RANKS = 16


class HeadsStudent(Student[HeadsModule]):
    """Training of multi-token heads on a frozen target.

    Head ``i`` learns the target's distribution ``i`` positions further on.
    """

    kind = "multi_token"
    title = "Multi-token heads"

    def build(self, generator: torch.Generator) -> HeadsModule:
        """Build heads that at first nearly copy their input.

        Their norms and unembeddings start as copies of the target's.
        """
        self.hidden = (self.options.shape.layer,)
        heads = HeadsModule(self.options.shape, self.teacher.llm.config)
        heads.initialize(generator, self.teacher.decoder.norm, self.teacher.unembedding)
        return heads

    def branches(self, tokens: Tensor, features: Features) -> Iterator[Branch]:
        """Yield one branch per head; the head of the nearest token is first.

        A branch lacks the last rows of each sequence, because the token that the head would predict
        is beyond the sequence.
        """
        heads = self.module
        (batch, length) = tokens.shape
        z = features.hidden[heads.shape.layer].float()
        rope = dense_rope(self.teacher.decoder, batch, length, z.dtype, z.device)
        attend = DenseAttention(batch, length, heads.config.windows)
        stages = head_stages(heads, rope, attend)
        for index, out in head_by_head(stages, z, chained=heads.shape.is_chained):
            rows, target_rows = shifted_rows(batch, length, index + 1, tokens.device)
            if len(rows):  # there are none if a held-out sequence is too short for this head
                weight = head_weight(heads, index, self.teacher.unembedding)
                yield Branch(heads.norms[index](out[rows]), weight, target_rows)

    @property
    def description(self) -> str:
        return describe(self.options.shape)


def describe(shape: HeadsShape) -> str:
    """Return the sizes of multi-token heads in words, for a model card."""
    layer = "a linear layer"
    if shape.kind == "transformer":
        layer = f"a transformer layer with an MLP of {shape.mlp}"
    return (
        f"{shape.num_heads} heads for the tokens 2 to {shape.num_heads + 1} places ahead, "
        f"{shape.order}, over the output of the target's layer {shape.layer}; each is {layer} and "
        f"a norm, with {shape.unembeddings} unembeddings."
    )


def head_weight(heads: HeadsModule | MedusaModule, index: int, shared: Tensor) -> Tensor:
    """Return a head's unembedding ``[vocab, hidden]``: its own, or ``shared`` if it has none."""
    return heads.unembeddings[index].get_parameter("weight") if heads.unembeddings else shared


def head_stages(heads: HeadsModule, rope: Rope, attend: DenseAttention) -> list[Stage]:
    """Return index (from 0) and function of each head, in the order in which the heads run.

    ``rope`` are the rotations of the rows, and ``attend`` is the attention of the heads' layers.
    """
    run = partial(heads.run_part, rope=rope, attend=attend)
    return [(index, partial(run, index)) for index in heads.shape.execution_order]


def head_by_head(
    stages: Sequence[Stage], z: Tensor, *, chained: bool
) -> Iterator[tuple[int, Tensor]]:
    """Yield number and output ``[rows, hidden]`` of each head, by ascending number.

    The caller runs the backward pass from each output before it takes the next one, so that only
    one head's logits are in memory.

    Args:
        stages: the heads, in the order in which they run.
        z: input of the first head, ``[rows, hidden]``, a leaf of the autograd graph.
        chained: False: all heads read ``z``. True: each head reads the output of the head before
            it; after the last output, the iterator passes the gradients back through the heads, and
            to ``z`` if it requires a gradient.
    """
    if not chained:
        for number, apply in sorted(stages, key=lambda stage: stage[0]):
            yield number, apply(z)
        return
    # number of each head, its output, and its output detached from the graph
    outputs: list[tuple[int, Tensor, Tensor]] = []
    leaf = z
    for number, apply in stages:
        out = apply(leaf)
        leaf = out.detach().requires_grad_()
        outputs.append((number, out, leaf))
    for number, _, leaf in sorted(outputs, key=lambda output: output[0]):
        yield number, leaf
    for _, out, leaf in reversed(outputs):
        if out.requires_grad:
            out.backward(leaf.grad)


def shifted_rows(
    batch: int, length: int, places: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the rows with a row ``places`` later in their sequence, and these later rows.

    Rows are numbered over all ``batch`` sequences of ``length`` rows. For two sequences of 3 rows
    and 1 place: ``0 1 3 4`` and ``1 2 4 5``.
    """
    all_rows = torch.arange(batch * length, device=device).view(batch, length)
    return all_rows[:, : length - places].reshape(-1), all_rows[:, places:].reshape(-1)


@dataclass(frozen=True)
class MedusaOptions(HeadsOptions):
    """Options of the training of Medusa heads.

    A resumed run may change ``tree_size``, which affects only the export.
    """

    FREE: ClassVar[frozenset[str]] = HeadsOptions.FREE | {"tree_size"}

    shape: MedusaShape = field(default_factory=MedusaShape)
    tree_size: int = 15  # number of draft tokens of the token tree in the exported files

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("tree-size", self.tree_size, 1, MAX_TREE_NODES)


class MedusaStudent(Student[MedusaModule]):
    """Training of Medusa heads.

    At position ``t``, the target itself chooses token ``t + 1``. Head ``i`` learns the target's
    distribution at position ``t + i``, from which token ``t + i + 1`` is chosen.

    Each export chooses the token tree by accuracies on held-out text: how often a head's token of a
    given rank is the target's most likely token. This text is the target's own, from one half of
    the held-out prompts; the engine measures the drafter with the other half.
    """

    kind = "medusa"
    title = "Medusa heads"

    options: MedusaOptions
    # Accuracies of the heads' tokens by rank, with the current weights; ``None`` if not measured.
    _accuracies: tuple[tuple[float, ...], ...] | None = None

    def build(self, generator: torch.Generator) -> MedusaModule:  # noqa: ARG002 - nothing is random
        """Build heads whose first weights make them predict the same token as the target."""
        heads = MedusaModule(self.options.shape, self.teacher.llm.config)
        heads.initialize(self.teacher.unembedding)
        self._run = maybe_compile(MedusaHeadModule.forward, compiles=self.options.compile)
        return heads

    def branches(self, tokens: Tensor, features: Features) -> Iterator[Branch]:
        count, length = tokens.shape
        with torch.no_grad():
            last = self.teacher.decoder.norm(features.last).float()
        for index, head in enumerate(self.module.layers):
            rows, target_rows = shifted_rows(count, length, index + 1, tokens.device)
            if not len(rows):  # there are none if the held-out sequence is too short for this head
                return
            weight = head_weight(self.module, index, self.teacher.unembedding)
            yield Branch(self._run(head, last[rows]), weight, target_rows)

    def backward(self, inputs: Tensor, targets: Tensor, scale: float) -> PassResult:
        """Add the gradient of the loss; drop measured accuracies, as the weights will change."""
        self._accuracies = None
        return super().backward(inputs, targets, scale)

    def exported_shape(self) -> MedusaShape:
        """Return the sizes of the heads, and the token tree that suits their current accuracies."""
        self._accuracies = self._accuracies or self.measure_ranks()
        tree = best_paths(self._accuracies, self.options.tree_size)
        return replace(self.options.shape, tree=tree, accuracies=self._accuracies)

    def prompts(self) -> list[list[int]]:
        """Return the half of the held-out prompts by which the token tree is not chosen."""
        halves = held_out_halves(self.data, self.vocab_size)
        return held_out_prompts(self.data) if halves is None else halves[1]

    @torch.no_grad()
    def measure_ranks(self) -> tuple[tuple[float, ...], ...]:
        """Return the accuracies on held-out text, ``[head][rank]``, each 0..1.

        An accuracy is the fraction of positions at which the head's token of this rank is the
        target's most likely token. Raises OptionError if the held-out text is too short.
        """
        o = self.options
        num_heads = o.shape.num_heads
        num_ranks = min(_NUM_RANKS, self.vocab_size)
        hits = torch.zeros(num_heads, num_ranks, dtype=torch.int64, device=self.device)
        seen = [0] * num_heads  # number of positions measured so far, for each head
        for sequences in self._held_out_sequences():
            for inputs, _ in sequences.batches(o.micro):
                for head, (branch, teacher) in enumerate(self._branches_with_targets(inputs)):
                    hits[head] += _hits(branch, teacher, num_ranks)
                    seen[head] += len(branch.hidden)
        if not all(seen):
            msg = (
                f"{self.data}: expected held-out text of more than {num_heads} tokens to choose "
                "the tree by, found less"
            )
            raise OptionError(msg)
        accuracies: list[tuple[float, ...]] = []
        for row, positions in zip(hits.tolist(), seen, strict=True):
            accuracies.append(tuple(round(hit / positions, 4) for hit in row))
        return tuple(accuracies)

    def _held_out_sequences(self) -> list[Sequences]:
        """Return the held-out sequences on which accuracies are measured.

        They are half of the target's own text, or all held-out text if there is no text of the
        target's.
        """
        length = self.options.first_length
        halves = held_out_halves(self.data, self.vocab_size)
        if halves is None:
            sets = held_out_sets(self.data, length, self.vocab_size)
            return [sequences for _, sequences in sets if len(sequences)]
        size, _ = halves
        file = self.data / "valid-on-policy.bin"
        whole = file.stat().st_size // token_dtype(self.vocab_size)().itemsize
        stop = size / whole
        return [Sequences(file, self.vocab_size, min(length, size - 1), seed=0, stop=stop)]

    @property
    def description(self) -> str:
        s = self.options.shape
        c = self.teacher.llm.config
        text = "held-out text"
        if held_out_halves(self.data, self.vocab_size) is not None:
            text = (
                "what the target says after half of the held-out prompts; the figures of decoding "
                "are those of the other half"
            )
        is_shared = s.unembeddings == "shared"
        unembedding = "the target's unembedding" if is_shared else "an unembedding of its own"
        return (
            f"{s.num_heads} heads of {s.blocks} residual blocks of size {c.hidden_size} each, with "
            f"{unembedding}, over the target's last hidden state after its final norm. The tree "
            f"has {self.options.tree_size} guesses, chosen by {text}."
        )


def _hits(branch: Branch, teacher: TeacherLogits, ranks: int) -> Tensor:
    """Return, for each rank, how often the head's token of this rank is the teacher's likeliest.

    The result has a number of rows of ``branch`` for each rank from 0 to ``ranks - 1``.
    """
    dtype = product_dtype(branch.hidden.device)
    hits = branch.hidden.new_zeros(ranks, dtype=torch.int64)
    weight = branch.weight.to(dtype)
    for chunk in chunks(len(branch.hidden), len(weight)):
        best = (branch.hidden[chunk].to(dtype) @ weight.T).topk(ranks).indices
        hits += (best == teacher(chunk).argmax(-1, keepdim=True)).sum(0)
    return hits
