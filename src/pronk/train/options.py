"""Everything that defines a training run, checked once. Light to import: ``pronk train --help`` needs it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pronk.errors import OptionError
from pronk.train.sources import SourceSpec

__all__ = [
    "OPTIMIZERS",
    "DataOptions",
    "DraftOptions",
    "LoopOptions",
    "OnPolicyOptions",
    "Shape",
    "TrainOptions",
    "option_name",
]

OPTIMIZERS = ("muon", "adamw")


@dataclass(frozen=True)
class Shape:
    """A Llama-architecture model with tied embeddings; ``mlp`` is the width of its gated layers.

    Raises:
        OptionError: sizes that are not positive or do not divide each other.
    """

    hidden: int = 320
    layers: int = 8
    heads: int = 10
    kv_heads: int = 2
    mlp: int = 832
    vocab: int = 4096
    context: int = 2048

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                msg = f"{name.replace('_', '-')}: expected at least 1, found {value}"
                raise OptionError(msg)
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            msg = (
                "expected heads to divide hidden into even parts, and kv-heads to divide heads; "
                f"found hidden {self.hidden}, heads {self.heads}, kv-heads {self.kv_heads}"
            )
            raise OptionError(msg)


@dataclass(frozen=True)
class DataOptions:
    """What to read and how to mix it.

    ``dialogues`` is the share of the mixture that dialogues get, wherever they were found. ``valid`` files are
    measured on, never trained on; ``exclude`` files name prompts that no training text may share 13 words with.
    ``tokenizer_bytes`` and ``valid_tokens`` limit the text that the tokenizer and one validation look at.

    Raises:
        OptionError: no sources, or the share of dialogues is out of range.
    """

    sources: tuple[SourceSpec, ...]
    valid: tuple[Path, ...] = ()
    exclude: tuple[Path, ...] = ()
    dialogues: float = 0.05
    vocab_size: int = 4096
    tokenizer_bytes: int = 30_000_000
    valid_tokens: int = 16384
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.sources:
            msg = "expected at least one source (--source WHAT=WEIGHT), found none"
            raise OptionError(msg)
        if not 0 <= self.dialogues < 1:
            msg = f"dialogues: expected a share from 0 to below 1, found {self.dialogues}"
            raise OptionError(msg)


@dataclass(frozen=True)
class LoopOptions:
    """Settings of the training loop, whatever is trained.

    ``batch`` is in tokens per step, ``micro`` in tokens per pass (gradients are accumulated over ``batch / micro``
    passes). The last ``final_share`` of the run reads sequences of ``final_length`` tokens instead of ``length``.
    ``minutes`` on the clock end the run early, with its schedule intact. ``floor`` is the last learning rate as a
    share of the peak ``rate``. ``warmup`` and the intervals are in steps.

    Raises:
        OptionError: an option out of its range.
    """

    # Options that may change when a run is resumed; all others define what it computes.
    FREE: ClassVar[frozenset[str]] = frozenset(
        {"minutes", "threads", "compile", "device", "evaluate_every", "save_every", "log_every"}
    )

    steps: int = 3000
    minutes: float | None = None
    batch: int = 8192
    micro: int = 4096
    length: int = 256
    final_length: int = 2048
    final_share: float = 0.2
    optimizer: str = "muon"
    rate: float = 3e-3
    floor: float = 0.02
    warmup: int = 60
    weight_decay: float = 0.1
    clip: float = 1.0
    compile: bool = False
    device: str = "cpu"
    threads: int | None = None
    seed: int = 0
    evaluate_every: int = 200
    save_every: int = 100
    log_every: int = 10

    def __post_init__(self) -> None:
        for name, valid, expected in self._rules():
            if not valid:
                msg = f"{option_name(name)}: expected {expected}, found {getattr(self, name)!r}"
                raise OptionError(msg)

    def defining(self) -> dict[str, Any]:
        """The options that a resumed run must have as before."""
        return {name: value for name, value in asdict(self).items() if name not in self.FREE}

    def _rules(self) -> list[tuple[str, bool, str]]:
        return [
            *((name, getattr(self, name) >= 1, "at least 1") for name in ("steps", "batch", "micro")),
            *((name, getattr(self, name) >= 1, "at least 1") for name in ("evaluate_every", "save_every", "log_every")),
            *((name, getattr(self, name) > 0, "more than 0") for name in ("rate", "clip")),
            *((name, getattr(self, name) >= 0, "at least 0") for name in ("warmup", "weight_decay", "seed")),
            *((name, 0 <= getattr(self, name) <= 1, "0 to 1") for name in ("floor", "final_share")),
            *self._length_rules(),
            ("micro", _divides(self.micro, self.batch), f"a divisor of batch {self.batch}"),
            ("micro", _divides(self.length, self.micro), f"a multiple of length {self.length}"),
            ("micro", _divides(self.final_length, self.micro), f"a multiple of final-length {self.final_length}"),
            ("minutes", self.minutes is None or self.minutes > 0, "more than 0"),
            ("threads", self.threads is None or self.threads >= 1, "at least 1"),
            ("optimizer", self.optimizer in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}"),
        ]

    def _length_rules(self) -> list[tuple[str, bool, str]]:
        return [(name, getattr(self, name) >= 1, "at least 1") for name in ("length", "final_length")]


@dataclass(frozen=True)
class TrainOptions(LoopOptions):
    """The loop's settings for a language model of ``shape``, whose context no sequence may exceed."""

    shape: Shape = field(default_factory=Shape)

    def _length_rules(self) -> list[tuple[str, bool, str]]:
        context = self.shape.context
        names = ("length", "final_length")
        return [(name, 1 <= getattr(self, name) <= context, f"1 to {context}") for name in names]


