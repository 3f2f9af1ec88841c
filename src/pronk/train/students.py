"""Training of drafters on a frozen target: base class, draft models, GLIDE, Kangaroo.

The target's features (outputs of its layers) and logits are computed with each batch. A drafter has
one or more *branches*; a branch predicts the token a fixed number of positions ahead, as a Medusa
head does. Branches are trained one after the other, so the largest tensor is a chunk of one
branch's logits.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from pronk.checkpoint import ModelConfig
from pronk.lab import TRAINED_FORMAT
from pronk.train.attention import (
    DelayedAttention,
    DenseAttention,
    Features,
    compute_features,
    dense_hidden,
    dense_rope,
)
from pronk.train.batches import Batches, Mixture, Sequences
from pronk.train.export import export_drafter, export_model
from pronk.train.lm import held_out_sets, model_config, two_phases
from pronk.train.loop import Module, Objective, PassResult, find_device
from pronk.train.losses import Comparison, TeacherLogits, autocast, distillation_loss
from pronk.train.modules.decoder import DecoderModule, maybe_compile
from pronk.train.modules.drafters import GlideDecoderModule, KangarooModule
from pronk.train.on_policy import held_out_prompts
from pronk.train.options import StudentOptions
from pronk.train.teacher import Teacher

_ADAPTERS = {  # kinds of Kangaroo's adapter in words, for the model card
    "attention": "one multi-head attention and two norms",
    "head": "one multi-head attention, two norms and a head of its own",
    "transformer": "one transformer layer and a norm",
    "mlp": "two linears, two norms and a head of its own",
}


@dataclass(frozen=True)
class Branch:
    """Predictions of one branch of a drafter, for ``n`` rows of a batch.

    A branch is a part of the drafter with a loss of its own: one of several heads, or the drafter
    at one depth of a draft. Rows are the positions of all sequences, one sequence after the other.
    """

    # Hidden states of the drafter after its last norm, ``[n, size]``, which the LM head reads.
    hidden: Tensor
    weight: Tensor  # weight of the branch's LM head, ``[vocab, size]``
    # For each prediction, the row of the batch whose target distribution is learned, ``[n]``.
    # ``None``: prediction i learns the distribution of row i.
    rows: Tensor | None = None


class Student(Objective[Module]):
    """Training objective of a drafter that learns the target's distribution.

    The loss is :func:`~pronk.train.losses.distillation_loss`. A subclass builds the drafter's
    module and computes its branches from the target's features. Raises OptionError if the text is
    shorter than one sequence, or the device does not exist.
    """

    kind: ClassVar[str]  # the drafter's name in drafter specifications, such as "medusa"
    # Texts for the model card: the type of drafter, the library that loads it, and whether it works
    # with targets other than the one it was trained on.
    title: ClassVar[str]
    library: ClassVar[str] = "pronk"
    other_targets: ClassVar[str] = "No other target can use it."
    options: StudentOptions
    # Numbers (from 1) of the target's layers whose outputs the drafter reads.
    hidden: tuple[int, ...] = ()
    # Numbers (from 1) of the target's layers whose keys and values the drafter reads.
    cache: tuple[int, ...] = ()

    def __init__(self, folder: Path, options: StudentOptions, teacher: Teacher) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.options = options
        self.teacher = teacher
        self.device = find_device(options.device)
        self.vocab_size = teacher.llm.config.vocab_size
        self.module = self.build(torch.Generator().manual_seed(options.seed)).to(self.device)
        self.phases = self._phases()
        self.identity = self.identify(teacher)

    @classmethod
    def identify(cls, teacher: Teacher) -> dict[str, Any]:
        """Return ``identity`` without building an objective, to check a resumed run before."""
        return {"kind": cls.kind, "target": teacher.fingerprints}

    @abstractmethod
    def build(self, generator: torch.Generator) -> Module:
        """Return the drafter's module with initial float32 weights, drawn from ``generator``."""

    @abstractmethod
    def branches(self, tokens: Tensor, features: Features) -> Iterator[Branch]:
        """Yield the branches of the drafter for a batch ``tokens`` ``[count, length]``.

        ``features`` are those of the target. The caller runs this under autocast.
        """

    def export(self, folder: Path, card: str, facts: Mapping[str, Any]) -> None:
        document = {
            "format": TRAINED_FORMAT,
            "kind": self.kind,
            "shape": asdict(self.exported_shape()),
            **facts,
        }
        document["target"] = {"name": self.teacher.name, **asdict(self.teacher.fingerprint)}
        export_drafter(folder, self.module, document, card)

    def exported_shape(self) -> Any:
        """Return the sizes of the drafter, which its JSON file stores under ``shape``."""
        return self.options.shape

    @property
    @abstractmethod
    def description(self) -> str:
        """Sizes of the drafter in words, for its model card."""

    @property
    def spec(self) -> str:
        """Template of the drafter's specification, to be formatted with the folder of the drafter.

        ``make_drafter(spec.format(model=folder))`` is the drafter.
        """
        return f"{self.kind}(model={{model!r}}, num_tokens={self.options.num_tokens})"

    def backward(self, inputs: Tensor, targets: Tensor, scale: float) -> PassResult:
        losses = list[float]()
        comparisons = list[Comparison]()
        for loss in self._losses(inputs, targets, comparisons):
            (loss * scale).backward()
            losses.append(float(loss.detach()))
        same = tuple(branch.same / branch.rows for branch in comparisons)
        return PassResult(sum(losses) / len(losses), same)

    def _losses(
        self, inputs: Tensor, targets: Tensor, comparisons: list[Comparison]
    ) -> Iterator[Tensor]:
        """Yield the loss of each branch of the drafter.

        The rows of branch ``i`` are added to ``comparisons[i]``, which are appended to the list as
        needed.
        """
        labels = targets.to(self.device).reshape(-1)
        hard = self.options.hard
        for i, (branch, teacher) in enumerate(self._branches_with_targets(inputs)):
            if i == len(comparisons):
                comparisons.append(Comparison())
            branch_labels = labels if branch.rows is None else labels[branch.rows]
            yield distillation_loss(
                branch.hidden, branch.weight, teacher, branch_labels, hard, into=comparisons[i]
            )

    def _branches_with_targets(self, inputs: Tensor) -> Iterator[tuple[Branch, TeacherLogits]]:
        """Yield each branch with a function that computes the target's logits for its rows.

        The function's argument is a slice of the branch's rows.
        """
        tokens = inputs.to(self.device)
        target = self.teacher.decoder
        features = compute_features(target, tokens, self.teacher.dtype, self.hidden, self.cache)

        @torch.no_grad()
        def logits(rows: Tensor, selection: slice) -> Tensor:
            return target.logits(features.last[rows[selection]])

        all_rows = torch.arange(tokens.numel(), device=self.device)
        branches = self.branches(tokens, features)
        while True:
            with autocast(self.device):
                branch = next(branches, None)
            if branch is None:
                return
            yield branch, partial(logits, all_rows if branch.rows is None else branch.rows)

    @torch.no_grad()
    def evaluate(self, length: int, seconds: float = math.inf) -> dict[str, float]:
        """Measure each branch on the held-out sets, then the whole drafter in the engine.

        The figures of a branch are ``KL``, its divergence from the target in nats, and ``same``,
        the fraction of rows in which branch and target have the same most likely token. Those of
        the drafter are acceptance rate (alpha), consistent token acceptance (CTAR) and tokens per
        forward pass (S), on held-out prompts (``served.py``).

        Args:
            length: number of tokens of a held-out sequence.
            seconds: time limit; branches and drafter take half of it each.
        """
        figures: dict[str, float] = {}
        sets = list(held_out_sets(self.data, length, self.vocab_size))
        for name, sequences in sets:
            comparisons = list[Comparison]()
            for inputs, targets in sequences.batches(self.options.micro, seconds / 2 / len(sets)):
                for _ in self._losses(inputs, targets, comparisons):
                    pass  # running the loop fills `comparisons`; the losses are not needed
            for i, branch in enumerate(comparisons, 1):
                number = f" {i}" if len(comparisons) > 1 else ""
                figures[f"{name} KL{number}"] = branch.divergence / branch.rows
                figures[f"{name} same{number}"] = branch.same / branch.rows
        prompts = self.prompts() if self.options.num_tokens else []
        return figures | self.serve(self.teacher.llm, self.spec, prompts, seconds / 2)

    def prompts(self) -> list[list[int]]:
        """Return the token ids of the prompts with which the engine measures the drafter."""
        return held_out_prompts(self.data)

    def _phases(self) -> tuple[Batches, Batches]:
        """Return the training sequences of the two phases, short and long ones.

        They are mixed from the text of the sources and the text that the target has written.
        """
        o = self.options
        first_own = self._own_text(o.length, used=o.final_share < 1)
        last_own = self._own_text(o.final_length, used=o.final_share > 0)
        if o.share == 1:
            return first_own, last_own
        first, last = two_phases(self.data / "train.bin", o, self.vocab_size)
        return Mixture(first, first_own, o.share), Mixture(last, last_own, o.share)

    def _own_text(self, length: int, *, used: bool) -> Sequences:
        """Return sequences of ``length`` tokens from the text that the target has written.

        Raises OptionError if the sequences are ``used`` and the text is shorter than one.
        """
        file = self.data / "on-policy.bin"
        sequences = Sequences(file, self.vocab_size, length, self.options.seed)
        if used and self.options.share:
            sequences.check()
        return sequences


