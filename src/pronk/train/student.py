"""Base class of the drafters that learn from a frozen target.

The target's features and logits are computed with each batch. A drafter has one or more *branches*; a branch predicts
the token a fixed number of positions ahead, as a Medusa head does. Branches are trained one after the other, so the
largest tensor is a chunk of one branch's logits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from pronk.architecture.config import ModelConfig
from pronk.drafters.from_target.modules.files import FORMAT
from pronk.train.batches import Batches, Mixture, Sequences, token_dtype
from pronk.train.export import export_drafter
from pronk.train.features import Features, compute_features
from pronk.train.lm import held_out_sets, two_phases
from pronk.train.loop import Passed, find_device
from pronk.train.losses import Comparison, TeacherLogits, distillation_loss
from pronk.train.on_policy import held_out_prompts
from pronk.train.options import StudentOptions
from pronk.train.served import SERVED_TOKENS, measure
from pronk.train.teacher import Teacher

__all__ = ["Branch", "Student", "describe_decoder"]

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class Branch:
    """Predictions of one branch for ``n`` rows of a batch."""

    hidden: Tensor  # ``[n, size]``, the drafter's states after the last norm, the input of the head
    weight: Tensor  # ``[vocab, size]``, the weight of the head
    rows: Tensor | None = None  # ``[n]``, rows of the batch whose target distribution is learned; ``None``: all rows


class Student(ABC, Generic[Module]):
    """A training objective with the loss of :func:`~pronk.train.losses.distillation_loss`.

    A subclass builds the module and computes its branches from the target's features.

    Raises:
        OptionError: the text is shorter than one sequence, or the device does not exist.
    """

    kind: ClassVar[str]  # name of the drafter in the registry
    what: ClassVar[str]  # description for the model card
    library: ClassVar[str] = "pronk"  # library that loads the drafter, for the model card
    others: ClassVar[str] = "No other target can use it."  # sentence about other targets, for the model card
    hidden: tuple[int, ...] = ()  # layers of the target, from 1, whose outputs the drafter reads
    cache: tuple[int, ...] = ()  # layers of the target, from 1, whose keys and values the drafter reads

    def __init__(self, folder: Path, options: StudentOptions, teacher: Teacher) -> None:
        self.folder, self.data, self.options, self.teacher = folder, folder / "data", options, teacher
        self.device = find_device(options.device)
        self.vocab_size = teacher.llm.config.vocab_size
        self.module = self.build(torch.Generator().manual_seed(options.seed)).to(self.device)
        self.phases: tuple[Batches, Batches] = self._phases()
        self.identity = self.identify(teacher)

    @classmethod
    def identify(cls, teacher: Teacher) -> dict[str, Any]:
        """Return :attr:`~pronk.train.loop.Objective.identity` before the run starts."""
        return {"kind": cls.kind, "target": teacher.fingerprints}

    @abstractmethod
    def build(self, generator: torch.Generator) -> Module:
        """Return the module with its initial weights, float32."""

    @abstractmethod
    def branches(self, tokens: Tensor, features: Features) -> Iterator[Branch]:
        """Yield the branches for ``tokens`` ``[count, length]``, one at a time; runs under autocast."""

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Compile ``function`` if the option is set."""
        return torch.compile(function) if self.options.compile else function

    def export(self, folder: Path, card: str, facts: Mapping[str, Any]) -> None:
        """Replace ``folder`` by the current drafter; ``facts`` go into its JSON file."""
        document = {"format": FORMAT, "kind": self.kind, "shape": asdict(self.exported_shape()), **facts}
        document["target"] = {"name": self.teacher.name, **asdict(self.teacher.fingerprint)}
        export_drafter(folder, self.module, document, card)

    def exported_shape(self) -> Any:
        """Return the shape, a dataclass, that the drafter's folder stores."""
        return self.options.shape

    @property
    @abstractmethod
    def description(self) -> str:
        """The shape in words, for the card."""

    @property
    def spec(self) -> str:
        """The exported drafter as text for ``make_drafter``; ``{model!r}`` stands for its folder."""
        return f"{self.kind}(model={{model!r}}, num_tokens={self.options.num_tokens})"

    def backward(self, inputs: Tensor, targets: Tensor, scale: float) -> Passed:
        """Return the mean loss of the branches; add ``scale`` times the gradient of their sum."""
        losses, sums = list[float](), list[Comparison]()
        for loss in self._losses(inputs, targets, sums):
            (loss * scale).backward()
            losses.append(float(loss.detach()))
        return Passed(sum(losses) / len(losses), tuple(each.same / each.rows for each in sums))

    def _losses(self, inputs: Tensor, targets: Tensor, sums: list[Comparison]) -> Iterator[Tensor]:
        """Yield the loss of each branch; add the rows of branch ``i`` to ``sums[i]``."""
        labels, hard = targets.to(self.device).reshape(-1), self.options.hard
        for i, (branch, teacher) in enumerate(self._pass(inputs)):
            sums += [Comparison()] if i == len(sums) else []
            chosen = labels if branch.rows is None else labels[branch.rows]
            yield distillation_loss(branch.hidden, branch.weight, teacher, chosen, hard, into=sums[i])

    def _pass(self, inputs: Tensor) -> Iterator[tuple[Branch, TeacherLogits]]:
        """Yield each branch with a function from a slice of its rows to the target's logits there."""
        tokens, target = inputs.to(self.device), self.teacher.decoder
        features = compute_features(target, tokens, self.teacher.dtype, self.hidden, self.cache)

        def logits(rows: Tensor) -> TeacherLogits:
            def part(rows_of: slice) -> Tensor:
                with torch.no_grad():
                    return target.logits(features.last[rows[rows_of]])

            return part

        every = torch.arange(tokens.numel(), device=self.device)
        found = self.branches(tokens, features)
        while True:
            with torch.autocast(self.device.type, torch.bfloat16):
                branch = next(found, None)
            if branch is None:
                return
            yield branch, logits(every if branch.rows is None else branch.rows)

    @torch.no_grad()
    def evaluate(self, length: int, seconds: float = math.inf) -> dict[str, float]:
        """Measure the branches on all held-out sets, then the drafter in the engine, half of ``seconds`` each.

        The figures of a branch are the divergence from the target, and the share of rows where both have the same most
        likely token. The engine measures alpha, CTAR and S on held-out prompts.
        """
        figures: dict[str, float] = {}
        sets = list(held_out_sets(self.data, length, self.vocab_size))
        for name, sequences in sets:
            sums = list[Comparison]()
            for inputs, targets in sequences.batches(self.options.micro, seconds / 2 / len(sets)):
                for _ in self._losses(inputs, targets, sums):
                    pass
            for i, each in enumerate(sums, 1):
                number = f" {i}" if len(sums) > 1 else ""
                figures |= {
                    f"{name} KL{number}": each.divergence / each.rows,
                    f"{name} same{number}": each.same / each.rows,
                }
        return figures | self._serve(seconds / 2)

    def judge(self, figures: Mapping[str, float]) -> float:
        """Return the mean divergence from the target, over held-out sets and branches."""
        found = [value for name, value in figures.items() if " KL" in name]
        return fmean(found) if found else math.nan

    def _serve(self, seconds: float) -> dict[str, float]:
        """Export the current drafter to ``RUN/latest`` and measure it in the engine."""
        prompts = self.prompts()
        if not self.options.num_tokens or not prompts:
            return {}
        latest = self.folder / "latest"
        self.export(latest, "", {})
        spec = self.spec.format(model=str(latest))
        return measure(self.teacher.llm, spec, prompts, SERVED_TOKENS, seconds)

    def prompts(self) -> list[list[int]]:
        """Return the prompts of the measurement in the engine."""
        return held_out_prompts(self.data)

    def _phases(self) -> tuple[Batches, Batches]:
        o = self.options
        own = [self._own_text(o.length, used=o.final_share < 1), self._own_text(o.final_length, used=o.final_share > 0)]
        if o.share == 1:
            return own[0], own[1]
        first, last = two_phases(self.data / "train.bin", o, self.vocab_size)
        return Mixture(first, own[0], o.share), Mixture(last, own[1], o.share)

    def _own_text(self, length: int, *, used: bool) -> Sequences:
        dtype = token_dtype(self.vocab_size)
        sequences = Sequences(self.data / "on-policy.bin", length, self.options.seed, dtype=dtype)
        if used and self.options.share:
            sequences.check()
        return sequences


def describe_decoder(config: ModelConfig, extra: str = "") -> str:
    """Return the sizes of a small decoder in words, for a card."""
    c = config
    return (
        f"{c.num_layers} layers, hidden size {c.hidden_size}, {c.num_heads} heads of {c.head_dim} over "
        f"{c.num_kv_heads} key/value heads, {extra and f'{extra}, '}MLP {c.intermediate_size}, tied embeddings. The "
        f"target's tokenizer, {c.vocab_size} tokens."
    )