@dataclass(frozen=True)
class DraftOptions(TrainOptions):
    """The loop's settings for a draft model.

    ``share`` of the training sequences are the target's own continuations. ``hard`` is the weight of the ordinary
    cross-entropy on the text; the rest is that of the divergence from the target. ``num_tokens`` guesses a step are
    made when the decoding engine measures the draft; with 0 it does not.
    """

    FREE: ClassVar[frozenset[str]] = LoopOptions.FREE | {"num_tokens"}

    share: float = 0.5
    hard: float = 0.0
    num_tokens: int = 4

    def _rules(self) -> list[tuple[str, bool, str]]:
        return [
            *super()._rules(),
            *((name, 0 <= getattr(self, name) <= 1, "0 to 1") for name in ("share", "hard")),
            ("num_tokens", 0 <= self.num_tokens <= 64, "0 to 64"),
        ]


@dataclass(frozen=True)
class OnPolicyOptions:
    """What the target is to write.

    ``tokens`` in all, after prompts of up to ``prompt`` tokens from the text, up to ``length`` tokens after each, one
    third of them greedy and the rest sampled. ``batch`` prompts are continued together, and an interruption loses no
    more. ``held_out`` prompts are kept to measure on.

    Raises:
        OptionError: an option out of its range.
    """

    tokens: int = 1_000_000
    prompt: int = 192
    length: int = 192
    batch: int = 96
    held_out: int = 24
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("tokens", 0), ("prompt", 8), ("length", 1), ("batch", 1), ("held_out", 0)):
            if getattr(self, name) < least:
                option = "on-policy" if name == "tokens" else option_name(name)
                msg = f"{option}: expected at least {least}, found {getattr(self, name)}"
                raise OptionError(msg)


def _divides(part: int, whole: int) -> bool:
    """A ``part`` below 1 has a rule of its own, but all rules are looked at."""
    return part < 1 or whole % part == 0


def option_name(field_name: str) -> str:
    """What the command line calls a field of :class:`LoopOptions`."""
    return "lr" if field_name == "rate" else field_name.replace("_", "-")
