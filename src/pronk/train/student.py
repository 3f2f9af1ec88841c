"""Base class of the drafters that learn from a frozen target.

The target's features (outputs of its layers) and logits are computed with each batch. A drafter has one or more
*branches*; a branch predicts the token a fixed number of positions ahead, as a Medusa head does. Branches are trained
one after the other, so the largest tensor is a chunk of one branch's logits.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from pronk.architecture.config import ModelConfig
from pronk.drafters.from_target.modules.files import FORMAT
from pronk.train.attention import Features, compute_features
from pronk.train.batches import Batches, Mixture, Sequences
from pronk.train.export import export_drafter
from pronk.train.lm import held_out_sets, two_phases
from pronk.train.loop import Module, Objective, PassResult, find_device
from pronk.train.losses import Comparison, TeacherLogits, autocast, distillation_loss
from pronk.train.on_policy import held_out_prompts
from pronk.train.options import StudentOptions
from pronk.train.teacher import Teacher


@dataclass(frozen=True)
class Branch:
    """Predictions of one branch for ``n`` rows (positions of all sequences, flattened) of a batch."""

    hidden: Tensor  # ``[n, size]``, the drafter's hidden states after its last norm: input of the branch's head
    weight: Tensor  # ``[vocab, size]``, weight of the branch's head
    # ``[n]``: for each prediction, the row whose target distribution it learns; ``None``: prediction i learns row i
    rows: Tensor | None = None


class Student(Objective[Module]):
    """Training objective of a drafter, with the loss of :func:`~pronk.train.losses.distillation_loss`.

    A subclass builds the drafter's module and computes its branches from the target's features. A text shorter than one
    sequence, or a device that does not exist, raises an OptionError.
    """

    kind: ClassVar[str]  # the drafter's name in drafter specifications, such as "medusa"
    # Texts of the model card: type of drafter, library that loads it, use with targets other than the teacher.
    title: ClassVar[str]
    library: ClassVar[str] = "pronk"
    other_targets: ClassVar[str] = "No other target can use it."
    options: StudentOptions
    hidden: tuple[int, ...] = ()  # numbers (first: 1) of the target's layers whose outputs the drafter reads
    cache: tuple[int, ...] = ()  # numbers (first: 1) of the target's layers whose keys and values the drafter reads

    def __init__(self, folder: Path, options: StudentOptions, teacher: Teacher) -> None:
        self.folder, self.data, self.options, self.teacher = folder, folder / "data", options, teacher
        self.device = find_device(options.device)
        self.vocab_size = teacher.llm.config.vocab_size
        self.module = self.build(torch.Generator().manual_seed(options.seed)).to(self.device)
        self.phases = self._phases()
        self.identity = self.identify(teacher)

    @classmethod
    def identify(cls, teacher: Teacher) -> dict[str, Any]:
        """Return ``identity``, which a resumed run must repeat; its check needs no instance."""
        return {"kind": cls.kind, "target": teacher.fingerprints}

    @abstractmethod
    def build(self, generator: torch.Generator) -> Module:
        """Return the drafter's module with its initial float32 weights, drawn from ``generator``."""

    @abstractmethod
    def branches(self, tokens: Tensor, features: Features) -> Iterator[Branch]:
        """Yield the branches for a batch ``tokens`` ``[count, length]``; the caller enables autocast for each."""

    def maybe_compile(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return ``function``, compiled with ``torch.compile`` if ``options.compile`` is set."""
        return torch.compile(function) if self.options.compile else function

    def export(self, folder: Path, card: str, facts: Mapping[str, Any]) -> None:
        document = {"format": FORMAT, "kind": self.kind, "shape": asdict(self.exported_shape()), **facts}
        document["target"] = {"name": self.teacher.name, **asdict(self.teacher.fingerprint)}
        export_drafter(folder, self.module, document, card)

    def exported_shape(self) -> Any:
        """Return the dataclass that the drafter's JSON file stores under ``shape``."""
        return self.options.shape

    @property
    @abstractmethod
    def description(self) -> str:
        """Sizes of the drafter in words, for the model card."""

    @property
    def spec(self) -> str:
        """Template of the drafter's specification: ``spec.format(model=folder)`` is for ``make_drafter``."""
        return f"{self.kind}(model={{model!r}}, num_tokens={self.options.num_tokens})"

    def backward(self, inputs: Tensor, targets: Tensor, scale: float) -> PassResult:
        losses, comparisons = list[float](), list[Comparison]()
        for loss in self._losses(inputs, targets, comparisons):
            (loss * scale).backward()
            losses.append(float(loss.detach()))
        return PassResult(sum(losses) / len(losses), tuple(branch.same / branch.rows for branch in comparisons))

    def _losses(self, inputs: Tensor, targets: Tensor, comparisons: list[Comparison]) -> Iterator[Tensor]:
        """Yield the loss of each branch; add branch i's counts to ``comparisons[i]``, appended if missing."""
        labels, hard = targets.to(self.device).reshape(-1), self.options.hard
        for i, (branch, teacher) in enumerate(self._branches_with_targets(inputs)):
            comparisons += [Comparison()] if i == len(comparisons) else []
            branch_labels = labels if branch.rows is None else labels[branch.rows]
            yield distillation_loss(branch.hidden, branch.weight, teacher, branch_labels, hard, into=comparisons[i])

    def _branches_with_targets(self, inputs: Tensor) -> Iterator[tuple[Branch, TeacherLogits]]:
        """Yield each branch with a function from a slice of its rows to the target's logits of these rows."""
        tokens, target = inputs.to(self.device), self.teacher.decoder
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
        """Measure the branches on the held-out sets, then the drafter in the engine; each takes half the time.

        The figures of a branch are the divergence from the target, and the share of rows where branch and target have
        the same most likely token. The engine measures alpha, CTAR and S (see ``served.py``) on held-out prompts.
        """
        figures: dict[str, float] = {}
        sets = list(held_out_sets(self.data, length, self.vocab_size))
        for name, sequences in sets:
            comparisons = list[Comparison]()
            for inputs, targets in sequences.batches(self.options.micro, seconds / 2 / len(sets)):
                for _ in self._losses(inputs, targets, comparisons):
                    pass  # the loop fills `comparisons`; the losses are not needed
            for i, branch in enumerate(comparisons, 1):
                number = f" {i}" if len(comparisons) > 1 else ""
                figures[f"{name} KL{number}"] = branch.divergence / branch.rows
                figures[f"{name} same{number}"] = branch.same / branch.rows
        prompts = self.prompts() if self.options.num_tokens else []
        return figures | self.serve(self.teacher.llm, self.spec, prompts, seconds / 2)

    def prompts(self) -> list[list[int]]:
        """Return the prompts with which the engine measures the drafter."""
        return held_out_prompts(self.data)

    def _phases(self) -> tuple[Batches, Batches]:
        o = self.options
        first_own = self._own_text(o.length, used=o.final_share < 1)
        last_own = self._own_text(o.final_length, used=o.final_share > 0)
        if o.share == 1:
            return first_own, last_own
        first, last = two_phases(self.data / "train.bin", o, self.vocab_size)
        return Mixture(first, first_own, o.share), Mixture(last, last_own, o.share)

    def _own_text(self, length: int, *, used: bool) -> Sequences:
        sequences = Sequences(self.data / "on-policy.bin", self.vocab_size, length, self.options.seed)
        if used and self.options.share:
            sequences.check()
        return sequences


def describe_decoder(config: ModelConfig, extra: str = "") -> str:
    """Return the sizes of a drafter that is a Transformer decoder in words, for the model card."""
    c = config
    return (
        f"{c.num_layers} layers, hidden size {c.hidden_size}, {c.num_heads} heads of {c.head_dim} over "
        f"{c.num_kv_heads} key/value heads, {extra and f'{extra}, '}MLP {c.intermediate_size}, tied embeddings. The "
        f"target's tokenizer, {c.vocab_size} tokens."
    )