def describe_decoder(c: ModelConfig, extra: str = "") -> str:
    """Return the sizes of a drafter that is a Transformer decoder in words, for the model card.

    ``extra`` is a further property that the sentence mentions.
    """
    attention = f"{c.num_heads} heads of {c.head_dim} over {c.num_kv_heads} key/value heads"
    if extra:
        attention = f"{attention}, {extra}"
    return (
        f"{c.num_layers} layers, hidden size {c.hidden_size}, {attention}, MLP "
        f"{c.intermediate_size}, tied embeddings. The target's tokenizer, {c.vocab_size} tokens."
    )


class DraftStudent(Student[DecoderModule]):
    """Training objective of a draft model: a small decoder with the target's vocabulary."""

    kind = "draft_model"
    title = "A draft model"
    library = "transformers"
    other_targets = (
        "Another target with the same tokenizer can be served, at a lower acceptance rate."
    )

    def build(self, generator: torch.Generator) -> DecoderModule:
        target = self.teacher.llm.config
        decoder = DecoderModule(model_config(self.options.shape, target.bos_id, target.eos_ids))
        decoder.initialize(generator)
        self._hidden = maybe_compile(dense_hidden, compiles=self.options.compile)
        return decoder

    def branches(self, tokens: Tensor, features: Features) -> Iterator[Branch]:  # noqa: ARG002 - reads tokens only
        hidden = self._hidden(self.module, tokens)
        yield Branch(self.module.norm(hidden), self.module.embedding)

    @property
    def description(self) -> str:
        return f"Llama architecture, {describe_decoder(self.module.config)}"

    def export(self, folder: Path, card: str, facts: Mapping[str, Any]) -> None:
        target = {"name": self.teacher.name, **self.teacher.fingerprints}
        documents = {"draft.json": {"target": target, **facts}} if facts else None
        export_model(self.module, self.teacher.folder, folder, card, documents)


