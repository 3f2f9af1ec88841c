"""What all drafters that learn from a frozen target have in common.

The target's features and its logits are computed with each batch. A drafter has one or several *branches*, each of
which says what follows so many tokens ahead; they are trained one after the other, so that the largest thing in memory
is a chunk of one branch's logits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from pronk.drafters.from_target.modules.files import FORMAT
from pronk.train.batches import Batches, Mixture, Sequences, token_dtype
from pronk.train.clock import within
from pronk.train.distill import Comparison, TeacherLogits, compare, distillation_loss
from pronk.train.export import export_drafter
from pronk.train.features import Features, compute_features
from pronk.train.lm import held_out_sets, two_phases
from pronk.train.loop import Passed, find_device
from pronk.train.on_policy import held_out_prompts
from pronk.train.options import StudentOptions
from pronk.train.served import SERVED_TOKENS, measure
from pronk.train.teacher import Teacher

__all__ = ["Branch", "Student"]

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class Branch:
    """One guess ahead, for some rows of a batch.

    Attributes:
        hidden: ``[n, size]``, what goes into the head: the drafter's states after their last norm.
        weight: ``[vocab, size]`` of the head.
        rows: ``[n]``, at which rows of the batch the target says what is guessed; ``None`` where all do, in order.
    """

    hidden: Tensor
    weight: Tensor
    rows: Tensor | None = None


class Student(ABC, Generic[Module]):
    """See :class:`~pronk.train.loop.Objective`; the loss is that of :mod:`pronk.train.distill`.

    A subclass builds the module, says what of the target it reads, and how its branches come from that.

    Args:
        folder: the run; ``folder / "data"`` must hold the text and the target's own.
        options: of the run.
        teacher: the target.

    Raises:
        OptionError: the text is shorter than one sequence, or there is no such device.
    """

    # The drafter's name; what its card calls it; what loads its files; and which other targets it may serve.
    kind: ClassVar[str]
    what: ClassVar[str]
    library: ClassVar[str] = "pronk"
    others: ClassVar[str] = "No other target can use it."
    # Layers of the target whose outputs, or keys and values, are read: 1 is the first.
    hidden: tuple[int, ...] = ()
    cache: tuple[int, ...] = ()

    def __init__(self, folder: Path, options: StudentOptions, teacher: Teacher) -> None:
        self.folder, self.data, self.options, self.teacher = folder, folder / "data", options, teacher
        self.device = find_device(options.device)
        self.vocab_size = teacher.llm.config.vocab_size
        self.module = self.build(torch.Generator().manual_seed(options.seed)).to(self.device)
        self.phases: tuple[Batches, Batches] = self._phases()
        self.identity = self.identify(teacher)

    @classmethod
    def identify(cls, teacher: Teacher) -> dict[str, Any]:
        """See :class:`~pronk.train.loop.Objective`; known before there is one."""
        return {"kind": cls.kind, "target": teacher.fingerprints}

    @abstractmethod
    def build(self, generator: torch.Generator) -> Module:
        """The module with its first weights, float32."""

    @abstractmethod
    def branches(self, tokens: Tensor, features: Features) -> Iterator[Branch]:
        """The branches for ``tokens`` ``[count, length]``, one at a time; runs under autocast."""

    def export(self, folder: Path, card: str, facts: Mapping[str, Any]) -> None:
        """Replace ``folder`` by the drafter as it is now; ``facts`` are for its JSON file."""
        document = {"format": FORMAT, "kind": self.kind, "shape": asdict(self.exported_shape()), **facts}
        document["target"] = {"name": self.teacher.name, **asdict(self.teacher.fingerprint)}
        export_drafter(folder, self.module, document, card)

    def exported_shape(self) -> Any:
        """The dataclass that a drafter's folder has as its shape: what it is made by."""
        return self.options.shape

    @property
    @abstractmethod
    def description(self) -> str:
        """Its shape, in words, for the card."""

    @property
    def spec(self) -> str:
        """The drafter to measure, with ``{model}`` where its folder goes; it guesses ``num_tokens`` a step."""
        return f"{self.kind}(model={{model!r}}, num_tokens={self.options.num_tokens})"

    def backward(self, inputs: Tensor, targets: Tensor, scale: float) -> Passed:
        """See :class:`~pronk.train.loop.Objective`; the loss is the branches' mean, the gradient that of their sum."""
        labels = targets.to(self.device).reshape(-1)
        losses, same = [], []
        for branch, teacher, seen in self._pass(inputs):
            chosen = labels if branch.rows is None else labels[branch.rows]
            loss = distillation_loss(branch.hidden, branch.weight, teacher, chosen, self.options.hard, into=seen)
            (loss * scale).backward()
            losses.append(float(loss.detach()))
            same.append(seen.same / seen.rows)
        return Passed(sum(losses) / len(losses), tuple(same))

    def _pass(self, inputs: Tensor) -> Iterator[tuple[Branch, TeacherLogits, Comparison]]:
        """The branches, the target's logits at their rows, to be computed by slices, and a count for each."""
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
            yield branch, logits(every if branch.rows is None else branch.rows), Comparison()

    @torch.no_grad()
    def evaluate(self, length: int, seconds: float = math.inf) -> dict[str, float]:
        """Divergence from the target, and how often both have the same likeliest token, on every held-out set.

        For several branches, each of them. With them alpha, CTAR and S, as the decoding engine measures them on
        held-out prompts. Half of ``seconds`` is for each of the two, which read as much as it allows.
        """
        figures: dict[str, float] = {}
        sets = list(held_out_sets(self.data, length, self.vocab_size))
        for name, sequences in sets:
            count, sums = max(1, self.options.micro // sequences.length), list[Comparison]()
            for start in within(seconds / 2 / len(sets), range(0, len(sequences), count)):
                inputs, _ = sequences.batch(start, min(count, len(sequences) - start))
                for i, (branch, teacher, fresh) in enumerate(self._pass(inputs)):
                    sums += [fresh] if i == len(sums) else []
                    compare(branch.hidden, branch.weight, teacher, sums[i])
            for i, each in enumerate(sums, 1):
                number = f" {i}" if len(sums) > 1 else ""
                figures |= {
                    f"{name} KL{number}": each.divergence / each.rows,
                    f"{name} same{number}": each.same / each.rows,
                }
        return figures | self._serve(seconds / 2)

    def judge(self, figures: Mapping[str, float]) -> float:
        """The mean divergence from the target, over held-out sets and branches."""
        found = [value for name, value in figures.items() if " KL" in name]
        return fmean(found) if found else math.nan

    def _serve(self, seconds: float) -> dict[str, float]:
        """What the decoding engine makes of the drafter as it is now in ``RUN/latest``."""
        prompts = self.prompts()
        if not self.options.num_tokens or not prompts:
            return {}
        latest = self.folder / "latest"
        self.export(latest, "", {})
        spec = self.spec.format(model=str(latest))
        return measure(self.teacher.llm, spec, prompts, SERVED_TOKENS, seconds)

    def prompts(self) -> list[list[int]]:
        """What the engine continues to measure the drafter."""
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