def block_mask(length: int, block: int, window: int | None = None) -> Tensor:
    """Return the mask of GLIDE's cross-attention in training, bool ``[length, length]``.

    A row sees the tokens of earlier blocks of ``block`` tokens each, as :class:`GlideStudent`
    shows; with ``window``, the target's sliding window in tokens, only those within the window.
    """
    positions = torch.arange(length)
    seen = positions[:, None] // block > positions // block
    return seen if window is None else seen & (positions > positions[:, None] - window)


class GlideStudent(Student[GlideDecoderModule]):
    """Training of a GLIDE drafter: a decoder with cross-attention to the target's cache.

    While the draft tokens of a step are generated, the target's cache ends before the first of
    them. Training imitates this: the text is cut into blocks of ``L`` tokens, and in
    cross-attention row ``j`` sees token ``k`` of the cache if ``block(j) > block(k)`` (section 4.1
    of the paper, L = 5). For L = 2, with ``x`` where row j sees token k::

          0 1 2 3 4
        0 . . . . .
        1 . . . . .
        2 x x . . .
        3 x x . . .
        4 x x x x .
    """

    kind = "glide"
    title = "A GLIDE drafter"

    def build(self, generator: torch.Generator) -> GlideDecoderModule:
        module = GlideDecoderModule(self.options.shape, self.teacher.llm.config)
        module.initialize(generator)
        self.cache = module.cache_layers
        self._hidden = maybe_compile(dense_hidden, compiles=self.options.compile)
        return module

    def branches(self, tokens: Tensor, features: Features) -> Iterator[Branch]:
        target = self.teacher.decoder
        (batch, length) = tokens.shape
        block = self.options.shape.block
        windows = [target.config.windows[layer - 1] for layer in self.cache]
        masks = [block_mask(length, block, window) for window in windows]
        attend = DelayedAttention(
            batch,
            length,
            rotation=dense_rope(target, batch, length, torch.float32, tokens.device),
            keys=[features.keys[layer] for layer in self.cache],
            values=[features.values[layer] for layer in self.cache],
            masks=[mask.to(tokens.device) for mask in masks],
        )
        hidden = self._hidden(self.module, tokens, attend=attend)
        yield Branch(self.module.norm(hidden), self.module.embedding)

    @property
    def description(self) -> str:
        if not self.cache:
            return describe_decoder(self.module.config, "no cross-attention")
        target = self.teacher.llm.config
        noun = "layers" if len(self.cache) > 1 else "layer"
        layers = ", ".join(map(str, self.cache))
        cross = (
            f"{target.num_heads} query heads of {target.head_dim} into the target's cache of "
            f"{noun} {layers}, trained with blocks of {self.options.shape.block} tokens"
        )
        return describe_decoder(self.module.config, cross)


class VanillaStudent(GlideStudent):
    """Training of GLIDE's decoder without cross-attention, as a draft model (drafter vanilla)."""

    kind = "vanilla"
    title = "GLIDE's twin without cross-attention, a draft model"


class KangarooStudent(Student[KangarooModule]):
    """Training of Kangaroo's adapter, which reads the output of the target's exit layer.

    The paper's loss (Liu et al. 2024, equation 3) is the cross-entropy against the target's
    distribution ``M^b``, over positions ``t`` and tokens ``n``::

        A* = argmin_A  sum_t sum_n  -M^b_n(x_t) log M^s_n(x_t),    M^s = head ∘ A ∘ M^b[:l]

    The divergence in :mod:`pronk.train.losses` differs from this loss by a constant, the target's
    entropy, and has the same gradient.
    """

    kind = "kangaroo"
    title = "A Kangaroo adapter"

    def build(self, generator: torch.Generator) -> KangarooModule:
        """Build the adapter; norm and LM head, if it has one, start as copies of the target's."""
        shape = self.options.shape
        teacher = self.teacher
        self.hidden = (shape.exit_layer,)
        adapter = KangarooModule(shape, teacher.llm.config)
        adapter.initialize(generator, teacher.decoder.norm, teacher.unembedding)
        self._adapt = maybe_compile(dense_adapter, compiles=self.options.compile)
        return adapter

    def branches(self, tokens: Tensor, features: Features) -> Iterator[Branch]:
        head = self.teacher.unembedding
        if self.module.head is not None:
            head = self.module.get_parameter("head.weight")
        early = features.hidden[self.options.shape.exit_layer].float()
        yield Branch(self._adapt(self.module, self.teacher.decoder, early, *tokens.shape), head)

    @property
    def description(self) -> str:
        shape = self.options.shape
        layers = self.teacher.llm.config.num_layers
        heads = f" {shape.heads} attention heads." if shape.has_attention else ""
        return (
            f"Exit after layer {shape.exit_layer} of {layers}; adapter of "
            f"{_ADAPTERS[shape.adapter]}.{heads}"
        )

    @property
    def spec(self) -> str:
        # ``eta`` is the confidence below which drafting stops; 0 measures all draft tokens.
        return f"{self.kind}(model={{model!r}}, num_tokens={self.options.num_tokens}, eta=0)"


def dense_adapter(
    adapter: KangarooModule, decoder: DecoderModule, early: Tensor, batch: int, length: int
) -> Tensor:
    """Return the output ``[batch * length, hidden]`` of Kangaroo's adapter.

    Rows are ``batch`` sequences of ``length`` tokens, one after the other. ``early``, of the same
    shape, is the output of the target's exit layer; ``decoder`` is the target.
    """
    rope = dense_rope(decoder, batch, length, early.dtype, early.device)
    return adapter(early, rope, DenseAttention(batch, length, adapter.config.windows))
